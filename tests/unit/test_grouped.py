"""Linear maps by group: against loops over rows, empty groups, every mode of differentiation, compiled."""

import pytest
import torch

from thalweg.ops.forward_mode import load_rules
from thalweg.ops.grouped import grouped_linear

SIZES = [[2, 0, 3, 1], [0, 0, 6, 0], [6, 0, 0, 0], [1, 1, 1, 3], [0, 0, 0, 0]]


def parts(sizes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), torch.tensor(sizes)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_and_gradients(sizes, compiled):
    x, weight, counts = parts(sizes)
    function = torch.compile(grouped_linear, fullgraph=True, backend="aot_eager") if compiled else grouped_linear
    y = function(x, weight, counts)
    owner = [group for group, count in enumerate(sizes) for _ in range(count)]
    want = torch.stack([weight[g] @ row for g, row in zip(owner, x, strict=True)]) if owner else x.new_empty(0, 5)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-13)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    got = torch.autograd.grad(y, [x, weight], cotangent)
    for g in range(4):
        mine = torch.tensor([o == g for o in owner], dtype=torch.bool)
        torch.testing.assert_close(got[1][g], cotangent[mine].mT @ x[mine], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(got[0][mine], cotangent[mine] @ weight[g], rtol=1e-12, atol=1e-13)


def test_every_mode_of_differentiation():
    x, weight, counts = parts(SIZES[0])
    call = lambda a, w: grouped_linear(a, w, counts)  # noqa: E731
    load_rules()
    assert torch.autograd.gradcheck(call, (x, weight), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, (x, weight))


def test_other_sizes_need_no_other_graph():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(grouped_linear, fullgraph=True, backend=backend)
    for sizes in SIZES[:4]:
        compiled(*parts(sizes))
    assert len(graphs) == 1
    torch.library.opcheck(torch.ops.thalweg.grouped_linear.default, parts(SIZES[0], torch.float32))
