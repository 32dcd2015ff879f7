"""Loop-written pieces that the references of several mixers share; scalars only, so that nothing vectorised judges itself."""

import torch
from torch import Tensor

Rows = list[list[Tensor]]


def skew_loops(values: list[Tensor], size: int, zero: Tensor) -> Rows:
    """A_ij = -A_ji, the upper triangle row by row from ``values``, ``zero`` on the diagonal."""
    left = iter(values)
    a = [[zero for _ in range(size)] for _ in range(size)]
    for i in range(size):
        for j in range(i + 1, size):
            a[i][j] = next(left)
            a[j][i] = -a[i][j]
    return a


def cayley_loops(a: Rows) -> Rows:
    """Q of (I + A) Q = I - A by Gaussian elimination; without pivoting, since the symmetric part I keeps every pivot at one or above."""
    n = len(a)
    left = [[a[i][j] + float(i == j) for j in range(n)] for i in range(n)]
    right = [[float(i == j) - a[i][j] for j in range(n)] for i in range(n)]
    return solve_loops(left, right)


def solve_loops(left: Rows, right: Rows) -> Rows:
    """X of left X = right by Gaussian elimination without pivoting."""
    n, m = len(left), len(right[0])
    left, right = [list(row) for row in left], [list(row) for row in right]
    for k in range(n):
        for i in range(k + 1, n):
            factor = left[i][k] / left[k][k]
            for j in range(k + 1, n):
                left[i][j] = left[i][j] - factor * left[k][j]
            for j in range(m):
                right[i][j] = right[i][j] - factor * right[k][j]
    x = right
    for k in reversed(range(n)):
        for j in range(m):
            known = sum((left[k][i] * x[i][j] for i in range(k + 1, n)), torch.zeros_like(x[k][j]))
            x[k][j] = (x[k][j] - known) / left[k][k]
    return x


def stacked(rows: Rows) -> Tensor:
    """[to from] from its scalars."""
    return torch.stack([torch.stack(row) for row in rows])
