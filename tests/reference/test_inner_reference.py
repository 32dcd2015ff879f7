"""Measures inside a feed-forward sublayer against references written in loops from the definitions, and what they must not be mistaken for."""

import math

import pytest
import torch

from thalweg.errors import InputError, ShapeError
from thalweg.geometry import catalog
from thalweg.geometry.inner import (
    hidden_blocks,
    hidden_coefficient,
    hidden_fraction,
    output_coefficient,
    output_fraction,
    partial_outputs,
)
from thalweg.geometry.updates import parallel_fraction_null

B, T, D, G = 2, 3, 5, 3


def gaussian(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def sublayer():
    """x [b t d], h [b t m], W [d m]."""
    return gaussian(B, T, D, seed=1), gaussian(B, T, G * D, seed=2), gaussian(D, G * D, seed=3)


def along(update, reference):
    """Coefficient and |cos| of two lists of numbers."""
    dot = sum(u * r for u, r in zip(update, reference, strict=True))
    size, own = (math.sqrt(sum(a * a for a in x)) for x in (reference, update))
    return dot / size**2, abs(dot) / (size * own)


def wrote(w, h, block):
    """y_g[i] = sum over the neurons j of the block of W[i, j] h[j]."""
    return [sum(w[i][block * D + j] * h[block * D + j] for j in range(D)) for i in range(D)]


def test_measures_equal_their_loops(sublayer):
    x, h, w = sublayer
    found = [hidden_coefficient(x, h), hidden_fraction(x, h), output_coefficient(h, w), output_fraction(h, w)]
    assert all(f.shape == (B, T, G) and f.dtype == torch.float64 for f in found)
    for b in range(B):
        for t in range(T):
            reference, hidden = x[b, t].tolist(), h[b, t].tolist()
            for g in range(G):
                block = hidden[g * D : (g + 1) * D]
                wanted = *along(block, reference), *along(wrote(w.tolist(), hidden, g), block)
                assert [f[b, t, g].item() for f in found] == pytest.approx(wanted, rel=1e-12)


def test_partial_outputs_add_up_to_the_output(sublayer):
    _, h, w = sublayer
    torch.testing.assert_close(partial_outputs(h, w).sum(-2), h @ w.T, rtol=1e-12, atol=1e-12)
    y = partial_outputs(h, w)[1, 2]
    for g in range(G):
        assert y[g].tolist() == pytest.approx(wrote(w.tolist(), h[1, 2].tolist(), g), rel=1e-12)
    assert hidden_blocks(h, D).data_ptr() == h.data_ptr()


def test_a_scale_of_the_identity_is_read_off():
    """W that passes block g on, scaled by 1, 2 and -3, and a hidden vector of multiples of x."""
    x = gaussian(4, D)
    h = torch.cat([0.5 * x, -2 * x, 7 * x], -1)
    w = torch.cat([scale * torch.eye(D, dtype=torch.float64) for scale in (1.0, 2.0, -3.0)], -1)
    assert torch.allclose(hidden_coefficient(x, h), torch.tensor([0.5, -2, 7]).double().expand(4, 3))
    assert torch.allclose(output_coefficient(h, w), torch.tensor([1.0, 2, -3]).double().expand(4, 3))
    assert torch.allclose(hidden_fraction(x, h), torch.ones(()).double())
    assert torch.allclose(output_fraction(h, w), torch.ones(()).double())


def test_another_order_of_the_neurons_is_the_same_function_and_other_numbers(sublayer):
    x, h, w = sublayer
    order = torch.randperm(G * D, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(partial_outputs(h[..., order], w[:, order]).sum(-2), partial_outputs(h, w).sum(-2))
    assert (hidden_fraction(x, h[..., order]) - hidden_fraction(x, h)).abs().max() > 0.1
    assert (output_fraction(h[..., order], w[:, order]) - output_fraction(h, w)).abs().max() > 0.1


def test_zeros_have_no_direction(sublayer):
    x, h, w = sublayer
    h = h.clone()
    h[..., :D] = 0
    for found in (hidden_coefficient(x, h), hidden_fraction(x, h), output_coefficient(h, w), output_fraction(h, w)):
        assert found[..., 0].abs().max() == 0 and found[..., 1:].abs().min() > 0
    assert hidden_coefficient(torch.zeros_like(x), h).abs().max() == 0


def test_random_directions_give_the_null():
    x, h = gaussian(4000, 16, seed=4), gaussian(4000, 48, seed=5)
    assert hidden_fraction(x, h).mean().item() == pytest.approx(parallel_fraction_null(16), rel=0.03)
    assert hidden_coefficient(x, h).mean().item() == pytest.approx(0.0, abs=0.01)


def test_shapes_that_do_not_fit_are_refused(sublayer):
    x, h, w = sublayer
    with pytest.raises(ShapeError, match="no whole number of blocks of width 5"):
        hidden_coefficient(x, h[..., :-1])
    with pytest.raises(ShapeError, match="share all but the last axis"):
        hidden_fraction(x[:1], h)
    with pytest.raises(ShapeError, match=r"hidden \[\.\.\. m\] and the last map \[d m\] must share m"):
        output_coefficient(h, w.T)
    with pytest.raises(InputError, match="NaN or infinite"):
        output_fraction(h * math.inf, w)


def test_the_catalogue_leads_here(sublayer):
    x, h, w = sublayer
    for name in ("inner_coefficient.hidden", "inner_coefficient.hidden_of_stream"):
        assert torch.equal(catalog.entry(name).resolve()(x, h), hidden_coefficient(x, h))
    assert torch.equal(catalog.entry("inner_fraction.output").resolve()(h, w), output_fraction(h, w))
