"""The central protocol: one ``Stream`` for a network, one ``StreamSite`` for each sublayer.

Axis legend, used in every file of this folder: ``b`` batch, ``t`` token, ``n`` stream (or value channel), ``d`` width. A matrix that moves
streams is ``mix[to, from]``.

    embedding [b t d] --enter--> State --read--> ([b t d], context) --sublayer--> update [b t d]
                                   ^                                                   |
                                   +------------------- write(state, update, context) <+      ... --leave--> [b t d]
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from thalweg.connections.declarations import Equivalence, Facts, GroupHint, Requirements
from thalweg.connections.tokens import Tokens
from thalweg.errors import InputError, ShapeError
from thalweg.ops.norms import Norm

State = Any  # a pytree of tensors of fixed structure that the Stream alone understands
Context = Any  # a pytree of tensors, or None: what one pass over the state computes for both verbs
Sublayer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Site:
    """Where a sublayer stands in the network. ``index`` counts sublayers, ``layer`` counts layers, both from 0; ``depth`` is in layers."""

    index: int
    layer: int
    kind: str
    depth: int
    sublayers_per_layer: int

    @staticmethod
    def stack(depth: int, kinds: Sequence[str]) -> "tuple[Site, ...]":
        """``depth`` layers with one sublayer per entry of ``kinds``."""
        if isinstance(kinds, str):
            raise InputError(f"kinds is a list with one name per sublayer, got the string {kinds!r}; write [{kinds!r}]")
        if not isinstance(depth, int) or isinstance(depth, bool):
            raise InputError(f"depth must be a whole number of layers, got {depth!r}")
        if depth < 1 or not kinds:
            raise InputError(
                f"a network needs at least one layer and one sublayer, got depth {depth} and kinds {tuple(kinds)}"
            )
        return tuple(
            Site(layer * len(kinds) + i, layer, kind, depth, len(kinds))
            for layer in range(depth)
            for i, kind in enumerate(kinds)
        )

    @staticmethod
    def decoder(depth: int) -> "tuple[Site, ...]":
        """The usual decoder: attention, then feed-forward, in every layer."""
        return Site.stack(depth, ("attention", "feed_forward"))

    @property
    def total(self) -> int:
        """Number of sublayers in the network."""
        return self.depth * self.sublayers_per_layer


@dataclass(frozen=True)
class ConnectionOptions:
    """Options that every connection has. Each connection's own dataclass extends it and sets the slots that it uses by default.

    norm: kind of norm in every slot. norm_eps: added to what a norm divides by, under the root. norm_bias: whether norms have a bias.
    input_norm: a norm before the sublayer. update_norm: a norm on what the sublayer returns, before it is written.
    final_norm: a norm on what the unembedding sees.
    """

    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-6
    norm_bias: bool = False
    input_norm: bool = True
    update_norm: bool = False
    final_norm: bool = True

    def make_norm(self, width: int, used: bool = True) -> Norm:
        """A norm of this configuration, or the identity where the slot is not used."""
        return Norm(width, self.norm if used else "none", eps=self.norm_eps, bias=self.norm_bias)

    def slots(self) -> dict[str, Any]:
        """The options that every connection has, to name the same norms of another one."""
        return {f.name: getattr(self, f.name) for f in fields(ConnectionOptions)}


class Mixing(NamedTuple):
    """How one site moves streams side by side, for measurement; float32 or wider.

    read [b t n]; write [b t n], None where something else is written; mix [b t to from]; logits [b t k] behind the mix, None where it
    has none.
    """

    read: Tensor
    write: Tensor | None
    mix: Tensor
    logits: Tensor | None = None


class StreamSite(nn.Module):
    """What happens to the state at one sublayer. ``read`` and ``write`` never change their arguments in place."""

    def __init__(self, width: int, site: Site, options: ConnectionOptions):
        super().__init__()
        self.site = site
        self.input_norm = options.make_norm(width, options.input_norm)
        self.update_norm = options.make_norm(width, options.update_norm)

    def read(self, state: State, tokens: Tokens | None = None) -> tuple[Float[Tensor, "b t d"], Context]:
        """State -> (sublayer input [b t d], context). Raises: ShapeError for a state of another width or number of streams."""
        return self.input_norm(shaped(state, self.input_norm.width)), None

    def write(self, state: State, update: Float[Tensor, "b t d"], context: Context) -> State:
        """State, what the sublayer returned [b t d], context of ``read`` -> next State."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it writes")

    def advance(
        self,
        following: "StreamSite | None",
        state: State,
        update: Tensor,
        context: Context,
        tokens: Tokens | None = None,
    ) -> tuple[State, Tensor | None, Context]:
        """Write here and read at the ``following`` site; override with a fused form if one exists (tested equal).

        After the last site (``following`` is None) the sublayer input and the context are None.
        """
        state = self.write(state, update, context)
        if following is None:
            return state, None, None
        return (state, *following.read(state, tokens))

    def parts(self, state: State) -> tuple[Tensor, Sequence[Tensor]]:
        """Of a state that enters here: its newest tensor, and what it holds of earlier places, the oldest first; for measurement."""
        return state, ()

    def gates(self, state: State, context: Context, update: Tensor | None = None) -> dict[str, Tensor]:
        """Named gate values for measurement, each [b t] or [b t d]; empty where a connection has none.

        update [b t d]: what the sublayer returned, for gates that look at it; they are left out without it.

        Names with a meaning across connections: ``gate`` (in [0, 1], on the update), ``beta`` (write strength), ``erase`` (the factor by
        which the old state is removed: 0 keep, 1 erase, 2 reflect, below 0 or above 2 amplify).
        """
        return {}

    @property
    def mixes(self) -> bool:
        """Whether this site moves several streams by a matrix, so that :meth:`mixing` is not None."""
        return False

    def mixing(self, state: State, context: Context) -> Mixing | None:
        """How this site moves its streams, in the pass that ``context`` is from; None unless it ``mixes``."""
        return None

    def force_mix(self, mix: Float[Tensor, "*batch to from"] | None) -> None:
        """Use this matrix in place of the learned one (broadcast over tokens), for ablations and tests; None: the learned one again.

        For sites that ``mixes``. Raises: ShapeError.
        """
        raise NotImplementedError(f"{type(self).__name__} mixes no streams")

    def reset_parameters(self) -> None:
        """Give every parameter its declared start. The model calls this after its generic initialisation."""
        self.input_norm.reset_parameters()
        self.update_norm.reset_parameters()


