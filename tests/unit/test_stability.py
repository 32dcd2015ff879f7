"""Spikes, variation, and the largest learning rate that survives."""

import math
import random

import pytest

from thalweg.errors import InputError
from thalweg.geometry import largest_stable_lr, spikes, variation


def test_one_spike_is_found_where_it_is():
    values = [1.0 + 0.01 * math.sin(i) for i in range(300)]
    values[170] = 5.0
    found = spikes(values, window=50, factor=1.5)
    assert found.steps == (170,) and found.judged == 250 and found.share == 1 / 250


def test_the_null_holds_for_any_distribution():
    random_ = random.Random(0)
    for draw in (random_.random, lambda: random_.gauss(0, 1), lambda: random_.paretovariate(0.5)):
        found = spikes([draw() for _ in range(20000)], window=40, quantile=0.9)
        assert found.null == pytest.approx(4 / 41)
        assert found.share == pytest.approx(found.null, abs=0.01)


def test_a_falling_loss_has_no_spikes_and_a_rising_one_has_only_those():
    assert spikes([1 / (i + 1) for i in range(200)], window=20).steps == ()
    assert spikes(list(range(200)), window=20).share == 1.0


def test_values_that_are_not_finite_are_spikes_and_enter_no_window():
    values = [1.0, 1.1, math.nan, 0.9, 1.0, math.inf, 1.05]
    found = spikes(values, window=3, quantile=0.5)
    assert found.steps == (2, 5, 6) and found.judged == 4
    assert spikes([math.nan] * 3).share == 1.0


def test_too_short_a_series_is_not_judged():
    found = spikes([1.0, 2.0], window=10)
    assert found.judged == 0 and found.share == 0 and found.steps == ()


@pytest.mark.parametrize("options", [{"window": 0}, {"quantile": 1.0}, {"quantile": 0.0}, {"factor": 0.5}])
def test_spike_refusals(options):
    with pytest.raises(InputError):
        spikes([1.0] * 5, **options)


def test_variation():
    assert variation([1.0, 3.0]) == pytest.approx(math.sqrt(2) / 2)
    assert variation([100.0, 2.0, 2.0, 2.0], skip=1) == 0
    assert variation([5.0, 10.0, 20.0]) == pytest.approx(variation([0.5, 1.0, 2.0]))
    assert variation([1.0, math.nan]) == math.inf and variation([0.0, 0.0]) == 0
    for values in ([1.0], [1.0, -1.0]):
        with pytest.raises(InputError):
            variation(values)


def test_largest_stable_lr():
    found = largest_stable_lr({1e-2: math.nan, 1e-4: 3.0, 1e-3: 2.5, 3e-3: 9.0}, limit=7.0)
    assert (found.lr, found.at_edge, found.diverged, found.isolated) == (1e-3, False, (3e-3, 1e-2), ())
    edge = largest_stable_lr({1e-4: 3.0, 1e-3: 7.0}, limit=7.0)
    assert edge.lr == 1e-3 and edge.at_edge


def test_one_diverged_seed_is_a_diverged_rate_and_an_island_does_not_count():
    found = largest_stable_lr({1e-4: [3.0, 3.1], 3e-4: [3.0, math.inf], 1e-3: [2.9, 2.9]}, limit=7.0)
    assert (found.lr, found.at_edge, found.isolated) == (1e-4, False, (1e-3,))
    none = largest_stable_lr({1e-4: math.inf}, limit=7.0)
    assert none.lr is None and not none.at_edge


@pytest.mark.parametrize("losses", [{}, {0.0: 1.0}, {-1.0: 1.0}, {math.nan: 1.0}, {1e-3: []}])
def test_lr_refusals(losses):
    with pytest.raises(InputError):
        largest_stable_lr(losses, limit=7.0)
    with pytest.raises(InputError):
        largest_stable_lr({1e-3: 1.0}, limit=math.inf)
