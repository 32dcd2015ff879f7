"""Families of models in transformers, and how each spells its layers. One file is one family or a close group; a name is a ``model_type``."""

from collections.abc import Callable, Iterator
from typing import Any

from thalweg.capture.maps import Map
from thalweg.registry import Entry, Registry

Speller = Callable[
    [Any], Map
]  # from the text config of a model; dotted names are relative to the module that holds the list of blocks
registry: Registry[Speller] = Registry(
    "family to capture", package="thalweg.capture.families", group="thalweg.capture.families"
)
register = registry.register


def entries() -> Iterator[Entry[Speller]]:
    """Every family with its summary and source."""
    return registry.entries()


__all__ = ["Speller", "entries", "register", "registry"]
