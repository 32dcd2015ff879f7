"""The error of an update along and across the dense one: against loops in float64, identities, nulls, and mistakes that would show."""

import math

import pytest
import torch

from thalweg.errors import InputError, ShapeError
from thalweg.geometry import (
    error_across,
    error_across_share,
    error_along,
    error_cosine,
    error_pooled,
    error_signed,
    error_total,
    sqnr,
)
from thalweg.geometry.errors import across_share_null, direction_cosine, error_lengths, random_error


def pair(tokens=7, width=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    dense = torch.randn(2, tokens, width, generator=g, dtype=torch.float64)
    return dense, dense + 0.3 * torch.randn(2, tokens, width, generator=g, dtype=torch.float64)


def by_loops(d, c):
    """From the definition alone, one token at a time: total, along, signed, across, share, cosine."""
    e = [ci - di for ci, di in zip(c, d, strict=True)]
    dd, ed = sum(x * x for x in d), sum(x * y for x, y in zip(e, d, strict=True))
    parallel = [ed / dd * x for x in d]
    across = [x - y for x, y in zip(e, parallel, strict=True)]
    norm = lambda v: math.sqrt(sum(x * x for x in v))  # noqa: E731
    cosine = sum(x * y for x, y in zip(c, d, strict=True)) / (norm(c) * norm(d))
    return norm(e) / norm(d), norm(parallel) / norm(d), ed / dd, norm(across) / norm(d), norm(across) / norm(e), cosine


MEASURES = (error_total, error_along, error_signed, error_across, error_across_share, error_cosine)


def test_every_measure_is_what_loops_say():
    """Catches: the reference taken from the compressed update, norms of the wrong vector, a sign lost."""
    dense, compressed = pair()
    found = torch.stack([measure(dense, compressed) for measure in MEASURES], -1)
    for row in range(2):
        for t in range(dense.shape[1]):
            wanted = by_loops(dense[row, t].tolist(), compressed[row, t].tolist())
            assert found[row, t].tolist() == pytest.approx(wanted, rel=1e-12)


def test_the_reference_is_the_dense_update():
    """Catches: both updates swapped, which the total over the wrong norm would show."""
    dense, compressed = pair()
    for measure in (error_total, error_signed, error_across):
        assert not torch.allclose(measure(dense, compressed), measure(compressed, dense), rtol=1e-3)


def test_norms_obey_pythagoras():
    dense, compressed = pair()
    total, along, across = (m(dense, compressed) for m in (error_total, error_along, error_across))
    torch.testing.assert_close(total**2, along**2 + across**2, rtol=1e-12, atol=0)


def test_golden_numbers():
    dense, compressed = torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0, 5.0]])  # e = (2, 1)
    assert float(error_signed(dense, compressed)) == pytest.approx(0.4)
    assert float(error_total(dense, compressed)) == pytest.approx(math.sqrt(5) / 5)
    assert float(error_across(dense, compressed)) == pytest.approx(0.2)  # (0.8, -0.6)
    assert float(error_across_share(dense, compressed)) == pytest.approx(1 / math.sqrt(5))
    assert float(sqnr(dense, compressed)) == pytest.approx(10 * math.log10(5))


def test_no_error_is_exactly_none():
    dense, _ = pair()
    for measure, wanted in zip(MEASURES, (0, 0, 0, 0, 0, 1), strict=True):
        assert (measure(dense, dense.clone()) == wanted).all(), measure.__name__
    assert (error_pooled(dense, dense) == 0).all() and (sqnr(dense, dense) == math.inf).all()


def test_an_update_of_zero():
    zero, one = torch.zeros(1, 4), torch.ones(1, 4)
    assert float(error_total(zero, zero)) == 0 and float(error_total(zero, one)) == math.inf
    assert float(error_signed(zero, one)) == 0 and float(error_cosine(zero, one)) == 0
    assert float(error_signed(one, zero)) == -1 and float(error_across(one, zero)) == 0  # what a dropped layer is
    assert float(error_total(one, zero)) == 1 and float(sqnr(one, zero)) == 0


def test_pooled_weighs_tokens_by_their_size():
    dense = torch.tensor([[1.0, 0.0], [100.0, 0.0]])
    compressed = dense + torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert float(error_total(dense, compressed).mean()) == pytest.approx(0.5)
    assert float(error_pooled(dense, compressed)) == pytest.approx(1 / math.sqrt(10001))
    assert float(sqnr(dense, compressed)) == pytest.approx(10 * math.log10(10001))


@pytest.mark.parametrize("width", [4, 64])
def test_a_random_error_lies_across_as_the_null_says(width):
    """The mean square share is exactly 1 - 1/d; catches a null of width instead of its root, or of d - 1."""
    g = torch.Generator().manual_seed(1)
    dense = torch.randn(40_000, width, generator=g)
    drawn = torch.randn(40_000, width, generator=g)
    share = error_across_share(dense, dense + drawn)
    assert float(share.square().mean().sqrt()) == pytest.approx(across_share_null(width), abs=4e-3 / math.sqrt(width))
    assert across_share_null(width) == math.sqrt(1 - 1 / width)


def test_the_norm_matched_error_is_that_vector():
    """``random_error`` keeps lengths only: they are those of the vector that points along the drawn direction. Catches a norm not matched."""
    dense, compressed = (x[0] for x in pair(width=6))
    drawn = torch.randn(dense.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = error_lengths(dense, compressed)
    chance = random_error(found, direction_cosine(dense, drawn))
    e = (compressed - dense).norm(dim=-1, keepdim=True) * drawn / drawn.norm(dim=-1, keepdim=True)
    wanted = error_lengths(dense, dense + e)
    torch.testing.assert_close(chance.error, found.error)
    for one, two in zip(chance, wanted, strict=True):
        torch.testing.assert_close(one, two)
    torch.testing.assert_close(chance.cosine, error_cosine(dense, dense + e))


def test_single_precision_keeps_small_errors():
    """float32 inputs with an error along of 1e-3: the part across is not swamped by rounding of the part along."""
    dense = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    found = error_lengths(dense, dense * 1.001)
    assert float(found.signed.mean()) == pytest.approx(1e-3, rel=1e-3)
    assert float(found.perpendicular.max()) < 1e-6


def test_what_is_refused():
    with pytest.raises(ShapeError, match="dense and compressed update must share"):
        error_total(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(InputError, match="the compressed update: 1 of "):
        error_total(torch.ones(1, 2), torch.tensor([[1.0, math.nan]]))
