"""Families of decoders in transformers, and how each is spelled in ours. One file is one family."""

from collections.abc import Iterator

from thalweg.errors import InputError
from thalweg.registry import Entry, Registry
from thalweg.surgery.families.base import Family, Piece

registry: Registry[type[Family]] = Registry(
    "family of models", package="thalweg.surgery.families", group="thalweg.surgery.families"
)
register = registry.register


def entries() -> Iterator[Entry[type[Family]]]:
    """Every family with its summary and source."""
    return registry.entries()


def of(model_type: object) -> Family:
    """The family that says ``model_type`` in its config.json. Raises: InputError that lists those there are."""
    if not isinstance(model_type, str) or model_type not in registry:
        raise InputError(
            f"no family of models is called {model_type!r}, so its weights cannot be mapped; known: {', '.join(registry.names())}"
        )
    return registry[model_type]()


__all__ = ["Family", "Piece", "entries", "of", "register", "registry"]
