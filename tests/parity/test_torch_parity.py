"""Norms, and whole pre-norm and post-norm stacks, against torch's own modules: outputs and gradients in float64."""

import pytest
import torch
from torch import nn

from thalweg.models import Decoder, DecoderConfig
from thalweg.ops.norms import Norm

VOCAB, WIDTH, DEPTH, HEADS, FFN, EPS = 23, 24, 3, 4, 40, 1e-5


def gaussian(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "bias", "theirs"),
    [
        ("rmsnorm", False, nn.RMSNorm(WIDTH, eps=EPS)),
        ("layernorm", False, nn.LayerNorm(WIDTH, eps=EPS, bias=False)),
        ("layernorm", True, nn.LayerNorm(WIDTH, eps=EPS)),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
def test_norms(kind, bias, theirs, scale):
    """At scale 1e-3 eps is ten times the variance; it must stand inside the root."""
    ours, theirs = Norm(WIDTH, kind, eps=EPS, bias=bias).double(), theirs.double()
    with torch.no_grad():
        for seed, (mine, other) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
            other.copy_(gaussian(WIDTH, seed=seed))
            mine.copy_(other)
    x = (scale * (gaussian(2, 5, WIDTH, seed=7) + 0.5)).requires_grad_()
    cotangent = gaussian(2, 5, WIDTH, seed=8)
    mine, other = ours(x), theirs(x)
    torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)
    got = torch.autograd.grad(mine, [x, *ours.parameters()], cotangent)
    want = torch.autograd.grad(other, [x, *theirs.parameters()], cotangent)
    for gradient, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10)


def encoder(norm_first):
    """torch's encoder under a causal mask is a decoder-only stack without positions."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, FFN, dropout=0.0, activation="gelu", layer_norm_eps=EPS, batch_first=True, norm_first=norm_first
    )
    last = nn.LayerNorm(WIDTH, eps=EPS) if norm_first else None
    return nn.TransformerEncoder(layer, DEPTH, norm=last, enable_nested_tensor=False).double()


def pairs(ours, theirs, norm_first):
    """Our parameters, as a list where torch packs several, and torch's."""
    for i, layer in enumerate(theirs.layers):
        attention, feed_forward = ours.blocks[i].sublayers
        chosen = (attention.query, attention.key, attention.value)
        yield [m.weight for m in chosen], layer.self_attn.in_proj_weight
        yield [m.bias for m in chosen], layer.self_attn.in_proj_bias
        both = [
            (attention.output, layer.self_attn.out_proj),
            (feed_forward.up, layer.linear1),
            (feed_forward.down, layer.linear2),
        ]
        sites = ours.stream.sites[2 * i : 2 * i + 2]
        norms = [site.input_norm if norm_first else site.output_norm for site in sites]
        both += zip(norms, (layer.norm1, layer.norm2), strict=True)
        for mine, other in both:
            yield [mine.weight], other.weight
            yield [mine.bias], other.bias
    if norm_first:
        yield [ours.stream.final_norm.weight], theirs.norm.weight
        yield [ours.stream.final_norm.bias], theirs.norm.bias


@pytest.mark.parametrize(("connection", "norm_first"), [("additive", True), ("post_norm", False)])
@pytest.mark.parametrize("padded", [False, True])
def test_a_whole_stack(connection, norm_first, padded):
    ours = Decoder(
        DecoderConfig(
            vocab_size=VOCAB,
            width=WIDTH,
            depth=DEPTH,
            heads=HEADS,
            feed_forward="gelu",
            ffn_width=FFN,
            norm="layernorm",
            norm_eps=EPS,
            connection=connection,
            connection_options={"norm_bias": True},
            bias=True,
            tie_embeddings=False,
        )
    ).double()
    theirs = encoder(norm_first)
    both = list(pairs(ours, theirs, norm_first))
    assert sum(len(mine) for mine, _ in both) + 2 == len(list(ours.parameters()))  # beside embedding and head
    assert len(both) == len(list(theirs.parameters()))
    with torch.no_grad():
        for seed, (mine, other) in enumerate(both):
            other.copy_(0.4 * gaussian(*other.shape, seed=seed))
            for part, value in zip(mine, other.chunk(len(mine)), strict=True):
                part.copy_(value)
    x = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(x)
    if padded:
        mask[0, 5:] = 0
    real = mask.bool()
    logits = ours(x, attention_mask=mask if padded else None, position_ids=torch.zeros_like(x)).logits[real]
    causal = torch.ones(7, 7, dtype=torch.bool).triu(1)
    hidden = theirs(ours.embedding(x), mask=causal, src_key_padding_mask=~real if padded else None)
    expected = ours.head(hidden)[real]
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-11)
    cotangent = gaussian(*logits.shape, seed=99)
    gradients = torch.autograd.grad(logits, [part for mine, _ in both for part in mine], cotangent)
    wanted = torch.autograd.grad(expected, [other for _, other in both], cotangent)
    parts = [part for (mine, _), gradient in zip(both, wanted, strict=True) for part in gradient.chunk(len(mine))]
    for gradient, part in zip(gradients, parts, strict=True):
        torch.testing.assert_close(gradient, part, rtol=1e-9, atol=1e-10)
