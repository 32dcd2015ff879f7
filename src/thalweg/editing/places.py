"""Which places of a model an edit acts on, and where its reference is seen."""

from typing import Any

import torch

from thalweg.capture import Located, Point, SitePlace
from thalweg.capture.attention import SLOT
from thalweg.capture.layers import chosen_layers
from thalweg.editing.options import EditOptions
from thalweg.errors import InputError
from thalweg.ops.value_edit import value_edit


def chosen(located: Located, options: EditOptions) -> tuple[SitePlace, ...]:
    """The sites that are edited, in the order of the pass; of whole blocks, all sites of the chosen layers.

    Raises: InputError where a chosen layer has no such sublayer, or no heads for an edit of values.
    """
    layers = chosen_layers(options.layers, located.depth, options.skip_first)
    for name in ("parallel", "perpendicular"):
        scale = getattr(options, name)
        if not isinstance(scale, int | float):
            chosen_layers(list(scale), located.depth)
    if not located.causal and options.phase != "all":
        raise InputError(f"an encoder neither prefills nor decodes, got phase {options.phase!r}; leave it at 'all'")
    places = tuple(p for p in located.sites if p.layer in layers and fits(p, options.site))
    lacking = [layer for layer in layers if not any(p.layer == layer for p in places)]
    if lacking:
        raise InputError(
            f"layers {_listed(lacking)} of this {located.family} model have no {_said(options.site)} to edit; choose others by layers"
        )
    if options.site == "value":
        check_heads(located, places, options)
    return places


def fits(place: SitePlace, site: str) -> bool:
    """Whether a place is edited as ``site``: mlp is whatever is no attention and holds none."""
    if site == "block":
        return True
    return place.kind == "attention" if site in ("value", "attention") else place.kind not in ("attention", "parallel")


def counts(located: Located, place: SitePlace) -> tuple[int, int] | None:
    """Query and key-value heads of an attention; None where it shows none. One of ours has them at its slot, behind whatever gate."""
    if place.heads is not None:
        return place.heads.query, place.heads.key_value
    module = located.module(place.sublayer)
    return (module.heads, module.kv_heads) if SLOT in vars(module) else None


def check_heads(located: Located, places: tuple[SitePlace, ...], options: EditOptions) -> None:
    """Raises: InputError for places without heads, heads that there are not, and groups that do not divide."""
    found = {place: counts(located, place) for place in places}
    without = [place for place in places if found[place] is None or (options.route == "hooks" and place.heads is None)]
    if without:
        layers = _listed([place.layer for place in without])
        raise InputError(
            f"values cannot be edited in layers {layers}: {without[0].no_heads or 'no heads are known there'}; "
            "choose other layers, or site 'attention'"
        )
    for place in places:
        query, key_value = found[place]  # type: ignore[misc]  # not None, see above
        for head in options.heads or ():
            if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < query:
                raise InputError(f"heads are numbers from 0 to {query - 1} in {place.name}, got {head!r}")
        o, v = torch.zeros(1, 1, query, 1), torch.zeros(1, 1, key_value, 1)
        value_edit(o, v, 0.0, group=options.group)  # says what is wrong with the group


def reference_of(located: Located, place: SitePlace, reference: str = "stream") -> Point:
    """Where the raw stream is seen that a site reads; of several streams, what it reads of them, before its norm."""
    if reference == "block_input":
        place = next(p for p in located.sites if p.layer == place.layer)
    return place.state if place.read is None else place.read


def head_mask(query: int, chosen: Any) -> torch.Tensor | None:
    """[h] True where a head is edited; None: all are."""
    if chosen is None:
        return None
    mask = torch.zeros(query, dtype=torch.bool)
    mask[list(chosen)] = True
    return mask


def _listed(layers: list[int]) -> str:
    return ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")


def _said(site: str) -> str:
    return {"mlp": "feed-forward sublayer", "block": "sublayers"}.get(site, "attention")
