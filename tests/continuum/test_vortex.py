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


def test_holm_in_order():
    assert vortex.holm({"a": 0.04, "b": 0.001, "c": 0.03}, 0.05) == {"a": False, "b": True, "c": False}
    assert vortex.holm({"a": 0.04, "b": 0.001, "c": 0.02}, 0.05) == {"a": True, "b": True, "c": True}


def test_bad_input_is_one_line():
    short = found(trajectory(rest=walk(0, times=100)))
    assert "at least 240 records" in short.failed
    with pytest.raises(InputError, match="skip must be") as error:
        found(trajectory(rest=walk(0)), skip=1.0)
    assert "\n" not in str(error.value)
    (finding,) = findings(trajectory(rest=walk(0)), None, ["splitting"])
    assert "looks at a model" in finding.not_applicable
