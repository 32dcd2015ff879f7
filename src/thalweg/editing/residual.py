"""Edits of what is added to the residual stream: hooks on the modules whose output is added."""

from collections.abc import Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from thalweg.capture import Located, Point, SitePlace
from thalweg.editing.arithmetic import Change
from thalweg.editing.hooks import Heard, last_at, on_output
from thalweg.editing.options import EditOptions
from thalweg.editing.passes import Passes
from thalweg.editing.places import reference_of
from thalweg.errors import InputError
from thalweg.ops.precision import wide


@contextmanager
def residual_edit(
    located: Located,
    places: tuple[SitePlace, ...],
    options: EditOptions,
    made: Mapping[int, Change],
    passes: Passes,
    heard: Heard | None = None,
):
    """Edit the updates of ``places`` inside the block. A block is edited as the sum of its updates against its input.

    heard: told the place and the update [b t d] before and after; of blocks not called.
    """
    with ExitStack() as stack:
        if options.site != "block":
            for place in places:
                _edit_update(stack, located, place, options, made[place.layer], passes, heard)
        else:
            for layer, change in made.items():
                _edit_block(stack, located, [p for p in places if p.layer == layer], options, change, passes)
        yield


def _edit_update(
    stack: ExitStack,
    located: Located,
    place: SitePlace,
    options: EditOptions,
    change: Change,
    passes: Passes,
    heard: Heard | None,
) -> None:
    """A factor on the update commutes with the edit, which is linear in it."""
    if change.is_identity:
        return
    seen = _seen(stack, located, reference_of(located, place, options.reference))

    def edited(update: Tensor) -> Tensor | None:
        if not passes.hold(options.phase):
            return None
        new = change.residual(seen(update, place.name), update, passes.now).to(update.dtype)
        new = passes.now.keep(new, update)
        if heard is not None:
            heard(place, update, new, passes.now)
        return new

    on_output(stack, located.module(place.update), edited)


def _edit_block(
    stack: ExitStack,
    located: Located,
    places: list[SitePlace],
    options: EditOptions,
    change: Change,
    passes: Passes,
) -> None:
    if change.is_identity:
        return None
    if located.tap is None and located.streams == 1 and all(place.norm_after is None for place in places):
        return _edit_step(stack, located, places, options, change, passes)
    if options.drops:
        for place in places:

            def none(update: Tensor) -> Tensor | None:
                return passes.now.keep(torch.zeros_like(update), update) if passes.hold(options.phase) else None

            on_output(stack, located.module(place.update), none)
        return None
    seen = _seen(stack, located, reference_of(located, places[0]))
    parts: dict[int, Tensor] = {}

    for place in places:

        def note(update: Tensor, place: SitePlace = place) -> Tensor | None:
            parts[place.index] = update * place.multiplier
            if place is not places[-1]:
                return None
            if len(parts) < len(places):
                raise InputError(
                    f"the sublayers of layer {place.layer} ran in another order than their sites; edit them one by one"
                )
            total = torch.stack([part.to(update.device) for part in parts.values()]).sum(0)
            parts.clear()
            if not passes.hold(options.phase):
                return None
            moved = change.residual(seen(update, place.name), total, passes.now) - total
            return passes.now.keep((update + moved / place.multiplier).to(update.dtype), update)

        on_output(stack, located.module(place.update), note)
    return None


def _edit_step(
    stack: ExitStack,
    located: Located,
    places: list[SitePlace],
    options: EditOptions,
    change: Change,
    passes: Passes,
) -> None:
    """One stream, additions only: the sum of the updates is what the block's output has more than its input."""
    block = places[0].block
    seen = _seen(stack, located, Point(block, "input"))

    def edited(after: Tensor) -> Tensor | None:
        if not passes.hold(options.phase):
            return None
        before = seen(after, block)
        if options.drops:
            return passes.now.keep(before, after)
        update = wide(after) - wide(before)
        moved = change.residual(before, update, passes.now) - update
        return passes.now.keep((after + moved).to(after.dtype), after)

    on_output(stack, located.module(block), edited)


def _seen(stack: ExitStack, located: Located, point: Point):
    """A function that gives the tensor last seen at a point, where another one is."""
    last = last_at(stack, located, point)

    def found(near: Tensor, where: str) -> Tensor:
        seen = last()
        if seen is None or seen.shape != near.shape:
            raise InputError(
                f"the stream that {where} is added to was not seen before it; the model runs its layers in another way"
            )
        return seen.to(near.device)

    return found
