"""Tiny models with random weights and grouped queries, and batches for them."""

import functools

import torch
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from thalweg.editing import edit

VOCAB, WIDTH, DEPTH, HEADS = 61, 24, 3, 4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, GROUPED),
    "mistral": (MistralForCausalLM, MistralConfig, {**GROUPED, "sliding_window": 4}),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config,
        {
            "vocab_size": VOCAB,
            "n_embd": WIDTH,
            "n_layer": DEPTH,
            "n_head": HEADS,
            "n_positions": 64,
            "n_inner": 40,
            "pad_token_id": 0,
        },
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {**GROUPED, "head_dim": 6, "sliding_window": 4, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 6},
    ),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, SIZES),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig,
        {**GROUPED, "residual_multiplier": 0.4, "embedding_multiplier": 2.0},
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {**GROUPED, "head_dim": 6, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "bert": (BertModel, BertConfig, {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
}
DECODERS = tuple(kind for kind in MODELS if kind != "bert")
EXACT = tuple(kind for kind in DECODERS if kind != "gpt_oss")  # its experts do not run in float64


@functools.cache
def tiny(kind: str, backend: str = "sdpa", dtype: torch.dtype = torch.float32):
    """A model in evaluation mode, the same object in every call; nobody may change it."""
    cls, config, values = MODELS[kind]
    with torch.random.fork_rng():
        model = cls(config(**values, attn_implementation=backend)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def words(rows: int = 2, length: int = 9, seed: int = 0) -> torch.Tensor:
    """Token ids, none of them special."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(ids: torch.Tensor, side: str, by: int = 3) -> dict[str, torch.Tensor]:
    """The rows with ``by`` tokens of padding, and the arguments that go with them; positions count real tokens."""
    fill = torch.zeros(len(ids), by, dtype=ids.dtype)
    ones, zeros = torch.ones_like(ids), torch.zeros_like(fill)
    parts = ((fill, ids), (zeros, ones)) if side == "left" else ((ids, fill), (ones, zeros))
    mask = torch.cat(parts[1], 1)
    return {
        "input_ids": torch.cat(parts[0], 1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }


@torch.no_grad()
def logits(model, ids, **more) -> torch.Tensor:
    """What the model says of the rows."""
    output = model(input_ids=ids, **more)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def captured(model, ids, layer=0, **values):
    """o [b t h dv] as the output projection of a layer gets it under an edit of that layer alone."""
    projection = model.model.layers[layer].self_attn.o_proj
    found = []
    with edit(model, layers=[layer], **values):
        handle = projection.register_forward_pre_hook(lambda _, args: found.append(args[0].detach()))
        logits(model, ids)
        handle.remove()
    return found[0].unflatten(-1, (4, -1))


def explicit(model, ids, layer=0):
    """A [b h t t] and the values of every query head [b h t dv], in float64."""
    found = []
    handle = model.model.layers[layer].self_attn.v_proj.register_forward_hook(
        lambda *call: found.append(call[-1].detach())
    )
    with torch.no_grad():
        matrix = model(input_ids=ids, output_attentions=True).attentions[layer]
    handle.remove()
    values = found[0].unflatten(-1, (2, -1)).transpose(1, 2)
    return matrix.double(), torch.stack([values[:, head // 2] for head in range(4)], 1).double()


def hooks(model) -> int:
    """Hooks on a model; transformers leaves some of its own once it was asked for attentions."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
