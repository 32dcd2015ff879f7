"""Mixers with half of the constraint, another one, or few dimensions: rows, columns, bounds, cyclic shifts."""

import math

import pytest
import torch

from thalweg import mixers
from thalweg.errors import InputError

NAMES = ("row_stochastic", "column_stochastic", "bounded", "circulant")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_all_start_at_the_matrix_of_sinkhorn(name, n):
    mixer, other = mixers.create(name, streams=n), mixers.create("sinkhorn", streams=n)
    mix = mixer(mixer.start())
    assert torch.allclose(mix, other(other.start()), atol=1e-6)
    if n == 4:
        assert mix[0].tolist() == pytest.approx([0.992618633] + 3 * [0.002460456], abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [22, 23])
def test_identity_claim_ends_at_22_streams(name, n):
    mixer = mixers.create(name, streams=n)
    departure = (mixer(mixer.start()) - torch.eye(n)).abs().max()
    assert (departure <= 0.05) == mixer.claims.identity == (n == 22)


def test_rows_and_columns_are_each_others_transpose():
    logits = torch.randn(3, 4, 4)
    rows = mixers.create("row_stochastic", streams=4)(logits.flatten(1))
    columns = mixers.create("column_stochastic", streams=4)(logits.mT.flatten(1))
    assert torch.allclose(rows.mT, columns)
    assert torch.allclose(rows.sum(-1), torch.ones(3, 4)) and not torch.allclose(
        rows.sum(-2), torch.ones(3, 4), atol=0.05
    )


def test_a_row_stochastic_matrix_can_copy_one_stream_to_all():
    logits = torch.full((4, 4), -50.0)
    logits[:, 2] = 50
    mix = mixers.create("row_stochastic", streams=4)(logits.flatten())
    assert torch.equal(mix @ torch.arange(4.0), torch.full((4,), 2.0))
    assert torch.linalg.matrix_norm(mix, 2).item() == pytest.approx(2)  # sqrt(n): no claim on singular values


def test_bound():
    for bound in (1.25, 2.0, 3.0):
        mixer = mixers.create("bounded", streams=3, bound=bound)
        assert torch.allclose(mixer(torch.zeros(9)), torch.full((3, 3), bound / 2))
        assert mixer(torch.full((9,), 1e4)).max() == bound and mixer(torch.full((9,), -1e4)).min() == 0
        assert torch.allclose(mixer(mixer.start()).sum(-1), torch.ones(3), atol=1e-6)
    for wrong in (1.0, 0.5, 1e300, math.inf, math.nan):
        with pytest.raises(InputError, match="bound must be above 1 and at most"):
            mixers.create("bounded", streams=3, bound=wrong)


def test_shift_k_receives_stream_i_plus_k():
    mixer, x = mixers.create("circulant", streams=5), torch.arange(5.0)
    for k in range(5):
        mix = mixer(torch.where(torch.arange(5) == k, 0.0, -1e4))
        assert torch.equal(mix @ x, x.roll(-k))


def test_circulant_matrices_commute_and_have_constant_diagonals():
    a, b = mixers.create("circulant", streams=6)(torch.randn(2, 6, dtype=torch.float64))
    assert torch.allclose(a @ b, b @ a)
    assert all(torch.equal(a[i], a[0].roll(i)) for i in range(6))


def test_share_keeps_the_rest_with_the_identity():
    plain, partial = (mixers.create("circulant", streams=4, share=s) for s in (1.0, 0.25))
    logits = torch.randn(7, 4)
    assert torch.allclose(partial(logits), 0.25 * plain(logits) + 0.75 * torch.eye(4))
    for wrong in (0.0, 1.5):
        with pytest.raises(InputError, match=r"share must lie in \(0, 1\]"):
            mixers.create("circulant", streams=4, share=wrong)
