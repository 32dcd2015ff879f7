"""How much of its own value a token reads: the diagonal of the attention weights, without the matrix.

Axis legend: ``b`` batch, ``h`` query heads, ``kv`` key-value heads, ``q`` queries, ``k`` keys (those of a cache included), ``d`` width.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.ops.precision import full_precision, wide

CHUNK = 128  # queries whose scores are held at once


def own_attention(
    query: Float[Tensor, "b h q d"],
    key: Float[Tensor, "b kv k d"],
    mask: Float[Tensor, "#b #h q keys"] | Bool[Tensor, "#b #h q keys"] | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " h"] | None = None,
    sliding_window: int | None = None,
    causal: bool = True,
    chunk: int = CHUNK,
) -> Float[Tensor, "b h q"]:
    """A_tt = exp(s_tt - ln(sum_s exp(s_ts) + exp(sink))): the weight of every query on its own key.

    Shapes: query [b h q d], key [b kv k d] -> [b h q], float32 or wider. The queries are the last q of the k positions; query head h reads
    key head h // (h / kv). Scores are scaling * q.k (1 / sqrt(d) unless given), then softcap * tanh(scores / softcap), then the mask.
    mask: [b or 1, h or 1, q, k or more], True where a query may look, or added to the scores (from half the lowest number of its dtype on
    down it hides); it says all there is to say about who sees whom. Without one the ``causal`` order does, with the ``sliding_window`` of a
    token and the ones before it, or every query sees every key. sinks: a logit per query head in the denominator alone, so that a row
    sums to less than 1. A query that may not look at itself, a padded one too, reads 0.
    Memory: the scores of ``chunk`` queries at a time, b * h * chunk * k numbers. Differentiable.
    Raises: ShapeError, InputError.
    Source: He et al. 2026 (arXiv 2609.15975), whose exclude-self edit needs this number; the log-sum-exp is the definition of softmax.
    """
    b, h, q, d, kv, k = _sizes(query, key)
    mask = _mask(mask, b, h, q, k)
    if chunk < 1:
        raise InputError(f"chunk must be at least 1 query, got {chunk}")
    if sinks is not None and sinks.shape != (h,):
        raise ShapeError(f"sinks must hold one logit per query head [{h}], got shape {list(sinks.shape)}")
    scale = d**-0.5 if scaling is None else scaling
    first = k - q
    with full_precision(query):
        keys, found = wide(key).mT, []
        for start in range(0, q, chunk):
            part = wide(query[:, :, start : start + chunk]) * scale
            count = part.shape[2]
            seen = first + start + count if mask is None and causal else k  # later keys are hidden from all of these
            scores = part.reshape(b, kv, h // kv * count, d) @ keys[..., :seen]
            scores = scores.view(b, h, count, seen)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if mask is not None:
                scores = _masked(scores, mask[:, :, start : start + chunk])
            elif causal:
                scores = _in_order(scores, first + start, sliding_window)
            found.append(_own(scores, first + start, sinks))
    return torch.cat(found, -1)


def _own(scores: Tensor, offset: int, sinks: Tensor | None) -> Tensor:
    own = scores.diagonal(offset=offset, dim1=-2, dim2=-1)
    seen = own > -torch.inf
    total = torch.logsumexp(torch.where(seen.unsqueeze(-1), scores, 0.0), -1)
    if sinks is not None:
        total = torch.logaddexp(total, wide(sinks).to(total.dtype)[:, None])
    return torch.where(seen, torch.exp(torch.where(seen, own, 0.0) - total), 0.0)


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return (scores + wide(mask)).masked_fill(hidden, -torch.inf)


def _in_order(scores: Tensor, offset: int, window: int | None) -> Tensor:
    at = offset + torch.arange(scores.shape[-2], device=scores.device)[:, None]
    to = torch.arange(scores.shape[-1], device=scores.device)
    hidden = to > at if window is None else (to > at) | (to <= at - window)
    return scores.masked_fill(hidden, -torch.inf)


def _sizes(query: Tensor, key: Tensor) -> tuple[int, int, int, int, int, int]:
    if query.ndim != 4 or key.ndim != 4 or query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1]:
        raise ShapeError(
            f"queries [b h q d] and keys [b kv k d] must share b and d, got {list(query.shape)} and {list(key.shape)}"
        )
    (b, h, q, d), (kv, k) = query.shape, key.shape[1:3]
    if kv < 1 or h % kv:
        raise ShapeError(f"{h} query heads cannot share {kv} key-value heads evenly")
    if q > k:
        raise ShapeError(f"the queries are the last of the keys, but there are {q} queries and {k} keys")
    return b, h, q, d, kv, k


def _mask(mask: Tensor | None, b: int, h: int, q: int, k: int) -> Tensor | None:
    if mask is None:
        return None
    fits = mask.ndim == 4 and mask.shape[0] in (1, b) and mask.shape[1] in (1, h) and mask.shape[2] == q
    if not fits or mask.shape[3] < k:
        raise ShapeError(f"a mask must be [{b} or 1, {h} or 1, {q}, {k} or more], got shape {list(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(f"a mask must be boolean or added to the scores in floating point, got {mask.dtype}")
    return mask[..., :k]
