"""Similarity of tokens and states: exact cases, nulls, edges."""

import math

import pytest
import torch

from thalweg.errors import InputError, ShapeError, UnknownNameError
from thalweg.geometry import residual_to_rank_one, rms, state_cosine, token_cosine
from thalweg.geometry.similarity import residual_null


def gaussian(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_token_cosine_of_exact_cases():
    assert token_cosine(torch.eye(5)).item() == pytest.approx(0, abs=1e-15)
    assert token_cosine(torch.ones(5, 3)).item() == pytest.approx(1, rel=1e-14)
    assert token_cosine(torch.tensor([[1.0, 0.0], [-2.0, 0.0]])).item() == pytest.approx(-1, rel=1e-14)
    x = torch.tensor([[3.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    assert token_cosine(x).item() == pytest.approx((2 * math.sqrt(0.5) + 0) / 3, rel=1e-12)


def test_token_cosine_ignores_the_size_of_tokens():
    x = gaussian(4, 9, 6)
    sizes = torch.logspace(-200, 200, 9, dtype=torch.float64).unsqueeze(-1)
    assert torch.allclose(token_cosine(x * sizes), token_cosine(x), rtol=1e-9)


def test_token_cosine_of_a_common_mean():
    common, own = gaussian(1, 256, seed=1), gaussian(256, 256)
    common = common * 16 / common.norm()
    for rho in (0.0, 0.5, 0.9):
        x = math.sqrt(rho) * common + math.sqrt(1 - rho) * own
        assert token_cosine(x).item() == pytest.approx(rho, abs=0.02)


def test_a_token_of_zeros_counts_zero_in_its_pairs():
    assert token_cosine(torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])).item() == pytest.approx(1 / 3)
    x = torch.zeros(3, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(token_cosine(x), x)
    assert torch.equal(gradient, torch.zeros(3, 2))


def test_token_cosine_needs_two_tokens():
    with pytest.raises(ShapeError, match="at least 2 tokens"):
        token_cosine(torch.ones(1, 4))


def test_rms():
    assert rms(torch.tensor([[3.0, 4.0]])).item() == pytest.approx(math.sqrt(12.5), rel=1e-14)
    assert rms(torch.zeros(2, 3)).item() == 0
    assert rms(gaussian(2, 50, 40) * 1e200).tolist() == pytest.approx((rms(gaussian(2, 50, 40)) * 1e200).tolist())
    x = torch.zeros(2, 3, requires_grad=True)
    assert torch.equal(torch.autograd.grad(rms(x), x)[0], torch.zeros(2, 3))


@pytest.mark.parametrize("norm", ["frobenius", "composite"])
def test_residual_of_equal_tokens_is_zero(norm):
    x = gaussian(1, 7).expand(5, 7)
    assert residual_to_rank_one(x, norm=norm).item() == pytest.approx(0, abs=1e-15)
    assert residual_to_rank_one(torch.zeros(5, 7), norm=norm).item() == 0


def test_residual_of_known_matrices():
    x = torch.tensor([[1.0, 2.0], [-1.0, 2.0]])
    assert residual_to_rank_one(x).item() == pytest.approx(math.sqrt(2 / 10), rel=1e-14)
    assert residual_to_rank_one(x, relative=False).item() == pytest.approx(math.sqrt(2), rel=1e-14)
    # the residual is [[1, 0], [-1, 0]]: column sums 2 and 0, row sums 1 and 1
    assert residual_to_rank_one(x, relative=False, norm="composite").item() == pytest.approx(math.sqrt(2), rel=1e-14)
    assert residual_to_rank_one(x, norm="composite").item() == pytest.approx(math.sqrt(2 / 12), rel=1e-14)


def test_the_mean_over_tokens_is_the_nearest_rank_one_stream():
    x, value = gaussian(6, 4), residual_to_rank_one(gaussian(6, 4), relative=False)
    for seed in range(20):
        other = x.mean(0, keepdim=True) + 0.1 * gaussian(1, 4, seed=seed + 1)
        assert (x - other).norm() > value


def test_residual_null():
    x = gaussian(200, 16, 64)
    assert residual_to_rank_one(x).square().mean().sqrt().item() == pytest.approx(residual_null(16), abs=0.002)


def test_state_cosine():
    a, b = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]), torch.tensor([[0.0, 2.0], [-3.0, -3.0], [1.0, 1.0]])
    assert state_cosine(a, b).tolist() == pytest.approx([0, -1, 0])
    assert state_cosine(a.double() * 1e-200, b.double() * 1e-200).tolist() == pytest.approx([0, -1, 0])


def test_refusals():
    with pytest.raises(UnknownNameError, match="Did you mean 'frobenius'"):
        residual_to_rank_one(torch.eye(2), norm="frobenus")
    with pytest.raises(ShapeError, match="share their last axis"):
        state_cosine(torch.ones(3), torch.ones(4))
    with pytest.raises(ShapeError, match="broadcast"):
        state_cosine(torch.ones(2, 3), torch.ones(4, 3))
    for function in (token_cosine, rms, residual_to_rank_one):
        with pytest.raises(InputError, match="NaN or infinite"):
            function(torch.tensor([[1.0, math.nan], [0.0, 1.0]]))
        with pytest.raises(ShapeError):
            function(torch.ones(3))
