"""Other published decoders that our options spell out: same weights, same logits and gradients as in transformers, in float64.

Qwen3: a norm on the queries and keys of every head. Gemma 2: norms before and after every sublayer, and a soft cap on the logits.
Granite: a fixed factor on every update, which is LayerScale where it starts. Phi: attention and feed-forward side by side.
"""

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from thalweg.models import Decoder, DecoderConfig
from thalweg.models.rotary import angles

VOCAB, WIDTH, DEPTH, HEADS, FFN, BASE, EPS, CAP = 37, 24, 3, 4, 40, 500.0, 1e-5, 1.5
HEAD = WIDTH // HEADS
ROPE = {"rope_type": "default", "rope_theta": BASE}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "pad_token_id": None,
}
LLAMA = {
    **SIZES,
    "num_key_value_heads": 2,
    "rms_norm_eps": EPS,
    "rope_parameters": ROPE,
    "tie_word_embeddings": True,
}
OURS = {
    "vocab_size": VOCAB,
    "width": WIDTH,
    "depth": DEPTH,
    "heads": HEADS,
    "ffn_width": FFN,
    "norm_eps": EPS,
    "rope_base": BASE,
}
FACTOR = 0.22


class Angles(nn.Module):
    """Their angles in float64; their own are float32, whatever the model."""

    def forward(self, x, position_ids, *_, **__):
        cos, sin = angles(position_ids, HEAD, BASE, torch.float64)
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)


class WideNorm(nn.Module):
    """Their RMSNorm without its detour through float32; Gemma's scale is 1 + weight."""

    def __init__(self, norm, shift):
        super().__init__()
        self.weight, self.shift = norm.weight, shift

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (self.shift + self.weight)


def prepared(cls, config):
    """Their model in float64 all the way, with random weights everywhere."""
    torch.manual_seed(0)
    model = cls(config).double().eval()
    model.config._attn_implementation = (
        "sdpa"  # the eager one takes its softmax in float32; without a cap they are the same
    )
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, WideNorm(child, shift=1.0 if cls is Gemma2ForCausalLM else 0.0))
            elif type(child).__name__.endswith("RotaryEmbedding"):
                setattr(module, name, Angles())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def maps(ours, theirs, names):
    for mine, other in names.items():
        first, second = getattr(ours, mine), getattr(theirs, other)
        yield first.weight, second.weight
        if first.bias is not None:
            yield first.bias, second.bias


ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
SWIGLU = {name: f"{name}_proj" for name in ("gate", "up", "down")}


def sequential(ours, theirs, norms, extra=()):
    """Pairs of our parameters and theirs for a model with two sublayers a layer; norms: ours by slot and theirs, a site each."""
    yield ours.embedding.weight, theirs.model.embed_tokens.weight
    yield ours.stream.final_norm.weight, theirs.model.norm.weight
    for i, layer in enumerate(theirs.model.layers):
        attention, feed_forward = ours.blocks[i].sublayers
        for site, named in zip(ours.stream.sites[2 * i : 2 * i + 2], norms, strict=True):
            yield from maps(site, layer, named)
        yield from maps(attention, layer.self_attn, ATTENTION | dict(extra))
        yield from maps(feed_forward, layer.mlp, SWIGLU)


def qwen3():
    theirs = prepared(Qwen3ForCausalLM, Qwen3Config(**LLAMA, head_dim=HEAD))
    ours = Decoder(DecoderConfig(**OURS, kv_heads=2, qk_norm=True)).double()
    norms = ({"input_norm": "input_layernorm"}, {"input_norm": "post_attention_layernorm"})
    return ours, theirs, sequential(ours, theirs, norms, {"query_norm": "q_norm", "key_norm": "k_norm"}.items())


