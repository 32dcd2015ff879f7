"""Tiny models and texts on which probes run; random weights, no value at a default that would hide a slip."""

from typing import Any

import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from thalweg import models

VOCAB, LENGTH = 61, 48
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
}
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


def llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_key_value_heads": 2, **IDS, **more}))


def bert() -> BertModel:
    torch.manual_seed(1)
    return BertModel(BertConfig(**SMALL, pad_token_id=0))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(2)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "n_inner": 40}
    return GPT2LMHeadModel(GPT2Config(**sizes, **IDS))


def ours(connection: str = "additive", **more: Any) -> models.Decoder:
    torch.manual_seed(3)
    sizes = {"vocab_size": VOCAB, "width": 32, "depth": 2, "heads": 4, "max_length": LENGTH, **more}
    return models.Decoder(models.DecoderConfig(connection=connection, **sizes))


def texts(count: int = 10, tokens: int = 30) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(VOCAB, (tokens + i,), generator=generator).tolist() for i in range(count)]
