"""What decoders and encoders share: embedding, a stream, blocks that write to it, and a head that reads what left it."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, cast

import torch
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
from thalweg.models.retained import take_weights
from thalweg.models.sublayers import Sublayer, TokenView
from thalweg.models.trace import StreamTrace
from thalweg.ops.precision import wide

if TYPE_CHECKING:
    from thalweg.capture import Located


class Losses(NamedTuple):
    """Of every sequence [b]: summed nats, and how many predictions they are of, float64."""

    nats: Tensor
    scored: Tensor

    @property
    def mean(self) -> float:
        """Nats per scored prediction."""
        return (self.nats.sum() / self.scored.sum()).item()


class Transformer(nn.Module):
    """Base of :class:`thalweg.models.Decoder` and :class:`thalweg.models.Encoder`; which of them, ``config`` says.

    Weights come from torch's global generator, or from ``generator``: one draw, whatever the architecture; two models of one seed that
    differ in the connection alone have the same embedding and sublayers, up to the gains that the connection requires.
    """

    made_of: ClassVar[type[DecoderConfig]]
    config: DecoderConfig
    head: nn.Linear

    def __init__(self, config: DecoderConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        if not isinstance(config, self.made_of) or config.causal != self.made_of.causal:
            name, wanted = type(self).__name__, self.made_of.__name__
            raise InputError(
                f"{_article(name)} is made of {_article(wanted)}, got {type(config).__name__}; give {wanted}(vocab_size=..., width=..., ...)"
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
            check_stream(config.connection, self.stream, causal=config.causal)
            edit_sites(self.stream, config)
            per_layer = len(config.layers)
            layers = [config.sites[i : i + per_layer] for i in range(0, len(config.sites), per_layer)]
            self.blocks = nn.ModuleList(
                Block(config, sites, [self.stream.requirements(s) for s in sites]) for sites in layers
            )
            self.head = self.make_head()
            initialise(self, seed)

    def make_head(self) -> nn.Linear:
        """The map from what left the stream to the logits."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it predicts")

    def initialise_head(self) -> None:
        """Draw the weights of the head, where they are its own."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its head starts")

    def losses(self, logits: Tensor, labels: Tensor) -> Losses:
        """The loss of every sequence by itself."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its loss is")

    def loss(self, logits: Tensor, labels: Tensor) -> Float[Tensor, ""]:
        """Mean nats per label that is not -100, float32 or wider; NaN if nothing is left."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its loss is")

    def blank_labels(self, batch: int, length: int) -> Int[Tensor, "..."]:
        """Labels of the right shape for ``batch`` sequences of ``length`` tokens, all of them 0."""
        return torch.zeros(batch, length, dtype=torch.long)

    def unembed(self, hidden: Float[Tensor, "b t d"]) -> Float[Tensor, "b t v"]:
        """What the stream left [b t d] -> logits [b t v], soft cap included."""
        logits = self.head(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else (cap * torch.tanh(wide(logits) / cap)).to(logits.dtype)

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
        """Embedding [b t d] -> what the head sees [b t d]."""
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
        from thalweg.models.capture import locate_transformer

        return locate_transformer(self)

    def with_edits(self, **edits: Any) -> Self:
        """A copy with the same weights and other edits, to evaluate with an edit what was trained without, or the reverse.

        edits: ``attention_edit`` and ``mlp_edit``, None for none; what is not named stays. Raises: InputError, UnknownNameError.
        """
        for name in edits:
            if name not in EDITS:
                raise UnknownNameError("edit", name, EDITS)
        weight = self.embedding.weight
        other = type(self)(self.config.replace(**edits), generator=torch.Generator().manual_seed(0))
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


def check_trace(trace: object) -> None:
    """Raises: InputError."""
    if trace is not None and not isinstance(trace, StreamTrace):
        raise InputError(f"trace must be a StreamTrace, got {type(trace).__name__}; make one by StreamTrace()")


def check_stream(name: str, stream: Stream, *, causal: bool = True) -> None:
    """What blocks and checkpoints need of a connection beyond the protocol. Raises: InputError."""
    if type(stream).advance is not Stream.advance:
        raise InputError(f"connection {name!r} must fuse in its site's advance: a block has its own sites only")
    if causal and stream.sees_later_tokens:
        raise InputError(
            f"connection {name!r} with these options sees later tokens, which a decoder must not; they are for encoders, choose others"
        )
    if any(module._non_persistent_buffers_set for module in stream.modules()):
        raise InputError(
            f"connection {name!r} must register its buffers as persistent: others are lost when a model is loaded"
        )


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
