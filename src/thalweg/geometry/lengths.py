"""An update in three lengths: that of the reference, of the part along it and of the part across; every ratio and angle from these.

What streams over many tokens keeps these three numbers a token and no vector.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real, same_width
from thalweg.ops.precision import wide

_SPLIT = "definition: update = coefficient * reference + perpendicular"
_PAPER = "He et al. 2026, arXiv 2609.15975"
_TAKES = "reference and update [... width]"


class Lengths(NamedTuple):
    """reference: ||z|| [...]; along: update . z / ||z||, signed [...]; across: ||update - parallel|| [...]."""

    reference: Tensor
    along: Tensor
    across: Tensor

    @property
    def update(self) -> Tensor:
        """||update||."""
        return torch.hypot(self.along, self.across)

    @property
    def coefficient(self) -> Tensor:
        """along / reference, 0 where the reference is zero: that of :func:`thalweg.geometry.updates.split_update`."""
        return self.along / divisor(self.reference)

    @property
    def over_perpendicular(self) -> Tensor:
        """|along| / across; infinite where nothing lies across, 0 for an update of zero."""
        return torch.where(self.along == 0, 0.0, self.along.abs() / self.across)

    @property
    def fraction(self) -> Tensor:
        """|along| / ||update||, 0 for an update of zero: that of :func:`thalweg.geometry.updates.parallel_fraction`."""
        return self.along.abs() / divisor(self.update)

    @property
    def energy(self) -> Tensor:
        """along^2 / ||update||^2: that of :func:`thalweg.geometry.updates.parallel_energy`."""
        return self.fraction.square()

    @property
    def angle(self) -> Tensor:
        """Between update and reference, in degrees; 90 where either is zero, as its cosine is then 0."""
        degrees = torch.rad2deg(torch.atan2(self.across, self.along))
        return torch.where((self.reference > 0) & (self.update > 0), degrees, 90.0)

    @property
    def relative(self) -> Tensor:
        """||update|| / ||reference||; an update of zero is 0, another on a zero reference infinite."""
        return torch.where(self.update > 0, self.update / self.reference, 0.0)

    @property
    def kept_cosine(self) -> Tensor:
        """cos(z, z + update) = (1 + alpha) / sqrt((1 + alpha)^2 + beta^2), 0 where z or the sum is zero."""
        whole = torch.hypot(self.reference + self.along, self.across)
        return torch.where(self.reference > 0, (self.reference + self.along) / divisor(whole), 0.0)

    @property
    def kept_cosine_small(self) -> Tensor:
        """1 - (beta / (1 + alpha))^2 / 2: :attr:`kept_cosine` for a small angle; 0 where z is zero."""
        slope = self.across / (self.reference + self.along)
        return torch.where(self.reference > 0, 1 - slope.square() / 2, 0.0)


def lengths(reference: Float[Tensor, "*#b width"], update: Float[Tensor, "*#b width"]) -> Lengths:
    """The three lengths on the last axis, in float32 or wider. Shapes: two [... width] that broadcast -> [...] each.

    The part across is subtracted before its norm is taken, so that a ratio near 1 loses no digits. Raises: ShapeError.
    """
    same_width(reference, update, "reference and update")
    z, u = wide(reference), wide(update)
    size = torch.linalg.vector_norm(z, dim=-1)
    along = (z * u).sum(-1) / divisor(size)
    across = torch.addcmul(u, (along / divisor(size)).unsqueeze(-1), z, value=-1)
    return Lengths(size, along, torch.linalg.vector_norm(across, dim=-1))


@measure(
    "parallel_over_perpendicular.raw",
    summary="what the sublayer returned: norm of its part along the state over that of its part across; no share",
    source=_PAPER,
    takes=_TAKES,
    range=(0.0, None),
    null="about sqrt(2 / (pi width)): random direction",
)
@measure(
    "parallel_over_perpendicular.step",
    summary="change of the state: norm of its part along the state over that of its part across; no share",
    source=_PAPER,
    takes=_TAKES,
    range=(0.0, None),
    null="about sqrt(2 / (pi width)): random direction",
)
def parallel_over_perpendicular(reference: Float[Tensor, "*#b width"], update: Float[Tensor, "*#b width"]) -> Tensor:
    """||parallel|| / ||perpendicular|| on the last axis, in float64: unbounded, the tangent's inverse of the angle.

    Infinite where nothing lies across, 0 for an update of zero. Not :func:`thalweg.geometry.updates.parallel_fraction` nor
    its square: sources call all three the parallel ratio. Raises: ShapeError, InputError.
    """
    return _exact(reference, update).over_perpendicular


def over_perpendicular_null(width: int) -> float:
    """Mean of ||parallel|| / ||perpendicular|| of a random direction: gamma(d/2 - 1) / (sqrt(pi) gamma((d - 1)/2)); infinite below 3."""
    if width < 3:
        return math.inf
    return math.exp(math.lgamma(width / 2 - 1) - math.lgamma((width - 1) / 2)) / math.sqrt(math.pi)


@measure(
    "update_angle.raw",
    summary="angle between what the sublayer returned and the state",
    source=_SPLIT,
    takes=_TAKES,
    range=(0.0, 180.0),
    unit="degrees",
    null="90: random direction",
)
@measure(
    "update_angle.step",
    summary="angle between the change of the state and the state",
    source=_SPLIT,
    takes=_TAKES,
    range=(0.0, 180.0),
    unit="degrees",
    null="90: random direction",
)
def update_angle(reference: Float[Tensor, "*#b width"], update: Float[Tensor, "*#b width"]) -> Tensor:
    """Angle on the last axis in degrees, in float64: above 90 the update shrinks the state. 90 where either is zero.

    From both lengths by atan2, which keeps its digits near 0 and 180 where the arc cosine loses them.
    Raises: ShapeError, InputError.
    """
    return _exact(reference, update).angle


@measure(
    "token_relative_update.raw",
    summary="norm of what the sublayer returned over the norm of the state, token by token",
    source="definition",
    takes=_TAKES,
    range=(0.0, None),
)
@measure(
    "token_relative_update.step",
    summary="norm of the change of the state over the norm of the state, token by token",
    source="definition",
    takes=_TAKES,
    range=(0.0, None),
)
def token_relative_update(reference: Float[Tensor, "*#b width"], update: Float[Tensor, "*#b width"]) -> Tensor:
    """||update|| / ||state|| on the last axis, in float64: every token counts alike.

    In :func:`thalweg.geometry.updates.relative_update` a few tokens with large states can outweigh all others.
    Raises: ShapeError, InputError.
    """
    return _exact(reference, update).relative


@measure(
    "layer_drop_cosine",
    summary="cosine between the state before a layer and after it: how little is lost when the layer is dropped",
    source=_PAPER,
    takes=_TAKES,
    range=(-1.0, 1.0),
    null="0: independent directions",
)
@measure(
    "layer_drop_cosine.small_angle",
    summary="the same by its approximation for small angles, 1 - (beta / (1 + alpha))^2 / 2",
    source=_PAPER,
    takes=_TAKES,
    range=(None, 1.0),
    options={"small_angle": True},
)
def layer_drop_cosine(
    reference: Float[Tensor, "*#b width"], update: Float[Tensor, "*#b width"], small_angle: bool = False
) -> Tensor:
    """cos(z, z + update) = (1 + alpha) / sqrt((1 + alpha)^2 + beta^2), with ||perpendicular|| = beta ||z||, in float64.

    small_angle: 1 - (beta / (1 + alpha))^2 / 2 instead, which holds for beta much smaller than 1 + alpha > 0; beside the exact one
    it shows whether the angle is small. Raises: ShapeError, InputError.
    """
    found = _exact(reference, update)
    return found.kept_cosine_small if small_angle else found.kept_cosine


def _exact(reference: Tensor, update: Tensor) -> Lengths:
    return lengths(real(reference, "the reference").double(), real(update, "the update").double())


def divisor(x: Tensor) -> Tensor:
    """x where it is positive, 1 elsewhere: of lengths that may be zero."""
    return torch.where(x > 0, x, 1.0)
