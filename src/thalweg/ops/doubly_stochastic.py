"""Sinkhorn normalisation of small matrices: rows and columns in turn, in the log domain, with its exact finite-iteration gradient.

Axis legend: ``to`` and ``from`` are streams, ``T`` is everything else. The work is done token-last, [to from T], because reductions over
a leading axis of four run over contiguous memory; over a trailing axis of four they do not.

Two forms of one function: with logarithms, finite for logits of any finite size, and with products of exponentials, some four times as fast on
a CPU, taken where the logits of a call lie within ``NARROW`` of each other, so that no product can overflow or vanish.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.ops.forward_mode import transformed
from thalweg.ops.precision import wide

LEAST_EPS = 1e-30  # with a smaller one sums that vanish in float32 would be divided by
NARROW = {torch.float32: 30.0, torch.float64: 300.0}  # scalings reach exp(+-2 NARROW), which these types hold with room


def sinkhorn(
    logits: Float[Tensor, "*batch to from"], iterations: int = 20, last: int = -1, eps: float = 0.0
) -> Float[Tensor, "*batch to from"]:
    """exp(logits), then ``iterations`` times: normalise the other axis first and ``last`` last.

    ``last`` is the axis summed over in the final normalisation: with -1 and no eps every row sums to exactly one, and the columns only as far
    as the iterations have converged, which depends on the spread of the logits. That is the order of the paper for ``mix[to, from]``. The
    released code keeps ``comb[from, to]`` and ends with the columns; transposed it is the same function.
    eps: the released code adds 1e-6 to the first softmax and to every sum, so that rows sum to a little less than one, or to 0.8 where
    one iteration meets logits of +-30; 0 (the paper) has none, and the least other is 1e-30. Then the work is in the log domain: finite, with
    finite gradients, for logits of any finite size, and as accurate as their grain lets it be: of float32 logits of 1e4 to 1e-3, of 1e8 no
    longer.
    Shapes: [... to from] -> [... to from], float32 or wider. The gradient is that of the iterations, not of their limit. Forward over
    forward differentiation is not supported by torch for such a function and gives zero; every other pair is.
    Raises: ShapeError, InputError.
    Source: mHC (arXiv 2512.24880) Eq. 9; eps: DeepSeek TileKernels.
    """
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise InputError(f"sinkhorn takes a tensor of real logits, got {got}")
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ShapeError(f"sinkhorn takes square logits [... to from], got shape {list(logits.shape)}")
    if not isinstance(iterations, int) or iterations < 1:
        raise InputError(f"sinkhorn needs a whole number of iterations, at least one, got {iterations!r}")
    if last not in (-1, -2):
        raise InputError(f"last is the axis of the final normalisation, -1 or -2, got {last}")
    if not isinstance(eps, int | float) or not (eps == 0 or LEAST_EPS <= eps < math.inf):
        raise InputError(f"eps must be 0 or a finite number of at least {LEAST_EPS}, got {eps!r}")
    if last == -2:
        return sinkhorn(logits.mT, iterations, -1, eps).mT
    shape, z = logits.shape, wide(logits)
    z = z.flatten(0, -3) if z.ndim > 2 else z.unsqueeze(0)
    z = z.permute(1, 2, 0).contiguous()
    if eps:
        p = _with_eps(z, iterations, eps)
    elif (
        torch.compiler.is_compiling() and not transformed()
    ):  # one opaque node: unrolled, the inductor needs half a minute for each shape
        p = _operator(z, iterations)
    else:
        p = _Sinkhorn.apply(z, iterations)
    # Contiguous, because batched products copy matrices that are not one by one.
    return p.permute(2, 0, 1).contiguous().view(shape)


def _with_eps(z: Tensor, iterations: int, eps: float) -> Tensor:
    """The released code's form, z [to from T]; its first softmax runs over the axis that is normalised first."""
    p = torch.softmax(z, 0) + eps
    p = p / (p.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        p = p / (p.sum(0, keepdim=True) + eps)
        p = p / (p.sum(1, keepdim=True) + eps)
    return p


def _potentials(z: Tensor, iterations: int) -> list[tuple[Tensor, Tensor]]:
    """(f [to 1 T], g [1 from T]) after every iteration; the matrix is exp(z + f + g)."""
    f = torch.zeros_like(z[:, :1])
    found = []
    for _ in range(iterations):
        g = -torch.logsumexp(z + f, 0, keepdim=True)
        f = -torch.logsumexp(z + g, 1, keepdim=True)
        found.append((f, g))
    return found


def _narrow(z: Tensor) -> bool:
    """Whether exponentials will do. On a CPU only, where looking at values stops nothing."""
    if z.device.type != "cpu" or z.dtype not in NARROW or not z.numel() or torch.compiler.is_compiling():
        return False
    try:
        return bool(z.amax() - z.amin() <= NARROW[z.dtype])
    except RuntimeError:  # values that cannot be looked at: under vmap, or while a graph is traced
        return False


def _scalings(z: Tensor, iterations: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """E = exp(z - max), and (u [to 1 T], v [1 from T]) after every iteration; the matrix is u E v: u, v are exp(f), exp(g) up to constants."""
    e = torch.exp(z - z.amax())
    u = torch.ones_like(e[:, :1])
    found = []
    for _ in range(iterations):
        v = (e * u).sum(0, keepdim=True).reciprocal()
        u = (e * v).sum(1, keepdim=True).reciprocal()
        found.append((u, v))
    return e, found


def _forward(z: Tensor, iterations: int) -> Tensor:
    if _narrow(z):
        v = _scalings(z, iterations)[1][-1][1]
        return torch.softmax(z + v.log(), 1)  # rows to the last digit, as below
    _, g = _potentials(z, iterations)[-1]
    return torch.softmax(z + g, 1)  # exp(z + f + g), but its rows sum to one also where the logits are huge


def _backward(z: Tensor, gradient: Tensor, iterations: int) -> Tensor:
    """Walk the iterations back; the potentials are made again, so only the logits are kept between the passes.

    f = -logsumexp_from(z + g) has df = -softmax_from(z + g) (dz + dg), and likewise for g. That softmax is exp(z + g + f), but its sums are
    one also where the grain of the logits is not small: those of the exponential, up to n, would multiply over the iterations.
    """
    if _narrow(z):
        return _backward_narrow(z, gradient, iterations)
    pairs = _potentials(z, iterations)
    dz = gradient * torch.softmax(z + pairs[-1][1], 1)
    df, dg = dz.sum(1, keepdim=True), dz.sum(0, keepdim=True)
    for step in range(iterations - 1, -1, -1):
        share = df * torch.softmax(z + pairs[step][1], 1)
        dz, dg = dz - share, dg - share.sum(0, keepdim=True)
        share = dg * torch.softmax(z + pairs[step - 1][0] if step else z, 0)
        dz, df = dz - share, -share.sum(1, keepdim=True)
        dg = torch.zeros_like(dg)
    return dz


def _backward_narrow(z: Tensor, gradient: Tensor, iterations: int) -> Tensor:
    """:func:`_backward` by scalings: each softmax is E u v, so dz is E times a sum of outer products of scalings."""
    e, pairs = _scalings(z, iterations)
    u, v = pairs[-1]
    weight = gradient * u * v  # dz = E weight
    dz = e * weight
    df, dg = dz.sum(1, keepdim=True), dz.sum(0, keepdim=True)
    for step in range(iterations - 1, -1, -1):
        u, v = pairs[step]
        a = df * u
        weight = torch.addcmul(weight, a, v, value=-1)
        dg = dg - v * (e * a).sum(0, keepdim=True)
        before = pairs[step - 1][0] if step else torch.ones_like(u)
        b = dg * v
        weight = torch.addcmul(weight, before, b, value=-1)
        df = -before * (e * b).sum(1, keepdim=True)
        dg = torch.zeros_like(dg)
    return e * weight


def _push(z: Tensor, direction: Tensor, iterations: int) -> Tensor:
    """Directional derivative of :func:`_forward`."""
    before = df = dg = torch.zeros_like(z[:, :1])
    p = z
    for f, g in _potentials(z, iterations):
        dg = -(torch.softmax(z + before, 0) * (direction + df)).sum(0, keepdim=True)
        p = torch.softmax(z + g, 1)
        df = -(p * (direction + dg)).sum(1, keepdim=True)
        before = f
    return p * (direction + df + dg)


class _Sinkhorn(torch.autograd.Function):
    """z [to from T] -> [to from T]; differentiable forwards, backwards and twice."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, iterations: int) -> Tensor:
        return _forward(z, iterations)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        z, ctx.iterations = inputs
        ctx.save_for_backward(z)
        ctx.save_for_forward(z)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        return _backward(z, gradients[0], ctx.iterations), None

    @staticmethod
    def jvp(ctx: Any, direction: Tensor, _: None) -> Tensor:
        (z,) = ctx.saved_tensors
        return _push(z, direction, ctx.iterations)


@torch.library.custom_op("thalweg::sinkhorn", mutates_args=())
def _operator(z: Tensor, iterations: int) -> Tensor:
    return _forward(z, iterations).contiguous()


@torch.library.custom_op("thalweg::sinkhorn_backward", mutates_args=())
def _operator_backward(z: Tensor, gradient: Tensor, iterations: int) -> Tensor:
    return _backward(z, gradient, iterations).contiguous()


@_operator.register_fake
def _(z: Tensor, iterations: int) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)


@_operator_backward.register_fake
def _(z: Tensor, gradient: Tensor, iterations: int) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    z, ctx.iterations = inputs
    ctx.save_for_backward(z)


def _pull(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (z,) = ctx.saved_tensors
    return _operator_backward(z, gradient, ctx.iterations), None


_operator.register_autograd(_pull, setup_context=_keep)
