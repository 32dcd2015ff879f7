"""Laws of the measures of mixing: their extremes, what renaming the streams does, and what holds for doubly stochastic matrices."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.errors import InputError, ShapeError
from thalweg.geometry import (
    amax_gain,
    channels,
    composite,
    constraint_error,
    difference_share,
    doubly_stochastic_null,
    dynamics,
    effective_streams,
    horizon,
    inf_norm_gain,
    logit_spread,
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
from thalweg.ops import sinkhorn
from thalweg.ops.birkhoff import birkhoff

fast = settings(max_examples=40, deadline=None, derandomize=True)
streams, seeds = st.integers(2, 6), st.integers(0, 1000)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def stochastic(n, seed, count=1):
    return birkhoff(gaussian(count, n, n, seed=seed))


def order(n, seed):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def value(x):
    return pytest.approx(x, abs=1e-9)


@fast
@given(n=streams, seed=seeds)
def test_extremes(n, seed):
    uniform = torch.full((n, n), 1 / n, dtype=torch.float64)
    for permutation in (torch.eye(n, dtype=torch.float64), torch.eye(n, dtype=torch.float64)[order(n, seed)]):
        assert permutation_index(permutation).item() == value(1)
        assert mixing_distance(permutation, to="permutation").item() == value(0)
        assert mixing_distance(permutation, to="uniform").item() == value(math.sqrt(n - 1))
        assert sigma_2(permutation).item() == value(1)
        assert channels(permutation) == (value(1), value(1), value(0), value(0))
    assert permutation_index(uniform).item() == value(0)
    assert sigma_2(uniform).item() == value(0)
    assert channels(uniform) == (value(1), value(0), value(0), value(0))
    for to in ("identity", "permutation"):
        assert mixing_distance(uniform, to=to).item() == value(math.sqrt(n - 1))
    assert mixing_distance(torch.eye(n), to="identity").item() == 0


@fast
@given(n=streams, seed=seeds)
def test_doubly_stochastic_matrices(n, seed):
    first, second = stochastic(n, seed), stochastic(n, seed + 1)
    both = composite([first, second])
    for mix in (first, both):
        assert torch.cat(constraint_error(mix)).tolist() == value([0, 0, 0])
        assert torch.cat([*amax_gain(mix), *inf_norm_gain(mix)]).tolist() == value([1] * 4)
        mean, difference, out, back = channels(mix)
        assert mean.item() == value(1) and difference.item() == value(sigma_2(mix).item())
        assert out.item() == value(0) and back.item() == value(0)
        assert 0 < permutation_index(mix) < 1
        # the mean of the squared singular values lies below the largest
        assert permutation_index(mix) <= sigma_2(mix) + 1e-9
    assert sigma_2(both) <= sigma_2(first) * sigma_2(second) + 1e-9  # memory is lost at every site
    assert horizon(sigma_2(both)) >= 1


@fast
@given(n=streams, seed=seeds)
def test_renaming_the_streams_changes_nothing_but_the_distance_from_the_identity(n, seed):
    mix = gaussian(n, n, seed=seed)
    rows, columns = order(n, seed), order(n, seed + 1)
    renamed = mix[rows][:, columns]
    for function in (sigma_2, permutation_index, lambda m: mixing_distance(m, to="permutation")):
        assert function(renamed).item() == value(function(mix).item())
    for function in (inf_norm_gain, constraint_error, channels):
        assert torch.stack(list(function(renamed))).tolist() == value(torch.stack(list(function(mix))).tolist())
    same = mix[rows][:, rows]
    assert mixing_distance(same, to="identity").item() == value(mixing_distance(mix, to="identity").item())


@fast
@given(n=streams, seed=seeds)
def test_gains_bound_each_other_and_swap_under_transposition(n, seed):
    mix = gaussian(7, n, n, seed=seed)
    amax, true, turned = amax_gain(mix), inf_norm_gain(mix), inf_norm_gain(mix.mT)
    for weak, strong in zip(amax, true, strict=True):
        assert (weak <= strong + 1e-12).all()
    assert torch.allclose(turned.forward, true.backward) and torch.allclose(turned.backward, true.forward)
    x = gaussian(7, n, 1, seed=seed + 1)
    assert ((mix @ x).abs().amax((-2, -1)) <= true.forward * x.abs().amax((-2, -1)) + 1e-12).all()
    for mean, single in zip(mean_map_gain(mix), amax, strict=True):
        assert mean <= single.mean() + 1e-12


@fast
@given(n=streams, seed=seeds)
def test_what_a_difference_of_streams_becomes(n, seed):
    mix, x = gaussian(n, n, seed=seed), gaussian(n, 5, seed=seed + 1)
    difference = x - x.mean(0)
    moved = mix @ difference
    found = channels(mix)
    assert (moved - moved.mean(0)).norm() <= found.difference * difference.norm() + 1e-9
    assert moved.mean(0).norm() * n**0.5 <= found.difference_to_mean * difference.norm() + 1e-9
    alike = mix @ torch.ones(n, 1, dtype=torch.float64)
    assert (alike - alike.mean()).norm().item() == value((found.mean_to_difference * n**0.5).item())


@fast
@given(n=streams, seed=seeds, scale=st.floats(0.1, 10))
def test_use_of_streams(n, seed, scale):
    weights = gaussian(n, seed=seed)
    shares = stream_shares(weights)
    assert shares.sum().item() == value(1) and (shares >= 0).all()
    assert stream_shares(-scale * weights).tolist() == value(shares.tolist())
    assert 1 - 1e-9 <= effective_streams(weights).item() <= n + 1e-9
    one = torch.zeros(n)
    one[seed % n] = scale
    assert effective_streams(one).item() == value(1)
    assert effective_streams(torch.full((n,), scale)).item() == value(n)
    assert effective_streams(0 * one).item() == 0 and stream_shares(0 * one).sum() == 0


@fast
@given(n=streams, seed=seeds)
def test_streams_that_are_copies_and_streams_that_are_not(n, seed):
    copies = gaussian(1, 9, seed=seed).expand(n, 9)
    assert difference_share(copies).item() == value(0)
    assert stream_cosine(copies).item() == value(1)
    assert stream_rank(copies).item() == pytest.approx(1 / n, abs=1e-6)
    apart = torch.linalg.qr(gaussian(9, n, seed=seed)).Q.mT
    assert difference_share(apart).item() == value(math.sqrt(1 - 1 / n))  # its null
    assert stream_cosine(apart).item() == value(0) and stream_rank(apart).item() == value(1)
    assert difference_share(0 * copies).item() == 0
    # a mixing matrix whose rows sum to one keeps the copies
    assert difference_share(stochastic(n, seed)[0] @ copies).item() == value(0)


@fast
@given(n=streams, seed=seeds)
def test_constants_are_not_dynamic(n, seed):
    constant = gaussian(1, n, seed=seed).expand(6, n).clone().requires_grad_()
    assert token_sd(constant).item() == 0 and dynamics(constant).item() == 0
    (gradient,) = torch.autograd.grad(dynamics(constant) + token_sd(constant), constant)
    assert torch.isfinite(gradient).all()
    moving = gaussian(6, n, seed=seed)
    assert dynamics(3 * moving).item() == pytest.approx(dynamics(moving).item())
    assert token_sd(moving + 5).item() == pytest.approx(token_sd(moving).item())
    assert dynamics(moving - moving.mean(0)).item() > 1e6  # nothing static is left
    assert logit_spread(gaussian(9, seed=seed) + 4).item() == pytest.approx(logit_spread(gaussian(9, seed=seed)).item())


def test_sinkhorn_errors_grow_with_the_spread_of_the_logits():
    logits = gaussian(2000, 4, 4)
    errors = [constraint_error(sinkhorn(spread * logits)).columns.quantile(0.99).item() for spread in (1, 2, 5)]
    assert errors[0] < 1e-5 < 1e-3 < errors[1] < errors[2] < 0.1
    assert constraint_error(sinkhorn(5 * logits)).rows.max() < 1e-9


def test_nulls_are_remembered_and_leave_the_generator_alone():
    before = torch.get_rng_state()
    null = doubly_stochastic_null(5, "sigma_2")
    assert torch.equal(before, torch.get_rng_state())
    assert 0 < null.value < 1 and null.sd > 0 and "5 streams" in null.kind
    values = sigma_2(sinkhorn(gaussian(400, 5, 5, seed=3), 200))
    assert null.value == pytest.approx(values.mean().item(), abs=4 * values.std().item() / 16)


def test_horizon_is_infinite_where_nothing_is_forgotten():
    assert horizon(torch.tensor([0.0, 0.5, 1.0, 1.5])).tolist() == [1, 2, math.inf, math.inf]


@pytest.mark.parametrize("function", [sigma_2, permutation_index, channels, inf_norm_gain, constraint_error])
def test_refusals(function):
    with pytest.raises(ShapeError):
        function(torch.ones(3))
    with pytest.raises(InputError, match="NaN"):
        function(torch.full((2, 2), math.nan))


def test_shapes_that_do_not_fit():
    for function in (sigma_2, permutation_index, channels, lambda m: mixing_distance(m, to="identity")):
        with pytest.raises(ShapeError):
            function(torch.ones(1, 1))
    for function in (permutation_index, channels):
        with pytest.raises(ShapeError, match="square"):
            function(torch.ones(2, 3))
    with pytest.raises(ShapeError, match="tokens to from"):
        mean_map_gain(torch.eye(2))
    with pytest.raises(ShapeError, match="at least one"):
        list(running_composites([]))
    with pytest.raises(ShapeError, match="reads 2 streams follows one that writes 3"):
        composite([torch.eye(3), torch.eye(2)])
    with pytest.raises(ShapeError, match=r"\[\.\.\. streams\]"):
        stream_shares(torch.tensor(1.0))
