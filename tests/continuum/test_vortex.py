"""The probe of vortices: found where a diffusion circulates, and never in a balanced one, a random walk, a drift, or its own surrogates."""

import math

import pytest
import torch

from thalweg.continuum import findings, vortex
from thalweg.continuum.trajectory import Trajectory
from thalweg.errors import InputError
from thalweg.geometry import circulation as flow

TIMES = 1500


def generator(seed):
    return torch.Generator().manual_seed(seed)


def turning(seed=0, turn=0.3, k=6, times=TIMES):
    """A path that turns in one plane of k at ``turn``, and relaxes at 0.2, per record; seen in another basis."""
    a = 0.2 * torch.eye(k, dtype=torch.float64)
    a[0, 1], a[1, 0] = turn, -turn
    path = flow.simulated(a, torch.eye(k, dtype=torch.float64), times, generator=generator(seed))[0]
    return path @ torch.linalg.qr(torch.randn(k, k, dtype=torch.float64, generator=generator(99)))[0]


def walk(seed, k=6, times=TIMES):
    return torch.randn(times, k, dtype=torch.float64, generator=generator(seed)).cumsum(0)


def trajectory(stride=1, facts=None, **blocks):
    n = len(next(iter(blocks.values())))
    return Trajectory(stride * torch.arange(1, n + 1), {b: x.float() for b, x in blocks.items()}, {}, facts or {})


def found(subject, **options):
    (finding,) = findings(subject, None, ["vortex"], options={"vortex": {"walks": 0, **options}})
    return finding


def value(finding, measure, **where):
    (row,) = finding.rows.where(measure=measure, **where)
    return row.value


@pytest.fixture(scope="module")
def circulating():
    return found(trajectory(stride=2, blocks_0=turning(), blocks_1=turning(1, turn=0.0)), skip=0.0, walks=10)


def test_a_vortex_is_found_where_it_is(circulating):
    assert not circulating.failed
    assert value(circulating, "vortex.found", site="blocks_0") == 1
    assert value(circulating, "vortex.found", site="blocks_1") == 0
    assert value(circulating, "vortex.found", site="", branch="") == 1
    assert "circulates in 1 of 2 blocks" in circulating.summary


def test_the_rate_is_that_of_the_process(circulating):
    """Unit covariance and exact one-record steps: exp(-.2) sin(.3) a record, a half of it a step at two steps a record."""
    wanted = math.exp(-0.2) * math.sin(0.3) / 2
    assert value(circulating, "vortex.area_rate", site="blocks_0", branch="") == pytest.approx(wanted, rel=0.15)
    assert value(circulating, "vortex.area_rate", site="blocks_0", branch="time backwards") == pytest.approx(
        -wanted, rel=0.15
    )
    (row,) = circulating.rows.where(measure="vortex.entropy_production", site="blocks_0")
    assert row.value > 5 * row.null
    (row,) = circulating.rows.where(measure="vortex.entropy_production", site="blocks_1")
    assert row.value < 5 * row.null


def test_random_walks_are_not_called_vortices(circulating):
    """The error that the note warns of: at 5 % no more than a handful of 60 walks may be called, though each draws its loops."""
    assert value(circulating, "vortex.found", branch="random walks in place of the weights") <= 0.1
    called = 0
    for seed in range(60):
        s = vortex.swirl(walk(seed), 39, generator(seed))
        called += s is not None and s.p <= 0.05
    assert called <= 6
    finding = found(trajectory(walk=walk(0)), skip=0.0)
    assert value(finding, "vortex.found", site="walk") == 0
    assert ("lower bound" in finding.summary) == bool(finding.rows.where(measure="vortex.area_rate"))
    assert value(finding, "vortex.swept_area") > 2


