"""What the value-space edit keeps: golden numbers, identities, heads, precision, refusals."""

import pytest
import torch

from thalweg.errors import InputError, ShapeError
from thalweg.ops.own_attention import own_attention
from thalweg.ops.value_edit import value_coefficient, value_edit

GROUPS = ["head", "kv", "kv:2", "all"]


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def read():
    """o [2 6 8 5], v [2 6 4 5] and A_tt [2 8 6] of a causal attention with two query heads to a value head."""
    scores = gaussian(2, 8, 6, 6).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    weights, v = scores.softmax(-1), gaussian(2, 6, 4, 5, seed=1)
    o = torch.einsum("bhts,bshd->bthd", weights, v.repeat_interleave(2, 2))
    return o, v, weights.diagonal(dim1=-2, dim2=-1)


def dot(a, b):
    return (a * b).sum(-1)


def test_golden_numbers():
    v = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)[None, :, None]
    weights = torch.tensor([[1.0, 0.0], [0.25, 0.75]], dtype=torch.float64)
    o, own = torch.einsum("ts,bshd->bthd", weights, v), weights.diagonal()[None, None]
    assert o[0, 1, 0].tolist() == [1, 0.75]
    assert value_coefficient(o, v, own)[0, 1, 0].item() == 0.125
    assert value_coefficient(o, v)[0, 1, 0].item() == 0.875
    assert value_edit(o, v, 0.0, own=own)[0, 1, 0].tolist() == [0.875, 0.625]
    assert value_edit(o, v, 0.0)[0, 1, 0].tolist() == [0.125, -0.125]
    assert value_edit(o, v, 0.0, own=own)[0, 0, 0].tolist() == [1, 0]  # the first token read nobody else
    assert value_edit(o, v, 0.0)[0, 0, 0].tolist() == [0, 0]