def gemma2():
    config = Gemma2Config(
        **LLAMA,
        head_dim=HEAD,
        query_pre_attn_scalar=HEAD,
        hidden_activation="silu",
        layer_types=["full_attention"] * DEPTH,
        attn_logit_softcapping=None,
        final_logit_softcapping=CAP,
    )
    theirs = prepared(Gemma2ForCausalLM, config)
    theirs.model.embed_tokens.embed_scale.fill_(1.0)  # ours does not scale embeddings
    ours = Decoder(
        DecoderConfig(**OURS, kv_heads=2, logit_softcap=CAP, connection_options={"update_norm": True})
    ).double()
    norms = (
        {"input_norm": "input_layernorm", "update_norm": "post_attention_layernorm"},
        {"input_norm": "pre_feedforward_layernorm", "update_norm": "post_feedforward_layernorm"},
    )
    return ours, theirs, sequential(ours, theirs, norms)


def granite():
    config = GraniteConfig(**LLAMA, attention_multiplier=HEAD**-0.5, residual_multiplier=FACTOR)
    theirs = prepared(GraniteForCausalLM, config)
    ours = Decoder(
        DecoderConfig(**OURS, kv_heads=2, connection="layerscale", connection_options={"init": FACTOR})
    ).double()
    with torch.no_grad():
        for site in ours.stream.sites:
            site.scale.fill_(FACTOR)  # 0.22 in float64
    norms = ({"input_norm": "input_layernorm"}, {"input_norm": "post_attention_layernorm"})
    return ours, theirs, sequential(ours, theirs, norms)


def phi():
    rope = {**ROPE, "partial_rotary_factor": 1.0}
    theirs = prepared(PhiForCausalLM, PhiConfig(**SIZES, hidden_act="gelu", layer_norm_eps=EPS, rope_parameters=rope))
    ours = Decoder(
        DecoderConfig(
            **OURS,
            layers=("parallel",),
            feed_forward="gelu",
            norm="layernorm",
            bias=True,
            tie_embeddings=False,
            connection_options={"norm_bias": True},
        )
    ).double()
    with torch.no_grad():
        theirs.lm_head.bias.zero_()  # our head has none

    def pairs():
        yield ours.embedding.weight, theirs.model.embed_tokens.weight
        yield ours.head.weight, theirs.lm_head.weight
        yield from maps(ours.stream, theirs.model, {"final_norm": "final_layernorm"})
        for block, site, layer in zip(ours.blocks, ours.stream.sites, theirs.model.layers, strict=True):
            (composite,) = block.sublayers
            yield from maps(site, layer, {"input_norm": "input_layernorm"})
            yield from maps(composite.attention, layer.self_attn, {**ATTENTION, "output": "dense"})
            yield from maps(composite.feed_forward, layer.mlp, {"up": "fc1", "down": "fc2"})

    return ours, theirs, pairs()


@pytest.mark.parametrize("family", [qwen3, gemma2, granite, phi])
@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_gradients(family, padded):
    ours, theirs, pairs = family()
    both = list(pairs)
    left_out = {"scale"} if family is granite else set()
    mine = [p for name, p in ours.named_parameters() if name.rsplit(".", 1)[-1] not in left_out]
    assert {id(p) for p, _ in both} == {id(p) for p in mine}
    heads = [p for name, p in theirs.named_parameters() if name == "lm_head.bias"]
    assert {id(p) for p in (*(q for _, q in both), *heads)} == {id(p) for p in theirs.parameters()}
    with torch.no_grad():
        for parameter, other in both:
            shift = 1.0 if family is gemma2 and other.ndim == 1 else 0.0
            parameter.copy_(other + shift)
    x = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(x)
    if padded:
        mask[0, :3] = 0
    real, positions = mask.bool(), (mask.cumsum(1) - 1).clamp(min=0)
    logits = ours(x, attention_mask=mask if padded else None).logits[real]
    expected = theirs(x, attention_mask=mask, position_ids=positions).logits[real]
    assert logits.std() > 0.3
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-11)
    cotangent = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad(logits, [p for p, _ in both], cotangent)
    wanted = torch.autograd.grad(expected, [p for _, p in both], cotangent)
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-8, atol=1e-9)
