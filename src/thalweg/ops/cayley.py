"""Skew matrices from free numbers, and the Cayley transform that turns them into rotations.

No buffer holds the layout: it is made anew from n at each call, so that no cast, no device without data and no checkpoint can spoil it.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.ops.precision import full_precision

LARGEST = (
    1e10  # entries beyond it count as it: there the solution is off by 1e-6, which two steps of POLISH take to rounding
)
POLISH = 2


def skew(values: Float[Tensor, "*batch pairs"], size: int) -> Float[Tensor, "*batch size size"]:
    """The skew matrix whose upper triangle holds ``values`` row by row: [... size (size - 1) / 2] -> [... size size].

    Raises: ShapeError.
    """
    pairs = size * (size - 1) // 2
    if values.ndim < 1 or values.shape[-1] != pairs:
        raise ShapeError(f"a skew matrix of size {size} takes values [... {pairs}], got shape {list(values.shape)}")
    place = torch.arange(size, device=values.device)
    low, high = torch.minimum(place[:, None], place), torch.maximum(place[:, None], place)
    index = low * (2 * size - low - 1) // 2 + high - low - 1
    index = torch.where(place[:, None] > place, index + pairs, index)
    index = torch.where(low == high, 2 * pairs, index)
    zero = values.new_zeros(*values.shape[:-1], 1)
    return torch.cat([values, -values, zero], -1)[..., index]


def upper(matrix: Float[Tensor, "*batch size size"]) -> Float[Tensor, "*batch pairs"]:
    """The upper triangle without the diagonal, row by row: what :func:`skew` was made from."""
    row, column = torch.triu_indices(matrix.shape[-1], matrix.shape[-1], 1, device=matrix.device)
    return matrix[..., row, column]


def cayley(a: Float[Tensor, "*batch size size"]) -> Float[Tensor, "*batch size size"]:
    """(I - A)(I + A)^-1, a rotation without the eigenvalue -1 where A is skew: [... size size] -> [... size size], float64.

    I + A can always be inverted, but its condition number is as large as the largest entries: in float64 the solution is orthogonal to 4e-12
    at entries of 1e4 and to 1e-6 at 1e10. Two steps of Newton and Schulz, M (3 I - M^T M) / 2, make it orthogonal to 1e-14 at entries of
    every size (measured, sizes 2 to 32, entries from 0.1 to 1e300); an entry beyond 1e10 counts as 1e10, and its derivative is zero.
    For large A the result tends to -I, but for the null space of A (one dimension where the size is odd), where it is I.
    Source: Cayley 1846; the steps: Bjorck and Bowie 1971.
    """
    a = a.double().clamp(-LARGEST, LARGEST)
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    with full_precision(a):
        m = torch.linalg.solve_ex(
            eye + a, eye - a
        ).result  # the factors commute; no check, which would wait for the device
        for _ in range(POLISH):
            m = 1.5 * m - 0.5 * m @ (m.mT @ m)
    return m
