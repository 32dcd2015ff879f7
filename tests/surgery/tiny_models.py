"""Small models of transformers with random weights everywhere and no value at its default, one for each thing a family may have."""

import functools

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB, WIDTH, DEPTH, HEADS, LENGTH = 61, 24, 3, 4, 48
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "rms_norm_eps": 3e-5,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_layer": DEPTH,
    "n_head": HEADS,
    "n_positions": LENGTH,
    "n_inner": 40,
    "layer_norm_epsilon": 3e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA3 = {
    **SIZES,
    "head_dim": 10,
    "query_pre_attn_scalar": 7,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 90.0}},
}
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {**SIZES, "rope_parameters": PLAIN, "tie_word_embeddings": False}),
    "llama, tied, biased, scaled": (
        LlamaForCausalLM,
        LlamaConfig,
        {**SIZES, "rope_parameters": LLAMA3, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "llama, bias in the feed-forward, linear": (
        LlamaForCausalLM,
        LlamaConfig,
        {**SIZES, "rope_parameters": LINEAR, "mlp_bias": True, "head_dim": 8},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {**SIZES, "sliding_window": 5, "rope_parameters": PLAIN}),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {**SIZES, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "rope_parameters": PLAIN},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**SIZES, "head_dim": 10, "rope_parameters": PLAIN}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2),
    "gpt2, untied, scaled by layer": (
        GPT2LMHeadModel,
        GPT2Config,
        {**GPT2, "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"},
    ),
    "gpt2, unscaled scores": (GPT2LMHeadModel, GPT2Config, {**GPT2, "scale_attn_weights": False}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**GEMMA3, "final_logit_softcapping": 3.0}),
    "gemma3, no window": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {**GEMMA3, "layer_types": ["full_attention"] * DEPTH, "tie_word_embeddings": False},
    ),
}


@functools.cache
def tiny(kind: str):
    """A model of ``KINDS`` in float32, the same object in every call: nobody may change it."""
    cls, config, values = KINDS[kind]
    with torch.random.fork_rng():
        model = cls(config(**values)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model
