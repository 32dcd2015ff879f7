"""A tiny model of transformers with random weights for every family that capture knows, and no value at a default that would hide a slip."""

import functools
from typing import Any

import torch
import transformers

VOCAB, WIDTH, LENGTH = 61, 32, 48
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
SPECIAL: dict[str, Any] = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
    **SPECIAL,
}
GROUPED = {**DECODER, "rope_parameters": PLAIN}
ENCODER = {
    **{k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "pad_token_id", "tie_word_embeddings")},
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.2,
}
EAGER = {"experts_implementation": "eager"}  # the grouped one has no float64
EXPERTS = {**EAGER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA = {
    **DECODER,
    "head_dim": 10,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 7,
    "final_logit_softcapping": 3.0,
}
V4 = {
    **EAGER,
    **{k: v for k, v in DECODER.items() if k != "intermediate_size"},
    "moe_intermediate_size": 16,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "hc_mult": 3,
    "sliding_window": 6,
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 4,
    "mlp_layer_types": ["moe", "moe"],
    "num_nextn_predict_layers": 0,
}
NEOX = {k: v for k, v in GROUPED.items() if k != "num_key_value_heads"}

# model_type -> class, config class, values
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 5}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**GROUPED, **EAGER, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 10}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**GROUPED, **EXPERTS, "head_dim": 10, "mlp_only_layers": [0]},
    ),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 10}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {**GROUPED, "no_rope_layers": [1, 0]}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **GROUPED,
            **EAGER,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": WIDTH,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": LENGTH,
            "n_inner": 40,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GEMMA, "rope_parameters": PLAIN, "attn_logit_softcapping": 5.0},
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **GEMMA,
            "rope_parameters": {
                "full_attention": PLAIN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
            },
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "olmo3": (
        "Olmo3ForCausalLM",
        "Olmo3Config",
        {**GROUPED, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            **GROUPED,
            "residual_multiplier": 0.3,
            "logits_scaling": 5.0,
            "attention_multiplier": 0.4,
            "embedding_multiplier": 3.0,
        },
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**NEOX, "hidden_dropout": 0.2, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", {**GROUPED, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**GROUPED, "logit_scale": 0.3}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GROUPED, "resid_pdrop": 0.2, "sliding_window": 6}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **GROUPED,
            **EAGER,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "q_lora_rank": 12,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v4": ("DeepseekV4ForCausalLM", "DeepseekV4Config", V4),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **GROUPED,
            **EXPERTS,
            "head_dim": 8,
            "shared_expert_intermediate_size": 16,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 6,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "bert": ("BertModel", "BertConfig", ENCODER),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", ENCODER),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaConfig", ENCODER),
    "electra": ("ElectraModel", "ElectraConfig", {**ENCODER, "embedding_size": 12}),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": VOCAB,
            "dim": WIDTH,
            "hidden_dim": 40,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": LENGTH,
        },
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            **{k: v for k, v in ENCODER.items() if k != "hidden_dropout_prob"},
            "local_attention": 6,
            "layer_types": ["full_attention", "sliding_attention"],
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
}


@functools.cache
def tiny(kind: str, dtype: torch.dtype = torch.float64):
    """The model of a family in ``dtype``, evaluation mode, the same object in every call: put back what you change."""
    cls, config, values = FAMILIES[kind]
    with torch.random.fork_rng():
        model = getattr(transformers, cls)(getattr(transformers, config)(**values)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def batch(kind: str, side: str = "none", length: int = 11) -> dict[str, torch.Tensor]:
    """Token ids of two rows; padded on the ``left``, on the ``right``, or not."""
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    if side != "none":
        mask[0, slice(0, 4) if side == "left" else slice(-4, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}
