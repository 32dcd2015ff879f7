"""Paired statistics against hand-computed and scipy values."""

import itertools

import numpy as np
import pytest
from scipy import stats

from thalweg.errors import InputError
from thalweg.statistics import sign_flip, spearman
from thalweg.studies import power
from thalweg.studies.statistics import levels, paired


def test_interval_equals_scipy():
    x = [0.3, -0.1, 0.25, 0.4, 0.05]
    ours = paired(x, margin=0.0, level=0.95)
    theirs = stats.ttest_1samp(x, 0.0)
    low, high = theirs.confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((low, high), rel=1e-12)
    assert ours.decisive_p == pytest.approx(theirs.pvalue, rel=1e-12)


def test_interval_and_p_agree_on_the_margin():
    x, rng = [], np.random.default_rng(0)
    for _ in range(200):
        x = rng.normal(0.05, 0.05, 6)
        for rate in (0.05, 0.0125):
            found = paired(x, margin=0.02, level=1 - rate)
            assert (found.low > 0.02) == (found.p_above < rate / 2)
            assert (found.high < 0.02) == (found.p_below < rate / 2)


def test_sign_flip_is_exact_by_enumeration():
    x = np.array([0.5, 0.2, -0.1, 0.4])
    patterns = [
        abs(sum(s * v for s, v in zip(signs, x, strict=True))) for signs in itertools.product((1, -1), repeat=4)
    ]
    assert sign_flip(x) == np.mean([p >= abs(x.sum()) - 1e-12 for p in patterns])


@pytest.mark.parametrize(("n", "least"), [(3, 0.25), (5, 0.0625)])
def test_smallest_sign_flip(n, least):
    found = paired([1.0 + 0.1 * i for i in range(n)])
    assert found.sign_flip == found.smallest_sign_flip == least


def test_sign_flip_sampled_is_near_exact():
    x = np.random.default_rng(1).normal(0.3, 1, 14)
    assert sign_flip(x, most_exact=5) == pytest.approx(sign_flip(x), abs=0.02)


@pytest.mark.parametrize(
    ("values", "margin", "above"),
    [([1.0, 1.0, 1.0], 0.5, True), ([1.0, 1.0, 1.0], 2.0, False), ([1.0, 1.0], 1.0, False)],
)
def test_no_spread(values, margin, above):
    found = paired(values, margin=margin)
    assert (found.low > margin) is above
    assert found.low == found.high == 1.0


@pytest.mark.parametrize("values", [[1.0], [], [1.0, float("nan")], [1.0, float("inf")]])
def test_refuses(values):
    with pytest.raises(InputError):
        paired(values)


def test_holm_by_hand():
    # alpha .05 over three: .01 <= .0167 open and decided; .03 > .025 open, not decided; .04 closed
    assert levels([0.03, 0.01, 0.04], alpha=0.05, method="holm") == [(0.025, True), (0.05 / 3, True), (0.05, False)]
    assert levels([0.03, 0.01], alpha=0.05, method="bonferroni") == [(0.025, True)] * 2


def test_family_error_under_the_null():
    """Under Holm the chance to decide any of three true nulls stays near alpha."""
    rng, wrong, trials = np.random.default_rng(2), 0, 2000
    for _ in range(trials):
        found = [paired(rng.normal(0, 1, 5)) for _ in range(3)]
        rates = levels([f.decisive_p for f in found], alpha=0.05, method="holm")
        wrong += any(is_open and f.decisive_p <= rate for f, (rate, is_open) in zip(found, rates, strict=True))
    assert wrong / trials == pytest.approx(0.05, abs=0.015)


def test_power_equals_the_noncentral_t():
    n, alpha, effect, sd = 6, 0.05, 0.04, 0.03
    exact = stats.nct.sf(stats.t.ppf(1 - alpha / 2, n - 1), n - 1, (effect - 0.01) / (sd / n**0.5))
    found = power.simulate(effect=effect, sd=sd, margin=0.01, pairs=n, alpha=alpha, simulations=100_000)
    assert found.power == pytest.approx(exact, abs=0.006)


def test_detectable_effect_has_power_of_four_fifths():
    found = power.simulate(effect=0.1, sd=0.02, margin=0.02, pairs=5, alpha=0.05)
    again = power.simulate(effect=found.detectable, sd=0.02, margin=0.02, pairs=5, alpha=0.05, seed=1)
    assert again.power == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize(("sd", "pairs"), [(0.0, 5), (-1.0, 5), (0.1, 1), (float("nan"), 5)])
def test_power_refuses(sd, pairs):
    with pytest.raises(InputError):
        power.simulate(effect=1, sd=sd, margin=0, pairs=pairs, alpha=0.05)


def test_rank_correlation_is_that_of_scipy_to_the_bit():
    rng = np.random.default_rng(0)
    for n in (3, 8, 41):
        for _ in range(20):
            x, y = rng.integers(0, 5, n).astype(float), rng.normal(size=n)
            if np.ptp(x):
                assert spearman(x, y) == stats.spearmanr(x, y).statistic


def test_rank_correlation_of_a_constant_is_what_the_caller_says():
    assert np.isnan(spearman([1, 1, 1], [1, 2, 3])) and np.isnan(spearman([1], [2]))
    assert spearman([1, 2, 3], [4, 4, 4], constant=0.0) == 0.0
    assert np.isnan(spearman([1, float("nan"), 3], [1, 2, 3], constant=0.0))  # unknown, not constant
