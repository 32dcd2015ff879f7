"""Measures of the spectrum: the calibration table, exact cases, precision, and what they refuse."""

import math

import pytest
import torch

from thalweg.errors import InputError, ShapeError, UnknownNameError
from thalweg.geometry import (
    effective_rank,
    gaussian_null,
    participation_ratio,
    pooled_effective_rank,
    rankme,
    relative_effective_rank,
    singular_values,
    stable_rank,
)
from thalweg.geometry.spectrum import spectral_measures


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def with_token_cosine(rho, tokens=256, width=256, seed=0):
    """Gaussian tokens with a common mean of the length of a token, so that the cosine between tokens is about rho."""
    common = gaussian(1, width, seed=seed + 1)
    common = common * math.sqrt(width) / common.norm()
    return math.sqrt(rho) * common + math.sqrt(1 - rho) * gaussian(tokens, width, seed=seed)


@pytest.mark.parametrize(
    ("tokens", "width", "value"),
    [(64, 256, 0.966), (128, 256, 0.926), (256, 256, 0.805), (512, 256, 0.926), (1024, 256, 0.966), (512, 512, 0.805)],
)
def test_gaussian_matrices(tokens, width, value):
    assert effective_rank(gaussian(tokens, width)).item() == pytest.approx(value, abs=0.004)


@pytest.mark.parametrize(
    ("rho", "value"),
    [(0.0, 0.804), (0.5, 0.712), (0.8, 0.592), (0.9, 0.488), (0.95, 0.380), (0.99, 0.165), (0.999, 0.0353)],
)
def test_a_common_mean_lowers_it_and_centring_undoes_that(rho, value):
    x = with_token_cosine(rho)
    assert effective_rank(x).item() == pytest.approx(value, abs=0.005)
    assert effective_rank(x, center=True).item() == pytest.approx(0.802, abs=0.004)


@pytest.mark.parametrize("rho", [0.5, 0.8, 0.9, 0.95, 0.99, 0.999])
def test_a_common_mean_is_a_spike_on_a_gaussian_bulk(rho):
    size = 256
    own = gaussian(size, size)
    bulk = math.sqrt(1 - rho) * singular_values(own).sum().item()
    spike = size * math.sqrt(rho) * (1 + (1 - rho) / (rho * size))  # of the spiked matrix, mean and noise added
    share = spike / (spike + bulk)
    entropy = -share * math.log(share) + (1 - share) * (
        math.log(effective_rank(own, normalize=False)) - math.log(1 - share)
    )
    assert effective_rank(with_token_cosine(rho)).item() == pytest.approx(math.exp(entropy) / size, abs=0.005)


@pytest.mark.parametrize(("factor", "value"), [(10, 0.759), (100, 0.285), (1000, 0.016)])
def test_a_massive_channel(factor, value):
    x = gaussian(8, 256, 256)
    x[..., 17] *= factor
    assert effective_rank(x).mean().item() == pytest.approx(value, abs=0.01)


def test_a_sink_token_and_its_removal():
    x = gaussian(8, 256, 256)
    x[:, 0] *= 100
    assert effective_rank(x).mean().item() == pytest.approx(0.287, abs=0.01)
    assert effective_rank(x, drop_first=True).mean().item() == pytest.approx(0.806, abs=0.01)


@pytest.mark.parametrize("method", ["gram", "svd"])
@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_equal_directions(size, method):
    orthogonal = torch.linalg.qr(gaussian(size, size)).Q * 3e-5
    for x in (torch.eye(size), orthogonal):
        assert effective_rank(x, method=method).item() == pytest.approx(1.0, abs=1e-12)
        assert effective_rank(x, normalize=False, method=method).item() == pytest.approx(size, rel=1e-12)
        assert stable_rank(x, method=method).item() == pytest.approx(size, rel=1e-12)
        assert participation_ratio(x, method=method).item() == pytest.approx(size, rel=1e-12)
        assert rankme(x, method=method).item() == pytest.approx(size, rel=1e-4)


@pytest.mark.parametrize("method", ["gram", "svd"])
@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (40, 9), (9, 40)])
def test_one_direction(shape, method):
    x = torch.outer(gaussian(shape[0]), gaussian(shape[1], seed=1))
    assert effective_rank(x, method=method).item() == pytest.approx(1 / min(shape), rel=1e-6)
    assert effective_rank(x, normalize=False, method=method).item() == pytest.approx(1.0, rel=1e-6)
    assert stable_rank(x, method=method).item() == pytest.approx(1.0, rel=1e-12)
    assert participation_ratio(x, method=method).item() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("function", [effective_rank, rankme, stable_rank, participation_ratio])
