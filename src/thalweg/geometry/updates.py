"""What an update does to the state: parts along and across a reference, size, share outside a tangent space."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real, same_width
from thalweg.geometry.similarity import rms, state_cosine
from thalweg.ops.precision import wide

_SPLIT = "definition: update = coefficient * reference + perpendicular"
_TAKES = "reference and update [... width]"


class UpdateSplit(NamedTuple):
    """An update taken apart: coefficient [...], parallel [... width] (coefficient * reference), perpendicular."""

    coefficient: Tensor
    parallel: Tensor
    perpendicular: Tensor


def split_update(reference: Float[Tensor, "*#batch width"], update: Float[Tensor, "*#batch width"]) -> UpdateSplit:
    """Split ``update`` into its part along ``reference`` and the rest, on the last axis.

        coefficient = <update, reference> / ||reference||^2      parallel = coefficient * reference

    Shapes: two [... width] that broadcast -> coefficient [...], parallel and perpendicular [... width]. A reference
    of zeros has no direction: coefficient 0, parallel 0, perpendicular the whole update. Computed in float32 or
    wider; the parts come back in the dtype of the update, the coefficient stays wide. Differentiable.
    Raises: ShapeError.
    """
    same_width(reference, update, "reference and update")
    r, u = wide(reference), wide(update)
    peak = r.detach().abs().amax(-1, keepdim=True)
    peak = torch.where(peak > 0, peak, 1.0)
    r = r / peak  # the square of a small reference would underflow
    square = r.square().sum(-1, keepdim=True)
    along = (u * r).sum(-1, keepdim=True) / torch.where(square > 0, square, 1.0)
    parallel = along * r
    return UpdateSplit((along / peak).squeeze(-1), parallel.to(update.dtype), (u - parallel).to(update.dtype))


@measure(
    "parallel_coefficient.raw",
    summary="signed size of what the sublayer returned along the state, in units of the state",
    source=_SPLIT,
    takes=_TAKES,
    range=(None, None),
    null="0: random direction",
)
@measure(
    "parallel_coefficient.step",
    summary="signed size of the change of the state along the state, in units of the state",
    source=_SPLIT,
    takes=_TAKES,
    range=(None, None),
    null="0: random direction",
)
def parallel_coefficient(reference: Float[Tensor, "*#b width"], update: Float[Tensor, "*#b width"]) -> Tensor:
    """The coefficient of :func:`split_update` in float64; -1 removes the reference, positive values strengthen it."""
    return split_update(real(reference, "the reference").double(), real(update, "the update").double()).coefficient


@measure(
    "parallel_energy.raw",
    summary="share of the squared norm of what the sublayer returned that lies along the state",
    source=_SPLIT,
    takes=_TAKES,
    range=(0.0, 1.0),
    null="1 / width: random direction",
)
@measure(
    "parallel_energy.step",
    summary="share of the squared norm of the change of the state that lies along the state",
    source=_SPLIT,
    takes=_TAKES,
    range=(0.0, 1.0),
    null="1 / width: random direction",
)
def parallel_energy(reference: Float[Tensor, "*#b width"], update: Float[Tensor, "*#b width"]) -> Tensor:
    """||parallel||^2 / ||update||^2 = cos^2 on the last axis; 0 where either is zero. Null: 1 / width.

    Not to be mixed up with :func:`parallel_fraction` (its root) or with ||parallel|| / ||perpendicular||
    (:func:`thalweg.geometry.lengths.parallel_over_perpendicular`).
    """
    return parallel_cosine(reference, update).square()


@measure(
    "parallel_fraction.raw",
    summary="share of the norm of what the sublayer returned that lies along the state: |cos|",
    source=_SPLIT,
    takes=_TAKES,
    range=(0.0, 1.0),
    null="mean |cos| of a random direction, about sqrt(2 / (pi width))",
)
@measure(
    "parallel_fraction.step",
    summary="share of the norm of the change of the state that lies along the state: |cos|",
    source=_SPLIT,
    takes=_TAKES,
    range=(0.0, 1.0),
    null="mean |cos| of a random direction, about sqrt(2 / (pi width))",
)
def parallel_fraction(reference: Float[Tensor, "*#b width"], update: Float[Tensor, "*#b width"]) -> Tensor:
    """||parallel|| / ||update|| = |cos| on the last axis; 0 where either is 0. Null: :func:`parallel_fraction_null`.

    One of three ratios that are not to be mixed up; the others are :func:`parallel_energy` and
    :func:`thalweg.geometry.lengths.parallel_over_perpendicular`.
    """
    return parallel_cosine(reference, update).abs()


def parallel_cosine(reference: Float[Tensor, "*#b width"], update: Float[Tensor, "*#b width"]) -> Tensor:
    """cos(reference, update) on the last axis, in float64; 0 where either is zero. Raises: ShapeError, InputError."""
    return state_cosine(reference, update)


def parallel_fraction_null(width: int) -> float:
    """Mean |cos| between a fixed and a uniformly random direction: gamma(d/2) / (sqrt(pi) gamma((d+1)/2))."""
    return math.exp(math.lgamma(width / 2) - math.lgamma((width + 1) / 2)) / math.sqrt(math.pi)


@measure(
    "update_rms.raw",
    summary="root mean square of what the sublayer returned",
    source="definition",
    takes="update [... tokens width]",
    range=(0.0, None),
    unit="stream units",
)
@measure(
    "update_rms.step",
    summary="root mean square of the change of the state",
    source="definition",
    takes="update [... tokens width]",
    range=(0.0, None),
    unit="stream units",
)
def update_rms(update: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
    """Root mean square of an update over tokens and width. Shapes: [... tokens width] -> [...]."""
    return rms(update)


@measure(
    "relative_update.raw",
    summary="norm of what the sublayer returned over the norm of the state",
    source="definition",
    takes="state and update [... tokens width]",
    range=(0.0, None),
)
@measure(
    "relative_update.step",
    summary="norm of the change of the state over the norm of the state",
    source="definition",
    takes="state and update [... tokens width]",
    range=(0.0, None),
)
def relative_update(
    state: Float[Tensor, "*batch tokens width"], update: Float[Tensor, "*batch tokens width"]
) -> Float[Tensor, "*batch"]:
    """||update|| / ||state|| over tokens and width. Shapes: [... tokens width] twice -> [...].

    A zero update is 0, also on a zero state; another update on a zero state is infinite.
    """
    size, whole = rms(update), rms(state)
    return torch.where(size > 0, size / whole, 0.0)


@measure(
    "off_tangent.raw",
    summary="share of the squared norm of what the sublayer returned outside the local tangent space of the states",
    source="ours: a test of the tangent claim of MGT, arXiv 2601.01014",
    takes="update [... width], basis [... width rank]",
    range=(0.0, 1.0),
    null="1 - rank/width: random direction",
)
@measure(
    "off_tangent.gated",
    summary="share of the squared norm of the gated update outside the local tangent space of the states",
    source="ours: a test of the tangent claim of MGT, arXiv 2601.01014",
    takes="update [... width], basis [... width rank]",
    range=(0.0, 1.0),
    null="1 - rank/width: random direction",
)
@measure(
    "off_tangent.step",
    summary="share of the squared norm of the change of the state outside the local tangent space of the states",
    source="ours: a test of the tangent claim of MGT, arXiv 2601.01014",
    takes="update [... width], basis [... width rank]",
    range=(0.0, 1.0),
    null="1 - rank/width: random direction",
)
def off_tangent(
    update: Float[Tensor, "*#batch width"], basis: Float[Tensor, "*#batch width rank"]
) -> Float[Tensor, "*batch"]:
    """||update - B B^T update||^2 / ||update||^2 for a basis B of orthonormal columns; columns of zeros do not count.

    Shapes: update [... width], basis [... width rank] -> [...]. A zero update is 0.
    Raises: ShapeError; InputError for NaN or infinity.
    """
    real(update, "the update")
    real(basis, "the tangent basis")
    if basis.ndim < 2 or basis.shape[-2] != update.shape[-1]:
        raise ShapeError(
            f"a tangent basis must be [... width rank] with the width of the update, "
            f"got shapes {list(basis.shape)} and {list(update.shape)}"
        )
    u, b = update.double(), basis.double()
    peak = u.detach().abs().amax(-1, keepdim=True)
    u = (u / torch.where(peak > 0, peak, 1.0)).unsqueeze(-1)
    outside = (u - b @ (b.mT @ u)).square().sum((-2, -1))
    whole = u.square().sum((-2, -1))
    return outside / torch.where(whole > 0, whole, 1.0)


def off_tangent_null(basis: Float[Tensor, "*batch width rank"]) -> Float[Tensor, "*batch"]:
    """Expected :func:`off_tangent` of a random direction: 1 - rank/width; columns of zeros do not count."""
    return 1 - basis.double().square().sum((-2, -1)) / basis.shape[-2]
