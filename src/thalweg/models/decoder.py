"""The decoder: embedding, a stream, blocks that write to it, unembedding."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thalweg import connections
from thalweg.connections import Stream, Tokens
from thalweg.errors import InputError, UnknownNameError
from thalweg.models.along import edit_sites
from thalweg.models.block import Block
from thalweg.models.cache import DecoderCache
from thalweg.models.config import EDITS, DecoderConfig
from thalweg.models.init import initialise, one_seed
from thalweg.models.look import IGNORED, check_ids, check_labels, look
from thalweg.models.retained import take_weights
from thalweg.models.sublayers import Sublayer, TokenView
from thalweg.models.trace import StreamTrace
from thalweg.ops.precision import wide

if TYPE_CHECKING:
    from thalweg.capture import Located


class DecoderOutput(NamedTuple):
    """logits [b t v]; loss: mean nats per token, float32 or wider, when labels were given; cache: the one that was handed in."""

    logits: Tensor
    loss: Tensor | None = None
    cache: DecoderCache | None = None


class Decoder(nn.Module):
    """A decoder-only language model over any connection.

    Weights come from torch's global generator, or from ``generator``: one draw, whatever the architecture; two decoders of one seed that
    differ in the connection alone have the same embedding and sublayers, up to the gains that the connection requires.
    """

    def __init__(self, config: DecoderConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        if not isinstance(config, DecoderConfig):
            raise InputError(
                f"a Decoder is made of a DecoderConfig, got {type(config).__name__}; give DecoderConfig(vocab_size=..., width=..., ...)"
            )
        self.config = config
        self.gradient_checkpointing = config.gradient_checkpointing
        with one_seed(generator) as seed:
            self.embedding = nn.Embedding(config.vocab_size, config.width)
            learned = config.positions == "learned"
            self.position_embedding = nn.Embedding(config.max_length, config.width) if learned else None
            self.stream = connections.create(
                config.connection, width=config.width, sites=config.sites, **config.stream_values()
            )
            check_stream(config.connection, self.stream)
            edit_sites(self.stream, config)
            per_layer = len(config.layers)
            layers = [config.sites[i : i + per_layer] for i in range(0, len(config.sites), per_layer)]
            self.blocks = nn.ModuleList(
                Block(config, sites, [self.stream.requirements(s) for s in sites]) for sites in layers
            )
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)
            if config.tie_embeddings:
                self.head.weight = self.embedding.weight
            initialise(self, seed)

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
        return DecoderOutput(logits, None if labels is None else next_token_loss(logits, labels), cache)

    def check_rest(self, cache: object, trace: object, logits_to_keep: object, *, scored: bool) -> None:
        """What is no token of the call. Raises: InputError."""
        if not isinstance(logits_to_keep, int | torch.SymInt) or isinstance(logits_to_keep, bool) or logits_to_keep < 0:
            raise InputError(
                f"logits_to_keep must be a whole number of at least 0 (all positions), got {logits_to_keep!r:.40}"
            )
        if scored and logits_to_keep:
            raise InputError(f"labels need all logits, got logits_to_keep {logits_to_keep}; leave one of them out")
        if trace is not None and not isinstance(trace, StreamTrace):
            raise InputError(f"trace must be a StreamTrace, got {type(trace).__name__}; make one by StreamTrace()")
        if cache is None:
            return
        if not isinstance(cache, DecoderCache):
            raise InputError(f"cache must be a DecoderCache, got {type(cache).__name__}; make one by DecoderCache()")
        if not torch.compiler.is_compiling():
            cache.claim(self)

    def embed(self, input_ids: Int[Tensor, "b t"], positions: Int[Tensor, "b t"] | None) -> Float[Tensor, "b t d"]:
        """Token ids [b t] -> what enters the stream [b t d], scaled and with learned positions where the model has them."""
        embedding, scale = self.embedding(input_ids), self.config.embedding_scale
        embedding = embedding if scale == 1 else embedding * scale
        return embedding if self.position_embedding is None else embedding + self.position_embedding(positions)

    def run(
        self,
        embedding: Float[Tensor, "b t d"],
        tokens: Tokens,
        view: TokenView,
        cache: DecoderCache | None = None,
        trace: StreamTrace | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Embedding [b t d] -> what the unembedding sees [b t d]."""
        sites: list[Any] = list(self.stream.sites)
        per_layer = len(self.config.layers)
        recorded = cache is not None or trace is not None
        recompute = self.gradient_checkpointing and torch.is_grad_enabled() and not recorded
        state = self.stream.enter(embedding, tokens)
        carry = (state, *sites[0].read(state, tokens))
        if trace is not None:
            trace.clear()
            trace.entered = state
        # A cache or a trace grows with every call: compiled blocks would be compiled anew for each.
        eager = recorded and not torch.compiler.is_compiling()
        with torch.compiler.set_stance("force_eager") if eager else nullcontext():
            for i, block in enumerate(self.blocks):
                here, behind = sites[i * per_layer : (i + 1) * per_layer], sites[(i + 1) * per_layer :]
                following = behind[0] if behind else None
                if recompute:
                    carry = checkpoint(block, carry, here, following, tokens, view, use_reentrant=False)
                else:
                    carry = block(carry, here, following, tokens, view, cache, trace)
        hidden = self.stream.leave(carry[0], tokens)
        if trace is not None:
            trace.left = hidden
        return hidden

    @property
    def sublayers(self) -> list[Sublayer]:
        """Every sublayer, in the order of the sites."""
        return [cast(Sublayer, sublayer) for block in self.blocks for sublayer in cast(Block, block).sublayers]

    def locate_stream(self) -> "Located":
        """Where the stream runs, for :func:`thalweg.capture.locate`."""
        from thalweg.models.capture import locate_decoder

        return locate_decoder(self)

    def with_edits(self, **edits: Any) -> "Decoder":
        """A copy with the same weights and other edits, to evaluate with an edit what was trained without, or the reverse.

        edits: ``attention_edit`` and ``mlp_edit``, None for none; what is not named stays. Raises: InputError, UnknownNameError.
        """
        for name in edits:
            if name not in EDITS:
                raise UnknownNameError("edit", name, EDITS)
        weight = self.embedding.weight
        other = Decoder(self.config.replace(**edits), generator=torch.Generator().manual_seed(0))
        other = other.to(weight.device, weight.dtype)
        take_weights(other, self)
        return other.train(self.training)

    def compile_blocks(self, **options: Any) -> None:
        """Compile every block with ``torch.compile(fullgraph=True, **options)``; blocks of one shape share one graph.

        Passes with a cache or a trace run uncompiled. All blocks draw on one recompile limit (64 here, torch's default is 8): the first
        and last layer may differ from the others, and every dtype, gradient mode and kind of length counts.
        """
        for block in self.blocks:
            block.compile(fullgraph=True, **{"recompile_limit": 64, **options})

    def unembed(self, hidden: Float[Tensor, "b t d"]) -> Float[Tensor, "b t v"]:
        """What the stream left [b t d] -> logits [b t v], soft cap included."""
        logits = self.head(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else (cap * torch.tanh(wide(logits) / cap)).to(logits.dtype)


def check_stream(name: str, stream: Stream) -> None:
    """What blocks and checkpoints need of a connection beyond the protocol. Raises: InputError."""
    if type(stream).advance is not Stream.advance:
        raise InputError(f"connection {name!r} must fuse in its site's advance: a block has its own sites only")
    if stream.sees_later_tokens:
        raise InputError(
            f"connection {name!r} with these options sees later tokens, which a decoder must not; they are for encoders, choose others"
        )
    if any(module._non_persistent_buffers_set for module in stream.modules()):
        raise InputError(
            f"connection {name!r} must register its buffers as persistent: others are lost when a model is loaded"
        )


def next_token_loss(logits: Float[Tensor, "b t v"], labels: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Mean cross-entropy of token t+1 under the logits at t, in nats, over the labels that are not -100."""
    following = F.pad(labels[:, 1:].long(), (0, 1), value=IGNORED)
    return F.cross_entropy(wide(logits).flatten(0, 1), following.flatten(), ignore_index=IGNORED)
