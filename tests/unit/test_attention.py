"""Attention against a reference in loops, in float64, outputs and gradients; rotary positions; padding; packed documents."""

import itertools
import math

import pytest
import torch

from thalweg.connections import Requirements
from thalweg.models.config import DecoderConfig
from thalweg.models.look import look
from thalweg.models.rotary import angles, rotate
from thalweg.models.sublayers import Attention

WIDTH, HEADS = 12, 3


def config(**changes):
    values = {"vocab_size": 11, "width": WIDTH, "depth": 1, "heads": HEADS, "max_length": 64, **changes}
    return DecoderConfig(**values)


def sublayer(cfg, inner_norm=False, seed=0):
    attention = Attention(cfg, Requirements(inner_norm=inner_norm), 0).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return attention


def view(cfg, length, batch=2, mask=None, segments=None, positions=None):
    ids = torch.zeros(batch, length, dtype=torch.long)
    tokens, seen = look(cfg, torch.float64, ids, mask, positions, segments, None)
    return tokens, seen


def norm(row, weight, eps):
    scale = torch.sqrt(sum(value * value for value in row) / len(row) + eps)
    return torch.stack([value / scale * w for value, w in zip(row, weight, strict=True)])


def linear(layer, row):
    out = torch.stack([sum(w * value for w, value in zip(weights, row, strict=True)) for weights in layer.weight])
    return out if layer.bias is None else out + layer.bias


def turn(row, position, base):
    half = len(row) // 2
    out = [None] * len(row)
    for i in range(half):
        angle = float(position) * base ** (-2 * i / len(row))
        pair = complex(math.cos(angle), math.sin(angle))
        out[i] = row[i] * pair.real - row[i + half] * pair.imag
        out[i + half] = row[i] * pair.imag + row[i + half] * pair.real
    return torch.stack(out)


