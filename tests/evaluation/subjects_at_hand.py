"""Small models with random weights, ours and of transformers, and tokenizers that fit them."""

import functools
import json

import torch
from tokenizers import Tokenizer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from thalweg.data.tasks.austen import shipped_tokenizer
from thalweg.models import Decoder, DecoderConfig, ThalwegConfig, ThalwegForCausalLM

VOCAB, LENGTH = 2051, 64  # the shipped vocabulary and three special tokens
SPECIAL = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


@functools.cache
def causal_tokenizer() -> PreTrainedTokenizerFast:
    """The shipped BPE as one of transformers: an end of text, nothing added by itself."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(shipped_tokenizer().library_json()), eos_token="<|endoftext|>"
    )


@functools.cache
def encoder_tokenizer() -> PreTrainedTokenizerFast:
    """The same with CLS, SEP round every text, and MASK."""
    table = json.loads(shipped_tokenizer().library_json())
    start = len(table["model"]["vocab"])
    for i, content in enumerate(SPECIAL.values()):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        table["added_tokens"].append({"id": start + i, "content": content, **flags})
    pieces = {name: {"id": name, "ids": [start + i], "tokens": [name]} for i, name in enumerate(("[CLS]", "[SEP]"))}
    a, b = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
    ends = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ("[CLS]", "[SEP]")]
    table["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [ends[0], a, ends[1]],
        "pair": [ends[0], a, ends[1], b, ends[1]],
        "special_tokens": pieces,
    }
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(table)), **SPECIAL)


def _filled(model, scale: float = 0.3):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@functools.cache
def model(kind: str, dtype: torch.dtype = torch.float64):
    """A small model, the same object in every call: nobody may change it."""
    with torch.random.fork_rng():
        return _filled(_MAKERS[kind]()).to(dtype)


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )


def gpt2():
    config = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "bos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, eos_token_id=None, **config))


def bert():
    config = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return BertForMaskedLM(BertConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **config))


def ours():
    return Decoder(DecoderConfig(vocab_size=VOCAB, width=16, depth=2, heads=2, max_length=LENGTH))


def shell():
    return ThalwegForCausalLM(
        ThalwegConfig.of(DecoderConfig(vocab_size=VOCAB, width=16, depth=2, heads=2, max_length=LENGTH))
    )


_MAKERS = {"llama": llama, "gpt2": gpt2, "bert": bert, "ours": ours, "shell": shell}
CAUSAL = ("llama", "gpt2", "ours", "shell")
TEXTS = [
    "She had been forced into prudence in her youth, she learned romance as she grew older.",
    " A short one. ",
    (
        "One man's ways may be as good as another's, but we all like our own best.\n\nNothing more was said of it for a week, "
        "and then it was said again by everybody at once; the carriage stood before the door, the horses were tired, and the "
        "rain, which had begun at noon, went on until the lanes were under water and nobody thought of going home."
    ),
]
