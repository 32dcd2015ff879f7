"""Bootstrap intervals against loops written from the definition, their coverage, and the ends of their range."""

import numpy as np
import pytest
from scipy import stats

from thalweg.errors import InputError
from thalweg.statistics import bootstrap

RNG = np.random.default_rng(5)
WEIGHTS = RNG.integers(20, 200, 24).astype(float)
VALUES = RNG.gamma(2.0, 1.0, 24) * WEIGHTS


def ratio(a, b):
    return a / b


def by_loop(a, b, level, resamples, seed, accelerate):
    """Percentile or BCa bounds, one resample at a time (Efron 1987, eq. 2.3 and 6.6)."""
    n, rng = len(a), np.random.default_rng(seed)
    drawn = []
    for _ in range(resamples):
        chosen = rng.integers(0, n, n)
        drawn.append(sum(a[i] for i in chosen) / sum(b[i] for i in chosen))
    drawn, estimate = np.sort(drawn), a.sum() / b.sum()
    ends = np.array([(1 - level) / 2, (1 + level) / 2])
    if accelerate:
        z0 = stats.norm.ppf((np.sum(drawn < estimate) + np.sum(drawn <= estimate)) / (2 * resamples))
        left = np.array([(a.sum() - a[i]) / (b.sum() - b[i]) for i in range(n)])
        d = left.mean() - left
        acceleration = (d**3).sum() / (6 * (d**2).sum() ** 1.5)
        z = z0 + stats.norm.ppf(ends)
        ends = stats.norm.cdf(z0 + z / (1 - acceleration * z))
    return np.quantile(drawn, ends)


@pytest.mark.parametrize("method", ["BCa", "percentile"])
def test_bounds_are_those_of_the_definition(method):
    found = bootstrap([VALUES, WEIGHTS], ratio, method=method, resamples=20_000, seed=1)
    low, high = by_loop(VALUES, WEIGHTS, 0.95, 20_000, 2, method == "BCa")
    width = high - low
    assert found.estimate == VALUES.sum() / WEIGHTS.sum()
    assert found.low == pytest.approx(low, abs=0.02 * width)
    assert found.high == pytest.approx(high, abs=0.02 * width)
    assert found.words == f"95% {method} bootstrap, 20000 resamples of 24"


def test_bca_is_not_percentile_on_skewed_values():
    bounds = [bootstrap([VALUES, WEIGHTS], ratio, method=m, resamples=20_000).low for m in ("BCa", "percentile")]
    assert abs(bounds[0] - bounds[1]) > 0.01


def test_seeded():
    one, again, other = (bootstrap([VALUES, WEIGHTS], ratio, resamples=500, seed=s) for s in (3, 3, 4))
    assert one == again
    assert one.low != other.low


def test_what_belongs_to_an_item_stays_together():
    """Columns resampled apart would give an interval about the ratio; together it is that number alone."""
    found = bootstrap([3 * WEIGHTS, WEIGHTS], ratio, resamples=500)
    assert found.low == pytest.approx(3)
    assert found.high == pytest.approx(3)


def test_coverage_near_the_level():
    rng, hit, trials = np.random.default_rng(7), 0, 300
    for i in range(trials):
        x = rng.normal(1.0, 1.0, 80)
        found = bootstrap([x, np.ones(80)], ratio, resamples=400, seed=i, level=0.9)
        hit += found.low <= 1.0 <= found.high
    assert hit / trials == pytest.approx(0.9, abs=0.05)


def test_no_spread_and_too_few():
    flat = bootstrap([np.full(5, 2.0), np.ones(5)], ratio)
    assert (flat.low, flat.estimate, flat.high) == (2, 2, 2)
    few = bootstrap([np.array([1.0, 2.0]), np.ones(2)], ratio)
    assert few.estimate == 1.5
    assert np.isnan(few.low)
    assert np.isnan(few.high)


def test_an_infinite_statistic_has_no_interval():
    found = bootstrap([np.array([1e4, 2e4, 3e4]), np.ones(3)], lambda a, b: np.exp(a / b))
    assert found.estimate == np.inf
    assert np.isnan(found.low)


@pytest.mark.parametrize(
    "call",
    [
        {"columns": []},
        {"columns": [np.ones(3), np.ones(4)]},
        {"columns": [np.ones((3, 2))]},
        {"columns": [np.ones(3), np.ones(3)], "method": "basic"},
        {"columns": [np.ones(3), np.ones(3)], "level": 1.0},
    ],
)
def test_refuses(call):
    with pytest.raises(InputError):
        bootstrap(call.pop("columns"), ratio, **call)
