"""Edits of values: of what the heads read, before the output projection."""

from collections.abc import Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from thalweg.capture import Located, Point, SitePlace
from thalweg.capture.attention import attention_tap
from thalweg.capture.attention_call import AttentionCall
from thalweg.editing.arithmetic import Change
from thalweg.editing.hooks import Heard, last_at, on_input
from thalweg.editing.options import EditOptions
from thalweg.editing.passes import Passes
from thalweg.editing.places import counts, head_mask
from thalweg.errors import InputError


@contextmanager
def value_edits(
    located: Located,
    places: tuple[SitePlace, ...],
    options: EditOptions,
    made: Mapping[int, Change],
    passes: Passes,
    route: str,
    heard: Heard | None = None,
):
    """Edit the values of ``places`` inside the block, in the attention function (``tap``) or round the projections (``hooks``).

    heard: told the place and o [b t h dv] before and after.
    """
    places = tuple(p for p in places if options.control == "diagonal" or not made[p.layer].is_identity)
    if not places:
        yield
    elif route == "tap":
        with _tapped(located, places, options, made, passes, heard):
            yield
    else:
        with ExitStack() as stack:
            for place in places:
                _hooked(stack, located, place, options, made[place.layer], passes, heard)
            yield


def _tapped(
    located: Located,
    places: tuple[SitePlace, ...],
    options: EditOptions,
    made: Mapping[int, Change],
    passes: Passes,
    heard: Heard | None,
):
    owners: dict[int, SitePlace] = {}
    for place in places:
        owners |= dict.fromkeys(map(id, located.module(place.sublayer).modules()), place)
    masks = {p.index: head_mask((counts(located, p) or (0,))[0], options.heads) for p in places}

    def on_attention(call: AttentionCall) -> Tensor | None:
        place = owners.get(id(call.module))
        if place is None or not passes.hold(options.phase):
            return None
        if options.control == "diagonal":
            new = call.without_own()
        else:
            own = call.own() if options.excludes_self else None
            new = made[place.layer].value(call.output, call.own_values(), own, passes.now)
        new = _kept(new, call.output, masks[place.index], passes)
        if heard is not None:
            heard(place, call.output, new, passes.now)
        return new

    return attention_tap(located.model, on_attention)


def _hooked(
    stack: ExitStack,
    located: Located,
    place: SitePlace,
    options: EditOptions,
    change: Change,
    passes: Passes,
    heard: Heard | None,
) -> None:
    """Full aggregate only: hooks do not know A_tt. Attention with a gate between value and output has its edit after the gate."""
    heads = place.heads
    assert heads is not None  # checked when the places were chosen
    mask = head_mask(heads.query, options.heads)
    projected = last_at(stack, located, Point(heads.value, "output"))

    def edited(flat: Tensor) -> Tensor | None:
        if not passes.hold(options.phase):
            return None
        seen, o = projected(), heads.outputs(flat)
        if seen is None:
            raise InputError(f"the output projection of {place.name} ran before its values; say route='tap'")
        new = change.value(o, heads.values(seen).to(o.device), None, passes.now)
        new = _kept(new, o, mask, passes)
        if heard is not None:
            heard(place, o, new, passes.now)
        return heads.flat(new)

    on_input(stack, located.module(heads.output), edited)


def _kept(new: Tensor, o: Tensor, mask: Tensor | None, passes: Passes) -> Tensor:
    """The edit at the chosen heads [h] of real tokens, in the dtype of the model."""
    new = passes.now.keep(new.to(o.dtype), o)
    return new if mask is None else torch.where(mask.to(o.device).unsqueeze(-1), new, o)
