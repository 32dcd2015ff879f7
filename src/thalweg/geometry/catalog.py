"""The catalogue of measures: what each one is, takes, ranges over and reads where there is nothing to find."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from thalweg.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])
Direction = Literal["higher", "lower", "neither"]


class Null(NamedTuple):
    """What a measure gives where there is nothing to find: mean, spread of one draw, how it was obtained."""

    value: float
    sd: float
    kind: str


@dataclass(frozen=True)
class Measure:
    """One measure, as ``thalweg list`` and ``show`` print it.

    function: its dotted name; options: the arguments that make this variant of it; takes: what it is given, with
    shapes; direction: which way is healthier, if any; range: None where it is open; null: in words.
    """

    name: str
    summary: str
    function: str
    options: Mapping[str, Any]
    takes: str
    unit: str
    direction: Direction
    range: tuple[float | None, float | None]
    null: str
    source: str

    def resolve(self) -> Callable[..., Any]:
        """The function itself, with the options of this variant."""
        module, _, name = self.function.rpartition(".")
        return partial(getattr(importlib.import_module(module), name), **self.options)


registry: Registry[Measure] = Registry("measure", package="thalweg.geometry", group="thalweg.measures")


def measure(
    name: str,
    *,
    summary: str,
    source: str,
    takes: str,
    range: tuple[float | None, float | None],
    unit: str = "",
    direction: Direction = "neither",
    null: str = "none",
    options: Mapping[str, Any] | None = None,
) -> Callable[[F], F]:
    """Decorator that enters a function of a module into the catalogue under ``name`` and leaves it as it is."""

    def add(function: F) -> F:
        dotted = f"{function.__module__}.{function.__qualname__}"
        entry = Measure(name, summary, dotted, dict(options or {}), takes, unit, direction, range, null, source)
        registry.register(name, summary=summary, source=source)(entry)
        return function

    return add


def names() -> list[str]:
    """Names of all measures."""
    return registry.names()


def entries() -> Iterator[Measure]:
    """Every measure, by name."""
    return (entry.value for entry in registry.entries())


def entry(name: str) -> Measure:
    """The measure called ``name``. Raises: UnknownNameError."""
    return registry[name]
