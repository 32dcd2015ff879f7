"""Attention as a transport plan: the weights of a head are drawn to hold the masses of the keys too, not of the queries alone."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from thalweg.ops.entropic import CausalMasses, causal_bridge_on, two_way_bridge
from thalweg.ops.precision import full_precision, wide


def transport_weights(
    query: Float[Tensor, "b h q d"],
    key: Float[Tensor, "b kv k d"],
    allowed: Bool[Tensor, "#b #h q k"] | None,
    past: CausalMasses | None,
    scale: float | None,
    iterations: int,
    causal: bool,
) -> tuple[Float[Tensor, "b h q k"], CausalMasses | tuple[()]]:
    """Weights, float32 or wider, and what later rows need of these: of the causal bridge, or both ways of Sinkhorn's iterations with uniform
    marginals, which leave nothing.

    allowed: True where a query may look; None: all, or in causal order those up to itself (then q is k). past: what the rows of earlier calls
    left; only a causal plan can be made row by row.
    """
    with full_precision(query):
        q, k = wide(query), wide(key)
        scores = (
            q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        )
        if allowed is None and causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        if not causal:
            return two_way_bridge(scores, iterations).exp(), ()
        plan, left = causal_bridge_on(scores, past, iterations)
        return plan.exp(), left


def among_real(
    allowed: Bool[Tensor, "#b 1 t k"] | None, real: Bool[Tensor, "b t"] | None
) -> Bool[Tensor, "b 1 t k"] | None:
    """``allowed`` with padding left to itself: what it reads is nobody's business, but here it would take mass from the keys."""
    if allowed is None or real is None:
        return allowed
    t, k = allowed.shape[-2:]
    itself = torch.arange(k, device=allowed.device) == torch.arange(k - t, k, device=allowed.device)[:, None]
    return allowed & (real[:, None, :, None] | itself)


def transported(weights: Float[Tensor, "b h q k"], value: Float[Tensor, "b kv k w"]) -> Float[Tensor, "b q h w"]:
    """What the heads read by these weights, in the dtype of the values."""
    with full_precision(value):
        y = weights @ wide(value).repeat_interleave(weights.shape[1] // value.shape[1], 1)
    return y.transpose(1, 2).to(value.dtype)
