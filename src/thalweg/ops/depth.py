"""A layer as a short flow: dx/dz = F_1(x) + ... + F_m(x) over one unit of depth, in any number of steps, by splitting."""

from collections.abc import Callable, Sequence
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, UnknownNameError

Field = Callable[[Tensor], Tensor]
Scheme = Literal["lie", "swapped", "together", "strang"]
SCHEMES: tuple[Scheme, ...] = ("lie", "swapped", "together", "strang")


def through_layer(
    x: Float[Tensor, "*b"], fields: Sequence[Field], steps: int = 1, scheme: Scheme = "lie", size: float | None = None
) -> Float[Tensor, "*b"]:
    """The state after ``steps`` steps of ``size`` (None: 1 / steps, one layer) through the fields of a layer. Shapes: that of x.

    lie: x + h F_1(x), then x + h F_2(x), ...; one step of it is a pre-norm transformer layer. swapped: the same in the opposite order.
    together: x + h (F_1(x) + F_2(x) + ...). All three are of first order. strang: half a step of F_1, F_2 ... up to a whole one of the
    last, and back, every part by the midpoint rule; of second order.
    Raises: UnknownNameError for a scheme; InputError for fewer than one step or a size that is not positive.
    Source: Strang 1968 (SIAM J. Numer. Anal. 5, 506); Lie-Trotter splitting as in Hairer, Lubich and Wanner 2006, II.5.
    """
    if scheme not in SCHEMES:
        raise UnknownNameError("splitting scheme", scheme, SCHEMES)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps through a layer are a whole number of at least 1, got {steps!r}")
    h = 1 / steps if size is None else size
    if not 0 < h < float("inf"):
        raise InputError(f"the size of a step must be positive and finite, got {h}")
    if not fields:
        return x
    order = list(fields)[::-1] if scheme == "swapped" else list(fields)
    for _ in range(steps):
        x = _step(x, order, h, scheme)
    return x


def _step(x: Tensor, fields: list[Field], h: float, scheme: Scheme) -> Tensor:
    if scheme == "together":
        updates = [field(x) for field in fields]
        for update in updates:
            x = x + scaled(update, h)
        return x
    if scheme == "strang" and fields:
        *first, last = fields
        for field in first:
            x = midpoint(x, field, h / 2)
        x = midpoint(x, last, h)
        for field in reversed(first):
            x = midpoint(x, field, h / 2)
        return x
    for field in fields:
        x = x + scaled(field(x), h)
    return x


def midpoint(x: Tensor, field: Field, h: float) -> Tensor:
    """One step of dx/dz = F(x) by the midpoint rule: x + h F(x + h/2 F(x))."""
    return x + scaled(field(x + scaled(field(x), h / 2)), h)


def scaled(update: Tensor, h: float) -> Tensor:
    """h times an update; the update itself at 1, so that one step is bitwise the model's own."""
    return update if h == 1 else update * h
