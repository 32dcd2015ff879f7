"""Jacobians of feed-forwards: what is symmetric, what is not, and the golden numbers of the note."""

import math

import pytest
import torch

from thalweg.errors import InputError, ShapeError
from thalweg.geometry import eigenvalues as eig
from thalweg.geometry.jacobian import jacobian_matrix


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


W, X = drawn(48, 16) / 4, drawn(16, seed=1)


def test_tied_weights_and_a_rising_activation_are_symmetric_and_positive():
    """Golden: imaginary part 0, smallest eigenvalue > 0."""
    j = jacobian_matrix(lambda x: W.T @ torch.sigmoid(W @ x), X)
    assert eig.imaginary_share(j) < 1e-12
    assert eig.antisymmetric_share(j) < 1e-14
    assert eig.negative_share(j) == 0
    assert torch.linalg.eigvalsh(j).min() > 0


def test_an_activation_that_falls_keeps_them_symmetric_but_not_positive():
    j = jacobian_matrix(lambda x: W.T @ torch.cos(3 * (W @ x)), X)
    assert eig.antisymmetric_share(j) < 1e-14
    assert eig.imaginary_share(j) < 1e-12
    assert eig.negative_share(j) > 0.1


def test_a_gate_must_be_tied_too():
    """Golden: down = up^T alone leaves an imaginary part above 0.1; with the gate tied to it, or frozen, none."""
    gate, up = drawn(48, 16, seed=2) / 2, drawn(48, 16, seed=3) / 2

    def gated(gate, frozen=None):
        silu = torch.nn.functional.silu
        return lambda x: up.T @ ((silu(gate @ x) if frozen is None else frozen) * (up @ x))

    half = jacobian_matrix(gated(gate), X)
    assert torch.linalg.eigvals(half).imag.abs().max() > 0.1
    assert eig.antisymmetric_share(half) > 0.1
    for whole in (gated(up), gated(gate, torch.nn.functional.silu(gate @ X))):
        assert eig.antisymmetric_share(jacobian_matrix(whole, X)) < 1e-12


def test_nulls_are_those_of_random_matrices():
    j = drawn(300, 300, seed=4)
    assert eig.imaginary_share(j).item() == pytest.approx(eig.GINIBRE_IMAGINARY, abs=0.02)
    assert eig.antisymmetric_share(j).item() == pytest.approx(eig.antisymmetric_null(300), abs=0.01)
    assert eig.negative_share(j).item() == pytest.approx(0.5, abs=0.06)


def test_a_rotation_turns_and_does_not_grow():
    turn = torch.tensor([[0.0, -2.0], [2.0, 0.0]])
    assert eig.imaginary_share(turn).item() == pytest.approx(1)
    assert eig.antisymmetric_share(turn).item() == pytest.approx(1)
    assert eig.growth_rate(turn).item() == pytest.approx(0, abs=1e-12)
    assert eig.growth_rate(torch.diag(torch.tensor([-1.0, 3.0]))).item() == 3


def test_reference_in_loops():
    j = drawn(5, 5, seed=6)
    anti = whole = 0.0
    for a in range(5):
        for b in range(5):
            anti += float((j[a, b] - j[b, a]) / 2) ** 2
            whole += float(j[a, b]) ** 2
    assert eig.antisymmetric_share(j).item() == pytest.approx(math.sqrt(anti / whole))
    values = torch.linalg.eigvals(j)
    assert eig.imaginary_share(j).item() == pytest.approx(
        sum(abs(complex(v).imag) for v in values) / sum(abs(complex(v)) for v in values)
    )


def test_zeros_and_bad_input():
    zero = torch.zeros(3, 3)
    assert eig.imaginary_share(zero) == eig.antisymmetric_share(zero) == eig.negative_share(zero) == 0
    for call, error in (
        (lambda: eig.growth_rate(torch.zeros(2, 3)), ShapeError),
        (lambda: eig.growth_rate(zero * math.nan), InputError),
    ):
        with pytest.raises(error) as raised:
            call()
        assert "\n" not in str(raised.value)
