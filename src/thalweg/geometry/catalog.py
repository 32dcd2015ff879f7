"""The catalogue of measures: what each one is, takes, ranges over and reads where there is nothing to find."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from thalweg.registry import Entry, Registry

F = TypeVar("F", bound=Callable[..., Any])


class Null(NamedTuple):
    """What a measure gives where there is nothing to find: its mean, the spread of one draw, and how it was obtained."""

    value: float
    sd: float
    kind: str


@dataclass(frozen=True)
class Measure:
    """One measure. ``takes``: its arguments with shapes. ``direction``: which way is healthier, if any. ``null``: in words."""

    function: Callable[..., Any]
    takes: str
    unit: str
    direction: Literal["higher", "lower", "neither"]
    range: tuple[float, float]
    null: str


registry: Registry[Measure] = Registry("measure", package="thalweg.geometry", group="thalweg.measures")


def measure(
    name: str,
    *,
    summary: str,
    source: str,
    takes: str,
    range: tuple[float, float],
    unit: str = "",
    direction: Literal["higher", "lower", "neither"] = "neither",
    null: str = "none",
) -> Callable[[F], F]:
    """Decorator that puts a function into the catalogue under ``name`` and leaves it as it is."""

    def add(function: F) -> F:
        registry.register(name, summary=summary, source=source)(Measure(function, takes, unit, direction, range, null))
        return function

    return add


def names() -> list[str]:
    """Names of all measures."""
    return registry.names()


def entries() -> Iterator[Entry[Measure]]:
    """Every measure with its summary and source."""
    return registry.entries()


def get(name: str) -> Measure:
    """The measure called ``name``. Raises: UnknownNameError."""
    return registry[name]
