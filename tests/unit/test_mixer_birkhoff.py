"""The Birkhoff projection: the limit of Sinkhorn's iterations, its exactness, and its derivatives."""

import pytest
import torch

from thalweg import mixers
from thalweg.errors import InputError, ShapeError
from thalweg.ops.birkhoff import birkhoff
from thalweg.ops.doubly_stochastic import sinkhorn
from thalweg.ops.forward_mode import load_rules


def normal(*shape, scale=1.0, seed=0, dtype=torch.float64):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def signs(*shape, scale, seed=0):
    return scale * (
        2.0 * torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1
    )


def off(mix):
    return max(float((mix.double().sum(axis) - 1).abs().max()) for axis in (-1, -2))


def test_golden_matrix():
    z = torch.tensor(
        [[0.5, -1, 2, 0], [1.5, 0.3, -0.7, -2], [-0.2, 0.8, 0.1, 1.2], [2.2, -0.4, -1.1, 0.6]], dtype=torch.float64
    )
    mix = mixers.create("newton", streams=4)(z.flatten())
    want = [
        [0.06888960, 0.05664278, 0.73474424, 0.13972338],
        [0.40411275, 0.44851995, 0.10656031, 0.04080698],
        [0.03598465, 0.36044944, 0.11559696, 0.48796895],
        [0.49101300, 0.13438783, 0.04309848, 0.33150069],
    ]
    torch.testing.assert_close(mix, torch.tensor(want, dtype=torch.float64), atol=1e-8, rtol=0)
    singular = torch.linalg.svdvals(mix).tolist()
    assert singular == pytest.approx([1, 0.65687359, 0.41747063, 0.30439764], abs=1e-8)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_is_where_sinkhorn_ends(n):
    for scale, allowed in ((1.0, 1e-12), (2.0, 1e-6)):  # at 2 a few have not ended after 2000 iterations
        z = normal(50, n, n, scale=scale).requires_grad_()
        weights = normal(50, n, n, seed=1)
        ours, theirs = birkhoff(z), sinkhorn(z, 2000)
        torch.testing.assert_close(ours, theirs, atol=allowed, rtol=0)
        (got,), (want,) = torch.autograd.grad(ours, z, weights), torch.autograd.grad(theirs, z, weights)
        torch.testing.assert_close(got, want, atol=100 * allowed, rtol=0)


def test_two_streams_have_a_closed_form():
    z = normal(100, 2, 2, scale=20)
    stays = torch.sigmoid((z[:, 0, 0] + z[:, 1, 1] - z[:, 0, 1] - z[:, 1, 0]) / 2)
    torch.testing.assert_close(birkhoff(z)[:, 0, 0], stays, atol=1e-14, rtol=0)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("scale", [1.0, 3.0, 10.0, 50.0, 1e4])
def test_both_marginals_are_exact(n, scale):
    for z in (normal(200, n, n, scale=scale), signs(200, n, n, scale=scale)):
        assert off(birkhoff(z)) < (1e-13 if scale < 1e4 else 1e-8)
        assert off(birkhoff(z.float())) < 3e-7


def test_a_large_scale_gives_the_best_assignment_and_ties_share_it():
    z = torch.tensor([[3.0, 2, 0], [2, 0, 0], [0, 1, 0.5]])  # 0 takes 1, 1 takes 0, 2 takes 2: 4.5, the best sum
    torch.testing.assert_close(birkhoff(1e4 * z), torch.eye(3)[[1, 0, 2]])
    torch.testing.assert_close(birkhoff(1e4 * torch.ones(4, 4)), torch.full((4, 4), 0.25))
    tied = torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 1]])
    torch.testing.assert_close(birkhoff(1e4 * tied), torch.tensor([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]]))


def test_rows_and_columns_added_to_the_logits_change_nothing():
    z = normal(20, 4, 4)
    shifted = z + normal(20, 4, 1, scale=100, seed=1) + normal(20, 1, 4, scale=100, seed=2)
    torch.testing.assert_close(birkhoff(shifted), birkhoff(z), atol=1e-12, rtol=0)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_derivatives_are_those_of_finite_differences(n):
    z = normal(2, n, n).requires_grad_()
    weights = normal(2, n, n, seed=1)
    load_rules()
    assert torch.autograd.gradcheck(lambda z: weights * birkhoff(z), (z,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda z: weights * birkhoff(z), (z,), check_fwd_over_rev=True)


@pytest.mark.parametrize("scale", [50.0, 1e4])
@pytest.mark.parametrize("n", [4, 8])
def test_gradients_keep_the_marginals_at_extreme_logits(n, scale):
    for z in (normal(200, n, n, scale=scale), signs(200, n, n, scale=scale)):
        z.requires_grad_()
        weights = normal(200, n, n, scale=1e4, seed=1)
        (found,) = torch.autograd.grad(birkhoff(z), z, weights)
        assert found.abs().max() < 4e4
        assert max(found.sum(axis).abs().max() for axis in (-1, -2)) < 1e-4


def test_gradient_near_a_permutation_is_that_of_the_small_entries():
    """Two streams, where all is known: dM_00 = M_00 M_01 / 2 (dZ_00 + dZ_11 - dZ_01 - dZ_10), down to entries of 1e-200."""
    for gap in (10.0, 100.0, 460.0):
        z = (gap * torch.eye(2, dtype=torch.float64)).requires_grad_()
        mix = birkhoff(z)
        (found,) = torch.autograd.grad(mix[0, 0], z)
        small = float(mix[0, 1].detach())
        assert small == pytest.approx(torch.sigmoid(torch.tensor(-gap, dtype=torch.float64)).item(), rel=1e-9)
        assert found.flatten().tolist() == pytest.approx([small / 2, -small / 2, -small / 2, small / 2], rel=1e-3)


def test_start_is_that_of_sinkhorn():
    mixer, other = mixers.create("birkhoff_projection", streams=4), mixers.create("sinkhorn", streams=4)
    assert torch.equal(mixer.start(), other.start())
    mix = mixer(mixer.start().double())
    assert mix.diagonal().tolist() == pytest.approx([0.992618633] * 4, abs=1e-9)
    assert mix[0, 1:].tolist() == pytest.approx([0.002460456] * 3, abs=1e-9)


def test_claims_depend_on_the_steps():
    claims = [mixers.create("birkhoff_projection", streams=4, steps=steps).claims for steps in (40, 12)]
    assert [(c.rows, c.columns, c.spectral) for c in claims] == [
        ("exact", "exact", True),
        ("exact", "converging", False),
    ]
    z = normal(500, 4, 4, scale=50)
    assert off(birkhoff(z, 12)) > 1e-6 and (birkhoff(z, 12).sum(-1) - 1).abs().max() < 1e-14
    assert off(birkhoff(normal(500, 4, 4), 8)) < 1e-12


def test_refusals():
    with pytest.raises(InputError, match="steps must be at least 8, got 7"):
        mixers.create("birkhoff_projection", streams=4, steps=7)
    with pytest.raises(InputError, match="at least one step, got 0"):
        birkhoff(torch.zeros(2, 2), 0)
    with pytest.raises(ShapeError, match=r"square logits \[... to from\], got shape \[2, 3\]"):
        birkhoff(torch.zeros(2, 3))
