"""One call of an attention function: what went in, what came out, and what each token read of its own value.

Axis legend: ``b`` batch, ``h`` query heads, ``kv`` key-value heads, ``q`` queries, ``k`` keys (those of a cache included), ``d`` width of
queries and keys, ``dv`` width of a value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from thalweg.errors import InputError
from thalweg.ops.own_attention import own_attention


@dataclass
class AttentionCall:
    """Inputs and output of one attention module in one forward pass.

    module: which called. query [b h q d], key [b kv k d] and value [b kv k dv]: after norms, rotation and the cache, as the scores see
    them. mask: None, boolean (True: may look) or added to the scores; ``causal`` says what holds without one. sinks [h]: logits in the
    denominator alone. output [b q h dv]: softmax(scores) value, before a gate and the output projection. again: computes the output anew
    from another mask, and from other keys and values where they are given (``key``, ``value``). dropout: rate on the weights in this call.
    weights [b h q k]: what the values were weighted by, where that is no softmax of the scores; None: it is.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float | None
    softcap: float | None
    sinks: Tensor | None
    output: Tensor
    again: Callable[..., Tensor]
    causal: bool = True
    dropout: float = 0.0
    weights: Tensor | None = None

    @property
    def layer(self) -> int | None:
        """What the module says of its layer; None where it says nothing."""
        return getattr(self.module, "layer_idx", None)

    @cached_property
    def first(self) -> int:
        """Position of the first query among the keys: a growing cache puts the queries last, one of fixed size where its mask ends.

        Raises: InputError where keys and queries are other tokens (no causal mask says who is who).
        """
        q, k = self.query.shape[2], self.key.shape[2]
        if q == k:
            return 0
        if self.mask is None:
            if q == 1:
                return k - 1
            if (
                self.causal
            ):  # transformers aligns a causal order without a mask to the first key (an empty cache of fixed size)
                return 0
        elif self.causal:
            seen = visible(self.mask, k)
            last = torch.where(seen, torch.arange(k, device=seen.device), -1).amax(-1)  # [b or 1, h or 1, q]
            return int((last - torch.arange(q, device=seen.device)).max())
        raise InputError(
            f"{q} queries on {k} keys without a causal order: it cannot be told which key is whose own; edit self-attention only"
        )

    def own(self) -> Float[Tensor, "b h q"]:
        """A_tt, the weight of every query on its own key, in float32 or wider; 0 for a query that is hidden from itself (padding).

        Raises: InputError with attention dropout, whose weights are not those of the softmax.
        """
        if self.dropout:
            raise InputError(
                "attention dropout is on, so a token's weight on itself is random; call model.eval() first"
            )
        if self.weights is not None:
            return self.weights.diagonal(self.first, -2, -1)
        end = self.first + self.query.shape[2]  # later keys of a cache of fixed size hold no token yet
        mask = None if self.mask is None else self.mask[..., :end]
        return own_attention(
            self.query,
            self.key[:, :, :end],
            mask,
            self.scaling,
            softcap=self.softcap,
            sinks=self.sinks,
            causal=self.causal,
        )

    def own_values(self) -> Float[Tensor, "b q kv dv"]:
        """The values of the queries themselves, of all that the keys hold."""
        return self.value[:, :, self.first : self.first + self.query.shape[2]].transpose(1, 2)

    def visible(self) -> Bool[Tensor, "#b #h q keys"]:
        """Who may look at whom."""
        q, k = self.query.shape[2], self.key.shape[2]
        if self.mask is not None:
            return visible(self.mask, k)
        seen = torch.ones(1, 1, q, k, dtype=torch.bool, device=self.query.device)
        return seen.tril(self.first) if self.causal else seen

    def without_own(self) -> Float[Tensor, "b q h dv"]:
        """The output with A_tt = 0 after the softmax and the row renormalised; a row that sees nobody else keeps its own.

        The same as hiding the diagonal before the softmax, which is what is computed: nothing is divided by 1 - A_tt.
        """
        seen = self.visible()
        own = torch.zeros_like(seen[:1, :1])
        at = torch.arange(own.shape[-2], device=own.device)
        own[..., at, self.first + at] = True
        alone = ~(seen & ~own).any(-1, keepdim=True)
        seen = seen & (~own | alone)
        if self.mask is None or self.mask.dtype == torch.bool:
            mask = seen
        else:
            hidden = torch.finfo(self.mask.dtype).min
            mask = torch.where(seen, self.mask[..., : self.key.shape[2]], hidden)
        return self.again(mask)


def visible(mask: Tensor, keys: int) -> Bool[Tensor, "#b #h q keys"]:
    """A mask of either kind as a boolean one; from half the lowest number of its dtype on down it hides."""
    mask = mask[..., :keys]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
