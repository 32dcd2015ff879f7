"""Laws that the measures obey for any input: invariances, bounds, and how they relate to each other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.geometry import (
    amax_gain,
    effective_rank,
    gate_statistics,
    off_tangent,
    parallel_energy,
    participation_ratio,
    rankme,
    residual_to_rank_one,
    rms,
    spikes,
    split_update,
    stable_rank,
    state_cosine,
    token_cosine,
)

SPECTRAL = [effective_rank, rankme, stable_rank, participation_ratio]
PER_SEQUENCE = [*SPECTRAL, token_cosine, residual_to_rank_one]


@st.composite
def matrices(draw, least_tokens=2):
    """Matrices of any shape up to 12 x 12, of any rank, some with repeated or zero tokens."""
    tokens, width = draw(st.integers(least_tokens, 12)), draw(st.integers(1, 12))
    rank = draw(st.integers(1, min(tokens, width)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(tokens, rank, dtype=torch.float64, generator=generator)
    x = x @ torch.randn(rank, width, dtype=torch.float64, generator=generator)
    if draw(st.booleans()):
        x[-1] = x[0]
    if draw(st.booleans()):
        x[draw(st.integers(0, tokens - 1))] = 0
    return x


def orthogonal(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q


def close(a, b, tolerance=1e-6):
    return torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=tolerance, atol=tolerance)


fast = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize("function", PER_SEQUENCE)
@fast
@given(x=matrices(), seed=st.integers(0, 1000), exponent=st.integers(-60, 60))
def test_rotation_scale_sign_and_order_do_not_matter(function, x, seed, exponent):
    value = function(x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    assert close(function(x @ orthogonal(x.shape[1], seed)), value)
    assert close(function(-x * 10.0**exponent), value)
    assert close(function(x[order]), value)


@pytest.mark.parametrize("function", SPECTRAL)
@fast
@given(x=matrices(), seed=st.integers(0, 1000))
def test_spectral_measures_do_not_see_a_rotation_of_the_tokens(function, x, seed):
    assert close(function(orthogonal(len(x), seed) @ x), function(x))
    assert close(function(x.mT), function(x))


@fast
@given(x=matrices())
def test_bounds_and_order_of_the_ranks(x):
    size, rank = min(x.shape), torch.linalg.matrix_rank(x).item()
    entropy, stable, shared = (
        f(x).item() for f in (lambda y: effective_rank(y, normalize=False), stable_rank, participation_ratio)
    )
    if rank == 0:
        assert entropy == stable == shared == effective_rank(x).item() == 0
        return
    slack = 1e-4
    assert 1 - slack <= stable <= shared + slack  # sum(s^2)/s1^2 <= sum(s^2)^2/sum(s^4)
    assert shared <= entropy + slack  # entropy of s is at least that of s^2, which is at least its Renyi-2 entropy
    assert entropy <= rank + slack
    assert 1 / size - slack <= effective_rank(x).item() <= 1 + slack
    assert rankme(x).item() <= size + slack


@fast
@given(x=matrices(), method=st.sampled_from(["center", "drop_first"]))
def test_gram_and_svd_agree(x, method):
    for options in ({}, {method: True}):
        assert close(effective_rank(x, **options), effective_rank(x, method="svd", **options), 1e-4)


@fast
@given(x=matrices())
def test_token_measures_stay_in_their_ranges(x):
    count = len(x)
    assert -1 / (count - 1) - 1e-12 <= token_cosine(x) <= 1 + 1e-12  # no more than a simplex can be spread out
    assert 0 <= residual_to_rank_one(x) <= 1 + 1e-12
    centred = x - x.mean(0)
    if rms(centred) > 1e-9:
        assert residual_to_rank_one(centred).item() == pytest.approx(1)
    assert close(rms(x).square() * (1 - residual_to_rank_one(x).square()), x.mean(0).square().mean(), 1e-9)


@fast
@given(x=matrices(), shift=st.floats(-100, 100))
def test_centring_forgets_the_common_mean(x, shift):
    shifted = x + shift * torch.ones(x.shape[1], dtype=torch.float64)
    if rms(x - x.mean(0)) > 1e-6:
        assert close(effective_rank(shifted, center=True), effective_rank(x, center=True), 1e-4)
    assert close(residual_to_rank_one(shifted, relative=False), residual_to_rank_one(x, relative=False), 1e-9)


@fast
@given(x=matrices(), seed=st.integers(0, 1000), scale=st.floats(0.1, 10))
def test_split_update_is_linear_and_pythagorean(x, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    update, other = torch.randn(2, *x.shape, dtype=torch.float64, generator=generator)
    coefficient, parallel, perpendicular = split_update(x, update)
    assert close(parallel.square().sum(-1) + perpendicular.square().sum(-1), update.square().sum(-1), 1e-9)
    assert close(parallel_energy(x, update) * update.square().sum(-1), parallel.square().sum(-1), 1e-9)
    assert close(
        split_update(x, update + scale * other).parallel, parallel + scale * split_update(x, other).parallel, 1e-9
    )
    assert close(split_update(-scale * x, update).parallel, parallel, 1e-9)
    again = split_update(x, parallel)
    assert close(again.parallel, parallel, 1e-9) and close(split_update(x, perpendicular).parallel, 0 * parallel, 1e-9)
    # the closed form of the cosine between the states before and after: (1 + a) / sqrt((1 + a)^2 + b^2)
    used = x.norm(dim=-1) > 1e-3
    along, across = 1 + coefficient[used], perpendicular[used].norm(dim=-1) / x[used].norm(dim=-1)
    assert close(state_cosine(x, x + update)[used], along / (along.square() + across.square()).sqrt(), 1e-9)


@fast
@given(x=matrices(), rank=st.integers(1, 12), seed=st.integers(0, 1000))
def test_off_tangent_and_its_complement_share_the_norm(x, rank, seed):
    width = x.shape[1]
    whole = orthogonal(width, seed)
    basis, rest = whole[:, : min(rank, width)], whole[:, min(rank, width) :]
    outside, inside = off_tangent(x, basis), off_tangent(x, rest)
    used = x.norm(dim=-1) > 0
    assert close((outside + inside)[used], torch.ones(int(used.sum()), dtype=torch.float64), 1e-9)
    rotation = orthogonal(basis.shape[1], seed + 1)
    assert close(off_tangent(x, basis @ rotation), outside, 1e-9)  # a matter of the space, not of its basis


@fast
@given(x=matrices(), seed=st.integers(0, 1000))
def test_gains_do_not_see_the_names_of_streams_and_swap_under_transposition(x, seed):
    gain = amax_gain(x)
    rows = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(seed))
    columns = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed + 1))
    permuted, transposed = amax_gain(x[rows][:, columns]), amax_gain(x.mT)
    assert close(permuted.forward, gain.forward, 1e-12) and close(permuted.backward, gain.backward, 1e-12)
    assert close(transposed.forward, gain.backward, 1e-12) and close(transposed.backward, gain.forward, 1e-12)


@fast
@given(values=st.lists(st.floats(-5, 5), min_size=1, max_size=30), threshold=st.floats(0.01, 0.49))
def test_erase_classes_are_a_partition(values, threshold):
    found = gate_statistics({"erase": torch.tensor(values, dtype=torch.float64)}, threshold=threshold)
    classes = ("identity", "partial", "erase", "flip", "reflect", "amplify")
    assert sum(found[f"erase.{name}"].item() for name in classes) == pytest.approx(1)


@fast
@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60), window=st.integers(1, 10))
def test_spikes_never_count_more_steps_than_they_judge(values, window):
    found = spikes(values, window=window)
    assert 0 <= len(found.steps) <= found.judged <= len(values) and 0 <= found.share <= 1
    assert {i for i, value in enumerate(values) if not math.isfinite(value)} <= set(found.steps)
