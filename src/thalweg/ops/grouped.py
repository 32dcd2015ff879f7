"""Linear maps by group: rows that lie group by group, each group with a weight of its own."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thalweg.ops.forward_mode import transformed


def grouped_linear(
    x: Float[Tensor, "rows in"], weight: Float[Tensor, "groups out in"], sizes: Int[Tensor, " groups"]
) -> Float[Tensor, "rows out"]:
    """y[r] = W[g(r)] x[r]: the first sizes[0] rows belong to group 0, the next sizes[1] to group 1, and so on.

    Shapes: x [rows in], weight [groups out in] of one dtype, sizes [groups] integers that sum to ``rows`` -> [rows out]. A group may be
    empty; its weight then has the gradient zero. Differentiable in every mode; one opaque node in a compiled graph, where the sizes stay
    data and no shape depends on them.
    Cost: one matrix product per group, so the work is that of the rows whatever the sizes; on a device the sizes are read once per call,
    which waits for it.
    """
    if (torch.compiler.is_compiling() and not transformed()) or isinstance(x, FakeTensor):
        return _operator(x, weight, sizes)
    return _forward(x, weight, sizes.tolist())


def _forward(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    return torch.cat([F.linear(part, w) for part, w in zip(x.split(sizes), weight.unbind(), strict=True)])


def _backward(gradient: Tensor, x: Tensor, weight: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    by_group = list(zip(gradient.split(sizes), x.split(sizes), weight.unbind(), strict=True))
    return torch.cat([g @ w for g, _, w in by_group]), torch.stack([g.mT @ part for g, part, _ in by_group])


@torch.library.custom_op("thalweg::grouped_linear", mutates_args=())
def _operator(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    return _forward(x, weight, sizes.tolist())


@torch.library.custom_op("thalweg::grouped_linear_backward", mutates_args=())
def _operator_backward(gradient: Tensor, x: Tensor, weight: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    return _backward(gradient, x, weight, sizes.tolist())


@_operator.register_fake
def _(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_operator_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _pull(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_operator_backward(gradient, *ctx.saved_tensors), None


_operator.register_autograd(_pull, setup_context=_keep)
