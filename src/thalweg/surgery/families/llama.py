"""Llama and those built like it: RMSNorm before every sublayer, rotary positions, SwiGLU."""

from collections.abc import Iterator
from typing import Any, ClassVar

from thalweg.models import DecoderConfig
from thalweg.surgery.families import register
from thalweg.surgery.families.base import Family, Piece, refuse, rotary, windows

ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
FEED_FORWARD = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@register("llama", summary="Llama 1 to 3.3, SmolLM2 and others of that class", source="transformers LlamaForCausalLM")
class Llama(Family):
    """``LlamaForCausalLM``: norms before attention and feed-forward, grouped heads, SwiGLU, llama3 or linear scaling of the angles."""

    # Our slot -> their norm, for each site of a layer.
    site_norms: ClassVar[tuple[dict[str, str], ...]] = (
        {"input_norm": "input_layernorm"},
        {"input_norm": "post_attention_layernorm"},
    )
    head_norms: ClassVar[dict[str, str]] = {}
    activations: ClassVar[dict[str, str]] = {"silu": "swiglu"}  # theirs -> ours

    def config(self, theirs):
        c = theirs.config
        base, scaling = rotary(self.angles(c))
        kind = self.activation(c)
        if kind not in self.activations:
            raise refuse("activation", kind, f"{', '.join(self.activations)} can be converted")
        return DecoderConfig(
            vocab_size=c.vocab_size,
            width=c.hidden_size,
            depth=c.num_hidden_layers,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_size=self.head_size(c),
            feed_forward=self.activations[kind],  # type: ignore[arg-type]  # checked when it is made
            ffn_width=c.intermediate_size,
            norm_eps=c.rms_norm_eps,
            rope_base=base,
            rotary_scaling=scaling,
            max_length=c.max_position_embeddings,
            tie_embeddings=bool(c.tie_word_embeddings),
            qk_norm=bool(self.head_norms),
            windows=windows(c),
            initial_std=c.initializer_range,
            **self.biases(c),
        )

    def angles(self, c: Any) -> dict[str, Any]:
        """Their parameters of the rotary angles, in the layers without a window."""
        return c.rope_parameters

    def activation(self, c: Any) -> str:
        """Their name of the function inside the feed-forward sublayer."""
        return c.hidden_act

    @staticmethod
    def head_size(c: Any) -> int | None:
        own = getattr(c, "head_dim", None)
        return None if own is None or own * c.num_attention_heads == c.hidden_size else own

    def biases(self, c: Any) -> dict[str, Any]:
        """Fields of ours that say where the linear maps have a bias."""
        return {
            "bias": bool(getattr(c, "mlp_bias", False)),
            "attention_bias": "all" if getattr(c, "attention_bias", False) else "none",
        }

    def pieces(self, theirs: Any, config: DecoderConfig) -> Iterator[Piece]:
        yield Piece("embedding.weight", "model.embed_tokens.weight")
        if not config.tie_embeddings:
            yield Piece("head.weight", "lm_head.weight")
        yield self.norm("stream.final_norm.weight", "model.norm.weight")
        for i in range(config.depth):
            layer = f"model.layers.{i}"
            for j, slots in enumerate(self.site_norms):
                for slot, name in slots.items():
                    yield self.norm(f"stream.sites.{2 * i + j}.{slot}.weight", f"{layer}.{name}.weight")
            attention, feed_forward = f"blocks.{i}.sublayers.0", f"blocks.{i}.sublayers.1"
            for slot, name in self.head_norms.items():
                yield self.norm(f"{attention}.{slot}.weight", f"{layer}.self_attn.{name}.weight")
            biased = {"none": (), "qkv": ("query", "key", "value"), "all": tuple(ATTENTION)}[config.biased_attention]
            for slot, name in ATTENTION.items():
                yield Piece(f"{attention}.{slot}.weight", f"{layer}.self_attn.{name}.weight")
                if slot in biased:
                    yield Piece(f"{attention}.{slot}.bias", f"{layer}.self_attn.{name}.bias")
            for slot, name in FEED_FORWARD.items():
                yield Piece(f"{feed_forward}.{slot}.weight", f"{layer}.mlp.{name}.weight")
                if config.bias:
                    yield Piece(f"{feed_forward}.{slot}.bias", f"{layer}.mlp.{name}.bias")

    def norm(self, ours: str, theirs: str) -> Piece:
        """The scale of a norm."""
        return Piece(ours, theirs)


@register("mistral", summary="Mistral 7B: Llama with a window", source="transformers MistralForCausalLM")
class Mistral(Llama):
    """``MistralForCausalLM``: as Llama; where the configuration names a window, every layer has it."""


@register(
    "qwen2",
    summary="Qwen2 and Qwen2.5: Llama with biases on query, key and value",
    source="transformers Qwen2ForCausalLM",
)
class Qwen2(Llama):
    """``Qwen2ForCausalLM``: as Llama, with biases on query, key and value, and windows where the configuration has them."""

    def biases(self, c):
        return {"attention_bias": "qkv"}


@register(
    "qwen3",
    summary="Qwen3: Llama with norms on the queries and keys of every head",
    source="transformers Qwen3ForCausalLM",
)
class Qwen3(Llama):
    """``Qwen3ForCausalLM``: as Llama, with a norm on the queries and keys of every head, heads of a width of their own, and windows."""

    head_norms: ClassVar[dict[str, str]] = {"query_norm": "q_norm", "key_norm": "k_norm"}
