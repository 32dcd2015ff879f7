"""How strong an edit is where it is applied: the edited vector against the unedited one, token by token."""

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real, same_width

_PAPER = "He et al. 2026, arXiv 2609.15975 (applied-strength audit)"
_TAKES = "output before and after the edit [... width]"


@measure(
    "applied.norm_ratio",
    summary="size of the change that an edit makes, over the size of what it changes",
    source=_PAPER,
    takes=_TAKES,
    range=(0.0, None),
    null="0: no edit",
)
def applied_norm_ratio(before: Float[Tensor, "*#b width"], after: Float[Tensor, "*#b width"]) -> Float[Tensor, "*b"]:
    """||after - before|| / ||before|| on the last axis, in float64; of two zero vectors 0, of a change of zero infinite. Raises: ShapeError,
    InputError."""
    change, size = _norms(before, after)
    return _over(change, size)


@measure(
    "applied.energy_ratio",
    summary="squared size of the change that an edit makes, over the squared size of what it changes",
    source=_PAPER,
    takes=_TAKES,
    range=(0.0, None),
    null="0: no edit",
)
def applied_energy_ratio(before: Float[Tensor, "*#b width"], after: Float[Tensor, "*#b width"]) -> Float[Tensor, "*b"]:
    """The square of :func:`applied_norm_ratio`; means over tokens of the two differ. Raises: ShapeError, InputError."""
    return applied_norm_ratio(before, after).square()


@measure(
    "applied.retained",
    summary="size of what an edit leaves, over the size before",
    source=_PAPER,
    takes=_TAKES,
    range=(0.0, None),
    null="1: no edit",
)
def retained_norm(before: Float[Tensor, "*#b width"], after: Float[Tensor, "*#b width"]) -> Float[Tensor, "*b"]:
    """||after|| / ||before|| on the last axis, in float64; of two zero vectors 1. Raises: ShapeError, InputError."""
    same_width(real(before, "the output before"), real(after, "the output after"), "the outputs before and after")
    size, left = before.double().norm(dim=-1), after.double().norm(dim=-1)
    return torch.where((size == 0) & (left == 0), 1.0, left / size)


def _norms(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    same_width(real(before, "the output before"), real(after, "the output after"), "the outputs before and after")
    return (after.double() - before.double()).norm(dim=-1), before.double().norm(dim=-1)


def _over(change: Tensor, size: Tensor) -> Tensor:
    return torch.where(change > 0, change / size, 0.0)
