"""Hooks on single modules: see the tensor that goes by, or put another in its place; a stack undoes them."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from thalweg.capture import Located, Point, SitePlace
from thalweg.capture.watching import given, item_of
from thalweg.editing.passes import Pass

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
