"""Updates taken apart: identities, zero references, dtypes, tangent shares and mixing gains."""

import math

import pytest
import torch

from thalweg.errors import InputError, ShapeError
from thalweg.geometry import (
    amax_gain,
    composite,
    local_tangent,
    mean_gain,
    off_tangent,
    off_tangent_null,
    parallel_coefficient,
    parallel_energy,
    parallel_fraction,
    relative_update,
    split_update,
    update_rms,
)
from thalweg.geometry.updates import parallel_fraction_null


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def test_split_by_hand():
    split = split_update(torch.tensor([2.0, 0.0]), torch.tensor([-1.0, 3.0]))
    assert split.coefficient.item() == -0.5
    assert split.parallel.tolist() == [-1.0, 0.0] and split.perpendicular.tolist() == [0.0, 3.0]
    coefficient, _parallel, _perpendicular = split
    assert coefficient.shape == ()


def test_the_parts_add_up_and_stand_upright():
    reference, update = gaussian(3, 5, 8), gaussian(3, 5, 8, seed=1)
    coefficient, parallel, perpendicular = split_update(reference, update)
    assert coefficient.shape == (3, 5)
    assert torch.allclose(parallel + perpendicular, update, rtol=1e-14)
    assert torch.allclose(parallel, coefficient.unsqueeze(-1) * reference, rtol=1e-12)
    assert torch.allclose((perpendicular * reference).sum(-1), torch.zeros(3, 5, dtype=torch.float64), atol=1e-13)


def test_a_zero_reference_has_no_direction():
    reference, update = torch.zeros(2, 4, requires_grad=True), gaussian(2, 4, dtype=torch.float32).requires_grad_()
    coefficient, parallel, perpendicular = split_update(reference, update)
    assert coefficient.tolist() == [0, 0] and not parallel.any() and torch.equal(perpendicular, update)
    loss = (coefficient * gaussian(2, seed=2)).sum() + (parallel * gaussian(2, 4, seed=3)).sum()
    for gradient in torch.autograd.grad(loss + (perpendicular * gaussian(2, 4, seed=4)).sum(), (reference, update)):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_small_and_large_references_in_float32(scale):
    reference, update = gaussian(6, dtype=torch.float32) * scale, gaussian(6, seed=1, dtype=torch.float32)
    exact = split_update(reference.double(), update.double())
    split = split_update(reference, update)
    assert torch.allclose(split.parallel.double(), exact.parallel, rtol=1e-5)
    assert torch.allclose(split.coefficient.double(), exact.coefficient, rtol=1e-5)


def test_a_bf16_update_is_split_wide_and_comes_back_in_bf16():
    reference, update = gaussian(64, dtype=torch.bfloat16), gaussian(64, seed=1, dtype=torch.bfloat16)
    split = split_update(reference, update)
    exact = split_update(reference.double(), update.double())
    assert split.coefficient.dtype == torch.float32 and split.parallel.dtype == torch.bfloat16
    assert split.coefficient.item() == pytest.approx(exact.coefficient.item(), rel=1e-5)
    assert torch.equal(split.perpendicular, exact.perpendicular.float().bfloat16())


def test_one_reference_for_many_updates():
    reference, update = gaussian(8), gaussian(3, 8, seed=1)
    assert torch.allclose(split_update(reference, update).coefficient, update @ reference / reference.square().sum())


def test_shares_along_the_state():
    reference, update = torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0])
    assert parallel_coefficient(reference, update).item() == pytest.approx(3)
    assert parallel_energy(reference, update).item() == pytest.approx(0.36)
    assert parallel_fraction(reference, update).item() == pytest.approx(0.6)
    assert parallel_energy(reference, torch.zeros(2)).item() == 0 == parallel_energy(torch.zeros(2), update).item()


def test_nulls_of_the_shares_hold_for_random_directions():
    reference, update = gaussian(20000, 12), gaussian(20000, 12, seed=1)
    assert parallel_energy(reference, update).mean().item() == pytest.approx(1 / 12, rel=0.03)
    assert parallel_fraction(reference, update).mean().item() == pytest.approx(parallel_fraction_null(12), rel=0.03)
    assert parallel_fraction_null(2) == pytest.approx(2 / math.pi, rel=1e-12)


def test_size_of_updates():
    state, update = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]])
    assert relative_update(state, update).item() == pytest.approx(0.2)
    assert update_rms(update).item() == pytest.approx(math.sqrt(0.5))
    assert relative_update(torch.zeros(1, 2), torch.zeros(1, 2)).item() == 0
    assert relative_update(torch.zeros(1, 2), update).item() == math.inf


