"""Jacobians by forward differentiation, their extremes, and gradient norms by depth."""

import math

import pytest
import torch

from thalweg.errors import InputError, ShapeError
from thalweg.geometry import (
    depth_slope,
    extreme_singular_values,
    gradient_norms,
    jacobian_matrix,
    jacobian_singular_values,
    state_gradient_norms,
)
from thalweg.geometry.jacobian import largest, mean_square, near_one, smallest


def gaussian(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_linear_map_is_its_own_jacobian(vectorize):
    matrix = gaussian(5, 7)
    found = jacobian_matrix(lambda x: matrix @ x, gaussian(7, seed=1), chunk=3, vectorize=vectorize)
    assert torch.allclose(found, matrix, rtol=1e-14)


def test_shapes_are_flattened_in_order():
    matrix = gaussian(6, 6)
    found = jacobian_matrix(lambda x: (matrix @ x.flatten()).reshape(3, 2), gaussian(2, 3, seed=1))
    assert torch.allclose(found, matrix, rtol=1e-14)


def test_agrees_with_reverse_differentiation_on_a_block():
    a, b = gaussian(8, 6), gaussian(6, 8, seed=1)

    def block(x):
        return x + torch.tanh(x / x.square().mean(-1, keepdim=True).sqrt() @ b) @ a

    point = gaussian(6, seed=2)
    assert torch.allclose(jacobian_matrix(block, point), torch.autograd.functional.jacobian(block, point), rtol=1e-12)


def test_skip_of_an_elementwise_erase():
    erase, state = gaussian(12), gaussian(12, seed=1)
    values = jacobian_singular_values(lambda x: x - erase * x, state)
    assert torch.allclose(values, (1 - erase).abs().sort(descending=True).values, rtol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 2.0])
def test_skip_of_a_rank_one_erase(beta):
    k = torch.nn.functional.normalize(gaussian(10), dim=0)
    values = jacobian_singular_values(lambda x: x - beta * k * (k @ x), gaussian(10, seed=1))
    expected = torch.tensor([1.0] * 9 + [abs(1 - beta)], dtype=torch.float64)
    assert torch.allclose(values, expected, rtol=1e-12, atol=1e-12)
    assert near_one(values).item() == (1.0 if abs(1 - beta) == 1 else 0.9)
    found = extreme_singular_values(lambda x: x - beta * k * (k @ x), gaussian(10, seed=1))
    assert found.largest == pytest.approx(1, rel=1e-9) and found.smallest == pytest.approx(abs(1 - beta), abs=1e-9)
    assert found.steps <= 3  # two distinct values


def test_summaries_of_singular_values():
    values = torch.tensor([[2.0, 1.05, 0.0], [1.0, 1.0, 1.0]])
    assert largest(values).tolist() == [2, 1] and smallest(values).tolist() == [0, 1]
    assert mean_square(values).tolist() == pytest.approx([(4 + 1.05**2) / 3, 1])
    assert near_one(values).tolist() == pytest.approx([1 / 3, 1])
    with pytest.raises(ShapeError):
        largest(torch.tensor(1.0))


@pytest.mark.parametrize(("outputs", "inputs"), [(30, 30), (45, 30)])
def test_lanczos_is_exact_with_as_many_steps_as_inputs(outputs, inputs):
    matrix = gaussian(outputs, inputs)
    exact = torch.linalg.svdvals(matrix)
    found = extreme_singular_values(lambda x: torch.sin(matrix @ x), torch.zeros(inputs).double(), steps=inputs)
    assert found.largest == pytest.approx(exact[0].item(), rel=1e-10)
    assert found.smallest == pytest.approx(exact[-1].item(), rel=1e-6)


def test_lanczos_bounds_a_large_map():
    matrix = gaussian(300, 300) / math.sqrt(300)
    exact = torch.linalg.svdvals(matrix)
    found = extreme_singular_values(
        lambda x: (matrix @ x.flatten()).reshape(20, 15), gaussian(30, 10, seed=1), steps=40
    )
    assert exact[0].item() * 0.99 < found.largest <= exact[0].item() * (1 + 1e-12)
    assert found.smallest >= exact[-1].item() and found.steps == 40


def test_lanczos_of_maps_that_lose_directions():
    wide = gaussian(4, 9)
    found = extreme_singular_values(lambda x: wide @ x, gaussian(9, seed=1))
    assert found.largest == pytest.approx(torch.linalg.svdvals(wide)[0].item(), rel=1e-10)
    assert found.smallest == pytest.approx(0, abs=1e-10)
    zero = extreme_singular_values(lambda x: 0 * x, gaussian(9, seed=1))
    assert zero.largest == zero.smallest == 0
    same = extreme_singular_values(lambda x: 3 * x, gaussian(9, seed=1))
    assert same.largest == pytest.approx(3) == same.smallest and same.steps == 1


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    extreme_singular_values(lambda x: 2 * x, gaussian(5))
    assert torch.equal(torch.get_rng_state(), before)


def test_refusals():
    with pytest.raises(InputError, match="NaN"):
        jacobian_matrix(lambda x: x, torch.tensor([1.0, math.nan]))
    with pytest.raises(InputError, match="1 to 4 inputs, got 5"):
        jacobian_matrix(lambda x: x, torch.ones(5), limit=4)
    with pytest.raises(InputError, match="at least one step"):
        extreme_singular_values(lambda x: x, torch.ones(5), steps=0)


def test_gradient_norms_by_depth():
    norms = gradient_norms([torch.tensor([3.0, 4.0]), None, torch.full((2, 2), math.nan)])
    assert norms[:2].tolist() == [5, 0] and norms[2].isnan()
    with pytest.raises(InputError, match="at least one"):
        gradient_norms([])


def test_gradients_reach_the_states_and_not_the_parameters():
    weight = torch.nn.Parameter(torch.tensor(0.5))
    first = torch.tensor([1.0, -2.0], requires_grad=True)
    states = [first]
    for _ in range(3):
        states.append(states[-1] * weight)
    unused = torch.ones(2, requires_grad=True)
    norms = state_gradient_norms((states[-1] * torch.tensor([3.0, 4.0])).sum(), [*states, unused])
    assert norms.tolist() == pytest.approx([0.625, 1.25, 2.5, 5.0, 0.0])
    assert weight.grad is None and first.grad is None
    assert depth_slope(norms[:4]) == pytest.approx(math.log(2))
    with pytest.raises(ShapeError):
        state_gradient_norms(states[-1], states)
    with pytest.raises(InputError, match="carry gradients"):
        state_gradient_norms(states[-1].sum(), [torch.ones(2)])


def test_depth_slope_passes_over_lost_gradients():
    assert depth_slope(torch.tensor([1.0, 0.0, math.nan, math.e**6])) == pytest.approx(2.0)
    with pytest.raises(InputError, match="two positive"):
        depth_slope(torch.tensor([1.0, 0.0]))
