"""Theory and estimators of circulating diffusions: golden numbers, references in loops, and what must not be called a vortex."""

import math

import pytest
import torch

from thalweg.errors import InputError, ShapeError
from thalweg.geometry import circulation as flow


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_diffusion(k=4, seed=0):
    """A stable drift and a diffusion that do not commute."""
    g = generator(seed)
    a = torch.eye(k, dtype=torch.float64) + 0.4 * torch.randn(k, k, dtype=torch.float64, generator=g)
    root = torch.randn(k, k, dtype=torch.float64, generator=g)
    return a + 0.5 * k * torch.eye(k, dtype=torch.float64), root @ root.mT / k + 0.2 * torch.eye(k, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(4))
def test_both_forms_of_entropy_production_and_an_antisymmetric_circulation(seed):
    """Would catch a factor of 2 in A C + C A^T = 2 D, and Q with the sign of the current."""
    a, d = random_diffusion(seed=seed)
    c = flow.stationary_covariance(a, d)
    q = flow.circulation(a, d)
    assert (a @ c + c @ a.mT - 2 * d).abs().max() < 1e-13
    assert (q + q.mT).abs().max() < 1e-13
    assert (a @ c - d - q).abs().max() < 1e-14
    one, two = flow.entropy_production(q, d, c), flow.entropy_production_of_drift(a, d, c)
    assert one > 0.01
    assert torch.isclose(one, two, rtol=1e-10)


def test_the_covariance_is_the_integral_over_the_past():
    """C = integral of exp(-A s) 2 D exp(-A^T s): a reference that knows no Lyapunov equation."""
    a, d = random_diffusion(3, 5)
    total, s, ds = torch.zeros(3, 3, dtype=torch.float64), 0.0, 5e-3
    for _ in range(1600):
        m = torch.linalg.matrix_exp(-a * (s + ds / 2))
        total += ds * m @ (2 * d) @ m.mT
        s += ds
    assert (total - flow.stationary_covariance(a, d)).abs().max() < 1e-3


def test_balance_with_a_symmetric_drift():
    """A = H: Q = (H C - C H) / 2, and zero exactly where [H, D] = 0; a preconditioner P balances where H P D = D P H."""
    g = generator(3)
    basis = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=g))[0]
    h = basis @ torch.diag(torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)) @ basis.mT
    commuting = basis @ torch.diag(torch.tensor([2.0, 0.3, 1.0, 0.7], dtype=torch.float64)) @ basis.mT
    other = torch.diag(torch.tensor([2.0, 0.3, 1.0, 0.7], dtype=torch.float64))
    assert flow.circulation(h, commuting).abs().max() < 1e-12
    q, c = flow.circulation(h, other), flow.stationary_covariance(h, other)
    assert q.abs().max() > 0.05
    assert (q - (h @ c - c @ h) / 2).abs().max() < 1e-12
    p = torch.diag(torch.tensor([1.0, 3.0, 0.4, 2.0], dtype=torch.float64))
    for noise, balanced in ((h, True), (other, False)):  # D ~ H: nothing circulates, whatever the preconditioner
        drift, diffusion = p @ h, p @ noise @ p
        assert torch.allclose(h @ p @ noise, noise @ p @ h) is balanced
        assert bool(flow.circulation(drift, diffusion).abs().max() < 1e-12) is balanced


