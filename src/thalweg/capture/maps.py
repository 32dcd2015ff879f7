"""A map: how the layers of a model are spelled. Families are maps made from a config; a user's map is a dict or a TOML file.

blocks = "model.layers"
final_norm = "model.norm"
head = "lm_head"

[[sites]]
kind = "attention"
reads = "input_layernorm"          # the raw stream is what this module gets
sublayer = "self_attn"
heads = { query = 8, key_value = 2, width = 16, value = "self_attn.v_proj", output = "self_attn.o_proj" }

[[sites]]
kind = "feed_forward"
reads = "post_attention_layernorm"
sublayer = "mlp"
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from thalweg import config
from thalweg.capture.layout import Heads, Inner, Located, Part, Point, SitePlace, named_apart
from thalweg.capture.linear import linear_weight
from thalweg.errors import InputError, UnknownNameError, nearest

KINDS = ("attention", "feed_forward", "mixer")
OTHER_NAMES = {  # that people write, and that would be taken for a sublayer of another sort
    **dict.fromkeys(("attn", "att", "self_attn", "self_attention"), "attention"),
    **dict.fromkeys(("mlp", "ffn", "ff", "feed-forward", "feed forward"), "feed_forward"),
}
LIKE = 0.8  # of a slip and the name that was meant
EXPERTS = "experts: every token passes other maps"


@dataclass(frozen=True)
class HeadsMap:
    """Heads of an attention sublayer; names within a block.

    query, key_value, width: counts of heads and width of a value (0: from the model's config). value: module whose output holds the values.
    part: ``whole``, ``last`` or ``tail``, see :class:`~thalweg.capture.Heads`.
    output: output projection, whose input is the heads side by side.
    """

    value: str
    output: str
    part: Part = "whole"
    query: int = 0
    key_value: int = 0
    width: int = 0


@dataclass(frozen=True)
class InnerMap:
    """The inside of a feed-forward sublayer; names within a block.

    last: last linear map, whose input is the hidden vector. given: module whose input is what the sublayer is given; output: module whose
    output is what the last map gave, dropout included; both empty for the sublayer.
    """

    last: str
    given: str = ""
    output: str = ""


@dataclass(frozen=True)
class SiteMap:
    """One sublayer; names within a block, of which the first of several with ``|`` between them counts that the block has.

    kind: ``attention``, ``feed_forward`` or a word for another sort, which must not read like one of these. sublayer: module that computes.
    reads: module whose input is the raw stream; empty for the block itself. update: module whose output is added; empty for the sublayer.
    norm_after: norm over the sum (post-norm). multiplier: factor on the update. streams: of many streams, the module that gets them and
    gives write weights, mixing matrix and what is read. heads: of attention; no_heads: why there are none. inner: of feed-forward.
    """

    kind: str
    sublayer: str
    reads: str = ""
    update: str = ""
    norm_after: str = ""
    multiplier: float = 1.0
    streams: str = ""
    heads: HeadsMap | None = None
    no_heads: str = ""
    inner: InnerMap | None = None

    def __post_init__(self) -> None:
        if self.kind in KINDS:
            return
        slip = OTHER_NAMES.get(self.kind.casefold()) or next(iter(nearest(self.kind, KINDS, n=1, cutoff=LIKE)), None)
        if slip is not None or not self.kind.isidentifier():
            hint = f"did you mean {slip!r}?" if slip else "it must be one word."
            raise InputError(
                f"the kind of a site was {self.kind!r}; {hint} Known: {', '.join(KINDS)}, or a word of your own for a sublayer of another sort"
            )


@dataclass(frozen=True)
class Map:
    """The layers of a model.

    blocks: dotted name of the list of layers. sites: sublayers of a layer in order. parallel: all of them read the input of the layer.
    final_norm, head: dotted names; empty where there is none. contract: module that makes one stream of many. base: module whose first output
    is the last hidden state; empty for the model. causal: a decoder. logit_scale, logit_softcap: factor on the logits, then c tanh(x / c).
    width, streams: 0 and 1: as the model's config says, one. family: what to call it.
    """

    blocks: str
    sites: tuple[SiteMap, ...]
    parallel: bool = False
    final_norm: str = ""
    head: str = ""
    contract: str = ""
    base: str = ""
    causal: bool = True
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    width: int = 0
    streams: int = 1
    family: str = ""

    def __post_init__(self) -> None:
        if not self.blocks or not self.sites:
            raise InputError("a map names the list of blocks and at least one site; give blocks and sites")


def read_map(given: "Map | Mapping[str, Any] | str | Path") -> Map:
    """A map from plain values or from a TOML file. Raises: InputError, UnknownNameError for a key that no map has."""
    if isinstance(given, Map):
        return given
    values = config.read_toml(given) if isinstance(given, str | Path) else given
    return config.build(Map, values, where="map")


FoundBy = Literal["family", "structure", "map"]


def place(model: nn.Module, spelled: Map, *, found_by: FoundBy) -> Located:
    """Put a map on a model. Raises: InputError or UnknownNameError for a name that the model does not have."""
    blocks = _module(model, spelled.blocks, "blocks")
    names = tuple(f"{spelled.blocks}.{name}" for name, _ in blocks.named_children())
    if not names:
        raise InputError(f"{spelled.blocks} holds no blocks; blocks is the dotted name of the list of layers")
    return place_blocks(model, spelled, [(name, spelled.sites, spelled.parallel) for name in names], found_by=found_by)


def place_blocks(
    model: nn.Module, spelled: Map, blocks: Sequence[tuple[str, tuple[SiteMap, ...], bool]], *, found_by: FoundBy
) -> Located:
    """The same with blocks that differ: the dotted name, the sites and whether they are parallel, for each."""
    for what in ("final_norm", "head", "contract", "base"):
        if getattr(spelled, what):
            _module(model, getattr(spelled, what), what)
    width = spelled.width or size_of(model, "hidden_size")
    sites: list[SitePlace] = []
    for layer, (name, inside, parallel) in enumerate(blocks):
        sites += _sites(model, inside, parallel, layer, name, len(sites))
    return Located(
        model=model,
        family=spelled.family or getattr(text_config(model), "model_type", "") or type(model).__name__,
        found_by=found_by,
        causal=spelled.causal,
        width=width,
        depth=len(blocks),
        sites=named_apart(sites),
        blocks=tuple(name for name, _, _ in blocks),
        streams=spelled.streams,
        base=spelled.base,
        contract=spelled.contract or None,
        final_norm=spelled.final_norm or None,
        head=spelled.head or None,
        logit_softcap=spelled.logit_softcap,
        logit_scale=spelled.logit_scale,
    )


def text_config(model: nn.Module) -> Any:
    """The configuration of the text part of a model of transformers, or None."""
    found: Any = getattr(model, "config", None)
    return found.get_text_config() if hasattr(found, "get_text_config") else found


def _sites(
    model: nn.Module, sites: Sequence[SiteMap], parallel: bool, layer: int, block: str, first: int
) -> list[SitePlace]:
    inside = _module(model, block, "block")

    def full(names: str, what: str) -> str:
        if not names:
            return block
        choices = [name.strip() for name in names.split("|")]
        found = next((name for name in choices if _has(inside, name)), None)
        if found is None:
            children = [name for name, _ in inside.named_modules() if name]
            raise UnknownNameError(f"module in {block} ({what})", choices[0], children)
        return f"{block}.{found}"

    seen = [
        Point(full(s.streams, "streams"), "input") if s.streams else Point(full(s.reads, "reads"), "input")
        for s in sites
    ]
    placed = []
    for i, site in enumerate(sites):
        last = i + 1 == len(sites) or parallel
        sublayer = full(site.sublayer, "sublayer")
        streams = full(site.streams, "streams") if site.streams else None
        heads, why = _heads(model, site, block, full)
        inner, why_not = _inner(model, site, sublayer, full)
        placed.append(
            SitePlace(
                index=first + i,
                layer=layer,
                kind=site.kind,
                name=f"layers.{layer}.{site.kind}",
                block=block,
                parallel=parallel,
                sublayer=sublayer,
                update=full(site.update, "update") if site.update else sublayer,
                multiplier=site.multiplier,
                norm_after=full(site.norm_after, "norm_after") if site.norm_after else None,
                state=seen[i],
                following=Point(block, "output") if last else seen[i + 1],
                read=Point(streams, "output", 2) if streams else None,
                mixing=(Point(streams, "output", 0), Point(streams, "output", 1)) if streams else None,
                heads=heads,
                no_heads=why,
                inner=inner,
                no_inner=why_not,
            )
        )
    return placed


def _heads(model: nn.Module, site: SiteMap, block: str, full: Any) -> tuple[Heads | None, str]:
    if site.heads is None:
        return None, site.no_heads or ("" if site.kind != "attention" else "the map names no heads")
    given = site.heads
    inside = _module(model, block, "block")
    if not any(_has(inside, name.strip()) for name in given.value.split("|")):
        return None, site.no_heads or f"{block} has no {given.value}"
    query = given.query or size_of(model, "num_attention_heads")
    key_value = given.key_value or getattr(text_config(model), "num_key_value_heads", None) or query
    own = getattr(text_config(model), "head_dim", None)
    width = given.width or own or size_of(model, "hidden_size") // query
    if query % key_value:
        raise InputError(f"query heads must be a multiple of key-value heads, got {query} and {key_value} in {block}")
    return Heads(query, key_value, width, full(given.value, "value"), full(given.output, "output"), given.part), ""


def _inner(model: nn.Module, site: SiteMap, sublayer: str, full: Any) -> tuple[Inner | None, str]:
    if site.kind != "feed_forward":
        return None, ""
    if any(name.rpartition(".")[2] == "experts" for name, _ in model.get_submodule(sublayer).named_modules()):
        return None, EXPERTS
    if site.inner is None:
        return None, "the map names no last linear map of the feed-forward sublayer"
    last = full(site.inner.last, "inner.last")
    weight = linear_weight(model.get_submodule(last))
    if weight is None:
        kind = type(model.get_submodule(last)).__name__
        return None, f"{last} is of the class {kind}, which does not show the weight of a linear map"
    given = full(site.inner.given, "inner.given") if site.inner.given else sublayer
    output = full(site.inner.output, "inner.output") if site.inner.output else sublayer
    return Inner(last, Point(given, "input"), Point(output, "output"), weight.shape[1]), ""


def size_of(model: nn.Module, name: str) -> int:
    found = getattr(text_config(model), name, None)
    if not isinstance(found, int):
        raise InputError(f"the model's config has no {name}; name it in the map")
    return found


def _has(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


def _module(model: nn.Module, name: str, what: str) -> nn.Module:
    if not isinstance(name, str) or not _has(model, name):
        raise UnknownNameError(f"module of the model ({what})", name, [n for n, _ in model.named_modules() if n])
    return model.get_submodule(name)
