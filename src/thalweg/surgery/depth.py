"""A deeper model: new layers whose updates are zero, so that they compute nothing where the connection hands the state on as it is."""

import copy
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from thalweg.connections import Stream, StreamSite
from thalweg.errors import InputError
from thalweg.models.config import EDITS, DecoderConfig
from thalweg.models.sharing import named_weights
from thalweg.models.sublayers import Prototypes, Sublayer
from thalweg.surgery.change import NEW, Grown, ParameterMap, rebuild, whole_decoder_of
from thalweg.surgery.width import REPLAYED, replay_length

KINDS = ("blocks", r"stream\.sites", r"stream\.compressors", r"stream\.scalars", r"stream\.alphas\.layer")
INDEXED = re.compile(
    rf"(?P<kind>^(?:{'|'.join(KINDS)}))(?P<dot>\.?)(?P<number>\d+)"
)  # what is numbered by layer, or by site


def grow_depth(
    model: Any,
    at: int | Sequence[int] | None = None,
    *,
    heads: int | None = None,
    allow_drift: bool = False,
    generator: torch.Generator | None = None,
    in_place: bool = False,
) -> Grown:
    """A model with more layers that computes what ``model`` computes; ``model`` itself is not changed unless ``in_place``.

    at: the layers of ``model`` that a new one goes before, from 0; its depth, or None: on top. Several: one new layer for each number, the
    same number twice for two. heads: query heads of a new layer (None: those of the configuration). It has the window of the layer below,
    and starts as in a fresh model but for its updates, which are zero: by the connection's own start where that does it (ReZero), by the
    scale of its update norm where it has one, else by its last maps. Its site starts where the connection hands the state on, if it knows
    such a place.
    Whether a site of update zero leaves the state as it is, and whether the old sites do what they did with more layers round them, is
    replayed in float64 on random states. allow_drift: return a warm start where that fails; ``change.drift`` says by how much (a share of the
    norm of what the stream leaves).
    generator, in_place: as in :func:`grow_heads`.
    Raises: InputError for places that are not there, a dictionary in place of the feed-forward sublayer (whose mixture cannot be zero)
    without an update norm, and a connection under which a layer more changes the function, unless ``allow_drift``.
    """
    decoder = whole_decoder_of(model)
    config: DecoderConfig = decoder.config
    order = places_of(at, config.depth)
    after = deeper(config, order, heads)
    per_layer = len(config.layers)
    layer_of = {new: old for new, old in enumerate(order) if old != NEW}
    before = named_weights(decoder)
    drift, fresh = 0.0, []

    def maps(name: str, value: Tensor) -> ParameterMap | None:
        found = INDEXED.match(name)
        if found is None:
            return ParameterMap(name)
        number = int(found["number"])
        by_site = found["kind"].endswith("sites")
        layer, part = divmod(number, per_layer) if by_site else (number, 0)
        if layer not in layer_of:
            return None
        moved = layer_of[layer] * per_layer + part if by_site else layer_of[layer]
        old = f"{found['kind']}{found['dot']}{moved}{name[found.end() :]}"
        if old not in before:
            return None
        if before[old].shape == value.shape:
            return ParameterMap(old)
        taken = history(decoder.stream.sites[moved], fresh[number], order) if by_site else None
        return None if taken is None else ParameterMap(old, {0: taken})

    def fill(new: Any) -> None:
        fresh.extend(new.stream.sites)
        cast(Stream, new.stream).start_as_additive()
        for site in new.stream.sites:
            alpha = getattr(getattr(site, "alpha", None), "value", None)  # of MGT: at 0 a zero update erases nothing
            if alpha is not None and not getattr(site.alpha, "positive", False):
                alpha.zero_()
            weight = getattr(site, "weight", None)
            if getattr(site, "slots", None) and isinstance(
                weight, Tensor
            ):  # DenseFormer: old states that are new places weigh nothing
                weight.zero_()
                if site.site.layer not in layer_of:
                    weight[-1] = 1.0

    def finish(new: Any) -> None:
        nonlocal drift
        silence(new, layer_of)
        drift = replayed(decoder.stream, new.stream, layer_of, per_layer)
        if not drift <= REPLAYED and not allow_drift:
            raise InputError(
                f"{config.connection!r} with these options is another function with a layer more, whatever that layer writes (the stream "
                f"differs by {drift:.2g} of its norm); allow_drift takes it as a warm start"
            )

    count = len(order) - config.depth
    what = f"grew {count} layer{'s' if count > 1 else ''} at {', '.join(str(i) for i, old in enumerate(order) if old == NEW)}"
    grown = rebuild(model, after, what, maps, fill, finish, generator=generator, in_place=in_place)
    return grown._replace(change=dataclasses.replace(grown.change, drift=drift if drift > REPLAYED else 0.0))


