"""Permutation matrices of few streams, and convex combinations of them."""

import itertools
import math

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.ops.precision import full_precision

MOST = 5  # streams, or streams of a factor; the number of matrices grows as n!


def _entries(n: int) -> tuple[tuple[float, ...], ...]:
    orders = itertools.permutations(range(n))
    return tuple(tuple(float(j == order[i]) for i in range(n) for j in range(n)) for order in orders)


ENTRIES = {n: _entries(n) for n in range(1, MOST + 1)}  # not a cached function: the compiler would trace it


def blend(logits: Float[Tensor, "*batch permutations"], n: int) -> Float[Tensor, "*batch to from"]:
    """sum_k softmax(logits)_k P_k over all n! permutation matrices: every doubly stochastic matrix is such a sum (Birkhoff, von Neumann).

    The permutations p are in the order of itertools, the identity first; P_p[i, p(i)] = 1. The matrices are made at each call: a buffer
    would be saved with every site of a model.
    """
    with full_precision(logits):
        matrices = torch.tensor(ENTRIES[n], dtype=logits.dtype, device=logits.device)
        return (torch.softmax(logits, -1) @ matrices).unflatten(-1, (n, n))


def refusal(n: int) -> str:
    """What n! logits would cost, for a person."""
    number = f"{math.factorial(n):,}" if n <= 20 else "more than 10^18"
    return f"{n}! permutations take {number} logits; up to {MOST} ({math.factorial(MOST)} logits) are served"
