"""The local tangent space of a point cloud: principal directions of a window of states."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.ops.precision import full_precision, wide

RELATIVE_FLOOR = 1e-10  # on squared singular values: below it the basis would not be orthonormal to 1e-6


class TangentSpace(NamedTuple):
    """An estimated tangent space.

    basis [.. d r]: orthonormal columns, the widest direction first; zero where ``valid`` is False.
    valid [..]: whether the window determines a subspace of this rank.
    """

    basis: Float[Tensor, "*batch d r"]
    valid: Bool[Tensor, "*batch"]


@torch.no_grad()
def local_tangent(
    window: Float[Tensor, "*batch w d"],
    rank: int,
    mask: Bool[Tensor, "*batch w"] | None = None,
    *,
    tolerance: float | None = None,
) -> TangentSpace:
    """The ``rank`` principal directions of each window of states, centred at the mean of the window.

    window: w states of width d; mask: True where a state counts. The result carries no gradient and has the dtype of
    the window, at least float32. A window is not valid when fewer than rank + 1 of its states count, when a state is
    not finite, or when its states do not span ``rank`` directions: the smallest singular value must exceed
    ``tolerance`` times the Frobenius norm of the uncentred window (default: 8 units of rounding of the window's dtype)
    and 1e-5 times the largest. Where the singular values number ``rank`` and ``rank + 1`` are equal the subspace is one
    of several.

    Cost: one w x w symmetric eigenproblem per window, in float64.
    Raises: InputError unless 1 <= rank < w and rank <= d; ShapeError for a mask of another shape.
    Source: local principal component analysis as in Zhang and Zha 2004 (SIAM J. Sci. Comput. 26, 313), from the Gram
    matrix.
    """
    size, width = window.shape[-2:]
    if not 1 <= rank < size or rank > width:
        raise InputError(
            f"rank must be at least 1, at most the width {width} and below the {size} states of the window (about their"
            f" mean they span one direction less), got {rank}; lower the rank or widen the window"
        )
    if mask is None:
        mask = torch.ones(window.shape[:-1], dtype=torch.bool, device=window.device)
    elif mask.shape != window.shape[:-1]:
        raise ShapeError(
            f"mask must have the shape {tuple(window.shape[:-1])} of the window's states, got {tuple(mask.shape)}"
        )
    if tolerance is None:
        tolerance = 8 * torch.finfo(window.dtype).eps

    # Masked states and windows that are not finite are cut out of the small matrices, not of the large ones.
    states = window.masked_fill(~mask.unsqueeze(-1), 0).double()
    count = mask.sum(-1)
    mean = states.sum(-2, keepdim=True) / count.clamp(min=1)[..., None, None]
    centred = states - mean
    gram = (centred @ centred.mT).masked_fill(~(mask.unsqueeze(-1) & mask.unsqueeze(-2)), 0)
    finite = gram.isfinite().flatten(-2).all(-1)
    gram = torch.where(finite[..., None, None], gram, 0.0)  # LAPACK stops at a NaN

    values, vectors = torch.linalg.eigh(gram)  # ascending
    values, vectors = values[..., -rank:].flip(-1), vectors[..., -rank:].flip(-1)
    power = gram.diagonal(dim1=-2, dim2=-1).sum(-1) + count * mean.square().sum((-2, -1))  # of the uncentred window
    floor = torch.maximum(tolerance**2 * power, RELATIVE_FLOOR * values[..., 0])
    valid = finite & (count > rank) & (values[..., -1] > floor)
    scale = torch.where(valid.unsqueeze(-1), values, torch.inf).rsqrt()
    basis = centred.mT @ (vectors * scale.unsqueeze(-2)).masked_fill(~mask.unsqueeze(-1), 0)
    basis = torch.where(valid[..., None, None], basis, 0.0)
    return TangentSpace(basis.to(wide(window).dtype), valid)


def project(
    x: Float[Tensor, "*batch d"], basis: Float[Tensor, "*#batch d r"], valid: Bool[Tensor, "*batch"] | None = None
) -> Float[Tensor, "*batch d"]:
    """The orthogonal projection of x on the span of orthonormal columns; x itself where ``valid`` is False.

    Shapes: x [.. d], basis [.. d r] or [d r], valid [..] -> [.. d], at least float32.
    """
    x = wide(x)
    with full_precision(x):
        inside = (x.unsqueeze(-2) @ basis @ basis.mT).squeeze(-2)
    return inside if valid is None else torch.where(valid.unsqueeze(-1), inside, x)
