"""The error of an update beside what it should be: how large, how far along the dense update, how far across, and what chance would give.

The reference is the dense update itself, not the stream: an error along it makes the update longer or shorter, one across it turns it.
What streams over many tokens keeps the numbers of :class:`ErrorLengths` a token and no vector.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real, same_width
from thalweg.geometry.lengths import Lengths, divisor, lengths
from thalweg.ops.precision import wide

_PAPER = "He et al. 2026, arXiv 2609.15975 (compression error)"
_TAKES = "dense and compressed update [... width]"
_CHANCE = "measured: a random error of the same norm at the same tokens"


class ErrorLengths(NamedTuple):
    """dense: ||Delta|| [...]; along: e . Delta / ||Delta||, signed [...]; across: ||e - parallel|| [...], with e = compressed - Delta."""

    dense: Tensor
    along: Tensor
    across: Tensor

    @property
    def error(self) -> Tensor:
        """||e||."""
        return torch.hypot(self.along, self.across)

    @property
    def total(self) -> Tensor:
        """||e|| / ||Delta||; no error is 0, any other on an update of zero infinite."""
        return self._over(self.error)

    @property
    def signed(self) -> Tensor:
        """e . Delta / ||Delta||^2: above 0 the update became longer, -1 leaves nothing of it."""
        return self._over(self.along)

    @property
    def perpendicular(self) -> Tensor:
        """Norm of the part across over ||Delta||."""
        return self._over(self.across)

    @property
    def share(self) -> Tensor:
        """Norm of the part across over ||e||, 0 without an error."""
        return torch.where(self.error > 0, self.across / divisor(self.error), 0.0)

    @property
    def cosine(self) -> Tensor:
        """cos(Delta, Delta + e); 0 where either is zero."""
        whole = torch.hypot(self.dense + self.along, self.across)
        found = torch.where((self.along == 0) & (self.across == 0), 1.0, (self.dense + self.along) / divisor(whole))
        return torch.where(self.dense > 0, found, 0.0)

    def _over(self, part: Tensor) -> Tensor:
        return torch.where(part == 0, 0.0, part / self.dense)


def error_lengths(dense: Float[Tensor, "*#b width"], compressed: Float[Tensor, "*#b width"]) -> ErrorLengths:
    """The three lengths on the last axis, in float32 or wider; exactly zero where both updates are equal. Raises: ShapeError."""
    same_width(dense, compressed, "dense and compressed update")
    reference = wide(dense)
    found: Lengths = lengths(reference, wide(compressed) - reference)
    return ErrorLengths(found.reference, found.along, found.across)


def random_error(found: ErrorLengths, cosine: Float[Tensor, "*b"]) -> ErrorLengths:
    """The lengths of an error of the same norm in another direction, whose cosine with the dense update is given [...]."""
    size, cosine = found.error, cosine.to(found.error.dtype)
    return ErrorLengths(found.dense, size * cosine, size * (1 - cosine.square()).clamp(min=0).sqrt())


def direction_cosine(dense: Float[Tensor, "n width"], directions: Float[Tensor, "n width"]) -> Float[Tensor, " n"]:
    """Cosine of every dense update and the random direction that is given for it; 0 for an update of zero."""
    z = wide(dense)
    size = torch.linalg.vector_norm(z, dim=-1) * torch.linalg.vector_norm(directions, dim=-1)
    return (z * directions).sum(-1) / divisor(size)


@measure(
    "error.total",
    summary="norm of the error of an update over the norm of the dense update, token by token",
    source=_PAPER,
    takes=_TAKES,
    range=(0.0, None),
    direction="lower",
    null="none: a random error of the same norm has the same total",
)
def error_total(dense: Float[Tensor, "*#b width"], compressed: Float[Tensor, "*#b width"]) -> Tensor:
    """||compressed - dense|| / ||dense|| on the last axis, in float64. Raises: ShapeError, InputError."""
    return _exact(dense, compressed).total


@measure(
    "error.along",
    summary="norm of the part of the error along the dense update, over the norm of that update",
    source=_PAPER,
    takes=_TAKES,
    range=(0.0, None),
    direction="lower",
    null=_CHANCE,
)
def error_along(dense: Float[Tensor, "*#b width"], compressed: Float[Tensor, "*#b width"]) -> Tensor:
    """|e . dense| / ||dense||^2 on the last axis, in float64. Raises: ShapeError, InputError."""
    return _exact(dense, compressed).signed.abs()


@measure(
    "error.signed",
    summary="signed part of the error along the dense update: above 0 the update is longer than it was",
    source=_PAPER,
    takes=_TAKES,
    range=(None, None),
    null="0: random direction",
)
def error_signed(dense: Float[Tensor, "*#b width"], compressed: Float[Tensor, "*#b width"]) -> Tensor:
    """e . dense / ||dense||^2 on the last axis, in float64; -1: nothing is left along it. Raises: ShapeError, InputError."""
    return _exact(dense, compressed).signed


@measure(
    "error.across",
    summary="norm of the part of the error across the dense update, over the norm of that update",
    source=_PAPER,
    takes=_TAKES,
    range=(0.0, None),
    direction="lower",
    null=_CHANCE,
)
def error_across(dense: Float[Tensor, "*#b width"], compressed: Float[Tensor, "*#b width"]) -> Tensor:
    """||e - parallel|| / ||dense|| on the last axis, in float64; total^2 = along^2 + across^2. Raises: ShapeError, InputError."""
    return _exact(dense, compressed).perpendicular


@measure(
    "error.across_share",
    summary="share of the norm of the error that lies across the dense update; below the null: an error with a direction",
    source=_PAPER,
    takes=_TAKES,
    range=(0.0, 1.0),
    null="sqrt(1 - 1 / width): isotropic error",
)
def error_across_share(dense: Float[Tensor, "*#b width"], compressed: Float[Tensor, "*#b width"]) -> Tensor:
    """||e - parallel|| / ||e|| on the last axis, in float64; 0 without an error. Null: :func:`across_share_null`."""
    return _exact(dense, compressed).share


@measure(
    "error.cosine",
    summary="cosine of the dense and the compressed update",
    source="definition",
    takes=_TAKES,
    range=(-1.0, 1.0),
    direction="higher",
    null=_CHANCE,
)
def error_cosine(dense: Float[Tensor, "*#b width"], compressed: Float[Tensor, "*#b width"]) -> Tensor:
    """cos(dense, compressed) on the last axis, in float64; 0 where either is zero. Raises: ShapeError, InputError."""
    return _exact(dense, compressed).cosine


@measure(
    "error.pooled",
    summary="norm of the error over the norm of the dense update, over all tokens at once: large updates decide",
    source="definition",
    takes="dense and compressed update [... tokens width]",
    range=(0.0, None),
    direction="lower",
    null="none: a random error of the same norm has the same",
)
def error_pooled(
    dense: Float[Tensor, "*b tokens width"], compressed: Float[Tensor, "*b tokens width"]
) -> Float[Tensor, "*b"]:
    """sqrt(sum ||e||^2 / sum ||dense||^2) over tokens, in float64. Raises: ShapeError, InputError."""
    found = _exact(dense, compressed)
    error, size = found.error.square().sum(-1), found.dense.square().sum(-1)
    return torch.where(error > 0, (error / size).sqrt(), 0.0)


@measure(
    "error.sqnr",
    summary="signal to quantisation noise ratio of an update over all tokens",
    source="definition",
    takes="dense and compressed update [... tokens width]",
    range=(None, None),
    unit="dB",
    direction="higher",
    null="none: a random error of the same norm has the same",
)
def sqnr(dense: Float[Tensor, "*b tokens width"], compressed: Float[Tensor, "*b tokens width"]) -> Float[Tensor, "*b"]:
    """10 log10(sum ||dense||^2 / sum ||e||^2) over tokens, in float64; infinite without an error. Raises: ShapeError, InputError."""
    return -20 * error_pooled(dense, compressed).log10()


def across_share_null(width: int) -> float:
    """sqrt(1 - 1/d): root of the mean square share of an isotropic error that lies across any given direction of R^d."""
    return math.sqrt(1 - 1 / width)


def _exact(dense: Tensor, compressed: Tensor) -> ErrorLengths:
    return error_lengths(real(dense, "the dense update").double(), real(compressed, "the compressed update").double())