@pytest.mark.parametrize("options", [{}, {"center": True}, {"drop_first": True}, {"method": "svd"}])
def test_zeros_have_no_direction(function, options):
    x = torch.zeros(3, 5, 4, requires_grad=True)
    value = function(x, **options)
    assert torch.equal(value, torch.zeros(3, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(value @ torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64), x)
    assert torch.isfinite(gradient).all()


def test_entropy_of_singular_values_not_of_their_squares():
    x = torch.diag(torch.tensor([3.0, 1.0]))
    p = torch.tensor([0.75, 0.25], dtype=torch.float64)
    assert effective_rank(x, normalize=False).item() == pytest.approx(math.exp(-(p * p.log()).sum()), rel=1e-12)
    assert stable_rank(x).item() == pytest.approx(10 / 9, rel=1e-12)
    assert participation_ratio(x).item() == pytest.approx(100 / 82, rel=1e-12)
    smoothed = p + 1e-7
    assert rankme(x).item() == pytest.approx(math.exp(-(smoothed * smoothed.log()).sum()), rel=1e-12)


def test_one_matrix_per_sequence_and_the_pooled_one():
    x = torch.cat([torch.eye(4).expand(1, 4, 4), torch.ones(1, 4, 4)])
    assert effective_rank(x).tolist() == pytest.approx([1.0, 0.25], abs=1e-6)
    assert pooled_effective_rank(x).item() == pytest.approx(effective_rank(x.reshape(8, 4)).item(), rel=1e-12)
    assert effective_rank(x.reshape(1, 2, 4, 4)).shape == (1, 2)


@pytest.mark.parametrize("method", ["gram", "svd"])
def test_several_measures_from_one_decomposition(method):
    x = gaussian(3, 20, 8)
    found = spectral_measures(x, method=method)
    assert list(found) == ["effective_rank", "stable_rank", "participation_ratio"]
    for name, function in zip(found, (effective_rank, stable_rank, participation_ratio), strict=True):
        assert torch.equal(found[name], function(x, method=method))


def test_relative_to_the_first_state():
    x, first = gaussian(3, 20, 8), gaussian(3, 20, 8, seed=1)
    first[2] = 0
    expected = (effective_rank(x) / effective_rank(first)).nan_to_num(posinf=0)
    assert torch.allclose(relative_effective_rank(x, first), expected, rtol=1e-12)


@pytest.mark.parametrize("shape", [(300, 64), (64, 300)])
def test_gram_agrees_with_svd_over_six_decades(shape):
    rank = min(shape)
    u = torch.linalg.qr(gaussian(shape[0], rank)).Q
    v = torch.linalg.qr(gaussian(shape[1], rank, seed=1)).Q
    spectrum = torch.logspace(0, -6, rank, dtype=torch.float64)
    x = u * spectrum @ v.mT
    assert torch.allclose(singular_values(x, method="svd"), spectrum, rtol=1e-9)
    assert torch.allclose(singular_values(x), spectrum, rtol=1e-3)
    p = spectrum / spectrum.sum()
    exact = math.exp(-(p * p.log()).sum()) / rank
    assert effective_rank(x, method="svd").item() == pytest.approx(exact, rel=1e-12)
    assert effective_rank(x).item() == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("method", ["gram", "svd"])
def test_scale_neither_overflows_nor_underflows(scale, method):
    x = gaussian(20, 8)
    assert effective_rank(x * scale, method=method).item() == pytest.approx(effective_rank(x).item(), rel=1e-9)
    assert torch.allclose(singular_values(x * scale, method=method) / scale, torch.linalg.svdvals(x), rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_measured_in_float64(dtype):
    x = gaussian(32, 16).to(dtype)
    value = effective_rank(x)
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(effective_rank(x.double()).item(), rel=1e-14)


def test_non_contiguous_input():
    x = gaussian(8, 20).mT
    assert effective_rank(x).item() == pytest.approx(effective_rank(x.contiguous()).item(), rel=1e-13)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite_is_refused(value):
    x = gaussian(4, 4)
    x[1, 2] = value
    with pytest.raises(InputError, match="1 of 16 values is NaN or infinite"):
        effective_rank(x)


@pytest.mark.parametrize(
    ("x", "options"),
    [
        (torch.ones(4), {}),
        (torch.ones(()), {}),
        (torch.ones(0, 4), {}),
        (torch.ones(4, 0), {}),
        (torch.ones(0, 4, 4), {}),
        (torch.ones(1, 4), {"center": True}),
        (torch.ones(1, 4), {"drop_first": True}),
    ],
)
def test_wrong_shapes_are_refused(x, options):
    with pytest.raises(ShapeError, match=r"\[\.\.\. tokens width\]"):
        effective_rank(x, **options)


def test_wrong_kinds_are_refused():
    with pytest.raises(InputError, match="int64"):
        effective_rank(torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(InputError, match="complex64"):
        effective_rank(torch.ones(3, 3, dtype=torch.complex64))
    with pytest.raises(InputError, match="list"):
        effective_rank([[1.0, 2.0]])
    with pytest.raises(UnknownNameError, match="Did you mean 'gram'"):
        effective_rank(torch.eye(3), method="grams")


def test_the_null_is_repeatable_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    null = gaussian_null(64, 256)
    assert torch.equal(torch.get_rng_state(), before)
    assert null.value == pytest.approx(0.966, abs=0.002) and 0 < null.sd < 0.005
    assert "64 x 256" in null.kind and gaussian_null(64, 256) is null
    assert gaussian_null(64, 256, center=True).value < null.value
    assert gaussian_null(64, 256, seed=1).value == pytest.approx(null.value, abs=0.002)


def test_null_of_the_participation_ratio_is_the_analytic_one():
    tokens, width = 64, 48
    analytic = (tokens * width + 2) / (tokens + width + 1)  # ratio of the expectations
    assert gaussian_null(tokens, width, "participation_ratio").value == pytest.approx(analytic, rel=0.01)
    edge = tokens * width / (math.sqrt(tokens) + math.sqrt(width)) ** 2  # of Marchenko and Pastur
    assert gaussian_null(tokens, width, "stable_rank").value == pytest.approx(edge, rel=0.1)


def test_unknown_null():
    with pytest.raises(UnknownNameError):
        gaussian_null(8, 8, "token_cosine")
    with pytest.raises(InputError, match="2 draws"):
        gaussian_null(8, 8, draws=1)
