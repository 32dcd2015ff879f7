"""The decoder: a causal transformer over any connection, and the loss of the next token."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from thalweg.errors import InputError
from thalweg.models.cache import DecoderCache
from thalweg.models.config import DecoderConfig
from thalweg.models.look import IGNORED, check_ids, check_labels, look
from thalweg.models.trace import StreamTrace
from thalweg.models.transformer import Losses, Transformer, check_trace
from thalweg.ops.precision import wide


class DecoderOutput(NamedTuple):
    """logits [b t v]; loss: mean nats per token, float32 or wider, when labels were given; cache: the one that was handed in."""

    logits: Tensor
    loss: Tensor | None = None
    cache: DecoderCache | None = None


class Decoder(Transformer):
    """A decoder-only language model over any connection.

    Weights come from torch's global generator, or from ``generator``: one draw, whatever the architecture; two decoders of one seed that
    differ in the connection alone have the same embedding and sublayers, up to the gains that the connection requires.
    """

    made_of = DecoderConfig

    def make_head(self) -> nn.Linear:
        head = nn.Linear(self.config.width, self.config.vocab_size, bias=False)
        if self.config.tie_embeddings:
            head.weight = self.embedding.weight
        return head

    def initialise_head(self) -> None:
        if not self.config.tie_embeddings:
            nn.init.normal_(self.head.weight, std=self.config.initial_std)

    def loss(self, logits: Float[Tensor, "b t v"], labels: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
        return next_token_loss(logits, labels)

    def losses(self, logits: Float[Tensor, "b t v"], labels: Int[Tensor, "b t"]) -> Losses:
        return token_losses(logits[:, :-1], labels[:, 1:])

    def forward(
        self,
        input_ids: Int[Tensor, "b t"],
        *,
        labels: Int[Tensor, "b t"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "b t"] | None = None,
        segments: Int[Tensor, "b t"] | None = None,
        cache: DecoderCache | None = None,
        trace: StreamTrace | None = None,
        logits_to_keep: int = 0,
    ) -> DecoderOutput:
        """Token ids [b t] -> logits [b t v], and the loss when labels are given.

        labels [b t]: aligned with ``input_ids``; the shift to the next token happens here, -100 is left out of the mean (NaN if nothing
        is left). attention_mask [b t], or [b p+t] with a cache that holds p tokens: nonzero where a token is real; left or right padding.
        position_ids [b t]: default 0, 1, ... over the real tokens of a row or of a segment. segments [b t]: equal within one packed
        document; tokens see their own document only. cache: holds the earlier tokens of the same rows and is extended in place. trace:
        filled with what happened to the stream. logits_to_keep: the last n positions only (0: all).
        Raises: InputError for ids or labels outside the vocabulary (on CPU), too long a sequence, the cache of another model, or arguments
        of another kind or that do not fit together; ShapeError.
        """
        check_ids(input_ids, self.embedding.num_embeddings)
        if labels is not None:
            check_labels(labels, input_ids, self.embedding.num_embeddings)
        self.check_rest(cache, trace, logits_to_keep, scored=labels is not None)
        tokens, view = look(
            self.config, self.embedding.weight.dtype, input_ids, attention_mask, position_ids, segments, cache
        )
        hidden = self.run(self.embed(input_ids, tokens.positions), tokens, view, cache, trace)
        logits = self.unembed(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        return DecoderOutput(logits, None if labels is None else self.loss(logits, labels), cache)

    def check_rest(self, cache: object, trace: object, logits_to_keep: object, *, scored: bool) -> None:
        """What is no token of the call. Raises: InputError."""
        if not isinstance(logits_to_keep, int | torch.SymInt) or isinstance(logits_to_keep, bool) or logits_to_keep < 0:
            raise InputError(
                f"logits_to_keep must be a whole number of at least 0 (all positions), got {logits_to_keep!r:.40}"
            )
        if scored and logits_to_keep:
            raise InputError(f"labels need all logits, got logits_to_keep {logits_to_keep}; leave one of them out")
        check_trace(trace)
        if cache is None:
            return
        if not isinstance(cache, DecoderCache):
            raise InputError(f"cache must be a DecoderCache, got {type(cache).__name__}; make one by DecoderCache()")
        if not torch.compiler.is_compiling():
            cache.claim(self)


def next_token_loss(logits: Float[Tensor, "b t v"], labels: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Mean cross-entropy of token t+1 under the logits at t, in nats, over the labels that are not -100."""
    following = F.pad(labels[:, 1:].long(), (0, 1), value=IGNORED)
    return F.cross_entropy(wide(logits).flatten(0, 1), following.flatten(), ignore_index=IGNORED)


def token_losses(logits: Float[Tensor, "b t v"], labels: Int[Tensor, "b t"]) -> Losses:
    """Cross-entropy of labels under the logits at their own place, summed over the tokens of each sequence, -100 left out."""
    each = F.cross_entropy(wide(logits).mT, labels.long(), ignore_index=IGNORED, reduction="none")
    return Losses(each.double().sum(-1), (labels != IGNORED).sum(-1).double())
