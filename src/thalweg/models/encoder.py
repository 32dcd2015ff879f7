"""The encoder: a transformer whose tokens see each other in both directions, to classify sequences or to fill in masked tokens."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from thalweg.errors import InputError, ShapeError
from thalweg.models.decoder import token_losses
from thalweg.models.encoder_config import EncoderConfig
from thalweg.models.look import IGNORED, can_look_at, check_ids, check_integers, check_labels, look
from thalweg.models.trace import StreamTrace
from thalweg.models.transformer import Losses, Transformer, check_trace
from thalweg.ops.precision import wide


class EncoderOutput(NamedTuple):
    """last_hidden_state [b t d]: what left the stream; logits: [b c] of a classification, [b t v] of masked tokens; loss: mean nats per
    label, float32 or wider, when labels were given.
    """

    last_hidden_state: Tensor
    logits: Tensor
    loss: Tensor | None = None


class Encoder(Transformer):
    """A bidirectional transformer over any connection, those that look at later tokens included.

    Weights come from torch's global generator, or from ``generator``: one draw, whatever the architecture; two encoders of one seed that
    differ in the connection alone have the same embedding and sublayers, up to the gains that the connection requires.
    Source: Devlin et al. 2019 (arXiv 1810.04805), with the layers of our decoders. Deviations: no segment embedding, no dropout, no pooler
    with a tanh, no next-sentence loss; the masked tokens are predicted by the (tied) unembedding alone, without a map and a norm before it.
    """

    made_of = EncoderConfig
    config: EncoderConfig  # type: ignore[assignment]

    def make_head(self) -> nn.Linear:
        config = self.config
        if config.classes is not None:
            return nn.Linear(config.width, config.classes)
        head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie_embeddings:
            head.weight = self.embedding.weight
        return head

    def initialise_head(self) -> None:
        if self.config.classifies or not self.config.tie_embeddings:
            nn.init.normal_(self.head.weight, std=self.config.initial_std)
        if self.head.bias is not None:
            nn.init.zeros_(self.head.bias)

    def forward(
        self,
        input_ids: Int[Tensor, "b t"],
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "b t"] | None = None,
        segments: Int[Tensor, "b t"] | None = None,
        trace: StreamTrace | None = None,
    ) -> EncoderOutput:
        """Token ids [b t] -> logits [b c] or [b t v], and the loss when labels are given.

        labels: [b] classes, or [b t] the tokens that were masked, at their own place (nothing is shifted); -100 is left out of the mean
        (NaN if nothing is left). attention_mask [b t]: nonzero where a token is real; left or right padding. position_ids [b t]: default
        0, 1, ... over the real tokens of a row or of a segment. segments [b t]: equal within one packed document; tokens see their own
        document only; not for a classification. trace: filled with what happened to the stream.
        Raises: InputError for ids or labels out of range or a row without a token (on CPU), too long a sequence, or arguments of another
        kind or that do not fit together; ShapeError.
        """
        check_ids(input_ids, self.embedding.num_embeddings)
        if labels is not None:
            self.check_labels(labels, input_ids)
        check_trace(trace)
        if segments is not None and self.config.classifies:
            raise InputError("packed documents (segments) have no class of their own; pass one document per row")
        tokens, view = look(
            self.config, self.embedding.weight.dtype, input_ids, attention_mask, position_ids, segments, None
        )
        hidden = self.run(self.embed(input_ids, tokens.positions), tokens, view, None, trace)
        logits = self.unembed(hidden, tokens.mask)
        return EncoderOutput(hidden, logits, None if labels is None else self.loss(logits, labels))

    def unembed(self, hidden: Float[Tensor, "b t d"], real: Bool[Tensor, "b t"] | None = None) -> Tensor:
        """What the stream left [b t d] -> logits, [b c] of a classification, else [b t v]. real: True where a token is no padding."""
        return super().unembed(pool(hidden, self.config.pooling, real) if self.config.classifies else hidden)

    def loss(self, logits: Tensor, labels: Tensor) -> Float[Tensor, ""]:
        return F.cross_entropy(wide(logits).flatten(0, -2), labels.long().flatten(), ignore_index=IGNORED)

    def losses(self, logits: Tensor, labels: Tensor) -> Losses:
        return (
            token_losses(logits[:, None], labels[:, None]) if self.config.classifies else token_losses(logits, labels)
        )

    def blank_labels(self, batch: int, length: int) -> Int[Tensor, "..."]:
        labels = super().blank_labels(batch, length)
        return labels[:, 0] if self.config.classifies else labels

    def check_labels(self, labels: Tensor, input_ids: Tensor) -> None:
        """Raises: InputError, ShapeError for what no loss can be taken of."""
        if not self.config.classifies:
            check_labels(labels, input_ids, self.embedding.num_embeddings)
            return
        check_integers("labels", labels, "[batch]")
        batch, classes = len(input_ids), self.head.out_features
        if labels.shape != (batch,):
            raise ShapeError(f"labels must be [{batch}], one class per row, got shape {tuple(labels.shape)}")
        if can_look_at(labels):
            wrong = (labels != IGNORED) & ((labels < 0) | (labels >= classes))
            if bool(wrong.any()):
                raise InputError(
                    f"labels must lie in 0..{classes - 1} (classes {classes}) or be {IGNORED} (not scored), got {int(labels[wrong][0])}"
                )


def pool(
    hidden: Float[Tensor, "b t d"], how: Literal["mean", "first", "max"], real: Bool[Tensor, "b t"] | None = None
) -> Float[Tensor, "b d"]:
    """One vector for each sequence: mean (in float32 or wider), first, or entry-wise maximum of its tokens that are ``real`` (None: all).

    Raises: InputError for a row without a real token (on CPU).
    """
    if real is None:
        real = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    elif can_look_at(real) and not bool(real.any(1).all()):
        raise InputError(f"row {int((~real.any(1)).nonzero()[0])} has no real token (attention_mask is 0), so no class")
    if how == "first":
        return hidden[torch.arange(len(hidden), device=hidden.device), real.int().argmax(1)]
    if how == "max":
        return hidden.masked_fill(~real[..., None], -torch.inf).amax(1)
    # A padded state may be anything, infinity too, so it is left out and not multiplied by 0.
    kept = wide(hidden).masked_fill(~real[..., None], 0.0)
    return (kept.sum(1) / real.sum(1, keepdim=True)).to(hidden.dtype)
