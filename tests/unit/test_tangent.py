import pytest
import torch
from torch import Tensor

from thalweg import connections
from thalweg.connections import Site, TokenMemory, Tokens
from thalweg.errors import InputError, ShapeError
from thalweg.geometry.tangent import local_tangent, project

WIDTH, LENGTH = 7, 12


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def projector(basis: Tensor) -> Tensor:
    return basis @ basis.mT


def plane(width: int, seed: int = 5) -> Tensor:
    """Orthonormal directions of a random plane [d 2]."""
    return torch.linalg.qr(normal(width, 2, seed=seed)).Q


# The estimate.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_the_projector_is_symmetric_idempotent_and_of_the_rank(dtype, rank):
    basis, valid = local_tangent(normal(2, 3, 6, 9, dtype=dtype), rank)
    assert basis.shape == (2, 3, 9, rank) and basis.dtype == dtype and valid.all()
    p = projector(basis.double())
    near = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-6}
    torch.testing.assert_close(p, p.mT, **near)
    torch.testing.assert_close(p @ p, p, **near)
    torch.testing.assert_close(p.diagonal(dim1=-2, dim2=-1).sum(-1), torch.full((2, 3), rank).double(), **near)


def test_the_plane_of_the_data_is_recovered_wherever_it_lies():
    directions = plane(9)
    window = normal(4, 6, 2) @ directions.T + 10 * normal(9, seed=1)
    basis, valid = local_tangent(window, 2)
    assert valid.all()
    torch.testing.assert_close(projector(basis), projector(directions).expand(4, 9, 9), rtol=0, atol=1e-10)


def test_the_directions_are_the_principal_ones_the_widest_first():
    window = normal(5, 6, 9)
    basis, _ = local_tangent(window, 3)
    want = torch.linalg.svd(window - window.mean(-2, keepdim=True)).Vh[:, :3].mT
    torch.testing.assert_close((basis * want).sum(-2).abs(), torch.ones(5, 3).double(), rtol=0, atol=1e-9)


def test_a_masked_state_is_as_good_as_absent():
    window = normal(6, 9)
    mask = torch.tensor([True, False, True, True, True, False])
    window[~mask] = torch.nan
    got, want = local_tangent(window, 2, mask), local_tangent(window[mask], 2)
    assert got.valid and want.valid
    torch.testing.assert_close(projector(got.basis), projector(want.basis), rtol=0, atol=1e-12)


def degenerate() -> dict[str, tuple[Tensor, Tensor | None]]:
    line = normal(6, 1) * normal(9, seed=1)
    broken = normal(6, 9)
    broken[2, 3] = torch.inf
    few = torch.tensor([False, False, False, False, True, True])
    return {
        "fewer than rank + 1": (normal(6, 9), few),
        "none": (normal(6, 9), torch.zeros(6, dtype=torch.bool)),
        "all equal": (normal(1, 9).expand(6, 9), None),
        "zero": (torch.zeros(6, 9).double(), None),
        "a line": (line, None),
        "a line far away": (line + 1e3, None),
        "not finite": (broken, None),
        "a line in float32": (line.float() + 1, None),
        "rounding noise in float32": (1 + 1e-7 * normal(6, 9, dtype=torch.float32), None),
    }


@pytest.mark.parametrize("case", degenerate())
def test_a_degenerate_window_projects_nothing(case):
    window, mask = degenerate()[case]
    basis, valid = local_tangent(window, 2, mask)
    assert not valid and (basis == 0).all()
    x = normal(9, dtype=basis.dtype).requires_grad_()
    y = project(x, basis, valid)
    assert torch.equal(y, x)
    cotangent = normal(9, seed=3, dtype=basis.dtype)
    y.backward(cotangent)
    assert torch.equal(x.grad, cotangent)


def test_enough_states_are_exactly_one_more_than_the_rank():
    for count, enough in ((2, False), (3, True)):
        mask = torch.arange(6) >= 6 - count
        assert local_tangent(normal(6, 9), 2, mask).valid == enough


def test_the_estimate_carries_no_gradient_and_the_projection_does():
    window, x = normal(6, 9).requires_grad_(), normal(9, seed=2).requires_grad_()
    basis, valid = local_tangent(window, 2)
    assert not basis.requires_grad
    cotangent = normal(9, seed=3)
    project(x, basis, valid).backward(cotangent)
    assert window.grad is None
    torch.testing.assert_close(x.grad, projector(basis) @ cotangent)


