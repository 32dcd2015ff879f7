"""The measures against references written in loops from their definitions, with gradients against random cotangents."""

import math

import pytest
import torch

from thalweg.geometry import (
    amax_gain,
    effective_rank,
    off_tangent,
    parallel_energy,
    participation_ratio,
    rankme,
    relative_update,
    residual_to_rank_one,
    rms,
    split_update,
    stable_rank,
    state_cosine,
    token_cosine,
)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sequence_of(function, x):
    return torch.stack([function(matrix) for matrix in x])


def prepared(x, center, drop_first):
    rows = [x[t] for t in range(1 if drop_first else 0, x.shape[0])]
    if center:
        mean = sum(rows) / len(rows)
        rows = [row - mean for row in rows]
    return torch.stack(rows)


def shares(x, **options):
    values = torch.linalg.svd(prepared(x, options.get("center"), options.get("drop_first"))).S
    return values, [value / sum(values) for value in values]


def reference_effective_rank(x, normalize=True, **options):
    values, p = shares(x, **options)
    entropy = sum(-share * torch.log(share) for share in p if share > 1e-12)
    return torch.exp(entropy) / (len(values) if normalize else 1)


def reference_rankme(x, **options):
    _, p = shares(x, **options)
    return torch.exp(sum(-(share + 1e-7) * torch.log(share + 1e-7) for share in p))


def reference_stable_rank(x, **options):
    values, _ = shares(x, **options)
    return sum(value**2 for value in values) / values[0] ** 2


def reference_participation_ratio(x, **options):
    x = prepared(x, options.get("center"), options.get("drop_first"))
    energy = torch.linalg.eigvalsh(x.mT @ x)
    return sum(energy) ** 2 / sum(value**2 for value in energy)


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / torch.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def reference_token_cosine(x):
    pairs = [cosine(x[i], x[j]) for i in range(len(x)) for j in range(i)]
    return sum(pairs) / len(pairs)


def reference_rms(x):
    return torch.sqrt(sum(value**2 for row in x for value in row) / x.numel())


def reference_residual(x, relative=True, norm="frobenius"):
    mean = sum(x) / len(x)
    rest = torch.stack([row - mean for row in x])

    def size(m):
        if norm == "frobenius":
            return torch.sqrt(sum(value**2 for row in m for value in row))
        columns = [sum(abs(m[i, j]) for i in range(m.shape[0])) for j in range(m.shape[1])]
        rows = [sum(abs(m[i, j]) for j in range(m.shape[1])) for i in range(m.shape[0])]
        return torch.sqrt(max(columns) * max(rows))

    return size(rest) / size(x) if relative else size(rest)


SPECTRAL = [
    (effective_rank, reference_effective_rank),
    (rankme, reference_rankme),
    (stable_rank, reference_stable_rank),
    (participation_ratio, reference_participation_ratio),
]
CASES = [
    *((f, r, o | m) for f, r in SPECTRAL for o in ({}, {"drop_first": True}) for m in ({}, {"method": "svd"})),
    *((f, r, {"center": True}) for f, r in SPECTRAL),
    (effective_rank, reference_effective_rank, {"normalize": False}),
    (token_cosine, reference_token_cosine, {}),
    (rms, reference_rms, {}),
    (residual_to_rank_one, reference_residual, {}),
    (residual_to_rank_one, reference_residual, {"relative": False}),
    (residual_to_rank_one, reference_residual, {"norm": "composite"}),
    (residual_to_rank_one, reference_residual, {"norm": "composite", "relative": False}),
]


@pytest.mark.parametrize("shape", [(9, 5), (5, 9)])
@pytest.mark.parametrize(("function", "reference", "options"), CASES)
def test_values_and_gradients(function, reference, options, shape):
    x = (gaussian(3, *shape) + 0.5).requires_grad_()
    plain = {key: value for key, value in options.items() if key != "method"}
    value, expected = function(x, **options), sequence_of(lambda m: reference(m, **plain), x)
    assert torch.allclose(value, expected, rtol=1e-9)
    if options.get("center") and shape[0] <= shape[1]:
        return  # an exact 0 among the singular values: the reference has no gradient there
    cotangent = gaussian(3, seed=7)
    (gradient,) = torch.autograd.grad(value @ cotangent, x)
    (exact,) = torch.autograd.grad(expected @ cotangent, x)
    assert torch.allclose(gradient, exact, rtol=1e-7, atol=1e-10)


