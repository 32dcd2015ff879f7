"""Compressors: what becomes of the weights of a linear map. One file is one compressor."""

from collections.abc import Iterator
from typing import Any

from thalweg import config
from thalweg.compression.compressors.base import Compressor, CompressorFacts, CompressorOptions, Made
from thalweg.errors import InputError
from thalweg.registry import Entry, Registry

registry: Registry[type[Compressor]] = Registry(
    "compressor", package="thalweg.compression.compressors", group="thalweg.compressors"
)
register = registry.register


def names() -> list[str]:
    """Names of all compressors, those of third parties included."""
    return registry.names()


def entries() -> Iterator[Entry[type[Compressor]]]:
    """Every compressor with its summary and source."""
    return registry.entries()


def create(name: str, **options: Any) -> Compressor:
    """A compressor with its options, checked.

    Raises: UnknownNameError for an unknown compressor or option; InputError for a value that is not allowed.
    """
    cls = registry[name]
    return cls(config.build(cls.Options, options, where=registry.entry(name).name))


__all__ = [
    "Compressor",
    "CompressorFacts",
    "CompressorOptions",
    "InputError",
    "Made",
    "create",
    "entries",
    "names",
    "register",
    "registry",
]
