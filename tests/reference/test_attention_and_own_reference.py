"""Attention with every token's weight on itself, against eager scores: values and gradients, rows without a gradient, mutants."""

import pytest
import torch
import torch.nn.functional as F

from thalweg.ops.attention_and_own import attention_and_own, can_attend
from thalweg.ops.forward_mode import jvp
from thalweg.ops.own_attention import own_attention

TOKENS, WIDTH = 7, 4


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def inputs(kv=4, dtype=torch.float64, tokens=TOKENS):
    shapes = [(2, 4, tokens, WIDTH), (2, kv, tokens, WIDTH), (2, kv, tokens, WIDTH)]
    return [gaussian(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


def eager(query, key, value, scaling, causal):
    shared = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
    scores = scaling * query @ key.mT
    if causal:
        length = scores.shape[-1]
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    return weights @ value, weights.diagonal(dim1=-2, dim2=-1)


def cotangents(dtype=torch.float64, quiet=()):
    output, own = gaussian(2, 4, TOKENS, WIDTH, seed=8, dtype=dtype), gaussian(2, 4, TOKENS, seed=9, dtype=dtype)
    for row in quiet:  # nothing arrives from the output of this query, all of it from its own weight
        output[:, :, row] = 0
    return output, own


def agrees(kv=4, causal=True, quiet=(), scale=1.0):
    given = inputs(kv)
    weights = [scale * c for c in cotangents(quiet=quiet)]
    ours = torch.autograd.grad(attention_and_own(*given, 0.6, causal), given, weights)
    wanted = torch.autograd.grad(eager(*given, 0.6, causal), given, weights)
    return all(torch.allclose(a, b, rtol=1e-11, atol=1e-13 * scale) for a, b in zip(ours, wanted, strict=True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv", [4, 2, 1])
def test_values_are_those_of_eager_scores(causal, kv):
    given = inputs(kv)
    for ours, wanted in zip(attention_and_own(*given, 0.6, causal), eager(*given, 0.6, causal), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv", [4, 2])
@pytest.mark.parametrize("quiet", [(), (0,), (3, 5), tuple(range(TOKENS))])
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_gradients_are_those_of_eager_scores(causal, kv, quiet, scale):
    assert agrees(kv, causal, quiet, scale)


def test_gradients_when_one_of_the_two_is_not_used():
    given = inputs()
    output, own = cotangents()
    for i, weight in enumerate((output, own)):
        ours = torch.autograd.grad(attention_and_own(*given, 0.6)[i], given, weight, allow_unused=True)
        wanted = torch.autograd.grad(eager(*given, 0.6, True)[i], given, weight, allow_unused=True)
        for a, b in zip(ours, wanted, strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-11, atol=1e-13)


def test_the_output_is_that_of_torch_to_the_bit():
    for dtype in (torch.float32, torch.float64):
        query, key, value = inputs(2, dtype, tokens=100)
        plain = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        output, own = attention_and_own(query, key, value)
        assert torch.equal(output, plain)
        torch.testing.assert_close(own, own_attention(query, key), rtol=1e-5, atol=1e-6)


def test_float32_is_as_good_as_eager_float32():
    exact = inputs()
    wanted = torch.autograd.grad(eager(*exact, 0.6, True), exact, cotangents(quiet=(2,)))
    given = [x.detach().float().requires_grad_() for x in exact]
    weights = [c.float() for c in cotangents(quiet=(2,))]
    ours = torch.autograd.grad(attention_and_own(*given, 0.6), given, weights)
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6)


def test_infinite_and_missing_gradients_do_not_hide():
    given = inputs()
    output, own = cotangents()
    output[0, 0, 1, 0] = torch.nan
    found = torch.autograd.grad(attention_and_own(*given, 0.6), given, (output, own))
    assert all(bool(g.isnan().any()) for g in found)


@pytest.mark.parametrize(
    "name",
    [
        "nothing handed on",
        "the other sign",
        "no diagonal",
    ],
)
def test_mutants_are_found_out(name, monkeypatch):
    assert agrees()
    if name == "no diagonal":
        monkeypatch.setattr(torch.Tensor, "addcmul_", lambda self, *_: self)
    else:
        wrong = (lambda a, b, c: a) if name == "nothing handed on" else (lambda a, b, c: a - b * c)
        monkeypatch.setattr(torch, "addcmul", wrong)
    assert not agrees()


def test_it_says_which_calls_it_does():
    query, key, _ = (x.detach() for x in inputs())
    assert can_attend(query, key, None)
    assert not can_attend(query, key, torch.ones(TOKENS, TOKENS, dtype=torch.bool))
    assert not can_attend(query[:, :, -1:], key, None)  # behind a cache
    assert not can_attend(query.bfloat16(), key.bfloat16(), None)
    assert not can_attend(query[:, :, :0], key[:, :, :0], None)
    seen = []
    jvp(lambda q: seen.append(can_attend(q, key, None)) or q * 1, query, torch.ones_like(query))
    assert seen == [False]