def places_of(at: int | Sequence[int] | None, depth: int) -> list[int]:
    """For each layer of the new model the old one, -1 for a new one. Raises: InputError."""
    wanted = [depth] if at is None else [at] if isinstance(at, int) else list(at)
    for place in wanted:
        if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place <= depth:
            raise InputError(
                f"a new layer goes before one of the layers 0 to {depth - 1}, or on top ({depth}), got {place!r}"
            )
    if not wanted:
        raise InputError("at names no place; leave it out for a layer on top")
    order: list[int] = []
    for layer in range(depth + 1):
        order += [NEW] * wanted.count(layer)
        order += [layer] if layer < depth else []
    return order


def deeper(config: DecoderConfig, order: list[int], heads: int | None = None) -> DecoderConfig:
    """The new configuration: what is listed by layer moves along."""

    def below(layer: int) -> int:
        return next((old for old in reversed(order[:layer]) if old != NEW), 0)

    windows = (
        tuple(config.windows[below(i) if old == NEW else old] for i, old in enumerate(order)) if config.windows else ()
    )
    born = config.heads if heads is None else heads
    counts = tuple(born if old == NEW else config.heads_of(old) for old in order)
    ragged = bool(config.layer_heads) or born != config.heads
    dense = next((i + 1 for i in reversed(range(len(order))) if 0 <= order[i] < config.dense_layers), 0)
    edits: dict[str, Any] = {}
    for name in EDITS:
        edit: Any = getattr(config, name)
        if edit is None:
            continue
        changes: dict[str, Any] = {}
        if edit.layers != "all":
            chosen = edit.chosen(config.depth)
            changes["layers"] = tuple(i for i, old in enumerate(order) if old in chosen)
        for scale in ("parallel", "perpendicular"):
            value = getattr(edit, scale)
            if isinstance(value, tuple):
                one = tuple([1.0] * born) if isinstance(value[0], tuple) else 1.0
                changes[scale] = tuple(one if old == NEW else value[old] for old in order)
        edits[name] = dataclasses.replace(edit, **changes)
    return config.replace(
        depth=len(order), windows=windows, layer_heads=counts if ragged else (), dense_layers=dense, **edits
    )


def history(old: Any, new: Any, order: list[int]) -> Tensor | None:
    """DenseFormer: for each state that the new site weighs, the weight that the old site had for it; None where one has no place."""
    if not (getattr(old, "slots", None) and getattr(new, "slots", None)):
        return None
    state_of = {
        1 + 0: 1,
        **{i + 2: layer + 2 for i, layer in enumerate(order) if layer != NEW},
    }  # place in the tuple of states
    where = {slot: k for k, slot in enumerate(old.slots)}
    taken = [where.get(state_of.get(slot, NEW), NEW) for slot in new.slots]
    return torch.tensor(taken) if set(taken) >= set(range(len(old.slots))) else None


def silence(new: Any, layer_of: dict[int, int]) -> None:
    """Make the updates of new layers zero, where the connection does not do it already."""
    for sublayer, site in zip(cast("list[Sublayer]", new.sublayers), new.stream.sites, strict=True):
        if site.site.layer in layer_of or mute(site):
            continue
        norm = site.update_norm
        if norm.weight is not None:
            norm.weight.zero_()
            if norm.bias is not None:
                norm.bias.zero_()
            continue
        if isinstance(sublayer, Prototypes):
            raise InputError(
                "a new dictionary of prototypes always writes a mixture of them; grow layers without, or with an update norm"
            )
        for linear in (m.linear for m in sublayer.maps() if m.last):
            linear.weight.zero_()
            if linear.bias is not None:
                linear.bias.zero_()


def mute(site: StreamSite) -> bool:
    """Whether the site multiplies its update by zero as it starts: then nothing else may be zero, or nothing would ever learn."""
    return bool((getattr(getattr(site, "scalar", None), "alpha", torch.ones(1)) == 0).all())


@torch.no_grad()
def replayed(old: Any, new: Any, layer_of: dict[int, int], per_layer: int) -> float:
    """By how much of its norm what the new stream leaves differs from the old one's; random sublayers, zero ones in new layers."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (copy.deepcopy(stream).cpu().double() for stream in (old, new))
    width = old.width
    weights = [torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5 for _ in ours.sites]
    embedding = torch.randn(2, replay_length(old), width, generator=generator, dtype=torch.float64)

    def runs(weight: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.tanh(x @ weight)

    new_sites: list[Callable[[Tensor], Tensor]] = []
    for i, site in enumerate(theirs.sites):
        layer, part = divmod(i, per_layer)
        if layer in layer_of:
            new_sites.append(runs(weights[layer_of[layer] * per_layer + part]))
        else:
            new_sites.append(torch.zeros_like if not mute(site) else runs(torch.eye(width, dtype=torch.float64)))
    before, after = ours(embedding, [runs(weight) for weight in weights]), theirs(embedding, new_sites)
    return float((after - before).norm() / before.norm())
