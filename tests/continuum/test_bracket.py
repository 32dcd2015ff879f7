"""The order swap against the bracket, and splitting schemes: golden orders, references in loops, mutants of the sign."""

import itertools
import math

import pytest
import torch

from thalweg.errors import InputError, UnknownNameError
from thalweg.geometry.bracket import bracket, order_swap, swap_cosine, swap_error, swap_of
from thalweg.ops.depth import through_layer


def fields(width=6, seed=0):
    """Two smooth fields that do not commute."""
    g = torch.Generator().manual_seed(seed)
    a, b, c, d = (torch.randn(width, width, dtype=torch.float64, generator=g) / width**0.5 for _ in range(4))
    x = torch.randn(5, width, dtype=torch.float64, generator=g)
    return (lambda x: torch.tanh(x @ a) @ b), (lambda x: torch.sin(x @ c) @ d), x


@pytest.mark.parametrize("seed", range(3))
def test_the_error_of_the_bracket_vanishes_with_the_step(seed):
    """The golden table: 6e-2, 5e-3, 5e-4 at h = .1, .01, .001, so one decade a decade. Catches DT and DR swapped, and a missing h."""
    t, r, x = fields(seed=seed)
    errors = [float(swap_error(t, r, x, h)) for h in (0.1, 0.01, 0.001)]
    assert 1e-2 < errors[0] < 2e-1
    assert 2e-4 < errors[2] < 2e-3
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.35)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.1)


def test_the_swap_is_minus_the_bracket_of_linear_fields():
    """T = A x, R = B x: R after T minus T after R is h^2 (B A - A B) x exactly, and [T, R] = (A B - B A) x."""
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randn(4, 4, dtype=torch.float64, generator=g) for _ in range(2))
    x = torch.randn(4, dtype=torch.float64, generator=g)
    t, r = (lambda x: a @ x), (lambda x: b @ x)
    commutator = (a @ b - b @ a) @ x
    assert torch.allclose(bracket(t, r, x), commutator, atol=1e-12)
    for h in (1.0, 0.3):
        assert torch.allclose(order_swap(t, r, x, h), -(h**2) * commutator, atol=1e-12)
    assert swap_cosine(order_swap(t, r, x), bracket(t, r, x)).item() == pytest.approx(1.0)


def test_the_swap_is_the_difference_of_two_orders_of_steps():
    """By the definition alone: two compositions of whole steps, one minus the other."""
    t, r, x = fields()
    for h in (1.0, 0.25):
        ahead = x + h * t(x)
        ahead = ahead + h * r(ahead)
        back = x + h * r(x)
        back = back + h * t(back)
        assert torch.allclose(order_swap(t, r, x, h), ahead - back, atol=1e-12)


def test_the_bracket_by_differences():
    t, r, x = fields()
    e = 1e-6
    wanted = (t(x + e * r(x)) - t(x - e * r(x)) - r(x + e * t(x)) + r(x - e * t(x))) / (2 * e)
    assert torch.allclose(bracket(t, r, x), wanted, atol=1e-8)


def test_both_at_once_are_both_and_take_what_is_known():
    t, r, x = fields()
    for given in ({}, {"t": t(x), "after": r(x + t(x))}):
        found = swap_of(t, r, x, **given)
        assert torch.allclose(found.residual, order_swap(t, r, x), atol=1e-12)
        assert torch.allclose(found.bracket, bracket(t, r, x), atol=1e-12)
        assert torch.equal(found.first, t(x))
        assert torch.allclose(found.second, r(x), atol=1e-12)


def test_fields_that_commute_leave_nothing():
    r = torch.linspace(0.2, 2, 6, dtype=torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert order_swap(lambda x: x * r, lambda x: x * r.flip(0), x).abs().max() < 1e-12
    assert float(swap_error(lambda x: x * 0, lambda x: x * 0, x, 0.1)) == 0


@pytest.mark.parametrize(("scheme", "order"), [("lie", 1), ("swapped", 1), ("together", 1), ("strang", 2)])
def test_schemes_converge_to_one_flow_at_their_order(scheme, order):
    """Against a Runge-Kutta reference of the unsplit flow. Catches a Strang step whose parts are Euler steps (order 1)."""
    t, r, x = fields()

    def flow(x, steps=400):
        h, f = 1 / steps, lambda x: t(x) + r(x)
        for _ in range(steps):
            k1 = f(x)
            k2 = f(x + h / 2 * k1)
            k3 = f(x + h / 2 * k2)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(x + h * k3))
        return x

    wanted = flow(x)
    errors = [(through_layer(x, [t, r], n, scheme) - wanted).norm().item() for n in (8, 16, 32)]
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.25)


def test_one_step_is_the_layer_itself_bit_by_bit():
    t, r, x = fields()
    after = x + t(x)
    assert torch.equal(through_layer(x, [t, r]), after + r(after))
    before = x + r(x)
    assert torch.equal(through_layer(x, [t, r], scheme="swapped"), before + t(before))
    assert torch.equal(through_layer(x, [t, r], scheme="together"), x + t(x) + r(x))
    assert torch.equal(through_layer(x, [t, r], 2, size=1.0), through_layer(through_layer(x, [t, r]), [t, r]))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: through_layer(x, [], scheme="strong"), UnknownNameError, "strang"),
        (lambda x: through_layer(x, [], 0), InputError, "at least 1"),
        (lambda x: through_layer(x, [], size=0.0), InputError, "positive"),
        (lambda x: order_swap(torch.sin, torch.cos, x, -1.0), InputError, "positive"),
        (lambda x: bracket(torch.sin, torch.cos, x * math.nan), InputError, "NaN"),
    ],
)
def test_bad_input_is_one_line(call, error, words):
    with pytest.raises(error, match=words) as raised:
        call(torch.ones(3))
    assert "\n" not in str(raised.value)
