"""The measures against numpy and scipy, which share no line with them."""

import numpy as np
import pytest
import torch
from scipy import linalg
from scipy.spatial.distance import pdist
from scipy.stats import entropy

from thalweg.geometry import (
    effective_rank,
    local_tangent,
    off_tangent,
    participation_ratio,
    residual_to_rank_one,
    split_update,
    stable_rank,
    state_cosine,
    token_cosine,
)


def singular(x):
    return np.linalg.svd(x, compute_uv=False)


def matrix(tokens, width, kind):
    rng = np.random.default_rng(tokens * width)
    x = rng.standard_normal((tokens, width))
    if kind == "low rank":
        x = x[:, :3] @ rng.standard_normal((3, width)) + 1e-3 * x
    if kind == "common mean":
        x = x + 4 * rng.standard_normal(width)
    if kind == "sink":
        x[0] *= 100
    return x


CASES = [
    (shape, kind)
    for shape in ((40, 12), (12, 40), (24, 24))
    for kind in ("gaussian", "low rank", "common mean", "sink")
]


@pytest.mark.parametrize(("shape", "kind"), CASES)
@pytest.mark.parametrize("method", ["gram", "svd"])
def test_ranks(shape, kind, method):
    x = matrix(*shape, kind)
    ours = torch.from_numpy(x)

    def rank(y):
        return np.exp(entropy(singular(y))) / min(y.shape)

    # A centred matrix has one singular value that is rounding alone: the Gram route drops it.
    near = 1e-6 if method == "gram" else 1e-12
    assert effective_rank(ours, method=method).item() == pytest.approx(rank(x), rel=near)
    assert effective_rank(ours, center=True, method=method).item() == pytest.approx(rank(x - x.mean(0)), rel=near)
    assert effective_rank(ours, drop_first=True, method=method).item() == pytest.approx(rank(x[1:]), rel=near)
    values = singular(x)
    assert stable_rank(ours).item() == pytest.approx(np.linalg.norm(x) ** 2 / np.linalg.norm(x, 2) ** 2, rel=1e-9)
    assert participation_ratio(ours).item() == pytest.approx((values**2).sum() ** 2 / (values**4).sum(), rel=1e-9)


@pytest.mark.parametrize(("shape", "kind"), CASES)
def test_likeness_of_tokens(shape, kind):
    x = matrix(*shape, kind)
    ours = torch.from_numpy(x)
    assert token_cosine(ours).item() == pytest.approx(1 - pdist(x, "cosine").mean(), abs=1e-12)
    # The nearest matrix of equal rows, by least squares on a column of ones.
    ones = np.ones((len(x), 1))
    rest = x - ones @ np.linalg.lstsq(ones, x, rcond=None)[0]
    assert residual_to_rank_one(ours).item() == pytest.approx(linalg.norm(rest) / linalg.norm(x), rel=1e-10)
    sizes = np.sqrt(np.abs(rest).sum(0).max() * np.abs(rest).sum(1).max())
    composite = residual_to_rank_one(ours, relative=False, norm="composite")
    assert composite.item() == pytest.approx(sizes, rel=1e-10)


def test_updates_are_split_as_least_squares_does():
    x, u = matrix(30, 10, "common mean"), matrix(30, 10, "gaussian")
    coefficient, parallel, perpendicular = split_update(torch.from_numpy(x), torch.from_numpy(u))
    for i in range(len(x)):
        best = np.linalg.lstsq(x[i][:, None], u[i], rcond=None)[0]
        assert coefficient[i].item() == pytest.approx(best[0], rel=1e-10)
        np.testing.assert_allclose(parallel[i].numpy(), best[0] * x[i], rtol=1e-10)
        np.testing.assert_allclose(perpendicular[i].numpy(), u[i] - best[0] * x[i], rtol=1e-9, atol=1e-12)
        angle = linalg.subspace_angles(x[i][:, None], u[i][:, None])[0]
        assert abs(state_cosine(torch.from_numpy(x[i]), torch.from_numpy(u[i])).item()) == pytest.approx(np.cos(angle))


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_local_tangents_are_principal_directions(rank):
    window, u = matrix(16, 10, "low rank"), matrix(16, 10, "gaussian")[0]
    basis = local_tangent(torch.from_numpy(window), rank)[0].numpy()
    directions = np.linalg.svd(window - window.mean(0), full_matrices=False)[2][:rank].T
    assert basis.shape == (10, rank)
    assert linalg.subspace_angles(basis, directions).max() < 1e-6
    outside = linalg.norm(u - linalg.orth(directions) @ linalg.orth(directions).T @ u) ** 2 / linalg.norm(u) ** 2
    assert off_tangent(torch.from_numpy(u), torch.from_numpy(basis)).item() == pytest.approx(outside, rel=1e-6)