@pytest.mark.parametrize("group", GROUPS)
def test_scales_of_one_are_the_identity(read, group):
    o, v, own = read
    assert value_edit(o, v, 1.0, 1.0, own, group) is o
    ones = torch.ones(8, dtype=torch.float64)
    assert torch.equal(value_edit(o, v, ones, 1.0, own, group), o)
    torch.testing.assert_close(value_edit(o, v, ones, ones, own, group), o, rtol=1e-14, atol=1e-15)
    assert torch.equal(value_edit(o.bfloat16(), v.bfloat16(), ones.float(), 1.0, own, group), o.bfloat16())


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("exclude_self", [False, True])
def test_removal_is_idempotent_and_scales_multiply(read, group, exclude_self):
    o, v, own = read
    own = own if exclude_self else None

    def edited(x, parallel, perpendicular):
        return value_edit(x, v, parallel, perpendicular, own, group)

    once = edited(o, 0.0, 1.0)
    torch.testing.assert_close(edited(once, 0.0, 1.0), once, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(edited(edited(o, 0.5, 3.0), -0.6, 0.2), edited(o, -0.3, 0.6), rtol=1e-11, atol=1e-12)
    assert (once - o).norm() > 0.1 * o.norm()


def test_what_stays_is_orthogonal_and_pythagoras_holds(read):
    o, v, own = read
    values = v.repeat_interleave(2, 2)
    across = value_edit(o, v, 0.0, 1.0)
    along = value_edit(o, v, 1.0, 0.0)
    torch.testing.assert_close(dot(across, values), torch.zeros(2, 6, 8, dtype=torch.float64), rtol=0, atol=1e-13)
    torch.testing.assert_close(dot(along, along) + dot(across, across), dot(o, o))
    context = value_edit(o, v, 0.0, 1.0, own) - own.transpose(1, 2).unsqueeze(-1) * values
    torch.testing.assert_close(dot(context, values), torch.zeros(2, 6, 8, dtype=torch.float64), rtol=0, atol=1e-13)
    joint = value_edit(o, v, 0.0, 1.0, group="all")
    assert dot(joint, values).abs().max() > 0.1
    torch.testing.assert_close(dot(joint, values).sum(-1), torch.zeros(2, 6, dtype=torch.float64), rtol=0, atol=1e-13)


@pytest.mark.parametrize("group", GROUPS)
def test_the_first_token_reads_nobody_else(read, group):
    o, v, own = read
    edited = value_edit(o, v, -2.0, 5.0, own, group)
    torch.testing.assert_close(edited[:, 0], o[:, 0], rtol=1e-12, atol=1e-13)
    assert (edited[:, 1:] - o[:, 1:]).abs().amax((-2, -1)).min() > 0.01
    torch.testing.assert_close(value_edit(o, v, 0.0, 1.0)[:, 0], torch.zeros_like(o[:, 0]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("group", ["head", "kv:2", "all"])
def test_grouped_heads_are_repeated_heads(read, group):
    o, v, own = read
    repeated = {"head": "head", "kv:2": "kv:4", "all": "all"}[group]
    expected = value_edit(o, v.repeat_interleave(2, 2), 0.2, 1.3, own, repeated)
    torch.testing.assert_close(value_edit(o, v, 0.2, 1.3, own, group), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("group", ["head", "kv", "all"])
def test_value_heads_may_be_permuted_together(read, group):
    o, v, own = read
    order = torch.tensor([2, 0, 3, 1])
    heads = (2 * order[:, None] + torch.arange(2)).flatten()
    edited = value_edit(o, v, 0.2, 1.3, own, group)
    torch.testing.assert_close(
        value_edit(o[:, :, heads], v[:, :, order], 0.2, 1.3, own[:, heads], group), edited[:, :, heads]
    )


def test_the_edit_is_a_change_of_the_diagonal():
    weights = gaussian(2, 4, 6, 6).tril().softmax(-1).tril()
    v = gaussian(2, 6, 4, 5, seed=1)
    own = weights.diagonal(dim1=-2, dim2=-1)
    o = torch.einsum("bhts,bshd->bthd", weights, v)
    beta = value_coefficient(o, v, own).transpose(1, 2)
    changed = weights + torch.diag_embed(-0.7 * beta)
    expected = torch.einsum("bhts,bshd->bthd", changed, v)
    torch.testing.assert_close(value_edit(o, v, 0.3, 1.0, own), expected, rtol=1e-12, atol=1e-14)


def test_scales_by_head_and_by_token(read):
    o, v, own = read
    by_head = torch.tensor([1.0, 0.0, 1, 1, 0.5, 1, 1, 2], dtype=torch.float64)
    edited = value_edit(o, v, by_head, 1.0, own)
    for head, scale in enumerate(by_head.tolist()):
        torch.testing.assert_close(edited[:, :, head], value_edit(o, v, scale, 1.0, own)[:, :, head])
    here = (torch.arange(6) > 2).double()[:, None]
    torch.testing.assert_close(value_edit(o, v, here, 1.0)[:, 3:], o[:, 3:])
    torch.testing.assert_close(value_edit(o, v, here, here)[:, :3], torch.zeros_like(o[:, :3]))


def test_a_value_of_zeros_has_no_direction(read):
    o, v, own = read
    v = v.clone()
    v[:, 2, 1] = 0
    inputs = [x.float().requires_grad_() for x in (o, v, own)]
    edited = value_edit(inputs[0], inputs[1], 0.0, 1.0, inputs[2])
    assert torch.equal(edited[:, 2, 2:4], inputs[0][:, 2, 2:4])
    assert value_coefficient(o, v, own)[:, 2, 2:4].tolist() == [[0, 0], [0, 0]]
    for gradient in torch.autograd.grad(edited, inputs, gaussian(*edited.shape, seed=9, dtype=torch.float32)):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_edited_in_float32(read, autocast):
    o, v, own = (x.bfloat16() for x in read)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        edited = value_edit(o, v, 0.3, 1.4, own, "kv")
        weights = own_attention(o.transpose(1, 2), v.transpose(1, 2))
    assert edited.dtype == torch.bfloat16 and weights.dtype == torch.float32
    assert torch.equal(edited, value_edit(o.float(), v.float(), 0.3, 1.4, own.float(), "kv").bfloat16())
    assert torch.equal(weights, own_attention(o.transpose(1, 2).float(), v.transpose(1, 2).float()))


def test_one_graph_with_gradients(read):
    o, v, own = (x.clone().requires_grad_() for x in read)

    def both(o, v, own):
        return value_edit(o, v, 0.0, 1.0) + value_edit(o, v, 0.2, 1.5, own, "kv:2")

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    cotangent = gaussian(*o.shape, seed=4)
    for a, b in zip(
        torch.autograd.grad(compiled(o, v, own), (o, v, own), cotangent),
        torch.autograd.grad(both(o, v, own), (o, v, own), cotangent),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("group", ["heads", "kv:", "kv:0", "kv:x", "kv:-1", ""])
def test_unknown_groups_are_refused(read, group):
    with pytest.raises(InputError, match="group must be head, kv, kv:N or all"):
        value_edit(read[0], read[1], 0.0, group=group)


def test_what_does_not_fit_is_refused(read):
    o, v, own = read
    with pytest.raises(InputError, match="that 3 divides, the model has 4"):
        value_edit(o, v, 0.0, group="kv:3")
    with pytest.raises(ShapeError, match="8 query heads cannot share 3"):
        value_edit(o, v[:, :, :3], 0.0)
    with pytest.raises(ShapeError, match=r"must be \[b h t\] = \[2, 8, 6\]"):
        value_edit(o, v, 0.0, own=own.transpose(1, 2))
    with pytest.raises(ShapeError, match="must share b, t and dv"):
        value_edit(o, v[:, :5], 0.0)
    with pytest.raises(ShapeError, match=r"broadcast to \[b t 8\]"):
        value_edit(o, v, torch.ones(4))
    query, key = gaussian(1, 4, 3, 2), gaussian(1, 2, 5, 2)
    with pytest.raises(ShapeError, match="there are 5 queries and 3 keys"):
        own_attention(gaussian(1, 4, 5, 2), gaussian(1, 2, 3, 2))
    with pytest.raises(ShapeError, match=r"must be \[1 or 1, 4 or 1, 3, 5 or more\]"):
        own_attention(query, key, torch.ones(1, 5))
    with pytest.raises(InputError, match=r"got torch\.int64"):
        own_attention(query, key, torch.ones(1, 1, 3, 5, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"one logit per query head \[4\]"):
        own_attention(query, key, sinks=torch.ones(2))
    with pytest.raises(InputError, match="chunk must be at least 1"):
        own_attention(query, key, chunk=0)
    with pytest.raises(ShapeError, match="must share b and d"):
        own_attention(query, key[..., :1])
    with pytest.raises(ShapeError, match="4 query heads cannot share 3"):
        own_attention(query, gaussian(1, 3, 5, 2))
