"""Two updates of one stream as two flows: what swapping their order does, and the bracket of their fields, which predicts it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real
from thalweg.geometry.similarity import state_cosine
from thalweg.ops.forward_mode import jvp

Field = Callable[[Tensor], Tensor]


class Swap(NamedTuple):
    """What one swap costs and predicts; all of the shape of the state.

    residual: second after first, minus first after second. bracket: [first, second]. first, second: both fields at the state. after: the
    second at the state that the first leads to.
    """

    residual: Tensor
    bracket: Tensor
    first: Tensor
    second: Tensor
    after: Tensor


def order_swap(
    first: Field,
    second: Field,
    x: Float[Tensor, "..."],
    step: float = 1.0,
    *,
    known: tuple[Tensor, Tensor] | None = None,
) -> Float[Tensor, "..."]:
    """R after T minus T after R, for steps x + h T(x) and x + h R(x): h (R(x + hT) - R(x)) - h (T(x + hR) - T(x)).

    first, second: T and R; known: their values at x, where they have been computed. Shapes: that of x. Written without the state itself, so
    that it keeps its digits at a small step.
    To lowest order -h^2 [T, R]. Raises: InputError for a state that is not finite or a step that is not positive.
    Source: Liang 2026 (arXiv 2607.17146), in words (its text was not readable); expansion derived by us, as in any text on
    Lie-Trotter splitting.
    """
    if not step > 0:
        raise InputError(f"a step must be positive, got {step}")
    real(x, "the state")
    t, r = (first(x), second(x)) if known is None else known
    return step * ((second(x + step * t) - r) - (first(x + step * r) - t))


def bracket(first: Field, second: Field, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """[T, R] = DT R - DR T at x, by forward differentiation. Shapes: that of x. The sign is that of ``order_swap = -h^2 [T, R]``."""
    real(x, "the state")
    return jvp(first, x, second(x))[1] - jvp(second, x, first(x))[1]


def swap_of(
    first: Field, second: Field, x: Float[Tensor, "..."], t: Tensor | None = None, after: Tensor | None = None
) -> Swap:
    """:func:`order_swap` at a step of 1 and :func:`bracket`, in as few passes as both need together.

    t: T(x), and after: R(x + T(x)), where a model has computed them already.
    """
    t = first(x) if t is None else t
    r, pushed_r = jvp(second, x, t)
    base, pushed_t = jvp(first, x, r)
    after = second(x + t) if after is None else after
    residual = (after - r) - (first(x + r) - base)
    return Swap(residual, pushed_t - pushed_r, t, r, after)


@measure(
    "splitting.cosine",
    summary="cosine between what swapping attention and feed-forward changes and the bracket that predicts it",
    source="Liang 2026, arXiv 2607.17146 (in words); sign and expansion derived by us",
    takes="residual and bracket [... width]",
    range=(-1.0, 1.0),
    null="prediction of another token, of another layer; 1/sqrt(width): random direction",
)
def swap_cosine(residual: Float[Tensor, "*b width"], bracket: Float[Tensor, "*b width"]) -> Float[Tensor, "*b"]:
    """cos(residual, -[T, R]) on the last axis; 0 where either is zero. Shapes: [... width] twice -> [...]."""
    return state_cosine(residual, -bracket)


@measure(
    "splitting.error",
    summary="what the bracket misses of the order swap at a step, relative to the bracket: vanishes with the step",
    source="derived by us",
    takes="two fields and a state",
    range=(0.0, None),
    null="0: the step is small",
)
def swap_error(first: Field, second: Field, x: Float[Tensor, "..."], step: float) -> Float[Tensor, ""]:
    """||swap / h^2 + [T, R]|| / ||[T, R]|| over the whole state: O(h) for smooth fields; 0 for two that commute and do nothing."""
    wanted = bracket(first, second, x)
    off = torch.linalg.vector_norm(order_swap(first, second, x, step) / step**2 + wanted)
    size = torch.linalg.vector_norm(wanted)
    return torch.where(off > 0, off / size, 0.0)
