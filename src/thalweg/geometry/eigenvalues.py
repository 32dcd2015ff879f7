"""A square Jacobian as the generator of a flow dx/dz = F(x): does it rotate, grow, or is it a gradient?"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real

GINIBRE_IMAGINARY = 2 / math.pi  # E|Im z| / E|z| over the unit disc: (4 / 3 pi) / (2 / 3)
_TAKES = "square Jacobians [... width width]"
_LIANG = "Liang 2026, arXiv 2607.17146 (symmetric feed-forward, in words); definition ours"


def _square(jacobian: Tensor) -> Tensor:
    if isinstance(jacobian, Tensor) and (
        jacobian.ndim < 2 or jacobian.shape[-1] != jacobian.shape[-2] or not jacobian.numel()
    ):
        raise ShapeError(f"a generator must be square [... width width], got shape {list(jacobian.shape)}")
    return real(jacobian, "the Jacobian").double()


def eigenvalues(jacobian: Float[Tensor, "*batch width width"]) -> Tensor:
    """All eigenvalues, complex128, in no order. Shapes: [... width width] -> [... width]. Raises: ShapeError, InputError."""
    return torch.linalg.eigvals(_square(jacobian))


@measure(
    "reaction.imaginary_share",
    summary="sum of |imaginary part| over sum of |eigenvalue| of the feed-forward Jacobian: 0 where it does not rotate",
    source=_LIANG,
    takes=_TAKES,
    range=(0.0, 1.0),
    null="2/pi: independent normal entries (circular law)",
)
def imaginary_share(
    jacobian: Float[Tensor, "*batch width width"], values: Tensor | None = None
) -> Float[Tensor, "*batch"]:
    """sum |Im lambda| / sum |lambda|; 0 for a zero matrix. Shapes: [... width width] -> [...]. Raises: ShapeError, InputError.

    values: the eigenvalues, where they are known.
    """
    spectrum: Tensor = eigenvalues(jacobian) if values is None else values
    size = spectrum.abs().sum(-1)
    return spectrum.imag.abs().sum(-1) / torch.where(size > 0, size, 1.0)


@measure(
    "reaction.antisymmetric_share",
    summary="norm of the antisymmetric part of the feed-forward Jacobian over its norm: 0 where it is a gradient",
    source="derived by us",
    takes=_TAKES,
    range=(0.0, 1.0),
    null="sqrt((1 - 1/width) / 2): independent entries",
)
def antisymmetric_share(jacobian: Float[Tensor, "*batch width width"]) -> Float[Tensor, "*batch"]:
    """||(J - J^T) / 2||_F / ||J||_F; 0 for a zero matrix. Shapes: [... width width] -> [...]. Raises: ShapeError, InputError."""
    j = _square(jacobian)
    size = torch.linalg.matrix_norm(j)
    return torch.linalg.matrix_norm((j - j.mT) / 2) / torch.where(size > 0, size, 1.0)


def antisymmetric_null(width: int) -> float:
    """:func:`antisymmetric_share` of independent entries: the root of its mean square, sqrt((1 - 1/width) / 2)."""
    return math.sqrt((1 - 1 / width) / 2)


@measure(
    "reaction.negative_share",
    summary="share of the eigenvalues of the feed-forward Jacobian with a negative real part",
    source="derived by us",
    takes=_TAKES,
    range=(0.0, 1.0),
    null="1/2: independent normal entries; 0: tied weights and an activation that rises",
)
def negative_share(
    jacobian: Float[Tensor, "*batch width width"], tolerance: float = 1e-9, values: Tensor | None = None
) -> Float[Tensor, "*batch"]:
    """Share of eigenvalues with Re lambda < -tolerance max|lambda|. Shapes: [... width width] -> [...]. Raises: ShapeError, InputError.

    values: the eigenvalues, where they are known.
    """
    spectrum: Tensor = eigenvalues(jacobian) if values is None else values
    floor = tolerance * spectrum.abs().amax(-1, keepdim=True)
    return (spectrum.real < -floor).double().mean(-1)


@measure(
    "reaction.growth_rate",
    summary="largest eigenvalue of the symmetric part of the feed-forward Jacobian: the fastest growth of a small difference",
    source="definition (logarithmic norm)",
    takes=_TAKES,
    range=(None, None),
    null="0: nothing grows",
)
def growth_rate(jacobian: Float[Tensor, "*batch width width"]) -> Float[Tensor, "*batch"]:
    """lambda_max((J + J^T) / 2), the rate per unit of depth. Shapes: [... width width] -> [...]. Raises: ShapeError, InputError."""
    j = _square(jacobian)
    return torch.linalg.eigvalsh((j + j.mT) / 2)[..., -1]
