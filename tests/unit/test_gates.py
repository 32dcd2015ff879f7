"""Statistics of gates and the place where they change sign."""

import math

import pytest
import torch

from thalweg.errors import InputError, ShapeError, UnknownNameError
from thalweg.geometry import gate_statistics, sign_transition
from thalweg.geometry.gates import gate_statistic

SHARES = ("identity", "partial", "erase", "flip", "reflect", "amplify")


def test_classes_of_the_erase_factor():
    cases = {
        "identity": [-0.1, 0.0, 0.1],
        "partial": [0.11, 0.5, 0.89],
        "erase": [0.91, 1.0, 1.09],
        "flip": [1.11, 1.5, 1.89],
        "reflect": [1.91, 2.0, 2.09],
        "amplify": [-0.11, -1.0, 2.11, 1e9],
    }
    for name, values in cases.items():
        found = gate_statistics({"erase": torch.tensor(values, dtype=torch.float64)})
        assert {share: found[f"erase.{share}"].item() for share in SHARES} == {s: float(s == name) for s in SHARES}


def test_shares_sum_to_one_and_follow_the_threshold():
    values = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 2
    for threshold in (0.01, 0.1, 0.4):
        found = gate_statistics({"erase": values}, threshold=threshold, keep=1)
        assert torch.allclose(sum(found[f"erase.{s}"] for s in SHARES), torch.ones(3, dtype=torch.float64))
    assert gate_statistics({"erase": torch.tensor([0.15])}, threshold=0.2)["erase.identity"] == 1


def test_beta_and_gate():
    beta = torch.tensor([[-1.0, 0.0, 1.0, 3.0]])
    found = gate_statistics({"beta": beta, "gate": torch.tensor([0.05, 0.5, 0.95, 0.99])})
    assert found["beta.mean"] == 0.75 and found["beta.below_zero"] == 0.25
    assert found["beta.sd"].item() == pytest.approx(beta.double().std(correction=0).item())
    assert found["gate.closed"] == 0.25 and found["gate.open"] == 0.5
    assert all(value.ndim == 0 and value.dtype == torch.float64 for value in found.values())


def test_log_of_alpha_beta_leaves_zeros_out():
    found = gate_statistics({"erase": torch.tensor([[math.e, 0.0, -(math.e**3)], [0.0, 0.0, 0.0]])}, keep=1)
    assert found["erase.log_abs"].tolist() == pytest.approx([2.0, -math.inf])


def test_kept_axes_and_unknown_gates():
    values = torch.arange(24.0).reshape(2, 3, 4)
    found = gate_statistics({"mine": values}, keep=2)
    assert set(found) == {"mine.mean", "mine.sd"}
    assert torch.equal(found["mine.mean"], values.double().mean(-1))
    assert gate_statistics({}) == {}
    assert gate_statistic(values, gate="beta", statistic="below_zero") == 0


def test_refusals():
    with pytest.raises(InputError, match="threshold"):
        gate_statistics({"beta": torch.ones(2)}, threshold=0.5)
    with pytest.raises(InputError, match="gate 'beta': 1 of 2 values is NaN"):
        gate_statistics({"beta": torch.tensor([1.0, math.nan])})
    with pytest.raises(ShapeError, match="first 2 axes"):
        gate_statistics({"beta": torch.ones(2)}, keep=2)
    with pytest.raises(UnknownNameError, match=r"Did you mean 'beta\.mean'"):
        gate_statistic(torch.ones(2), gate="beta", statistic="maen")


def logistic(place, midpoint, sharpness):
    return 1 / (1 + math.exp(-sharpness * (place - midpoint)))


@pytest.mark.parametrize("sharpness", [-6.0, -1.0, 2.0, 9.0])
def test_a_logistic_transition_is_found_again(sharpness):
    sites = 21
    below = [logistic(site / (sites - 1), 0.4, sharpness) for site in range(sites)]
    found = sign_transition([0.5 - share for share in below], below, count=10**9)
    assert found.depth == pytest.approx(8.0) and found.midpoint == pytest.approx(8.0, rel=1e-4)
    assert found.sharpness == pytest.approx(sharpness, rel=1e-4)


def test_transition_edges():
    flat = sign_transition([0.2, 0.2, 0.2], [0.3, 0.3, 0.3], count=100)
    assert flat.depth is None and flat.sharpness == 0 and flat.midpoint == math.inf
    step = sign_transition([1.0, 1.0, -3.0], [0.0, 0.0, 1.0], count=100)
    assert step.depth == pytest.approx(1.25) and math.isfinite(step.sharpness) and step.sharpness > 8
    assert sign_transition([1.0, 0.0, -1.0], [0.0, 0.5, 1.0], count=10).depth == 1.0
    assert sign_transition([0.0, 0.0], [0.5, 0.5], count=10).depth == 0.0
    assert sign_transition([1.0, 0.0], [0.0, 0.5], count=10).depth == 1.0


@pytest.mark.parametrize(
    ("means", "below", "count"),
    [([1.0], [0.0], 5), ([1.0, 2.0], [0.0], 5), ([1.0, 2.0], [0.0, 1.5], 5), ([1, 2], [0, 1], 0)],
)
def test_transition_refusals(means, below, count):
    with pytest.raises(InputError):
        sign_transition(means, below, count)
