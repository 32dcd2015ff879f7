"""Growth of hidden units against gromo: one map in both, what growth leaves unchanged, what its directions promise at first order."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare_growth.py"


@pytest.fixture(scope="module")
def both():
    """The comparison of the benchmark: models, data and growths."""
    assert importlib.util.find_spec("gromo"), "these tests need gromo; run: make test-parity"
    spec = importlib.util.spec_from_file_location("compare_growth", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_growth"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["compare_growth"]


@pytest.fixture
def case(both):
    x, wanted = both.data(0)
    ours = both.ours(x, both.START, 0)
    return ours, both.theirs(ours), x[: both.SAMPLES], wanted[: both.SAMPLES]


@pytest.mark.parity
def test_a_feed_forward_sublayer_is_their_two_layer_map(both, case):
    ours, theirs, x, wanted = case
    gradients = []
    for model in (ours, theirs):
        out = both.output(model, x)
        gradients.append([out.detach(), *torch.autograd.grad(both.loss_of(out, wanted), both.weights(model))])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parity
def test_gradmax_takes_the_singular_vectors_of_the_gradient(both, case):
    """Their numbers against an SVD of our own: mean over samples of (gradient at the output) (input)^T."""
    ours, theirs, x, wanted = case
    both.statistics_of(theirs, x, wanted, both.ADDED, **both.GROMO["GradMax"])
    layer = theirs.currently_updated_layer
    out = both.output(ours, x).detach().requires_grad_()
    (both.loss_of(out, wanted) * len(x)).backward()
    left, singular, _ = torch.linalg.svd(out.grad.T @ x / len(x))
    torch.testing.assert_close(layer.eigenvalues_extension.detach(), singular[: both.ADDED], rtol=1e-3, atol=1e-5)
    found = layer.extended_input_layer.weight.detach()
    overlap = (left[:, : both.ADDED].T @ (found / found.norm(dim=0))).abs().diagonal()
    assert (overlap > 0.999).all()


@pytest.mark.parity
def test_optimal_directions_lower_the_loss_as_promised(both, case):
    """At a small step the loss falls by the step times the stated first-order improvement; without their projection, so that it is exact."""
    _, theirs, x, wanted = case
    both.statistics_of(theirs, x, wanted, both.ADDED, use_covariance=True, use_projection=False)
    promised, scale = float(theirs.currently_updated_layer.first_order_improvement.detach()), 0.015
    theirs.set_scaling_factor(scale)
    with torch.no_grad():
        fall = float(both.loss_of(both.output(theirs, x), wanted) - both.loss_of(theirs.extended_forward(x), wanted))
    assert promised > 0.05 and fall / scale**2 == pytest.approx(promised, rel=0.03)


@pytest.mark.parity
def test_what_growth_changes_at_once(both, case):
    """Ours and GradMax change no output, and of new weights of one norm those of GradMax have the larger gradient; TINY lowers the loss."""
    ours, theirs, x, wanted = case
    before = both.output(ours, x).detach()
    grown, _ = both.grow_width(ours, ffn_width=both.START + both.ADDED, generator=torch.Generator().manual_seed(0))
    norm = float(both.weights(grown)[0][-both.ADDED :].detach().norm())
    gradmax = both.grow_theirs(theirs, "GradMax", x, wanted, norm)
    assert float(both.weights(gradmax)[1][:, -both.ADDED :].detach().norm()) == pytest.approx(norm, rel=1e-5)
    for model in (grown, gradmax):
        assert (both.output(model, x) - before).abs().max() < 1e-5
    assert both.gradient_on_new(gradmax, x, wanted) > 1.5 * both.gradient_on_new(grown, x, wanted)
    tiny = both.grow_theirs(both.theirs(ours), "TINY", x, wanted, norm)
    after = both.output(tiny, x)
    assert (after - before).abs().max() > 0.1 and both.loss_of(after, wanted) < 0.9 * both.loss_of(before, wanted)
