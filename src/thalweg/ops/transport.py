"""Points of a transport polytope: tables with given margins, built from 2 x 2 tables.

Nothing is subtracted twice and nothing is clamped: every cell is a sum of terms that are not negative in floating point either, so
remainders stay at or above zero, and keep their relative precision, where the intervals close.
"""

import math

from torch import Tensor, minimum, relu, stack


def table(up: Tensor, down: Tensor, row: Tensor, column: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A 2 x 2 table with first row ``row``, first column ``column`` and second column ``rest``; the second row is what remains.

    The first cell lies at the share ``up`` (``down`` = 1 - up, given apart for its precision) of [max(0, row - rest), min(row, column)].
    Returns the cells 11, 12, 21, 22, all of the common shape. Where the interval is empty or closed, the derivatives are those of one of
    the bounds and finite; they keep the margins.
    """
    excess = row - rest
    low, high = relu(excess), minimum(row, column)
    width = (high - low).clamp_min(0)  # below zero only by rounding
    more, less = width * up, width * down
    return low + more, (row - high) + less, (column - high) + less, (low - excess) + more


def split(up: Tensor, down: Tensor, values: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """``values`` [k ...] = a + b, both nonnegative, with the sums ``first`` and ``second`` [...], from k - 1 shares, first entry first."""
    a, b = [], []
    for more, less, value in zip(up.unbind(), down.unbind(), values.unbind()[:-1], strict=True):
        one, other, first, second = table(more, less, value, first, second)
        a.append(one)
        b.append(other)
    return stack([*a, first]), stack([*b, second])


def near_identity(n: int) -> list[list[float]]:
    """A doubly stochastic matrix near the identity, a start for charts of the polytope.

    It is softmax(6 I - 3), from which mHC starts, but for up to 0.3 of an off-diagonal entry, of rank one and without sums: at the
    symmetric matrix itself the bounds of many intervals tie, and a chart has no derivative there.
    """
    off = 1 / (math.exp(6) + n - 1)
    u = [i - (n - 1) / 2 for i in range(n)]
    v = [i * i - (n - 1) * (2 * n - 1) / 6 for i in range(n)]
    scale = 0.3 * off / max(max(map(abs, u)) * max(map(abs, v)), 1e-9)
    return [[(1 - (n - 1) * off if i == j else off) + scale * u[i] * v[j] for j in range(n)] for i in range(n)]


def logit_within(value: float, row: float, column: float, rest: float) -> float:
    """The logit at which :func:`table` gives ``value`` in its first cell."""
    return math.log((value - max(0.0, row - rest)) / (min(row, column) - value))