@pytest.mark.parametrize("kind", ["balanced", "drifting", "shuffled"])
def test_what_does_not_circulate_is_not_called(kind):
    """At 5 % no more than five of 30: balanced diffusions of unlike rates, a decaying drift, and a true vortex with its records shuffled."""
    called = 0
    for seed in range(30):
        g = generator(seed)
        if kind == "balanced":
            rates = torch.linspace(0.05, 0.6, 5, dtype=torch.float64).diag()
            path = flow.simulated(rates, torch.eye(5, dtype=torch.float64), 1000, generator=g)[0]
        elif kind == "drifting":
            path = torch.exp(-torch.linspace(0, 3, 1000, dtype=torch.float64))[:, None] * torch.arange(5) + 0.01 * walk(
                seed, 5, 1000
            )
        else:
            path = turning(seed, times=1000)[torch.randperm(1000, generator=g)]
        s = vortex.swirl(path, 39, g)
        called += s is not None and s.p <= 0.05
    assert called <= 5


def test_time_backwards_is_a_vortex_of_the_other_sense():
    path = turning()
    forward, backward = (vortex.swirl(x, 99, generator(0)) for x in (path, path.flip(0)))
    assert forward is not None and backward is not None
    assert forward.p <= 0.05 and backward.p <= 0.05  # each plane is turned to its own sense
    assert forward.rate > 0 and backward.rate > 0


def test_a_sense_that_turns_round_is_no_vortex():
    """The second half turns against the first: the same loops, and nothing stationary. Would catch a test of |rate| alone."""
    path = torch.cat([turning(times=800), turning(seed=1, turn=-0.3, times=800)])
    s = vortex.swirl(path, 99, generator(0))
    assert s is None or s.p == 1


def test_momentum_shows_in_the_weights_only_where_noise_and_curvature_do_not_commute():
    for commutes, called in ((True, False), (False, True)):
        h = torch.diag(torch.tensor([0.6, 0.1], dtype=torch.float64))
        root = (
            torch.eye(2, dtype=torch.float64)
            if commutes
            else torch.tensor([[1.0, 1.0], [0.0, 0.15]], dtype=torch.float64)
        )
        x, v, path, g = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64), [], generator(5)
        for _ in range(6000):
            v = 0.9 * v - 0.3 * (h @ x + root @ torch.randn(2, dtype=torch.float64, generator=g))
            x = x + v
            path.append(x)
        s = vortex.swirl(torch.stack(path)[::2], 199, g)
        assert s is not None
        assert (s.p <= 0.01) is called


def test_plain_descent_circulates_where_noise_and_curvature_do_not_commute_and_not_where_noise_follows_it():
    """D proportional to H: balanced at any preconditioner; the control that a vortex needs."""
    h = torch.tensor([[0.5, 0.3], [0.3, 0.4]], dtype=torch.float64)
    for noise, called in (
        (torch.linalg.cholesky(h), False),
        (torch.diag(torch.tensor([0.4, 1.5], dtype=torch.float64)), True),
    ):
        x, path, g = torch.zeros(2, dtype=torch.float64), [], generator(6)
        for _ in range(9000):
            x = x - 0.2 * (h @ x + noise @ torch.randn(2, dtype=torch.float64, generator=g))
            path.append(x)
        s = vortex.swirl(torch.stack(path), 199, g)
        assert (s is not None and s.p <= 0.01) is called  # None: no plane of the first half came back


def test_the_radius_is_predicted_from_the_facts_of_the_run():
    g, x, path = generator(4), torch.zeros(200, dtype=torch.float64), []
    for step in range(900):
        x = (1 - 0.05) * x - 0.1 * torch.randn(200, dtype=torch.float64, generator=g)
        if step >= 300:
            path.append(x)
    subject = trajectory(facts={"lr": 0.1, "weight_decay": 0.5, "schedule": "constant"}, rest=torch.stack(path))
    assert value(found(subject, skip=0.0), "vortex.radius_ratio") == pytest.approx(1, rel=0.03)
    assert any(
        "cosine schedule" in c
        for c in found(trajectory(facts={"schedule": "cosine"}, rest=torch.stack(path)), skip=0.0).caveats
    )


