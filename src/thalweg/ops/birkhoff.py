"""Projection of small matrices to the Birkhoff polytope: the limit of Sinkhorn's iterations, by Newton steps, with the gradient of the limit.

Axis legend: ``to`` and ``from`` are streams, ``T`` is everything else. The work is token-last, [to from T], and in float64: at logits of 1e4
the grain of a float32 potential is 1e-3, and so would be the marginals.

The matrix is P = softmax_from(Z + v), whose rows sum to one at every potential v [from T]; its columns do where the convex function
sum_to logsumexp_from(Z + v) - sum_from v is least. Gradient: column sums of P minus one. Hessian, rows summing to one: the Laplacian of
the graph on the columns with the weights W = P^T P. Laplacians are solved here without a subtraction (:func:`_newton`,
:func:`_tangent`), because near a permutation the weights are far below the rounding of one.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.ops.forward_mode import transformed
from thalweg.ops.precision import wide_dtype

WARM = 4.0  # spread of the scaled logits at the first step: there one Newton step is nearly enough
FLOOR = 1e-14  # weight to the ground: links weaker than the rounding of the marginals are left alone, or their noise would take all steps
POLISH = 8  # last steps at the full logits
WIDEST = 1e3  # spread, means of rows and columns taken out, to which wider logits are scaled down: beyond it the way is too steep
HUGE = 1e306  # so that sums of the largest float64 are finite


def birkhoff(logits: Float[Tensor, "*batch to from"], steps: int = 40) -> Float[Tensor, "*batch to from"]:
    """The doubly stochastic matrix diag(a) exp(logits) diag(b): the projection by relative entropy, where Sinkhorn's iterations end.

    steps: damped Newton steps; all but the last 8 follow the solution while the logits grow from a spread of 4 to their size. With 40 both
    marginals are one to 1e-13 for normal logits and for signs at random, of every size (n to 16), and to 1e-9 for all that was tried.
    Shapes: [... to from] -> [... to from], float32 or wider; computed in float64. Rows are exact at every number of steps.
    Logits whose spread, the means of rows and columns taken out, exceeds 1000 are scaled down to it as a whole; those beyond 1e306 count as
    that. The gradient is that of the limit: one Laplacian solve, the same map forwards and backwards; higher derivatives too, but for forward
    mode over forward mode, which autograd.Function takes for zero.
    Raises: ShapeError, InputError.
    Source: the problem and its Newton method: Wang & Qiu 2026, arXiv 2606.07574 (seen by the text of its code's README, yixuan/mHC-proj).
    Deviations: steps are damped by log(1 + D) / D, D the spread of the step (generalised self-concordance, Sun & Tran-Dinh 2019), and the
    logits grow along the way, and from a spread of 1000 on no further; a fixed number of steps instead of a tolerance; any number of streams.
    """
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ShapeError(f"birkhoff takes square logits [... to from], got shape {list(logits.shape)}")
    if steps < 1:
        raise InputError(f"birkhoff needs at least one step, got {steps}")
    shape = logits.shape
    dtype = wide_dtype(logits.dtype)
    z = logits.double().reshape(-1, *shape[-2:]).permute(1, 2, 0).contiguous()
    z = z.clamp(-HUGE, HUGE)
    z = z * (WIDEST / _spread(_centred(z)).clamp(min=WIDEST))
    opaque = torch.compiler.is_compiling() and not transformed()  # one node of the graph, as for sinkhorn
    p = _operator(z, steps) if opaque else _Birkhoff.apply(z, steps)
    return p.permute(2, 0, 1).reshape(shape).to(dtype)


def _gram(a: Tensor, b: Tensor) -> Tensor:
    """a^T b over the rows: [to j T], [to k T] -> [j k T]."""
    if len(a) <= 8:
        return (a.unsqueeze(2) * b.unsqueeze(1)).sum(0)
    return sum((x.unsqueeze(1) * y for x, y in zip(a[1:], b[1:], strict=True)), a[0].unsqueeze(1) * b[0])


def _one_hot(p: Tensor) -> Tensor:
    """[k row 1 1]: true where row is k."""
    return torch.eye(p.shape[1], dtype=torch.bool, device=p.device)[..., None, None]


def _newton(p: Tensor, one_hot: Tensor) -> Tensor:
    """Newton step [from T] at P: Laplacian(P^T P) step = 1 - column sums; the last column is the ground, whose step is zero.

    Column k as the mean of its neighbours, step_k = (source_k + sum_j w_kj step_j) / sum_j w_kj, is put into the rows of all others: those
    to come and those done take the same update. Only sums, products and quotients of weights; the diagonal is never asked for.
    """
    table = torch.cat([_gram(p, p), (1 - p.sum(0)).unsqueeze(1)], 1)  # [row column T], the last column is the source
    for k in range(p.shape[1] - 1):
        share = table[k, 1:] / (table[k, 1:-1].sum(0) + FLOOR)
        table = torch.where(one_hot[k], share, table[:, 1:] + table[:, :1] * share)
    return torch.where(one_hot[-1, :, 0], 0.0, table[:, 1])


def _tangent(p: Tensor, direction: Tensor) -> Tensor:
    """P * (D - u 1^T - 1 v^T) with u, v such that all marginals vanish: the derivative of the limit, a symmetric map. [to from T] -> same.

    v solves Laplacian(P^T P) v = sum_k B_jk, B_jk = sum_i P_ij P_ik (D_ij - D_ik). The sources stay on the edges, B antisymmetric, so that
    v is a mean of differences of D with weights that may be as small as they like; summed on the nodes they would cancel.
    """
    one_hot, tiny = _one_hot(p), torch.finfo(p.dtype).tiny
    weight, moment = _gram(p, p), _gram(p * direction, p)
    edge = moment - moment.transpose(0, 1)
    v = torch.zeros_like(p[0])  # what a column that is done has beyond the mean of the columns to come
    for k in range(p.shape[1] - 1):
        total = weight[k, 1:].sum(0).clamp(min=tiny)
        share, drift = weight[k, 1:] / total, edge[k, 1:] / total
        beyond = drift.sum(0)
        v = torch.where(one_hot[k, :, 0], beyond, v + weight[:, 0] * beyond)
        edge = edge[:, 1:] + edge[:, :1] * share + weight[:, :1] * drift
        weight = torch.where(one_hot[k], share, weight[:, 1:] + weight[:, :1] * share)
    v = torch.where(one_hot[-1, :, 0], 0.0, v)
    free = direction - v
    return p * (free - (p * free).sum(1, keepdim=True))


def _centred(z: Tensor) -> Tensor:
    """Without the means of columns, then rows: what the potentials can undo says nothing about the spread."""
    z = z - z.mean(0, keepdim=True)
    return z - z.mean(1, keepdim=True)


def _spread(z: Tensor) -> Tensor:
    """Largest less smallest entry [T]."""
    return z.amax((0, 1)) - z.amin((0, 1))


def _forward(z: Tensor, steps: int) -> Tensor:
    z = _centred(z)
    first = WARM / _spread(z).clamp(min=WARM)
    growing = steps - min(POLISH, steps // 2)
    v, scale, one_hot = torch.zeros_like(z[0]), first, _one_hot(z)
    for k in range(steps):
        before, scale = scale, first ** max(0.0, 1 - k / growing)
        v = v * (scale / before)
        step = _newton(torch.softmax(scale * z + v, 1), one_hot)
        spread = (step.amax(0) - step.amin(0)).clamp(min=1e-8)
        v = v + step * (torch.log1p(spread) / spread)
    return torch.softmax(z + v / scale, 1)


class _Birkhoff(torch.autograd.Function):
    """z [to from T] -> [to from T], float64; differentiable forwards, backwards and again: the derivative is a function of the output."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, steps: int) -> Tensor:
        return _forward(z, steps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (p,) = ctx.saved_tensors
        return _tangent(p, gradients[0]), None

    @staticmethod
    def jvp(ctx: Any, direction: Tensor, _: None) -> Tensor:
        (p,) = ctx.saved_tensors
        return _tangent(p, direction)


@torch.library.custom_op("thalweg::birkhoff", mutates_args=())
def _operator(z: Tensor, steps: int) -> Tensor:
    return _forward(z, steps).contiguous()


@torch.library.custom_op("thalweg::birkhoff_tangent", mutates_args=())
def _operator_tangent(p: Tensor, direction: Tensor) -> Tensor:
    return _tangent(p, direction).contiguous()


@_operator.register_fake
def _(z: Tensor, steps: int) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)


@_operator_tangent.register_fake
def _(p: Tensor, direction: Tensor) -> Tensor:
    return torch.empty_like(p, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _pull(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return _operator_tangent(*ctx.saved_tensors, gradient), None


_operator.register_autograd(_pull, setup_context=_keep)
