"""GPT-2: learned positions, LayerNorm with bias, biases everywhere, weights stored transposed and query, key and value in one."""

from thalweg.models import DecoderConfig
from thalweg.surgery.families import register
from thalweg.surgery.families.base import Family, Piece, only, refuse

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


@register("gpt2", summary="GPT-2 and DistilGPT-2", source="transformers GPT2LMHeadModel")
class GPT2(Family):
    """``GPT2LMHeadModel``. Its linear maps are ``Conv1D``, whose weight is [in out]; ours are [out in].

    A scale of 1 / (layer + 1) on the attention scores, where the configuration asks for it, goes into the query map.
    """

    def config(self, theirs):
        c = theirs.config
        only(c, add_cross_attention=False)
        if c.activation_function not in ACTIVATIONS:
            raise refuse("activation_function", c.activation_function, f"{', '.join(ACTIVATIONS)} can be converted")
        return DecoderConfig(
            vocab_size=c.vocab_size,
            width=c.n_embd,
            depth=c.n_layer,
            heads=c.n_head,
            feed_forward=ACTIVATIONS[c.activation_function],  # type: ignore[arg-type]  # checked when it is made
            ffn_width=c.n_inner,
            norm="layernorm",
            norm_eps=c.layer_norm_epsilon,
            positions="learned",
            max_length=c.n_positions,
            tie_embeddings=bool(c.tie_word_embeddings),
            bias=True,
            attention_scale=None if c.scale_attn_weights else 1.0,
            initial_std=c.initializer_range,
            embedding_std=c.initializer_range,
            connection_options={"norm_bias": True},
        )

    def pieces(self, theirs, config):
        yield Piece("embedding.weight", "transformer.wte.weight")
        yield Piece("position_embedding.weight", "transformer.wpe.weight")
        if not config.tie_embeddings:
            yield Piece("head.weight", "lm_head.weight")
        yield from norm("stream.final_norm", "transformer.ln_f")
        for i in range(config.depth):
            layer, attention, feed_forward = f"transformer.h.{i}", f"blocks.{i}.sublayers.0", f"blocks.{i}.sublayers.1"
            yield from norm(f"stream.sites.{2 * i}.input_norm", f"{layer}.ln_1")
            yield from norm(f"stream.sites.{2 * i + 1}.input_norm", f"{layer}.ln_2")
            for part, name in enumerate(("query", "key", "value")):
                scale = 1 / (i + 1) if name == "query" and theirs.config.scale_attn_by_inverse_layer_idx else None
                yield from third(f"{attention}.{name}", f"{layer}.attn.c_attn", part, scale)
            for ours, name in (
                (f"{attention}.output", "attn.c_proj"),
                (f"{feed_forward}.up", "mlp.c_fc"),
                (f"{feed_forward}.down", "mlp.c_proj"),
            ):
                yield Piece(f"{ours}.weight", f"{layer}.{name}.weight", lambda weight: weight.T)
                yield Piece(f"{ours}.bias", f"{layer}.{name}.bias")


def norm(ours: str, theirs: str):
    """Scale and shift of a norm."""
    for part in ("weight", "bias"):
        yield Piece(f"{ours}.{part}", f"{theirs}.{part}")


def third(ours: str, theirs: str, part: int, scale: float | None):
    """One of the three maps that are stored side by side, [in 3*out], times ``scale``."""

    def take(joint):  # [in 3*out] or [3*out]
        found = joint.T.chunk(3)[part] if joint.ndim == 2 else joint.chunk(3)[part]
        return found if scale is None else found * scale

    yield Piece(f"{ours}.weight", f"{theirs}.weight", take)
    yield Piece(f"{ours}.bias", f"{theirs}.bias", take)
