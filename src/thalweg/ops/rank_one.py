"""Rank-one changes of a state: the delta step, the bare write, and the reflection.

Axis legend: ``n`` value channel, ``d`` width. A state X [... n d] holds one vector of width d per value channel: the
transpose of the d x d_v matrix of the literature, so ``k^T X`` contracts its last axis. Every result has the dtype of
its state; the arithmetic runs in float32 or wider, autocast or not.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError
from thalweg.ops.precision import full_precision, wide

LEAST_EPS = 1e-12  # of a smaller one the gradient at zero overflows in float32


def check_direction_eps(eps: float) -> None:
    """Raises: InputError for an eps that :func:`direction` does not bear."""
    if not LEAST_EPS <= eps < math.inf:
        raise InputError(f"direction_eps must be finite and at least {LEAST_EPS}, got {eps}")


def direction(h: Float[Tensor, "*batch d"], eps: float = 1e-5) -> Float[Tensor, "*batch d"]:
    """k = h / sqrt(|h|^2 + eps^2): a vector of norm |h| / sqrt(|h|^2 + eps^2), which is 1 for all but the smallest h.

    Shapes: [... d] -> [... d], float32 or wider. No further factor 1 / sqrt(d); h = 0 gives k = 0, its gradient finite, with eps from 1e-12 on.
    In float32 |h| lies below 1e19, where its square overflows.
    Source: Deep Delta Learning, arXiv 2601.00417 v3 (the direction of the rank-one update).
    """
    h = wide(h)
    return h * torch.rsqrt(h.square().sum(-1, keepdim=True) + eps**2)


def delta(
    x: Float[Tensor, "*batch n d"],
    k: Float[Tensor, "*batch d"],
    v: Float[Tensor, "*batch n"],
    beta: Float[Tensor, "*batch"],
) -> Float[Tensor, "*batch n d"]:
    """X + beta k (v^T - k^T X): what X holds along k moves towards v by the share beta; all orthogonal to k stays.

    With |k| = 1 the error e = k^T X - v^T becomes (1 - beta) e: beta 0 keeps what is there, 1 replaces, 2 reflects it.
    For fixed k, beta and v the map of X has determinant 1 - beta and spectrum {1 (d - 1 times), 1 - beta} per channel.
    Shapes: x [... n d], k [... d], v [... n], beta [...] -> [... n d].
    Source: Deep Delta Learning, arXiv 2601.00417 v3 (delta update; with n = 1 its vector form x + beta (v - k^T x) k).
    """
    with full_precision(x):
        kept, k = wide(x), wide(k).unsqueeze(-2)
        error = wide(v) - torch.linalg.vecdot(kept, k)
        return torch.addcmul(kept, (wide(beta).unsqueeze(-1) * error).unsqueeze(-1), k).to(x.dtype)


def write(
    x: Float[Tensor, "*batch n d"],
    k: Float[Tensor, "*batch d"],
    v: Float[Tensor, "*batch n"],
    beta: Float[Tensor, "*batch"],
) -> Float[Tensor, "*batch n d"]:
    """X + beta k v^T: the delta step without its erasure.

    Shapes: x [... n d], k [... d], v [... n], beta [...] -> [... n d].
    Source: the write-only control that Deep Delta Learning asks for (arXiv 2601.00417, limits section).
    """
    with full_precision(x):
        step = (wide(beta).unsqueeze(-1) * wide(v)).unsqueeze(-1)
        return torch.addcmul(wide(x), step, wide(k).unsqueeze(-2)).to(x.dtype)


def reflect(x: Float[Tensor, "*batch n d"], k: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch n d"]:
    """X - 2 k (k^T X) / |k|^2: every row of X reflected at the hyperplane orthogonal to k, of any norm.

    Symmetric, orthogonal and its own inverse. k = 0 names no hyperplane and gives NaN.
    Shapes: x [... n d], k [... d] -> [... n d].
    Source: Householder 1958, "Unitary triangularization of a nonsymmetric matrix".
    """
    with full_precision(x):
        kept, k = wide(x), wide(k).unsqueeze(-2)
        share = torch.linalg.vecdot(kept, k) / torch.linalg.vecdot(k, k)
        return torch.addcmul(kept, share.unsqueeze(-1), k, value=-2).to(x.dtype)