def test_too_few_records_are_told_in_records_and_steps():
    """The default training of 1,000 steps at one record every 4; what is told is enough, and no more than that."""
    short = found(trajectory(stride=4, rest=walk(0, times=250)))
    assert "at least 240 records behind the first 30%, 342 in all, got 250" in short.failed
    assert "at least 1,368 steps at one record every 4, or record every 2" in short.failed and "\n" not in short.failed
    assert found(trajectory(rest=walk(0, times=341))).failed and not found(trajectory(rest=walk(0, times=342))).failed
    every = found(trajectory(rest=walk(0, times=250))).failed
    assert "at least 342 steps at one record every 1" in every and "or record" not in every
    assert (
        "23,901 in all" in found(trajectory(rest=walk(0)), skip=0.99).failed
    )  # fewer than three are left behind the first


def test_the_rate_is_that_of_the_plane_found_a_lower_bound_for_the_fastest():
    """A plane that turns at 0.1 a record among 16 directions of noise is found askew, and the interval is for what was found."""
    means = {}
    for k in (2, 16):
        drift = torch.eye(k, dtype=torch.float64)
        drift[0, 1], drift[1, 0] = 2.0, -2.0
        swirls = [
            vortex.swirl(
                flow.simulated(drift, torch.eye(k).double(), 2100, step=0.05, generator=generator(s))[0],
                19,
                generator(0),
            )
            for s in range(6)
        ]
        rates = [s.rate for s in swirls if s is not None]
        means[k] = sum(rates) / len(rates)
    fastest = math.exp(-0.05) * math.sin(0.1)  # of the exact steps of simulated paths
    assert means[2] == pytest.approx(fastest, rel=0.1)
    assert 0.4 * fastest < means[16] < 0.85 * fastest


def test_the_rate_says_of_which_plane_it_is(circulating):
    from thalweg.geometry import catalog

    (row,) = circulating.rows.where(measure="vortex.area_rate", site="blocks_0", branch="")
    assert "of the plane that the first half chose" in row.interval
    assert "lower bound for the fastest" in circulating.summary
    assert any("lower bound" in line and "0.068 among 16 (in 6 of 12)" in line for line in circulating.caveats)
    assert "lower bound for the fastest" in {m.name: m.summary for m in catalog.entries()}["vortex.area_rate"]


@pytest.mark.parametrize(("lr", "words"), [(100.0, "100%"), (1e-20, "0%")])
def test_a_decay_without_a_radius_leaves_out_one_row(lr, words):
    """lr * weight_decay of a record at 1 or above, or lost in rounding: one row less, and the rest as it was."""
    facts = {"lr": lr, "weight_decay": 3.0, "schedule": "constant"}
    finding = found(trajectory(stride=3, facts=facts, rest=turning()), skip=0.0)
    assert not finding.failed and not finding.rows.where(measure="vortex.radius_ratio")
    assert value(finding, "vortex.found", site="rest") == 1
    assert any("radius_ratio is left out" in line and words in line for line in finding.caveats)


def test_holm_in_order():
    assert vortex.holm({"a": 0.04, "b": 0.001, "c": 0.03}, 0.05) == {"a": False, "b": True, "c": False}
    assert vortex.holm({"a": 0.04, "b": 0.001, "c": 0.02}, 0.05) == {"a": True, "b": True, "c": True}


def test_bad_input_is_one_line():
    for options, words in (({"skip": 1.0}, "skip of vortex"), ({"level": 0.0}, "level of vortex")):
        with pytest.raises(InputError, match=f"{words} must be") as error:
            found(trajectory(rest=walk(0)), **options)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="surrogates of vortex must be at least 19, got 5"):
        found(trajectory(rest=walk(0)), surrogates=5)
    (finding,) = findings(trajectory(rest=walk(0)), None, ["splitting"])
    assert "looks at a model" in finding.not_applicable
