"""How much of its own value a token reads: the diagonal of the attention weights, without the matrix.

Axis legend: ``b`` batch, ``h`` query heads, ``kv`` key-value heads, ``q`` queries, ``k`` keys (those of a cache included), ``d`` width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from thalweg.errors import InputError, ShapeError
from thalweg.ops.forward_mode import transformed
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
    Memory: the scores of ``chunk`` queries at a time, b * h * chunk * k numbers, in the backward pass too, which computes them again.
    Differentiable once; compiled, and under forward-mode derivatives, by autograd alone, which keeps all scores and can do it again.
    Raises: ShapeError, InputError.
    Source: He et al. 2026 (arXiv 2609.15975), whose exclude-self edit needs this number; the log-sum-exp is the definition of softmax.
    """
    b, h, q, d, _, k = _sizes(query, key)
    mask = _mask(mask, b, h, q, k)
    if chunk < 1:
        raise InputError(f"chunk must be at least 1 query, got {chunk}")
    if sinks is not None and sinks.shape != (h,):
        raise ShapeError(f"sinks must hold one logit per query head [{h}], got shape {list(sinks.shape)}")
    scale = d**-0.5 if scaling is None else scaling
    scores = _Scores(scale, softcap, mask, causal, sliding_window, k - q, chunk)
    inputs = (query, key) if sinks is None else (query, key, sinks)
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if not recorded or torch.compiler.is_compiling() or transformed():
        return scores.own(query, key, sinks)[0]
    return _Recomputed.apply(scores, query, key, sinks)


@dataclass(frozen=True)
class _Scores:
    """How scores are made of queries and keys, some queries at a time."""

    scale: float
    softcap: float | None
    mask: Tensor | None
    causal: bool
    window: int | None
    first: int  # position of the first query among the keys
    chunk: int

    def parts(self, query: Tensor, key: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
        """Some queries, their scaled rows [b kv rows d], their scores [b h rows keys] with hidden ones at -inf, and under a cap these before
        the mask."""
        (b, h, q, d), (kv, k) = query.shape, key.shape[1:3]
        keys = wide(key).mT
        for start in range(0, q, self.chunk):
            part = wide(query[:, :, start : start + self.chunk]) * self.scale
            count = part.shape[2]
            ordered = self.mask is None and self.causal
            seen = self.first + start + count if ordered else k  # later keys are hidden from all of these
            rows = part.reshape(b, kv, h // kv * count, d)
            scores = (rows @ keys[..., :seen]).view(b, h, count, seen)
            capped = None
            if self.softcap is not None:
                scores = capped = self.softcap * torch.tanh(scores / self.softcap)
            if self.mask is not None:
                scores = _masked(scores, self.mask[:, :, start : start + count])
            elif self.causal:
                scores = _in_order(scores, self.first + start, self.window)
            yield slice(start, start + count), rows, scores, capped

    def own(self, query: Tensor, key: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """A_tt and the logarithm of what its row is divided by, both [b h q]."""
        with full_precision(query):
            found = [
                _own(scores, self.first + at.start, sinks, self.mask is not None)
                for at, _, scores, _ in self.parts(query, key)
            ]
        return torch.cat([own for own, _ in found], -1), torch.cat([total for _, total in found], -1)


class _Recomputed(torch.autograd.Function):
    """dA_tt/ds_tu = A_tt (1[u = t] - A_tu), with the scores made a second time."""

    @staticmethod
    def forward(ctx: Any, scores: _Scores, query: Tensor, key: Tensor, sinks: Tensor | None) -> Tensor:
        own, total = scores.own(query, key, sinks)
        ctx.scores = scores
        ctx.save_for_backward(query, key, sinks, own, total)
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        made: _Scores = ctx.scores
        query, key, sinks, own, total = ctx.saved_tensors
        (b, h, _, d), kv = query.shape, key.shape[1]
        to_query, to_key = torch.empty_like(query), torch.zeros_like(wide(key))
        weight = gradient * own  # [b h q], 0 where a query is hidden from itself
        with full_precision(query):
            for at, rows, scores, capped in made.parts(query, key):
                seen = scores.shape[-1]
                each = torch.exp(scores - total[..., at, None]).mul_(-weight[..., at, None])
                if made.mask is not None:  # a row that sees nobody has no total
                    each = torch.where(weight[..., at, None] == 0, 0.0, each)
                each.diagonal(offset=made.first + at.start, dim1=-2, dim2=-1).add_(weight[..., at])
                if capped is not None and made.softcap is not None:
                    each = each * (1 - (capped / made.softcap).square())
                flat = each.reshape(b, kv, -1, seen)
                to_query[:, :, at] = ((flat @ wide(key)[:, :, :seen]) * made.scale).view(b, h, -1, d).to(query.dtype)
                to_key[:, :, :seen] += flat.mT @ rows
        to_sinks = None
        if sinks is not None:
            share = torch.exp(wide(sinks)[:, None] - total)
            to_sinks = -torch.where(weight == 0, 0.0, weight * share).sum((0, 2)).to(sinks.dtype)
        return None, to_query, to_key.to(key.dtype), to_sinks


def _own(scores: Tensor, offset: int, sinks: Tensor | None, masked: bool) -> tuple[Tensor, Tensor]:
    """A_tt and the logarithm of the sum of a row; masked: some queries may be hidden from themselves, or see nobody."""
    own = scores.diagonal(offset=offset, dim1=-2, dim2=-1)
    seen = own > -torch.inf
    total = torch.logsumexp(torch.where(seen.unsqueeze(-1), scores, 0.0) if masked else scores, -1)
    if sinks is not None:
        total = torch.logaddexp(total, wide(sinks).to(total.dtype)[:, None])
    if not masked:
        return torch.exp(own - total), total
    return torch.where(seen, torch.exp(torch.where(seen, own, 0.0) - total), 0.0), total


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