def test_off_tangent_inside_outside_and_between():
    basis = torch.eye(5)[:, :2]
    assert off_tangent(torch.tensor([1.0, -2.0, 0.0, 0.0, 0.0]), basis).item() == pytest.approx(0, abs=1e-15)
    assert off_tangent(torch.tensor([0.0, 0.0, 1.0, 0.0, 2.0]), basis).item() == pytest.approx(1)
    assert off_tangent(torch.tensor([1.0, 0.0, 0.0, 3.0, 0.0]).double() * 1e-200, basis).item() == pytest.approx(0.9)
    assert off_tangent(torch.zeros(5), basis).item() == 0


def test_off_tangent_null_holds_for_random_directions_and_counts_no_zero_columns():
    basis = torch.linalg.qr(gaussian(20, 6)).Q
    assert off_tangent_null(basis).item() == pytest.approx(1 - 6 / 20)
    assert off_tangent(gaussian(20000, 20, seed=1), basis).mean().item() == pytest.approx(0.7, abs=0.005)
    padded = torch.cat([basis, torch.zeros(20, 3, dtype=torch.float64)], -1)
    assert off_tangent_null(padded).item() == pytest.approx(0.7)
    update = gaussian(20, seed=2)
    assert off_tangent(update, padded).item() == pytest.approx(off_tangent(update, basis).item())


def test_off_tangent_of_states_on_a_plane():
    plane = torch.linalg.qr(gaussian(10, 2)).Q
    window = gaussian(4, 8, 2, seed=1) @ plane.mT + gaussian(10, seed=2)
    basis = local_tangent(window, 2).basis
    inside, across = gaussian(4, 2, seed=3) @ plane.mT, gaussian(4, 10, seed=4)
    across = across - across @ plane @ plane.mT
    assert off_tangent(inside, basis).tolist() == pytest.approx([0] * 4, abs=1e-12)
    assert off_tangent(across, basis).tolist() == pytest.approx([1] * 4, abs=1e-12)


def test_refusals():
    with pytest.raises(ShapeError, match="last axis"):
        split_update(torch.ones(3), torch.ones(4))
    with pytest.raises(ShapeError, match="last axis"):
        split_update(torch.tensor(1.0), torch.tensor(2.0))
    with pytest.raises(ShapeError, match="tangent basis"):
        off_tangent(torch.ones(4), torch.ones(3, 2))
    with pytest.raises(InputError, match="NaN"):
        off_tangent(torch.full((4,), math.nan), torch.eye(4))
    with pytest.raises(ShapeError, match=r"\[\.\.\. to from\]"):
        amax_gain(torch.ones(3))


def test_amax_gain_is_of_row_sums_forward_and_column_sums_backward():
    mix = torch.tensor([[1.0, 2.0, -4.0], [0.0, 3.0, 0.5]])  # row sums -1, 3.5; column sums 1, 5, -3.5
    gain = amax_gain(mix)
    assert (gain.forward.item(), gain.backward.item()) == (3.5, 5.0)
    transposed = amax_gain(mix.mT)
    assert (transposed.forward.item(), transposed.backward.item()) == (5.0, 3.5)
    negative = amax_gain(torch.tensor([[-3.0, 1.0], [1.0, 0.0]]))  # the absolute value of the sum, not the sum of those
    assert (negative.forward.item(), negative.backward.item()) == (2.0, 2.0)


def test_amax_gain_is_wide_and_batched():
    mix = torch.full((2, 3, 4, 4), 0.25, dtype=torch.bfloat16)
    forward, backward = amax_gain(mix)
    assert forward.shape == backward.shape == (2, 3) and forward.dtype == torch.float32
    assert torch.equal(forward, torch.ones(2, 3)) and torch.equal(backward, torch.ones(2, 3))


def test_composite_applies_the_first_matrix_first():
    a, b = gaussian(5, 3, 3), gaussian(5, 3, 3, seed=1)
    x = gaussian(5, 3, 1, seed=2)
    assert torch.allclose(composite([a, b]) @ x, b @ (a @ x))
    row_stochastic = [torch.softmax(gaussian(5, 4, 4, seed=i), -1) for i in range(60)]
    assert mean_gain(row_stochastic).forward.item() == pytest.approx(1, abs=1e-12)
    assert mean_gain(row_stochastic).backward.item() > 1.1
    with pytest.raises(ShapeError, match="at least one"):
        composite([])
    with pytest.raises(ShapeError, match="reads 2 streams"):
        composite([torch.eye(3), torch.eye(2)])
