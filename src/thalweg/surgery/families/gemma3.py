"""Gemma 3, its text decoder: norms before and after every sublayer, windows, two bases of the rotary angles."""

from typing import ClassVar

from thalweg.surgery.families import register
from thalweg.surgery.families.base import Piece, only, refuse, rotary
from thalweg.surgery.families.llama import Llama


@register(
    "gemma3_text",
    summary="Gemma 3, text only: sandwich norms, windows, query and key norms",
    source="transformers Gemma3ForCausalLM",
)
class Gemma3(Llama):
    """``Gemma3ForCausalLM``.

    Its norms multiply by 1 + weight, which becomes our scale. The factor on the embedding is read from the model, which has rounded it.
    """

    site_norms: ClassVar[tuple[dict[str, str], ...]] = (
        {"input_norm": "input_layernorm", "update_norm": "post_attention_layernorm"},
        {"input_norm": "pre_feedforward_layernorm", "update_norm": "post_feedforward_layernorm"},
    )
    head_norms: ClassVar[dict[str, str]] = {"query_norm": "q_norm", "key_norm": "k_norm"}
    activations: ClassVar[dict[str, str]] = {"gelu_pytorch_tanh": "geglu_tanh", "silu": "swiglu"}

    def config(self, theirs):
        c = theirs.config
        only(c, attn_logit_softcapping=None, use_bidirectional_attention=False)
        local, scaling = rotary(c.rope_parameters["sliding_attention"])
        if scaling is not None:
            raise refuse("rope_type of layers with a window", scaling.kind, "default can be converted")
        plain = super().config(theirs)
        return plain.replace(
            window_rope_base=local if plain.windows else None,
            attention_scale=c.query_pre_attn_scalar**-0.5,
            embedding_scale=float(theirs.model.embed_tokens.embed_scale),
            logit_softcap=c.final_logit_softcapping,
            connection_options={"update_norm": True},
        )

    def angles(self, c):
        return c.rope_parameters["full_attention"]

    def activation(self, c):
        return c.hidden_activation

    def norm(self, ours, theirs):
        return Piece(ours, theirs, lambda weight: 1 + weight)
