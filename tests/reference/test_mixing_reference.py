"""Measures of mixing and of streams against references written in loops from their definitions, with gradients against random cotangents."""

import itertools
import math

import pytest
import torch

from thalweg.geometry import (
    channels,
    common_gradient_norms,
    composite,
    constraint_error,
    difference_share,
    dynamics,
    effective_streams,
    inf_norm_gain,
    logit_spread,
    loss_change,
    mean_map_gain,
    mixing_distance,
    permutation_index,
    running_composites,
    sigma_2,
    stream_cosine,
    stream_rank,
    stream_shares,
    token_sd,
)
from thalweg.geometry.mixing import sigma

N = 4


def gaussian(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def norm(values):
    return torch.sqrt(sum(v * v for v in values))


def entries(m):
    return [m[i, j] for i in range(m.shape[0]) for j in range(m.shape[1])]


def row_sums(m, of=lambda v: v):
    return [sum(of(m[i, j]) for j in range(m.shape[1])) for i in range(m.shape[0])]


def product(a, b):
    return torch.stack(
        [
            torch.stack([sum(a[i, k] * b[k, j] for k in range(a.shape[1])) for j in range(b.shape[1])])
            for i in range(a.shape[0])
        ]
    )


def basis(n):
    """An orthonormal basis whose first vector is the mean channel, by Helmert."""
    rows = [[1 / math.sqrt(n)] * n]
    rows += [
        [1 / math.sqrt(k * (k + 1))] * k + [-k / math.sqrt(k * (k + 1))] + [0.0] * (n - k - 1) for k in range(1, n)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def largest_singular(m):
    return torch.linalg.eigvalsh(product(m.mT, m))[-1].sqrt()


def reference_channels(m):
    q = basis(len(m))
    turned = product(product(q, m), q.mT)
    return [abs(turned[0, 0]), largest_singular(turned[1:, 1:]), norm(turned[1:, 0]), norm(turned[0, 1:])]


def reference_distance(m, to):
    n = len(m)
    targets = {
        "identity": [torch.eye(n)],
        "uniform": [torch.full((n, n), 1 / n)],
        "permutation": [torch.eye(n)[list(order)] for order in itertools.permutations(range(n))],
    }[to]
    found = [norm([a - b for a, b in zip(entries(m), entries(t.double()), strict=True)]) for t in targets]
    return min(found, key=lambda v: v.item())


def reference_spread(z):
    mean = sum(z) / len(z)
    return torch.sqrt(sum((v - mean) ** 2 for v in z) / len(z))


def reference_effective(w):
    total = sum(abs(v) for v in w)
    return torch.exp(-sum(abs(v) / total * torch.log(abs(v) / total) for v in w))


def reference_rank(x):
    values = torch.linalg.svdvals(x)
    shares = [v / sum(values) for v in values]
    return torch.exp(-sum(p * torch.log(p) for p in shares)) / len(values)


def reference_cosine(x):
    pairs = [(a, b) for a in range(len(x)) for b in range(a)]
    return sum(sum(x[a] * x[b]) / (norm(x[a]) * norm(x[b])) for a, b in pairs) / len(pairs)


def reference_difference(x):
    mean = [sum(x[i, d] for i in range(len(x))) / len(x) for d in range(x.shape[1])]
    return norm([x[i, d] - mean[d] for i in range(len(x)) for d in range(x.shape[1])]) / norm(entries(x))


def token_statistics(x):
    means = [sum(x[t, c] for t in range(len(x))) / len(x) for c in range(x.shape[1])]
    variance = [sum((x[t, c] - means[c]) ** 2 for t in range(len(x))) / len(x) for c in range(x.shape[1])]
    root = [torch.sqrt(sum(v) / x.shape[1]) for v in (variance, [m * m for m in means])]
    return root[0], root[0] / root[1]


CASES = {
    "inf_norm_gain": (
        inf_norm_gain,
        lambda m: [max(row_sums(m, abs)), max(row_sums(m.mT, abs))],
        (N, N),
    ),
    "sigma_1": (lambda m: [sigma(m, index=1)], lambda m: [largest_singular(m)], (N, 3)),
    "sigma_2": (lambda m: [sigma_2(m)], lambda m: [torch.linalg.eigvalsh(product(m.mT, m))[-2].sqrt()], (N, 3)),
    "channels": (channels, reference_channels, (N, N)),
    "constraint_error": (
        constraint_error,
        lambda m: [
            max(abs(s - 1) for s in row_sums(m)),
            max(abs(s - 1) for s in row_sums(m.mT)),
            max(-v for v in entries(m)),
        ],
        (N, N),
    ),
    **{
        f"distance to {to}": (
            lambda m, to=to: [mixing_distance(m, to=to)],
            lambda m, to=to: [reference_distance(m, to)],
            (N, N),
        )
        for to in ("identity", "uniform", "permutation")
    },
    "permutation_index": (
        lambda m: [permutation_index(m)],
        lambda m: [reference_distance(m, "uniform") / math.sqrt(N - 1)],
        (N, N),
    ),
    "logit_spread": (lambda z: [logit_spread(z)], lambda z: [reference_spread(z)], (N * N,)),
    "stream_shares": (
        lambda w: stream_shares(w).unbind(-1),
        lambda w: [abs(v) / sum(abs(u) for u in w) for v in w],
        (N,),
    ),
    "effective_streams": (lambda w: [effective_streams(w)], lambda w: [reference_effective(w)], (N,)),
    "stream_rank": (lambda x: [stream_rank(x)], lambda x: [reference_rank(x)], (N, 6)),
    "stream_cosine": (lambda x: [stream_cosine(x)], lambda x: [reference_cosine(x)], (N, 6)),
    "difference_share": (lambda x: [difference_share(x)], lambda x: [reference_difference(x)], (N, 6)),
    "coefficients": (lambda x: [token_sd(x), dynamics(x)], token_statistics, (7, N)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    function, reference, shape = CASES[name]
    x = gaussian(3, *shape, seed=len(name)).requires_grad_()
    found = torch.stack([torch.as_tensor(part) for part in function(x)], -1)
    expected = torch.stack([torch.stack(list(reference(one))) for one in x])
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
    cotangent = gaussian(*expected.shape, seed=99)
    (gradient,) = torch.autograd.grad((found * cotangent).sum(), x)
    (exact,) = torch.autograd.grad((expected * cotangent).sum(), x)
    assert torch.allclose(gradient, exact, rtol=1e-7, atol=1e-10)


def test_gain_of_the_mean_map():
    mix = gaussian(2, 5, N, 3).requires_grad_()
    means = [sum(one[t] for t in range(5)) / 5 for one in mix]
    expected = torch.stack(
        [torch.stack([max(abs(s) for s in row_sums(m)), max(abs(s) for s in row_sums(m.mT))]) for m in means]
    )
    found = torch.stack(list(mean_map_gain(mix)), -1)
    assert torch.allclose(found, expected, rtol=1e-12)
    cotangent = gaussian(2, 2, seed=1)
    (gradient,) = torch.autograd.grad((found * cotangent).sum(), mix)
    (exact,) = torch.autograd.grad((expected * cotangent).sum(), mix)
    assert torch.allclose(gradient, exact, rtol=1e-10)


def test_composites_of_any_two_sites():
    mixes = [gaussian(2, N, N, seed=s) for s in range(5)]
    expected = [[torch.eye(N, dtype=torch.float64) for _ in range(2)]]
    for mix in mixes[1:4]:
        expected.append([product(mix[b], expected[-1][b]) for b in range(2)])
    assert torch.allclose(composite(mixes[1:4]), torch.stack(expected[-1]), rtol=1e-12)
    for found, exact in zip(running_composites(mixes[1:4]), expected[1:], strict=True):
        assert torch.allclose(found, torch.stack(exact), rtol=1e-12)
    backwards = list(running_composites(mixes, backwards=True))
    for first in range(5):  # the product of the sites from ``first`` on
        assert torch.allclose(backwards[4 - first], composite(mixes[first:]), rtol=1e-12)


def test_common_gradient():
    gradients = [gaussian(2, 3, N, 5, seed=s) for s in range(2)]
    expected = [
        norm([sum(g[b, t, i, d] for i in range(N)) for b in range(2) for t in range(3) for d in range(5)]).item()
        for g in gradients
    ]
    assert common_gradient_norms(gradients).tolist() == pytest.approx(expected, rel=1e-12)


def test_change_in_loss_and_its_error():
    before, after = gaussian(6).exp(), gaussian(6, seed=1).exp()
    scored = torch.tensor([3, 4, 1, 2, 5, 3])
    found = loss_change(before, after, scored)
    total = sum(scored.tolist())
    mean = sum((b - a).item() for a, b in zip(before, after, strict=True)) / total
    rest = [(b - a).item() - mean * c for a, b, c in zip(before, after, scored.tolist(), strict=True)]
    assert found.mean == pytest.approx(mean)
    assert found.error == pytest.approx(math.sqrt(6 / 5 * sum(r * r for r in rest)) / total)
    # with equal counts it is the standard error of a mean
    same = loss_change(before, after, torch.full((6,), 2))
    assert same.error == pytest.approx(((after - before) / 2).std().item() / math.sqrt(6))
    assert loss_change(before[:1], after[:1], scored[:1]).error is None