def test_a_looser_tolerance_refuses_what_it_calls_noise():
    window = normal(6, 2) @ plane(9).T + 1e-3 * normal(6, 9, seed=3)
    assert local_tangent(window, 3).valid
    assert not local_tangent(window, 3, tolerance=0.01).valid
    assert local_tangent(window, 2, tolerance=0.01).valid


def test_what_cannot_be_estimated_is_refused():
    for rank in (0, 6, 10):
        with pytest.raises(InputError, match="rank must be at least 1"):
            local_tangent(normal(6, 9), rank)
    with pytest.raises(InputError, match="at most the width 3"):
        local_tangent(normal(6, 3), 4)
    with pytest.raises(ShapeError, match="mask must have the shape"):
        local_tangent(normal(6, 9), 2, torch.ones(5, dtype=torch.bool))


# The connection.


def create(depth: int = 2, **options):
    torch.manual_seed(0)
    options = {"window": 4, "rank": 2} | options
    return connections.create("tangent_projector", width=WIDTH, sites=Site.decoder(depth), **options).double()


def sublayers_of(stream):
    """Token-wise, so that whatever crosses tokens comes from the connection."""
    maps = [normal(stream.width, stream.width, seed=10 + i) for i in range(len(stream.sites))]
    return [lambda x, m=m: torch.tanh(x @ m) for m in maps]


@pytest.mark.parametrize("subspace", ["tangent", "random"])
def test_the_first_tokens_are_additive_and_the_others_are_not(subspace):
    stream = create(subspace=subspace)
    additive = connections.create("additive", width=WIDTH, sites=Site.decoder(2)).double()
    x = normal(2, LENGTH, WIDTH)
    got, want = stream(x, sublayers_of(stream)), additive(x, sublayers_of(stream))
    torch.testing.assert_close(got[:, :3], want[:, :3], rtol=1e-12, atol=1e-12)
    assert ((got - want)[:, 3:].norm(dim=-1) > 1e-2).all()


def test_states_of_a_plane_stay_in_it():
    directions, stream = plane(WIDTH), create(depth=1)
    offset = normal(WIDTH, seed=1)
    x = normal(1, LENGTH, 2) @ directions.T + offset
    site = stream.sites[0]
    _, context = site.read(x)
    update = normal(1, LENGTH, WIDTH, seed=2)
    moved = site.write(x, update, context) - x
    outside = torch.eye(WIDTH).double() - projector(directions)
    assert (moved[:, 3:] @ outside).abs().max() < 1e-10
    torch.testing.assert_close(moved[:, 3:], update[:, 3:] @ projector(directions), rtol=0, atol=1e-10)
    torch.testing.assert_close(moved[:, :3], update[:, :3])
    half = create(depth=1, strength=0.5).sites[0]
    torch.testing.assert_close(half.write(x, update, context) - x, (update + moved) / 2)


def test_strength_zero_is_the_additive_connection():
    stream = create(strength=0.0)
    claim = stream.equals_at_start()
    assert claim is not None and create().equals_at_start() is None
    twin = connections.create(claim.name, width=WIDTH, sites=Site.decoder(2), **claim.options).double()
    x = normal(2, LENGTH, WIDTH)
    torch.testing.assert_close(stream(x, sublayers_of(stream)), twin(x, sublayers_of(stream)), rtol=1e-12, atol=1e-12)


def run(stream, x: Tensor, sizes=None, **tokens) -> Tensor:
    """The whole in one pass, or in pieces of these sizes through one memory."""
    if sizes is None:
        return stream(x, sublayers_of(stream), Tokens(**tokens))
    memory, outputs, at = TokenMemory(), [], 0
    for size in sizes:
        here = {name: value[:, at : at + size] for name, value in tokens.items()}
        outputs.append(stream(x[:, at : at + size], sublayers_of(stream), Tokens(memory=memory, **here)))
        at += size
    return torch.cat(outputs, 1)


PIECES = {"chunks": (5, 4, 3), "steps": (1,) * LENGTH, "prefill then steps": (9, 1, 1, 1), "short first": (2, 7, 3)}


