"""Edits of what is added to the residual stream: hooks on the modules whose output is added."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.capture import Located, Point, SitePlace
from thalweg.capture.watching import given, item_of
from thalweg.editing.arithmetic import Change
from thalweg.editing.options import EditOptions
from thalweg.editing.passes import Pass, Passes
from thalweg.editing.places import reference_of
from thalweg.errors import InputError
from thalweg.ops.precision import wide

Heard = Callable[[SitePlace, Tensor, Tensor, Pass], None]  # place, what was edited, what became of it


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
        if not holds(passes, options.phase):
            return None
        new = change.residual(seen(update, place.name), update, passes.now).to(update.dtype)
        new = passes.now.keep(new, update)
        if heard is not None:
            heard(place, update, new, passes.now)
        return new

    _on_output(stack, located.module(place.update), edited)


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
                return passes.now.keep(torch.zeros_like(update), update) if holds(passes, options.phase) else None

            _on_output(stack, located.module(place.update), none)
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
            if not holds(passes, options.phase):
                return None
            moved = change.residual(seen(update, place.name), total, passes.now) - total
            return passes.now.keep((update + moved / place.multiplier).to(update.dtype), update)

        _on_output(stack, located.module(place.update), note)
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
        if not holds(passes, options.phase):
            return None
        before = seen(after, block)
        if options.drops:
            return passes.now.keep(before, after)
        update = wide(after) - wide(before)
        moved = change.residual(before, update, passes.now) - update
        return passes.now.keep((after + moved).to(after.dtype), after)

    _on_output(stack, located.module(block), edited)


def holds(passes: Passes, phase: str) -> bool:
    """Whether an edit of this phase holds for the pass that is running."""
    return phase == "all" or (phase == "decode") == passes.now.decoding


def _seen(stack: ExitStack, located: Located, point: Point):
    """A function that gives the tensor last seen at a point, where another one is."""
    last: list[Tensor] = []

    def note(value: Tensor) -> None:
        last[:] = [value]

    module: nn.Module = located.module(point.module)
    if point.side == "input":
        handle = module.register_forward_pre_hook(lambda _, args, kwargs: note(given(args, kwargs)), with_kwargs=True)
    else:
        handle = module.register_forward_hook(lambda _, args, output: note(item_of(output, point.item)))
    stack.callback(last.clear)
    stack.callback(handle.remove)

    def found(near: Tensor, where: str) -> Tensor:
        if not last or last[0].shape != near.shape:
            raise InputError(
                f"the stream that {where} is added to was not seen before it; the model runs its layers in another way"
            )
        return last[0].to(near.device)

    return found


def _on_output(stack: ExitStack, module: nn.Module, edited: Any) -> None:
    """Let ``edited`` take the first tensor that a module gives and give another, or None to keep it."""

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        new = edited(item_of(output, 0))
        if new is None:
            return None
        if isinstance(output, Tensor):
            return new
        return type(output)((new, *output[1:])) if type(output) in (tuple, list) else _with(output, new)

    stack.callback(module.register_forward_hook(hook).remove)


def _with(output: Any, first: Tensor) -> Any:
    """An output object of transformers with another first tensor."""
    name = next(iter(output.keys()))
    output[name] = first
    return output