def test_gradient_is_finite_where_a_singular_value_is_zero():
    x = gaussian(2, 5, 9).requires_grad_()
    (gradient,) = torch.autograd.grad(effective_rank(x, center=True) @ gaussian(2, seed=1), x)
    step = 1e-6 * gaussian(2, 5, 9, seed=2)
    slope = (effective_rank(x + step, center=True) - effective_rank(x - step, center=True)) @ gaussian(2, seed=1) / 2
    assert (gradient * step).sum().item() == pytest.approx(slope.item(), rel=1e-5)


def reference_split(r, u):
    coefficient = sum(a * b for a, b in zip(r, u, strict=True)) / sum(a * a for a in r)
    parallel = torch.stack([coefficient * a for a in r])
    return coefficient, parallel, torch.stack([b - a for a, b in zip(parallel, u, strict=True)])


def test_split_update():
    reference, update = gaussian(4, 6).requires_grad_(), gaussian(4, 6, seed=1).requires_grad_()
    rows = [reference_split(r, u) for r, u in zip(reference, update, strict=True)]
    loss, exact = 0.0, 0.0
    for i, part in enumerate(split_update(reference, update)):
        expected = torch.stack([row[i] for row in rows])
        assert torch.allclose(part, expected, rtol=1e-12, atol=1e-14)
        cotangent = gaussian(*part.shape, seed=i + 2)
        loss, exact = loss + (part * cotangent).sum(), exact + (expected * cotangent).sum()
    gradients = torch.autograd.grad(loss, (reference, update))
    for gradient, expected in zip(gradients, torch.autograd.grad(exact, (reference, update)), strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-10, atol=1e-12)


def reference_off_tangent(u, basis):
    outside = u.clone()
    for column in basis.mT:
        outside = outside - sum(a * b for a, b in zip(column, u, strict=True)) * column
    return sum(a * a for a in outside) / sum(a * a for a in u)


def test_shares_of_updates():
    a, u = gaussian(4, 6).requires_grad_(), gaussian(4, 6, seed=1).requires_grad_()
    basis = torch.linalg.qr(gaussian(4, 6, 2, seed=2)).Q
    found = torch.stack([state_cosine(a, u), parallel_energy(a, u), off_tangent(u, basis)])
    rows = [[cosine(x, y), cosine(x, y) ** 2, reference_off_tangent(y, b)] for x, y, b in zip(a, u, basis, strict=True)]
    expected = torch.stack([torch.stack(row) for row in rows]).mT
    assert torch.allclose(found, expected, rtol=1e-10)
    cotangent = gaussian(3, 4, seed=3)
    gradients = torch.autograd.grad((found * cotangent).sum(), (a, u))
    for gradient, exact in zip(gradients, torch.autograd.grad((expected * cotangent).sum(), (a, u)), strict=True):
        assert torch.allclose(gradient, exact, rtol=1e-9, atol=1e-11)


def test_relative_update():
    state, update = gaussian(2, 5, 3), gaussian(2, 5, 3, seed=1)
    expected = [
        math.dist(u.flatten(), [0] * 15) / math.dist(s.flatten(), [0] * 15) for s, u in zip(state, update, strict=True)
    ]
    assert relative_update(state, update).tolist() == pytest.approx(expected, rel=1e-12)


def test_amax_gain():
    mix = gaussian(3, 4, 5).requires_grad_()
    forward, backward = amax_gain(mix)
    rows = [[abs(sum(m[i, j] for j in range(5))) for i in range(4)] for m in mix]
    columns = [[abs(sum(m[i, j] for i in range(4))) for j in range(5)] for m in mix]
    expected = torch.stack([torch.stack([max(r), max(c)]) for r, c in zip(rows, columns, strict=True)])
    assert torch.allclose(torch.stack([forward, backward], -1), expected, rtol=1e-12)
    cotangent = gaussian(3, 2, seed=1)
    (gradient,) = torch.autograd.grad((torch.stack([forward, backward], -1) * cotangent).sum(), mix)
    (exact,) = torch.autograd.grad((expected * cotangent).sum(), mix)
    assert torch.allclose(gradient, exact, rtol=1e-12)