@pytest.mark.parametrize("sizes", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("subspace", ["tangent", "random"])
def test_in_pieces_equals_the_full_pass(sizes, subspace):
    stream, x = create(subspace=subspace), normal(2, LENGTH, WIDTH)
    torch.testing.assert_close(run(stream, x, sizes), run(stream, x), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("sizes", [None, *PIECES.values()], ids=["full", *PIECES])
def test_left_padding_of_any_length_changes_no_real_token(sizes):
    stream, x = create(), normal(3, LENGTH, WIDTH)
    mask = torch.ones(3, LENGTH, dtype=torch.bool)
    mask[1, :2], mask[2, :6] = False, False
    x[~mask] = 1e3
    got = run(stream, x, sizes, mask=mask)
    for row in range(3):
        torch.testing.assert_close(got[row, mask[row]], run(stream, x[row, mask[row]][None])[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("sizes", [None, *PIECES.values()], ids=["full", *PIECES])
def test_packed_documents_do_not_see_each_other(sizes):
    stream, x = create(), normal(2, LENGTH, WIDTH)
    segments = torch.tensor([[0] * 5 + [1] * 7, [3] * 8 + [1] * 4])
    got = run(stream, x, sizes, segments=segments)
    for row, cut in ((0, 5), (1, 8)):
        for part in (slice(0, cut), slice(cut, LENGTH)):
            torch.testing.assert_close(got[row, part], run(stream, x[row : row + 1, part])[0], rtol=1e-9, atol=1e-10)


def test_segments_come_with_every_call_or_none():
    segments = torch.zeros(1, 4, dtype=torch.long)
    for first, second in ((segments, None), (None, segments)):
        stream, memory = create(), TokenMemory()
        stream(normal(1, 4, WIDTH), sublayers_of(stream), Tokens(memory=memory, segments=first))
        with pytest.raises(InputError, match="segments must be given in every call"):
            stream(normal(1, 4, WIDTH), sublayers_of(stream), Tokens(memory=memory, segments=second))


def test_the_future_never_changes_the_past_and_the_window_is_strictly_past():
    stream, x = create(depth=1), normal(1, LENGTH, WIDTH)
    full = run(stream, x)
    for t in range(1, LENGTH):
        moved = x.clone()
        moved[:, t:] = 1 - 3 * moved[:, t:]
        assert torch.equal(run(stream, moved)[:, :t], full[:, :t])
    site = stream.sites[0]
    basis, _ = site.read(x)[1]
    moved = x.clone()
    moved[:, 7] += 5
    changed = (site.read(moved)[1][0] - basis).flatten(2).norm(dim=-1)[0] > 1e-6
    assert changed.nonzero().flatten().tolist() == [8, 9, 10, 11]


def test_no_gradient_reaches_other_tokens_through_the_subspace():
    stream, x = create(), normal(1, LENGTH, WIDTH).requires_grad_()
    stream(x, sublayers_of(stream))[:, 8].backward(normal(1, WIDTH, seed=4))
    reached = x.grad.norm(dim=-1)[0] > 0
    assert reached.nonzero().flatten().tolist() == [8]


def test_states_that_are_not_finite_are_passed_on_and_do_not_stop_the_run():
    stream, x = create(), normal(1, LENGTH, WIDTH)
    x[0, 5, 0] = torch.nan
    out = run(stream, x)
    assert out[0, :5].isfinite().all() and out[0, 5].isnan().all() and out[0, 10:].isfinite().all()


def test_the_random_subspace_is_drawn_at_reset_and_saved():
    stream, twin = create(subspace="random"), create(subspace="random")
    first, second = stream.state_dict()["sites.0.basis"], stream.state_dict()["sites.1.basis"]
    torch.testing.assert_close(first.T @ first, torch.eye(2).double(), rtol=0, atol=1e-6)
    assert not torch.allclose(first, second)
    assert torch.equal(first, twin.state_dict()["sites.0.basis"])
    assert "sites.0.basis" not in dict(stream.named_parameters())
    assert not any("basis" in name for name in create().state_dict())


def test_options_out_of_range_are_refused():
    for options, message in (
        ({"rank": 4, "window": 4}, "below window"),
        ({"rank": 0}, "at least 1"),
        ({"strength": 1.5}, "strength"),
        ({"rank": WIDTH, "window": 16}, "below the width"),
    ):
        with pytest.raises(InputError, match=message):
            create(**options)
