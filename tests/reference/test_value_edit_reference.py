"""The value-space edit and the own weight against references written in loops from the definitions, and mutants that must be found out."""

import math

import pytest
import torch

from thalweg.ops.forward_mode import jvp
from thalweg.ops.own_attention import own_attention
from thalweg.ops.value_edit import value_coefficient, value_edit

B, T, HEADS, KV, WIDTH = 2, 3, 8, 4, 3
GROUPS = ["head", "kv", "kv:2", "all"]
SCALES = [(0.0, 1.0), (1.0, 0.0), (0.3, 1.7), (-1.0, 0.5)]


def gaussian(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attention(seed=0):
    """Weights [b h t t] of a causal attention and values [b t kv dv]: outputs that an attention could have made."""
    scores = gaussian(B, HEADS, T, T, seed=seed)
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1), gaussian(B, T, KV, WIDTH, seed=seed + 1)


def read(weights, v):
    """o [b t h dv]: query head h reads value head h // (h / kv)."""
    return torch.einsum("bhts,bshd->bthd", weights, v.repeat_interleave(HEADS // KV, 2))


def heads_of(group, h):
    """The query heads that are projected together with ``h``."""
    each = HEADS // KV
    size = {"head": 1, "kv": each, "kv:2": 2 * each, "all": HEADS}[group]
    return range(h // size * size, (h // size + 1) * size)


def reference(o, v, parallel, perpendicular, own, group):
    out = torch.empty_like(o)
    for b in range(B):
        for t in range(T):
            d, c, r = {}, {}, {}
            for h in range(HEADS):
                r[h] = v[b, t, h // (HEADS // KV)]
                d[h] = r[h] * (0.0 if own is None else own[b, h, t])
                c[h] = o[b, t, h] - d[h]
            for h in range(HEADS):
                joint = heads_of(group, h)
                dot = sum(sum(c[g][i] * r[g][i] for i in range(WIDTH)) for g in joint)
                square = sum(sum(r[g][i] ** 2 for i in range(WIDTH)) for g in joint)
                along = dot / square * r[h]
                out[b, t, h] = d[h] + parallel * along + perpendicular * (c[h] - along)
    return out


def gradients(function, inputs, seed):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    found = torch.autograd.grad(out, inputs, gaussian(*out.shape, seed=seed), allow_unused=True, materialize_grads=True)
    return out.detach(), found


def agrees(edit, group, scales, exclude_self):
    """Whether outputs and all gradients of ``edit`` are those of the reference, at a random cotangent."""
    weights, v = attention(seed=3)
    inputs = [read(weights, v), v] + ([weights.diagonal(dim1=-2, dim2=-1)] if exclude_self else [])

    def run(function):
        return gradients(lambda o, v, own=None: function(o, v, *scales, own, group), inputs, 7)

    (out, grads), (expected, wanted) = run(edit), run(reference)
    pairs = [(out, expected), *zip(grads, wanted, strict=True)]
    return all(torch.allclose(a, b, rtol=1e-10, atol=1e-11) for a, b in pairs)


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("group", GROUPS)
def test_outputs_and_gradients_are_those_of_the_reference(group, scales, exclude_self):
    assert agrees(value_edit, group, scales, exclude_self)


def repeated_by_element(o, v, parallel, perpendicular, own, group):
    """The bug of the first published tables: the flat value axis repeated element by element."""
    wrong = v.flatten(2).repeat_interleave(HEADS // KV, -1).unflatten(-1, (HEADS, WIDTH))
    return value_edit(o, wrong, parallel, perpendicular, own, group)


def repeated_by_tile(o, v, parallel, perpendicular, own, group):
    return value_edit(o, v.repeat(1, 1, HEADS // KV, 1), parallel, perpendicular, own, group)


def own_forgotten(o, v, parallel, perpendicular, own, group):
    return value_edit(o, v, parallel, perpendicular, None, group)


def own_of_the_head_before(o, v, parallel, perpendicular, own, group):
    return value_edit(o, v, parallel, perpendicular, None if own is None else own.roll(1, 1), group)


def value_detached(o, v, parallel, perpendicular, own, group):
    return value_edit(o, v.detach() + 0 * v, parallel, perpendicular, own, group)


def scales_swapped(o, v, parallel, perpendicular, own, group):
    return value_edit(o, v, perpendicular, parallel, own, group)


def grouped_too_wide(o, v, parallel, perpendicular, own, group):
    wider = dict(zip(GROUPS, [*GROUPS[1:], "head"], strict=True))
    return value_edit(o, v, parallel, perpendicular, own, wider[group])


def own_kept_out_of_the_across_part(o, v, parallel, perpendicular, own, group):
    """s_across times the whole output: the own part is scaled with it."""
    beta = value_coefficient(o, v, own, group).unsqueeze(-1)
    return perpendicular * o + (parallel - perpendicular) * beta * v.repeat_interleave(HEADS // KV, 2)


ALWAYS = [repeated_by_element, repeated_by_tile, value_detached, scales_swapped, grouped_too_wide]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("mutant", ALWAYS)
def test_a_wrong_layout_scale_or_gradient_is_found_out(mutant, group):
    assert not agrees(mutant, group, (0.3, 1.7), False) and not agrees(mutant, group, (0.3, 1.7), True)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("mutant", [own_forgotten, own_of_the_head_before, own_kept_out_of_the_across_part])
def test_a_wrong_own_part_is_found_out(mutant, group):
    assert not agrees(mutant, group, (0.3, 1.7), True)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("exclude_self", [False, True])
def test_gradcheck(group, exclude_self):
    weights, v = attention(seed=5)
    inputs = [read(weights, v)[:1, :2], v[:1, :2], weights.diagonal(dim1=-2, dim2=-1)[:1, :, :2]]
    inputs = [x.clone().requires_grad_() for x in inputs[: 3 if exclude_self else 2]]
    assert torch.autograd.gradcheck(lambda o, v, own=None: value_edit(o, v, 0.3, 1.4, own, group), inputs)


def eager_own(query, key, mask, scaling, softcap, sinks):
    """The diagonal of the weights of an eager attention, row by row; mask True where a query may look."""
    b, h, q, d = query.shape
    kv, k = key.shape[1:3]
    out = torch.zeros(b, h, q, dtype=query.dtype)
    for i in range(b):
        for head in range(h):
            for t in range(q):
                scores = []
                for s in range(k):
                    score = scaling * sum(query[i, head, t, j] * key[i, head // (h // kv), s, j] for j in range(d))
                    scores.append(score if softcap is None else softcap * torch.tanh(score / softcap))
                seen = [s for s in range(k) if mask[i, t, s]]
                if k - q + t in seen:
                    total = sum(torch.exp(scores[s]) for s in seen)
                    total = total + (0 if sinks is None else torch.exp(sinks[head]))
                    out[i, head, t] = torch.exp(scores[k - q + t]) / total
    return out


def causal(b, q, k, window=None):
    at, to = torch.arange(k - q, k)[:, None], torch.arange(k)
    seen = (to <= at) if window is None else (to <= at) & (to > at - window)
    return seen.expand(b, q, k).clone()


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("q", "k"), [(6, 6), (2, 6), (1, 6)])
def test_own_weights_are_the_diagonal_of_eager_ones(chunk, softcap, with_sinks, q, k):
    query, key = gaussian(2, 4, q, 3), gaussian(2, 2, k, 3, seed=1)
    sinks = gaussian(4, seed=2) if with_sinks else None
    expected = eager_own(query, key, causal(2, q, k), 0.7, softcap, sinks)
    options = {"scaling": 0.7, "softcap": softcap, "sinks": sinks, "chunk": chunk}
    torch.testing.assert_close(own_attention(query, key, **options), expected, rtol=1e-12, atol=1e-14)
    mask = causal(2, q, k)[:, None]
    torch.testing.assert_close(own_attention(query, key, mask, **options), expected, rtol=1e-12, atol=1e-14)
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    torch.testing.assert_close(own_attention(query, key, added, **options), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("hidden", ["by order", "by window", "by what is added"])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_of_own_weights_are_those_of_eager_ones(softcap, hidden):
    """With chunks, a cap, sinks and a bias that is added to the scores; grouped heads; queries behind a cache."""
    query, key, sinks = gaussian(2, 4, 3, 3), gaussian(2, 2, 6, 3, seed=1), gaussian(4, seed=2)
    inputs = [x.requires_grad_() for x in (query, key, sinks)]
    options = {"scaling": 0.7, "softcap": softcap, "chunk": 2}
    seen, bias = causal(2, 3, 6, 2 if hidden == "by window" else None), 0.0
    if hidden == "by what is added":
        bias = gaussian(2, 4, 3, 6, seed=4)
        options["mask"] = bias.masked_fill(~seen[:, None], -torch.inf)
    elif hidden == "by window":
        options["sliding_window"] = 2
    ours = own_attention(query, key, sinks=sinks, **options)
    scores = 0.7 * query @ key.repeat_interleave(2, 1).mT
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~seen[:, None], -torch.inf)
    rows = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, 4, 3, 1)], -1).softmax(-1)
    theirs = torch.stack([rows[:, :, t, 3 + t] for t in range(3)], -1)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    cotangent = gaussian(2, 4, 3, seed=5)
    mine, wanted = (torch.autograd.grad(out, inputs, cotangent) for out in (ours, theirs))
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_own_weights_have_forward_derivatives_too():
    query, key, direction = (
        gaussian(1, 2, 4, 3),
        gaussian(1, 1, 4, 3, seed=1).requires_grad_(),
        gaussian(1, 2, 4, 3, seed=2),
    )
    value, pushed = jvp(lambda q: own_attention(q, key), query, direction)
    eps = 1e-6
    ahead, behind = (own_attention(query + sign * eps * direction, key) for sign in (1, -1))
    torch.testing.assert_close(pushed, (ahead - behind) / (2 * eps), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(value, own_attention(query, key))


def test_the_backward_pass_keeps_no_scores():
    """Queries and keys, and two numbers a query; not b h t t."""
    query, key = (gaussian(1, 2, 64, 3, seed=s).requires_grad_() for s in (0, 1))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        own_attention(query, key)
    assert max(kept) == query.numel() and len(kept) <= 5


def test_padding_and_windows_hide_what_they_should():
    query, key = gaussian(2, 4, 6, 3), gaussian(2, 2, 6, 3, seed=1)
    seen = causal(2, 6, 6, window=3)
    seen[0, :, :2] = False  # padded on the left
    seen[1, :, 5:] = False  # padded on the right
    expected = eager_own(query, key, seen, 3**-0.5, None, None)
    assert expected[0, :, :2].eq(0).all() and expected[1, :, 5].eq(0).all() and expected[1, :, :5].gt(0).all()
    torch.testing.assert_close(own_attention(query, key, seen[:, None], chunk=4), expected, rtol=1e-12, atol=1e-14)
    windowed = eager_own(query, key, causal(2, 6, 6, window=3), 3**-0.5, None, None)
    found = own_attention(query, key, sliding_window=3, chunk=4)
    torch.testing.assert_close(found, windowed, rtol=1e-12, atol=1e-14)
    everything = eager_own(query, key, torch.ones(2, 6, 6, dtype=torch.bool), 3**-0.5, None, None)
    torch.testing.assert_close(own_attention(query, key, causal=False), everything, rtol=1e-12, atol=1e-14)


def test_gradients_of_own_weights_pass_by_hidden_rows():
    query, key, sinks = gaussian(1, 2, 4, 3), gaussian(1, 1, 4, 3, seed=1), gaussian(2, seed=2)
    mask = causal(1, 4, 4)[:, None]
    mask[:, :, 1] = False
    inputs = [x.requires_grad_() for x in (query, key, sinks)]
    assert torch.autograd.gradcheck(lambda q, k, s: own_attention(q, k, mask, sinks=s, chunk=3), inputs)
    assert math.isclose(own_attention(query, key, mask)[0, 0, 0].item(), 1.0)
