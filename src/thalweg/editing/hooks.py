"""Hooks on single modules: see the tensor that goes by, or put another in its place; a stack undoes them."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from thalweg.capture import Located, Point, SitePlace
from thalweg.capture.layout import Heads
from thalweg.capture.watching import given, item_of
from thalweg.editing.passes import Pass
from thalweg.errors import InputError
from thalweg.models.retained import Edit

Heard = Callable[[SitePlace, Tensor, Tensor, Pass], None]  # place, what was edited, what became of it
Edited = Callable[[Tensor], Tensor | None]  # None keeps what there was


def last_at(stack: ExitStack, located: Located, point: Point) -> Callable[[], Tensor | None]:
    """A function that gives the tensor last seen at a point, None before there was one."""
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
    return lambda: last[0] if last else None


def on_output(stack: ExitStack, module: nn.Module, edited: Edited) -> None:
    """Let ``edited`` take the first tensor that a module gives and give another."""

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        new = edited(item_of(output, 0))
        return None if new is None else with_output(output, new)

    stack.callback(module.register_forward_hook(hook).remove)


def on_input(stack: ExitStack, module: nn.Module, edited: Edited) -> None:
    """Let ``edited`` take the first tensor that a module is given and give another."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        new = edited(given(args, kwargs))
        return None if new is None else with_input(args, kwargs, new)

    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


class Turning:
    """What is seen at one module until it is used at another. An object, not a closure: a copy of the model gets a copy of its own."""

    def __init__(self, edit: Edit, name: str, heads: Heads | None = None):
        self.edit, self.name, self.item, self.heads = edit, name, 0, heads
        self.seen: Tensor | None = None

    def see(self, located: Located, point: Point) -> Any:
        """Look at a point from now on; the handle of the hook."""
        module = located.module(point.module)
        if point.side == "input":
            return module.register_forward_pre_hook(self.see_input, with_kwargs=True)
        self.item = point.item
        return module.register_forward_hook(self.see_output)

    def see_input(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.seen = given(args, kwargs)

    def see_output(self, _: nn.Module, args: Any, output: Any) -> None:
        self.seen = item_of(output, self.item)

    def take(self, near: Tensor) -> Tensor:
        """What was seen, once: nothing of a pass is kept after it."""
        seen, self.seen = self.seen, None
        if seen is None or seen.shape[:2] != near.shape[:2]:
            raise InputError(
                f"what {self.name} is edited along was not seen before it; the model runs its layers in another way"
            )
        return seen.to(near.device)

    def turn_output(self, _: nn.Module, args: Any, output: Any) -> Any:
        """An update of the stream."""
        update = item_of(output, 0)
        return with_output(output, self.edit.along(update, self.take(update)))

    def turn_input(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """What the heads read, on its way into the output projection."""
        assert self.heads is not None  # of edits of values
        flat = given(args, kwargs)
        o = self.edit(self.heads.outputs(flat), self.heads.values(self.take(flat)))
        return with_input(args, kwargs, self.heads.flat(o))


def with_output(output: Any, new: Tensor) -> Any:
    """What a module gave, with another first tensor."""
    if isinstance(output, Tensor):
        return new
    return type(output)((new, *output[1:])) if type(output) in (tuple, list) else _with(output, new)


def with_input(args: tuple[Any, ...], kwargs: dict[str, Any], new: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module is called with, with another first tensor."""
    old = given(args, kwargs)
    return tuple(new if value is old else value for value in args), {
        name: new if value is old else value for name, value in kwargs.items()
    }


def _with(output: Any, first: Tensor) -> Any:
    """An output object of transformers with another first tensor."""
    name = next(iter(output.keys()))
    output[name] = first
    return output
