"""A decoder whose layers are integrated in finer steps with the weights that it has: any step, any splitting, the same parameters."""

from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

from thalweg.errors import InputError
from thalweg.models.decoder import Decoder, DecoderOutput, next_token_loss
from thalweg.models.look import check_ids, check_labels, look
from thalweg.ops.depth import Field, Scheme, through_layer


class IntegratedDecoder(nn.Module):
    """``decoder`` with every layer as dx/dz = F_1(x) + F_2(x) over one unit of depth, in ``steps`` steps of ``size`` by ``scheme``.

    F_i: what its i-th sublayer adds to a state, norms included. size: None for 1 / steps, which is one layer's depth in all. One step of
    ``lie`` is bitwise the decoder. The parameters are the decoder's own, shared, and can be trained through either.
    For connections that add an update to one stream (``additive``, in all forms of its norms).
    Raises: InputError for another connection; as :func:`thalweg.ops.depth.through_layer`.
    """

    def __init__(self, decoder: Decoder, steps: int = 1, scheme: Scheme = "lie", size: float | None = None):
        super().__init__()
        if not isinstance(decoder, Decoder):
            raise InputError(
                f"a Decoder is integrated, got {type(decoder).__name__}; of transformers' models take their probe (splitting)"
            )
        if decoder.config.connection != "additive":
            raise InputError(
                f"layers are integrated where they add an update to one stream (additive), got connection {decoder.config.connection!r}"
            )
        through_layer(decoder.embedding.weight.new_zeros(1), (), steps, scheme, size)  # refuses what is no step
        self.decoder, self.steps, self.size = decoder, steps, size
        self.scheme: Scheme = scheme

    @property
    def config(self) -> Any:
        """That of the decoder."""
        return self.decoder.config

    def forward(
        self,
        input_ids: Int[Tensor, "b t"],
        *,
        labels: Int[Tensor, "b t"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "b t"] | None = None,
        segments: Int[Tensor, "b t"] | None = None,
    ) -> DecoderOutput:
        """As :meth:`Decoder.forward`, without a cache. Raises: as it does."""
        own = self.decoder
        check_ids(input_ids, own.embedding.num_embeddings)
        if labels is not None:
            check_labels(labels, input_ids, own.embedding.num_embeddings)
        tokens, view = look(
            own.config, own.embedding.weight.dtype, input_ids, attention_mask, position_ids, segments, None
        )
        x = own.stream.enter(own.embed(input_ids, tokens.positions), tokens)
        sites, per_layer = list(own.stream.sites), len(own.config.layers)
        sublayers = own.sublayers

        def field(i: int) -> Field:
            def update(x: Tensor) -> Tensor:
                read, _ = sites[i].read(x, tokens)
                return sites[i].update_norm(sublayers[i](read, view))

            return update

        for start in range(0, len(sites), per_layer):
            fields = [field(i) for i in range(start, start + per_layer)]
            x = through_layer(x, fields, self.steps, self.scheme, self.size)
        logits = own.unembed(own.stream.leave(x, tokens))
        return DecoderOutput(logits, None if labels is None else next_token_loss(logits, labels))