@pytest.mark.parametrize(("commutes", "expected"), [(True, 0.0), (False, 0.3)])
def test_momentum_always_has_a_current_in_phase_space(commutes, expected):
    """x' = v, v' = -H x - g v + noise: the block of positions is zero only where noise and curvature commute."""
    h = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
    turn = 0.0 if commutes else 0.6
    r = torch.tensor([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]], dtype=torch.float64)
    noise = r @ torch.diag(torch.tensor([3.0, 0.2], dtype=torch.float64)) @ r.mT
    zero, one = torch.zeros(2, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    drift = torch.cat([torch.cat([zero, -one], 1), torch.cat([h, 0.5 * one], 1)])
    diffusion = torch.block_diag(zero, noise)
    q = flow.circulation(drift, diffusion)
    assert q.abs().max() > 0.5
    found = q[:2, :2].abs().max().item()
    assert found < 1e-12 if commutes else found > expected


def long_path(seed=1, times=60_000, step=0.05):
    a, d = random_diffusion(4, seed)
    return a, d, flow.simulated(a, d, times, step=step, generator=generator(seed))[0]


def test_area_rate_has_the_sign_and_the_size_of_the_theory():
    """Would catch -Q, a missing 1/2 and a division by the number of rows in place of the time."""
    a, d, path = long_path(step=0.02)
    q = flow.circulation(a, d)
    got, lagged = flow.area_rate(path, 0.02), flow.lag_antisymmetry(path, 1, 0.02)
    upper = torch.triu_indices(4, 4, 1)
    for found, sign in ((got, 1), (lagged, -1)):
        pair = torch.stack([found[*upper], sign * q[*upper]])
        assert torch.corrcoef(pair)[0, 1] > 0.98
        assert (pair[0] * pair[1]).sum() / pair[1].square().sum() == pytest.approx(1.0, abs=0.12)
        assert (found + found.mT).abs().max() < 1e-12


def test_area_rate_in_loops():
    x = torch.randn(7, 3, dtype=torch.float64, generator=generator(8))
    y = x - x.mean(0)
    for i in range(3):
        for j in range(3):
            total = 0.0
            for t in range(6):
                middle = (y[t] + y[t + 1]) / 2
                dx = y[t + 1] - y[t]
                total += float(middle[i] * dx[j] - middle[j] * dx[i]) / 2
            assert flow.area_rate(x, 0.3)[i, j].item() == pytest.approx(total / (6 * 0.3), abs=1e-12)


def test_time_backwards_turns_the_sign():
    _, _, path = long_path(times=2000)
    assert torch.allclose(flow.area_rate(path.flip(0)), -flow.area_rate(path), atol=1e-14)


def test_drift_and_diffusion_are_found_again():
    a, d, path = long_path()
    found = flow.fit(path, 0.05)
    assert (found.drift - a).abs().max() < 0.25
    assert (found.diffusion - d).abs().max() < 0.03 * d.abs().max()
    assert (found.circulation - flow.circulation(a, d)).abs().max() < 0.03
    assert (found.covariance - flow.stationary_covariance(a, d)).abs().max() < 0.04 * found.covariance.abs().max()


def test_a_random_walk_draws_loops_of_ten_thirds():
    """The golden 3.3 +- 0.3 at 2,000 steps, and variances .61 / .15 / .07: a large area proves nothing."""
    areas, shares = [], []
    for seed in range(6):
        walk = torch.randn(2000, 256, dtype=torch.float64, generator=generator(seed)).cumsum(0)
        areas.append(flow.swept_area(walk).item())
        shares.append(flow.component_shares(walk))
    assert sum(areas) / 6 == pytest.approx(flow.SWEPT_BY_WALK, abs=0.3)
    assert torch.tensor(shares).mean(0).tolist() == pytest.approx([0.61, 0.15, 0.07], abs=0.03)


def test_the_cosines_of_the_limit_sweep_exactly_ten_thirds():
    s = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    path = torch.stack([torch.cos(math.pi * s), 0.5 * torch.cos(2 * math.pi * s)], 1)
    assert flow.swept_area(path).item() == pytest.approx(10 / 3, rel=1e-3)


def test_a_random_walk_does_not_relax_and_noise_does():
    below = [
        flow.relaxations(torch.randn(800, 1, dtype=torch.float64, generator=generator(s)).cumsum(0)) < 14.1
        for s in range(200)
    ]
    assert 0.88 <= sum(below) / 200 <= 0.99  # Dickey and Fuller: 95 %
    assert flow.relaxations(torch.randn(800, 2, dtype=torch.float64, generator=generator(1))) > 600


def test_the_plane_holds_the_circulation():
    """Two directions turn, six others only relax and two walk: the plane is the one that turns, with its sense, and the walk is left out."""
    a = torch.zeros(8, 8, dtype=torch.float64) + torch.eye(8, dtype=torch.float64)
    a[0, 1], a[1, 0] = 2.0, -2.0
    path = flow.simulated(a, torch.eye(8, dtype=torch.float64), 8000, step=0.05, generator=generator(2))[0]
    walk = torch.randn(8000, 2, dtype=torch.float64, generator=generator(3)).cumsum(0)
    plane = flow.fastest_plane(torch.cat([path, walk], 1), 50.0)
    assert plane is not None
    assert (plane.kept, plane.of) == (8, 10)
    inside = plane.basis[:2].square().sum() / plane.basis.square().sum()
    assert inside > 0.95
    coordinates = torch.cat([path, walk], 1) @ plane.basis
    assert flow.area_rate(coordinates, 0.05)[0, 1] > 1.5  # Q of unit covariance: 2
    assert torch.cov(coordinates.mT, correction=0) == pytest.approx(torch.eye(2, dtype=torch.float64), abs=1e-9)


def test_norm_radius_within_three_per_cent():
    n, lr, noise, decay = 2000, 0.1, 1.0, 0.5
    g, x, norms, path = generator(4), torch.zeros(2000, dtype=torch.float64), [], []
    for step in range(900):
        x = (1 - lr * decay) * x - lr * noise * torch.randn(n, dtype=torch.float64, generator=g)
        if step >= 300:
            norms.append(x.norm().item())
            path.append(x)
    predicted = flow.norm_radius(n, lr, noise, decay)
    assert predicted == pytest.approx(math.sqrt(n * lr * noise**2 / (2 * decay)), rel=0.03)
    assert sum(norms) / len(norms) == pytest.approx(predicted, rel=0.03)
    every_third = torch.stack(path)[::3]
    assert flow.radius_ratio(torch.stack(path), lr * decay) == pytest.approx(1, rel=0.03)
    assert flow.radius_ratio(every_third, 1 - (1 - lr * decay) ** 3) == pytest.approx(1, rel=0.03)
    assert flow.radius_ratio(torch.stack(path), 3 * lr * decay) > 1.3  # another decay than the path had


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: flow.area_rate(torch.zeros(2, 2)), "at least 3 times"),
        (lambda: flow.area_rate(torch.full((5, 2), math.nan)), "NaN"),
        (lambda: flow.stationary_covariance(-torch.eye(2), torch.eye(2)), "pull back"),
        (lambda: flow.fit(torch.randn(5, 3)), "at least 8 times"),
        (lambda: flow.fit(torch.randn(50, 1).expand(50, 2)), "depend on each other"),
        (lambda: flow.circulation(torch.eye(2), torch.eye(3)), "one size"),
        (lambda: flow.swept_area(torch.randn(9, 1)), "two directions"),
        (lambda: flow.radius_ratio(torch.randn(9, 2), 1.0), "between 0 and 1"),
        (lambda: flow.lag_antisymmetry(torch.randn(9, 2), 0), "at least one"),
    ],
)
def test_bad_input_is_one_line(call, words):
    with pytest.raises((InputError, ShapeError), match=words) as error:
        call()
    assert "\n" not in str(error.value)