class Stream(nn.Module):
    """What happens to the state once per network, and the sites. Subclass it, once per connection.

    A subclass sets ``Options`` (a dataclass extending :class:`ConnectionOptions`), ``SiteModule`` (its :class:`StreamSite`) and ``facts``; it
    overrides the verbs that differ from the plain residual stream, and writes :meth:`reference` in loops.
    """

    Options: ClassVar[type[ConnectionOptions]] = ConnectionOptions
    SiteModule: ClassVar[type[StreamSite]] = StreamSite
    facts: ClassVar[Facts]
    sites: Any  # ModuleList of StreamSite; nn.ModuleList forgets the type of its members

    def __init__(self, width: int, sites: Sequence[Site], options: ConnectionOptions):
        super().__init__()
        if width < 1 or not sites:
            raise InputError(
                f"a stream needs a positive width and at least one site, got width {width} and {len(sites)} sites"
            )
        self.width, self.options, self.layout = width, options, tuple(sites)
        self.sites = nn.ModuleList(self.make_site(site) for site in sites)
        self.final_norm = options.make_norm(width, options.final_norm)

    def make_site(self, site: Site) -> StreamSite:
        """The module of one site; override to share parameters between sites."""
        return self.SiteModule(self.width, site, self.options)

    def enter(self, embedding: Float[Tensor, "b t d"], tokens: Tokens | None = None) -> State:
        """Embedding [b t d] -> State. Raises: ShapeError for an embedding of another width."""
        return shaped(embedding, self.width, what="embedding")

    def leave(self, state: State, tokens: Tokens | None = None) -> Float[Tensor, "b t d"]:
        """State -> what the unembedding sees [b t d]."""
        return self.final_norm(state)

    def observe(self, state: State) -> Float[Tensor, "b t n d"]:
        """State -> its streams, for measurement only."""
        return state.unsqueeze(2)

    def advance(
        self, index: int, state: State, update: Tensor, context: Context, tokens: Tokens | None = None
    ) -> tuple[State, Tensor | None, Context]:
        """Write at site ``index`` and read at the next; see :meth:`StreamSite.advance`."""
        following = self.sites[index + 1] if index + 1 < len(self.sites) else None
        return self.sites[index].advance(following, state, update, context, tokens)

    def forward(self, embedding: Tensor, sublayers: Sequence[Sublayer], tokens: Tokens | None = None) -> Tensor:
        """Drive the whole stack: embedding [b t d] and one callable per site -> [b t d]."""
        if len(sublayers) != len(self.sites):
            raise InputError(f"this stream has {len(self.sites)} sites, got {len(sublayers)} sublayers")
        state = self.enter(embedding, tokens)
        x, context = self.sites[0].read(state, tokens)
        for index, sublayer in enumerate(sublayers):
            assert x is not None  # only the last site has nothing to read after it
            state, x, context = self.advance(index, state, sublayer(x), context, tokens)
        return self.leave(state, tokens)

    def reference(self, embedding: Tensor, sublayers: Sequence[Sublayer], tokens: Tokens | None = None) -> Tensor:
        """The same as :meth:`forward`, written in loops from the equation alone; slow on purpose. The battery compares the two."""
        raise NotImplementedError(f"{type(self).__name__} has no loop-written reference")

    def reset_parameters(self) -> None:
        """Give every parameter of the stream its declared start; runs after the model's generic initialisation."""
        for site in self.sites:
            site.reset_parameters()
        self.final_norm.reset_parameters()

    def requirements(self, site: Site) -> Requirements:
        """What this connection asks of the sublayer at ``site``."""
        return Requirements(output_gain=site.total**-0.5)

    def group_hints(self) -> dict[str, GroupHint]:
        """Patterns (fnmatch, on names inside the stream) -> optimiser hints; the first match wins. Vectors never decay by default."""
        return {}

    def frozen(self) -> dict[str, str]:
        """Patterns of parameters that do not move within three steps from the declared start -> the reason."""
        return {}

    @classmethod
    def variants(cls) -> list[dict[str, Any]]:
        """Option sets that the battery runs beside the defaults: every form whose equation differs."""
        return []

    def equals_at_start(self) -> Equivalence | None:
        """What the untrained stream equals, if anything; checked by the battery."""
        return None

    @classmethod
    def additive_options(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Values of options that ``given`` leaves open, with which the stream can start as ``additive`` does."""
        return {}

    def start_as_additive(self) -> tuple[float, ...] | None:
        """Move the start to where the stream computes what ``additive`` with the same norm slots does, and stays able to learn.

        Returns the factor by which each site multiplies its update there (1: as it is), for the caller to divide the map by that makes the
        update; None where no start of these options does that, and nothing is moved then.
        """
        found = self.equals_at_start()
        if (
            found is None
            or found.name != "additive"
            or dict(found.options) != self.options.slots()
            or found.tolerance > 1e-9
        ):
            return None
        return (1.0,) * len(self.layout)

    @property
    def looks_along_tokens(self) -> bool:
        """Whether ``read`` at one token depends on other (past) tokens."""
        return False

    @property
    def sees_later_tokens(self) -> bool:
        """Whether a write at one token depends on tokens after it: for encoders, which a decoder refuses."""
        return False

    def extra_repr(self) -> str:
        return f"width={self.width}, sites={len(self.layout)}"


def shaped(x: Any, *tail: int, what: str = "state") -> Tensor:
    """``x`` as it is. Raises: ShapeError unless it is a tensor [b t *tail], ``tail`` being [d] or [n d].

    No axis that a compiler may keep symbolic is looked at.
    """
    shape = list(x.shape) if isinstance(x, Tensor) else []
    if len(shape) != 2 + len(tail) or any(shape[2 + i] != size for i, size in enumerate(tail)):
        axes = ("streams", "width")[-len(tail) :]
        wanted = ", ".join(f"{axis} {size}" for axis, size in zip(axes, tail, strict=True))
        got = f"shape {shape}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ShapeError(f"the {what} must be a tensor [batch, tokens, {wanted}], got {got}")
    return x


def reference_norm(norm: Norm, x: Tensor) -> Tensor:
    """A norm in loops over one vector: x [d] -> [d]; for the loop-written references."""
    if norm.kind == "none":
        return x
    width = x.shape[0]
    mean: Tensor | float = sum(x[i] for i in range(width)) / width if norm.kind == "layernorm" else 0.0
    power = sum((x[i] - mean) ** 2 for i in range(width)) / width
    out = []
    for i in range(width):
        y = (x[i] - mean) / torch.sqrt(torch.as_tensor(power + norm.eps))
        if norm.weight is not None:
            y = y * norm.weight[i]
        if norm.bias is not None:
            y = y + norm.bias[i]
        out.append(y)
    return torch.stack(out)


def each_token(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply ``function`` to the rows [d] of every batch entry and token of tensors [b t d]; for the loop-written references."""
    batch, length = tensors[0].shape[:2]
    return torch.stack(
        [torch.stack([function(*(x[i, j] for x in tensors)) for j in range(length)]) for i in range(batch)]
    )


def tensors_of(state: State) -> Iterable[Tensor]:
    """Every tensor of a pytree, in order."""
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
