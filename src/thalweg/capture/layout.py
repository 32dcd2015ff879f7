"""Where the residual stream runs through a model: plain descriptions, by the dotted names of modules.

Nothing here computes; :mod:`thalweg.capture.watching` attaches to what is described, :mod:`thalweg.capture.proof` shows that it is true.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from jaxtyping import Float
from torch import Tensor, nn

from thalweg.errors import ShapeError

if TYPE_CHECKING:
    from thalweg.capture.watching import Tap

Part = Literal["whole", "last", "tail"]


@dataclass(frozen=True)
class Point:
    """One tensor of a forward pass: what a module gets (its first tensor) or gives (``item`` of a tuple)."""

    module: str
    side: Literal["input", "output"]
    item: int = 0


@dataclass(frozen=True)
class Heads:
    """How the values and the head outputs of one attention sublayer are laid out.

    query, key_value: counts of heads; query head h reads key-value head ``h // (query // key_value)``. width: of one value, dv.
    value: dotted module whose output holds the values of the tokens of the call. part: how they are cut out of it: ``whole`` (values only),
    ``last`` (queries | keys | values, each with its heads side by side), ``tail`` (the last ``width`` channels of every key-value head).
    output: dotted output projection; its input is o, the heads side by side.
    """

    query: int
    key_value: int
    width: int
    value: str
    output: str
    part: Part = "whole"

    @property
    def group(self) -> int:
        """Query heads that read one key-value head."""
        return self.query // self.key_value

    def values(self, projected: Float[Tensor, "b t c"]) -> Float[Tensor, "b t kv dv"]:
        """Output of ``value`` -> the values, a view. Raises: ShapeError where the channels do not divide so."""
        channels, wanted = projected.shape[-1], self.key_value * self.width
        if self.part == "tail":
            if channels % self.key_value or channels // self.key_value < self.width:
                raise ShapeError(
                    f"{self.value} gives {channels} channels, which are not {self.key_value} heads of at least {self.width}"
                )
            return projected.unflatten(-1, (self.key_value, -1))[..., -self.width :]
        if channels < wanted or (self.part == "whole" and channels != wanted):
            more = "at least " if self.part == "last" else ""
            raise ShapeError(
                f"{self.value} gives {channels} channels, {self.key_value} key-value heads of width {self.width} "
                f"need {more}{wanted}"
            )
        return projected[..., channels - wanted :].unflatten(-1, (self.key_value, self.width))

    def outputs(self, flat: Float[Tensor, "b t hdv"]) -> Float[Tensor, "b t h dv"]:
        """Input of ``output`` -> o by head, a view. Raises: ShapeError."""
        if flat.shape[-1] != self.query * self.width:
            raise ShapeError(
                f"{self.output} takes {flat.shape[-1]} channels, {self.query} heads of width {self.width} "
                f"have {self.query * self.width}"
            )
        return flat.unflatten(-1, (self.query, self.width))

    def flat(self, o: Float[Tensor, "b t h dv"]) -> Float[Tensor, "b t hdv"]:
        """The inverse of :meth:`outputs`."""
        return o.flatten(-2)


@dataclass(frozen=True)
class Inner:
    """Where the inside of a feed-forward sublayer is seen.

    last: dotted last linear map, whose input is the hidden vector h. given: where the sublayer's own input x is seen, after the norm before
    it, if any. output: where W h + bias is seen, before a norm after the sublayer and a multiplier. width: of h.
    """

    last: str
    given: Point
    output: Point
    width: int


@dataclass(frozen=True)
class SitePlace:
    """One place where a sublayer writes to the stream.

    index: counts sites, layer: counts layers, both from 0. kind: ``attention``, ``feed_forward``, or another name for a sublayer of
    another sort. parallel: it shares its state and its next state with the other parallel sites of the layer. sublayer: dotted module
    that computes. update: dotted module whose output is added: the sublayer, or its post-norm in sandwich models. multiplier: factor on
    the update. norm_after: dotted norm over the sum (post-norm models), or None. state, following: where the stream is seen before and
    after. read: of several streams, where their combination is seen that the sublayer reads, before its norm. mixing: of several streams,
    where the weights of the write [b t n] and the matrix ``[from, to]`` [b t n n] are seen.
    heads: of attention, None with the reason in ``no_heads``. inner: of feed-forward, None with the reason in ``no_inner``.
    """

    index: int
    layer: int
    kind: str
    name: str
    sublayer: str
    update: str
    state: Point
    following: Point
    block: str = ""
    parallel: bool = False
    multiplier: float = 1.0
    norm_after: str | None = None
    read: Point | None = None
    mixing: tuple[Point, Point] | None = None
    heads: Heads | None = None
    no_heads: str = ""
    inner: Inner | None = None
    no_inner: str = ""


@dataclass(frozen=True)
class Located:
    """The residual stream of ``model``.

    family: what the model calls itself. found_by: how it was located. causal: a decoder with logits over the next token. width, depth,
    streams: sizes (one stream unless many). sites: in the order of the pass. blocks: dotted names of the layers. base: dotted module whose
    first output is the last hidden state ("" where it is the model). contract: dotted module that makes one stream of many at the end.
    final_norm, head: dotted names, or None. logit_softcap: c tanh(x / c) on the logits, logit_scale: a factor on them before that.
    notes: what a reader of the numbers should know. tap: how a model that is not observed by hooks on modules is watched.
    """

    model: nn.Module = field(repr=False)
    family: str
    found_by: Literal["family", "structure", "map", "own"]
    causal: bool
    width: int
    depth: int
    sites: tuple[SitePlace, ...]
    blocks: tuple[str, ...]
    streams: int = 1
    base: str = ""
    contract: str | None = None
    final_norm: str | None = None
    head: str | None = None
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    notes: tuple[str, ...] = ()
    tap: "Callable[[Located], Tap] | None" = field(default=None, repr=False)

    def module(self, name: str) -> Any:
        """The module of a dotted name of this description."""
        return self.model.get_submodule(name)

    @property
    def attention(self) -> tuple[SitePlace, ...]:
        """The attention sites."""
        return tuple(place for place in self.sites if place.kind == "attention")


def named_apart(places: Iterable[SitePlace]) -> tuple[SitePlace, ...]:
    """The places, those of one name in a layer told apart by a number behind the second and later ones."""
    seen: Counter[str] = Counter()
    found = []
    for place in places:
        seen[place.name] += 1
        found.append(place if seen[place.name] == 1 else replace(place, name=f"{place.name}.{seen[place.name]}"))
    return tuple(found)
