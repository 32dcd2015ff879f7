"""Mixers made of rotations: orthogonal, squared blocks of one, and the spectral sphere."""

import math

import pytest
import torch

from thalweg import mixers
from thalweg.errors import InputError, ShapeError
from thalweg.ops.cayley import cayley, skew, upper


def normal(*shape, seed=0, scale=1.0, dtype=torch.float64):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def start(name, n, **options):
    mixer = mixers.create(name, streams=n, **options)
    return mixer(mixer.start().double()).detach()


def jacobian_at_start(name, n, **options):
    mixer = mixers.create(name, streams=n, **options).double()
    return torch.func.jacrev(mixer)(mixer.start().double()).detach()


def test_skew_reads_row_by_row_and_back():
    values = torch.arange(1.0, 7)
    a = skew(values, 4)
    assert a.tolist() == [[0, 1, 2, 3], [-1, 0, 4, 5], [-2, -4, 0, 6], [-3, -5, -6, 0]]
    assert torch.equal(upper(a), values)
    assert skew(torch.zeros(2, 0), 1).tolist() == [[[0]], [[0]]]
    with pytest.raises(ShapeError, match=r"size 4 takes values \[... 6\], got shape \[5\]"):
        skew(torch.zeros(5), 4)


def test_cayley_of_two_axes_is_the_rotation_by_twice_the_arc_tangent():
    for a in (-3.0, 0.0, 0.2, 1.0):
        angle = 2 * math.atan(a)
        want = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        torch.testing.assert_close(cayley(skew(torch.tensor([a]), 2)), torch.tensor(want, dtype=torch.float64))


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize(("scale", "allowed"), [(1.0, 1e-14), (50.0, 1e-12), (1e4, 1e-10)])
def test_cayley_is_orthogonal_at_logits_of_every_size(n, scale, allowed):
    q = cayley(skew(normal(500, n * (n - 1) // 2, scale=scale), n))
    assert (q.mT @ q - torch.eye(n)).abs().max() < n * allowed
    assert torch.linalg.det(q).sub(1).abs().max() < n * n * allowed


def test_orthogonal_in_float32_is_exact_to_its_rounding():
    mixer = mixers.create("orthogonal", streams=5)
    for scale in (1.0, 50.0, 1e4):
        mix = mixer(normal(500, 10, scale=scale, dtype=torch.float32))
        assert mix.dtype == torch.float32
        assert (mix.double().mT @ mix.double() - torch.eye(5)).abs().max() < 1e-6


def test_orthogonal_starts_at_the_identity_and_moves():
    assert torch.equal(start("orthogonal", 4), torch.eye(4, dtype=torch.float64))
    moved = jacobian_at_start("cayley", 4)  # [to from pair]
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    for k, (i, j) in enumerate(pairs):
        want = torch.zeros(4, 4, dtype=torch.float64)
        want[i, j], want[j, i] = -2, 2
        torch.testing.assert_close(moved[..., k], want)


def test_orthogonal_at_huge_logits_turns_all_but_the_axis_around():
    mixer = mixers.create("orthogonal", streams=2)
    torch.testing.assert_close(mixer(torch.tensor([1e8])), -torch.eye(2), atol=1e-6, rtol=0)
    a = torch.tensor([3e7, -2e7, 1e7])  # the axis, which A maps to zero
    axis = torch.tensor([a[2], -a[1], a[0]]) / a.norm()
    mix = mixers.create("orthogonal", streams=3)(a)
    torch.testing.assert_close(mix, 2 * torch.outer(axis, axis) - torch.eye(3), atol=1e-6, rtol=0)


def test_orthostochastic_of_two_streams_is_a_squared_cosine():
    mixer = mixers.create("orthostochastic", streams=2, s=1)
    for a in (0.0, 0.3, 1.0):
        stays = math.cos(2 * math.atan(a)) ** 2
        want = torch.tensor([[stays, 1 - stays], [1 - stays, stays]], dtype=torch.float64)
        torch.testing.assert_close(mixer(torch.tensor([a], dtype=torch.float64)), want)


def test_orthostochastic_blocks_belong_to_streams():
    # A turns axis 0 of stream 0 into axis 1 of stream 2 by a right angle, so half of each stream changes place.
    mixer = mixers.create("go_mhc", streams=3, s=2)
    a = torch.zeros(6, 6, dtype=torch.float64)
    a[0, 5], a[5, 0] = 1, -1
    want = torch.tensor([[0.5, 0, 0.5], [0, 1, 0], [0.5, 0, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(mixer(upper(a)), want)


def test_orthostochastic_counts_generators():
    for s, count in ((1, 6), (2, 28), (3, 66)):
        mixer = mixers.create("orthostochastic", streams=4, s=s)
        assert mixer.generators == count and mixer.scaled == (count,)
    assert mixers.create("orthostochastic", streams=1, s=1).scaled == ()


def test_orthostochastic_published_start_has_no_gradient_and_ours_has():
    assert torch.equal(start("orthostochastic", 4, start="zeros"), torch.eye(4, dtype=torch.float64))
    assert not jacobian_at_start("orthostochastic", 4, start="zeros").any()
    assert not mixers.create("orthostochastic", streams=4, start="zeros").claims.moves
    assert mixers.create("orthostochastic", streams=4).claims.moves
    mix = start("orthostochastic", 4)
    assert mix.diagonal().tolist() == pytest.approx([0.9622] * 4, abs=1e-3)
    norms = jacobian_at_start("orthostochastic", 4).flatten(0, 1).norm(dim=0)
    inside = mixers.create("orthostochastic", streams=4).start() == 0.5
    assert inside.sum() == 4 and norms[inside].min() > 0.04 and norms[~inside].min() > 0.2


@pytest.mark.parametrize(("n", "s"), [(n, s) for n in (2, 3, 4, 8, 16) for s in (1, 2, 3)])
def test_orthostochastic_offset_is_the_identity_to_within_a_twentieth(n, s):
    assert 0.02 < (start("orthostochastic", n, s=s) - torch.eye(n)).abs().max() < 0.04


def test_orthostochastic_sums_are_exact_in_float32_at_huge_logits():
    mix = mixers.create("orthostochastic", streams=4)(normal(500, 28, scale=1e4, dtype=torch.float32)).double()
    assert max((mix.sum(axis) - 1).abs().max() for axis in (-1, -2)) < 2e-7


def test_orthostochastic_refusals():
    with pytest.raises(
        InputError, match=r"does not serve 17 streams: a system of 51 x 51 .* 1275 logits; .* at most 48"
    ):
        mixers.create("orthostochastic", streams=17, s=3)
    with pytest.raises(InputError, match="s, the size of a block, must be at least 1, got 0"):
        mixers.create("orthostochastic", streams=4, s=0)
    with pytest.raises(InputError, match="start"):
        mixers.create("orthostochastic", streams=4, start="ones")


def test_spectral_sphere_published_start():
    mixer = mixers.create("s2hc", streams=4)
    logits = mixer.start()
    assert logits.tolist() == [0] * 6 + [4] * 3 and mixer.scaled == (3, 3, 3)
    assert dict(mixer.named_parameters()).keys() == {"gamma_u", "gamma_v"}
    assert mixer.gamma_u == mixer.gamma_v == 1
    mix = start("spectral_sphere", 4)
    assert mix.diagonal().tolist() == pytest.approx([0.999497] * 4, abs=1e-6)
    assert mix[0, 1:].tolist() == pytest.approx([0.000168] * 3, abs=1e-6)


def test_spectral_sphere_turns_u_against_v_at_the_start():
    moved = jacobian_at_start("spectral_sphere", 4)
    torch.testing.assert_close(moved[..., :3], -moved[..., 3:6])
    assert moved[..., :6].flatten(0, 1).norm(dim=0).tolist() == pytest.approx([2.8265] * 6, abs=1e-3)
    assert moved[..., 6:].flatten(0, 1).norm(dim=0).tolist() == pytest.approx([1 - math.tanh(4) ** 2] * 3, abs=1e-6)


def test_spectral_sphere_helmert_basis():
    basis = mixers.create("spectral_sphere", streams=4).helmert(torch.device("cpu"))
    want = [
        [2**-0.5, 6**-0.5, 12**-0.5],
        [-(2**-0.5), 6**-0.5, 12**-0.5],
        [0, -2 * 6**-0.5, 12**-0.5],
        [0, 0, -3 * 12**-0.5],
    ]
    torch.testing.assert_close(basis, torch.tensor(want, dtype=torch.float64))


def test_spectral_sphere_singular_values_are_those_of_the_logits():
    mixer = mixers.create("spectral_sphere", streams=5).double()
    logits = normal(64, 16)
    found = torch.linalg.svdvals(mixer(logits).detach())
    want = torch.cat([torch.ones(64, 1), logits[:, 12:].tanh().abs()], -1).sort(-1, descending=True).values
    torch.testing.assert_close(found, want)
    assert mixer(logits).min() < -0.1


def test_spectral_sphere_scale_of_the_rotations_is_learned():
    mixer = mixers.create("spectral_sphere", streams=4)
    logits = normal(9, dtype=torch.float32)
    mixer(logits)[0, 1].backward()
    assert mixer.gamma_u.grad.abs() > 1e-3 and mixer.gamma_v.grad.abs() > 1e-3
    before = mixer(logits).detach()
    torch.nn.init.constant_(mixer.gamma_u, 0.0)
    assert (mixer(logits) - before).abs().max() > 0.01
    mixer.reset_parameters()
    assert torch.equal(mixer(logits), before)


def test_spectral_sphere_of_one_and_two_streams():
    one, two = mixers.create("spectral_sphere", streams=1), mixers.create("spectral_sphere", streams=2)
    assert one.generators == 0 and one.scaled == () and one(torch.zeros(3, 0)).tolist() == [[[1.0]]] * 3
    assert two.generators == 1 and two.scaled == (1,) and not [*two.parameters()]
    stays = (1 + math.tanh(-0.7)) / 2
    assert two(torch.tensor([-0.7])).flatten().tolist() == pytest.approx([stays, 1 - stays, 1 - stays, stays])
