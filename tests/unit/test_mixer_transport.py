"""The Birkhoff polytope as a transport polytope, entry by entry and by quadrants."""

import pytest
import torch

from thalweg import mixers
from thalweg.errors import InputError
from thalweg.ops.transport import near_identity, split, table

BOTH = ("transport", "transport_recursive")


def test_golden_numbers():
    mixer = mixers.create("tbp", streams=4)
    rows = [[0.5, 0.25, 0.125, 0.125], [0.25, 0.375, 0.1875, 0.1875]] + 2 * [[0.125, 0.1875, 0.34375, 0.34375]]
    assert torch.equal(mixer(torch.zeros(9)), torch.tensor(rows))
    mix = mixer((16 * torch.eye(3) - 8).flatten().double())
    assert mix.diagonal().tolist() == pytest.approx([0.999665, 0.999665, 0.999665, 0.998995], abs=1e-6)


def test_midpoints_of_quadrants_are_uniform():
    for n in (2, 4, 8, 16):
        mixer = mixers.create("rtbp", streams=n)
        assert torch.equal(mixer(torch.zeros(mixer.generators)), torch.full((n, n), 1 / n))


def test_order_of_the_recursive_logits():
    """The first logit is the mass of the upper left quadrant; of an odd number, the last entry."""
    mixer, logits = mixers.create("rtbp", streams=4), torch.randn(9, dtype=torch.float64)
    mix = mixer(logits)
    assert mix[:2, :2].sum().item() == pytest.approx(2 * logits[0].sigmoid().item())
    quadrants = {
        5: (slice(2), slice(2)),
        6: (slice(2), slice(2, 4)),
        7: (slice(2, 4), slice(2)),
        8: (slice(2, 4), slice(2, 4)),
    }
    for k, quadrant in quadrants.items():
        moved = mixer(logits + (torch.arange(9) == k)) - mix
        inside = torch.zeros(4, 4, dtype=torch.bool)
        inside[quadrant] = True
        assert (moved[inside].abs() > 1e-6).all() and (moved[~inside].abs() < 1e-12).all()
    for k, margin in ((1, "rows 0 1"), (2, "rows 2 3"), (3, "columns 0 1"), (4, "columns 2 3")):
        moved = mixer(logits + (torch.arange(9) == k)) - mix
        line = moved if margin.startswith("rows") else moved.mT
        assert [i for i in range(4) if line[i, :2].sum().abs() > 1e-6] == [int(i) for i in margin.split()[1:]]
    odd = mixers.create("rtbp", streams=5)(torch.arange(16, dtype=torch.float64) - 4)
    assert odd[4, 4].item() == pytest.approx(torch.tensor(-4.0).sigmoid().item())


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 16])
def test_start_is_the_chosen_matrix(name, n):
    mixer = mixers.create(name, streams=n)
    assert torch.allclose(mixer(mixer.start()), torch.tensor(near_identity(n)), atol=2e-6)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("n", [3, 4, 6, 7, 8])
def test_start_is_at_no_kink(name, n):
    """Derivatives from both sides agree; at symmetric matrices, among them the code's start, they do not in general."""
    mixer = mixers.create(name, streams=n)

    def kink(at, h=1e-6):
        basis = h * torch.eye(mixer.generators, dtype=torch.float64)
        right, left = (mixer(at + basis) - mixer(at)) / h, (mixer(at) - mixer(at - basis)) / h
        return ((right - left).abs().amax((1, 2)) / right.abs().amax((1, 2))).max()

    assert kink(mixer.start().double()) < 1e-5
    if n >= 6:  # in smaller ones the kinks of two bounds cancel at the midpoint
        assert kink(torch.zeros(mixer.generators, dtype=torch.float64)) > 0.1


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("scale", [1.0, 5.0, 50.0, 1e4])
def test_margins_and_signs_hold_to_rounding(name, scale):
    mixer = mixers.create(name, streams=7)
    logits = scale * torch.randn(3000, 36, generator=torch.Generator().manual_seed(0))
    mix = mixer(logits.requires_grad_())
    assert mix.min() >= 0
    assert (mix.sum(-1) - 1).abs().max() < 2e-6 and (mix.sum(-2) - 1).abs().max() < 2e-6
    (gradient,) = torch.autograd.grad(mix, logits, 1e4 * torch.randn_like(mix))
    assert gradient.isfinite().all()


def test_vertices_are_exact():
    mixer = mixers.create("transport", streams=4)
    for code in range(2**9):
        mix = mixer(torch.tensor([1e4 if code >> k & 1 else -1e4 for k in range(9)]))
        assert set(mix.flatten().tolist()) == {0.0, 1.0} and (mix.sum(0) == 1).all() and (mix.sum(1) == 1).all()


def test_small_remainders_keep_their_precision():
    logits = torch.tensor([18.0, 0.0, 0.0, 18.0])
    mix, exact = (mixers.create("transport", streams=3)(z) for z in (logits, logits.double()))
    assert torch.allclose(
        mix.double(), exact, rtol=1e-5, atol=0
    )  # 1 - sigmoid(18) = 1.5e-8 is nothing beside one in float32


@pytest.mark.parametrize(
    "margins", [(1.0, 1.0, 1.0), (0.0, 0.0, 1.0), (1.0, 0.0, 1.0), (0.0, 1.0, 0.0), (2.0, 1.0, 1.0), (0.0,) * 3]
)
@pytest.mark.parametrize("up", [0.0, 0.3, 1.0])
def test_derivatives_at_ties_keep_the_margins(margins, up):
    row, column, rest = (torch.tensor(m, requires_grad=True) for m in margins)
    m11, m12, m21, m22 = table(torch.tensor(up), torch.tensor(1 - up), row, column, rest)
    assert min(m11, m12, m21, m22) >= 0
    for total, wanted in ((m11 + m12, [1, 0, 0]), (m11 + m21, [0, 1, 0]), (m12 + m22, [0, 0, 1])):
        found = torch.autograd.grad(total, (row, column, rest), retain_graph=True)
        assert torch.stack(found).tolist() == pytest.approx(wanted, abs=1e-6)


def test_split():
    values = torch.rand(5, 100)
    first = values.sum(0) * torch.rand(100)
    share = torch.rand(4, 100)
    a, b = split(share, 1 - share, values, first, values.sum(0) - first)
    assert min(a.min(), b.min()) >= 0
    assert torch.allclose(a + b, values, atol=1e-6) and torch.allclose(a.sum(0), first, atol=1e-6)


def test_minorisation():
    plain, blended = (mixers.create("transport", streams=4, minorisation=d) for d in (0.0, 0.2))
    logits = 20 * torch.randn(50, 9)
    assert torch.allclose(blended(logits), 0.8 * plain(logits) + 0.05)
    assert blended(logits).min() >= 0.05
    assert plain.claims.reaches == "birkhoff" and blended.claims.reaches == "own"
    for wrong in (-0.1, 1.0):
        with pytest.raises(InputError, match=r"minorisation must lie in \[0, 1\)"):
            mixers.create("transport", streams=4, minorisation=wrong)


@pytest.mark.parametrize("name", BOTH)
def test_one_stream_has_no_logits(name):
    mixer = mixers.create(name, streams=1)
    assert mixer.generators == 0 and mixer.scaled == () and mixer.start().shape == (0,)
    assert torch.equal(mixer(torch.zeros(2, 3, 0)), torch.ones(2, 3, 1, 1))