def reference(attention, cfg, x, positions, real, segments):
    """Row by row, head by head, key by key."""
    w, group = cfg.head_width, cfg.heads // cfg.key_value_heads
    rows = []
    for b in range(x.shape[0]):
        keys, values = [], []
        for t in range(x.shape[1]):
            k, v = linear(attention.key, x[b, t]), linear(attention.value, x[b, t])
            heads = [k[h * w : (h + 1) * w] for h in range(cfg.key_value_heads)]
            if cfg.qk_norm:
                heads = [norm(head, attention.key_norm.weight, cfg.norm_eps) for head in heads]
            keys.append([turn(head, positions[b, t], cfg.rope_base) for head in heads])
            values.append([v[h * w : (h + 1) * w] for h in range(cfg.key_value_heads)])
        for t in range(x.shape[1]):
            q = linear(attention.query, x[b, t])
            heads = []
            for h in range(cfg.heads):
                head = q[h * w : (h + 1) * w]
                if cfg.qk_norm:
                    head = norm(head, attention.query_norm.weight, cfg.norm_eps)
                head = turn(head, positions[b, t], cfg.rope_base)
                seen = [
                    s
                    for s in range(t + 1)
                    if s == t or (bool(real[b, s]) and int(segments[b, s]) == int(segments[b, t]))
                ]
                scores = [
                    sum(a * c for a, c in zip(head, keys[s][h // group], strict=True)) / math.sqrt(w) for s in seen
                ]
                weights = [torch.exp(score) for score in scores]
                total = sum(weights)
                heads.append(
                    sum(weight / total * values[s][h // group] for weight, s in zip(weights, seen, strict=True))
                )
            if cfg.attention_gate == "head":
                gates = torch.sigmoid(linear(attention.gate, x[b, t]))
                heads = [head * gate for head, gate in zip(heads, gates, strict=True)]
            y = torch.cat(heads)
            if cfg.attention_gate == "element":
                y = y * torch.sigmoid(linear(attention.gate, x[b, t]))
            if attention.inner_norm.weight is not None:
                y = norm(y, attention.inner_norm.weight, cfg.norm_eps)
            rows.append(linear(attention.output, y))
    return torch.stack(rows).view_as(x)


CASES = {
    "plain": {},
    "one key-value head": {"kv_heads": 1},
    "grouped": {"heads": 6, "kv_heads": 3},
    "bias": {"bias": True},
    "qk norm": {"qk_norm": True, "norm_eps": 1e-3},
    "gate per head": {"attention_gate": "head", "heads": 6, "kv_heads": 2},
    "gate per element": {"attention_gate": "element", "kv_heads": 1},
    "inner norm": {"attention_gate": "head", "norm_eps": 1e-3},
    "rope base": {"rope_base": 100.0},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_loops(case):
    cfg = config(**CASES[case])
    attention = sublayer(cfg, inner_norm=case == "inner norm")
    generator = torch.Generator().manual_seed(1)
    length = 5
    x = torch.randn(2, length, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(2, length, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]) if case in ("plain", "grouped") else None
    tokens, seen = view(cfg, length, mask=mask)
    real = torch.ones(2, length) if mask is None else mask
    leaves = [x, *attention.parameters()]
    ours = attention(x, seen)
    theirs = reference(attention, cfg, x, tokens.positions, real, torch.zeros(2, length))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    mine = torch.autograd.grad(ours, leaves, cotangent)
    wanted = torch.autograd.grad(theirs, leaves, cotangent)
    for gradient, expected in zip(mine, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-10)


def test_packed_documents_equal_the_loops_and_the_documents_alone():
    cfg = config(kv_heads=1)
    attention = sublayer(cfg)
    x = torch.randn(1, 7, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    segments = torch.tensor([[4, 4, 4, 9, 9, 9, 9]])
    tokens, seen = view(cfg, 7, batch=1, segments=segments)
    assert tokens.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    packed = attention(x, seen)
    torch.testing.assert_close(
        packed, reference(attention, cfg, x, tokens.positions, torch.ones(1, 7), segments), rtol=1e-11, atol=1e-11
    )
    for part in (slice(0, 3), slice(3, 7)):
        alone = attention(x[:, part], view(cfg, part.stop - part.start, batch=1)[1])
        torch.testing.assert_close(packed[:, part], alone, rtol=1e-12, atol=1e-12)


def test_rotation_is_relative():
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=generator, dtype=torch.float64)

    def score(at, behind):
        turned = [rotate(x, *angles(torch.tensor([[p]]), 8, 10000.0, torch.float64)) for x, p in ((q, at), (k, behind))]
        return (turned[0] * turned[1]).sum().item()

    for distance, shift in itertools.product((0, 1, 5), (1, 17, 1000)):
        assert score(distance, 0) == pytest.approx(score(distance + shift, shift), rel=1e-10, abs=1e-10)
    assert score(1, 0) != pytest.approx(score(0, 1), rel=1e-3)  # the direction matters


def test_rotation_by_hand():
    cos, sin = angles(torch.tensor([[3]]), 4, 100.0, torch.float64)
    x = torch.tensor([1.0, 2.0, 0.0, 0.0], dtype=torch.float64).view(1, 1, 1, 4)
    expected = [math.cos(3.0), 2 * math.cos(0.3), math.sin(3.0), 2 * math.sin(0.3)]  # pairs (0, 2) and (1, 3)
    assert rotate(x, cos, sin).flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_angles_are_wide_and_the_result_is_not():
    cos, _ = angles(torch.arange(4)[None], 8, dtype=torch.bfloat16)
    assert cos.dtype == torch.float32
    x = torch.ones(1, 2, 4, 8, dtype=torch.bfloat16)
    assert rotate(x, cos, cos).dtype == torch.bfloat16


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_real_tokens(side):
    cfg = config(kv_heads=1)
    attention = sublayer(cfg)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(1, 4, WIDTH, generator=generator, dtype=torch.float64)
    pad = torch.randn(1, 3, WIDTH, generator=generator, dtype=torch.float64) * 100
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] if side == "left" else [[1, 1, 1, 1, 0, 0, 0]])
    padded = torch.cat([pad, x] if side == "left" else [x, pad], dim=1)
    alone = attention(x, view(cfg, 4, batch=1)[1])
    together = attention(padded, view(cfg, 7, batch=1, mask=mask)[1])
    assert together.isfinite().all()
    torch.testing.assert_close(together[mask.bool()][None], alone, rtol=1e-12, atol=1e-12)


def test_a_gate_starts_from_the_sublayer_input_not_from_its_output():
    cfg = config(attention_gate="head")
    attention = sublayer(cfg)
    x = torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    before = attention(x, view(cfg, 3, batch=1)[1])
    with torch.no_grad():
        attention.value.weight.mul_(2.0)
    after = attention(x, view(cfg, 3, batch=1)[1])
    torch.testing.assert_close(after, 2 * before, rtol=1e-12, atol=1e-12)  # the gate did not move
