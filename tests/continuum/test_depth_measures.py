"""Trajectories through depth and clusters of tokens: references in loops, nulls, and exact cases."""

import math

import pytest
import torch

from thalweg.errors import InputError, ShapeError
from thalweg.geometry import depth


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_turning_in_loops():
    x = drawn(5, 4)
    for i in range(1, 4):
        before, behind = x[i] - x[i - 1], x[i + 1] - x[i]
        cosine = float(before @ behind / (before.norm() * behind.norm()))
        assert depth.turning(x)[i - 1].item() == pytest.approx(math.acos(cosine))


def test_a_line_is_straight_and_a_walk_is_not():
    line = torch.arange(7, dtype=torch.float64)[:, None] * drawn(5)
    assert depth.turning(line).max() < 1e-6
    assert depth.straightness(line).item() == pytest.approx(1)
    walk = drawn(40, 33, 2000).cumsum(1)
    assert depth.turning(walk).mean().item() == pytest.approx(math.pi / 2, abs=0.01)
    assert depth.straightness(walk).mean().item() == pytest.approx(32**-0.5, rel=0.03)
    assert depth.straightness(torch.ones(3, 4)).item() == 0


def test_energy_in_loops():
    x, total = drawn(4, 3), 0.0
    for i in range(4):
        for j in range(4):
            total += math.exp(1.5 * (float(x[i] @ x[j] / (x[i].norm() * x[j].norm())) - 1))
    assert depth.energy(x, 1.5).item() == pytest.approx(total / 16)


def test_energy_of_uniform_directions_and_of_one():
    for width in (3, 40, 2000):  # a Bessel function of such an order is no longer a number
        null = depth.energy_null(64, width, 2.0)
        assert depth.energy(drawn(50, 64, width), 2.0).mean().item() == pytest.approx(null, rel=0.01)
    assert depth.energy(torch.ones(5, 3)).item() == pytest.approx(1)


def test_attention_with_identity_maps_never_lowers_the_energy():
    """The theorem that the measure is from: the flow dx_i = P_x sum_j softmax(beta <x_i, x_j>) x_j raises E_beta and merges the tokens."""
    x = torch.nn.functional.normalize(drawn(12, 3), dim=-1)
    before, first = depth.energy(x).item(), depth.clusters(x, 0.95)
    for _ in range(400):
        y = torch.softmax(x @ x.T, -1) @ x
        x = torch.nn.functional.normalize(x + 0.1 * (y - (x * y).sum(-1, keepdim=True) * x), dim=-1)
        now = depth.energy(x).item()
        assert now >= before - 1e-9
        before = now
    assert first > 0.3
    assert depth.clusters(x, 0.95) == pytest.approx(1 / 12)


def test_clusters_are_linked_not_only_near():
    """A chain holds together although its ends are far apart; would catch counting centres in place of components."""
    angle = torch.linspace(0, 2.0, 11, dtype=torch.float64)
    chain = torch.stack([angle.cos(), angle.sin()], 1)
    apart = torch.tensor([[-1.0, -0.2]], dtype=torch.float64)
    assert depth.clusters(torch.cat([chain, apart])) == pytest.approx(2 / 12)
    assert depth.clusters(drawn(30, 500)) == 1


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: depth.turning(torch.zeros(2, 3)), ShapeError),
        (lambda: depth.energy(torch.ones(2, 3), 0.0), InputError),
        (lambda: depth.clusters(torch.ones(2, 3), 1.0), InputError),
        (lambda: depth.clusters(torch.ones(2, 2, 3)), ShapeError),
    ],
)
def test_bad_input_is_one_line(call, error):
    with pytest.raises(error) as raised:
        call()
    assert "\n" not in str(raised.value)
