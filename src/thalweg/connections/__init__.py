"""Residual connections: how a deep transformer's layers write to its stream. One file is one connection."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from thalweg import config
from thalweg.connections.base import ConnectionOptions, Mixing, Site, Stream, StreamSite
from thalweg.connections.declarations import Equivalence, Facts, GroupHint, Requirements
from thalweg.connections.tokens import TokenMemory, Tokens
from thalweg.errors import InputError
from thalweg.registry import Entry, Registry

registry: Registry[type[Stream]] = Registry("connection", package="thalweg.connections", group="thalweg.connections")
register = registry.register


def names() -> list[str]:
    """Names of all connections, those of third parties included."""
    return registry.names()


def entries() -> Iterator[Entry[type[Stream]]]:
    """Every connection with its summary and source."""
    return registry.entries()


def make_options(name: str, options: dict[str, Any]) -> ConnectionOptions:
    """The typed options of connection ``name`` from plain values. Raises: UnknownNameError, InputError."""
    return config.build(registry[name].Options, options, where=f"{name}")


def create(name: str, *, width: int, sites: Sequence[Site], **options: Any) -> Stream:
    """A new stream of connection ``name``, with its declared initial values.

    width: size of the stream; sites: one :class:`Site` per sublayer (``Site.decoder(depth)`` for the usual decoder); options: fields of
    the connection's ``Options``.
    Raises: UnknownNameError for an unknown connection or option; InputError for a value that is not allowed.
    """
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise InputError(f"width must be a whole number of at least 1, got {width!r}")
    if not isinstance(sites, Sequence) or not all(isinstance(site, Site) for site in sites):
        got = repr(sites) if isinstance(sites, int | str) else type(sites).__name__
        raise InputError(f"sites must be a sequence of Site, such as Site.decoder(depth), got {got}")
    stream = registry[name](width, sites, make_options(name, options))
    stream.reset_parameters()
    return stream


def option_defaults(name: str) -> dict[str, Any]:
    """Options of connection ``name`` with their default values."""
    cls = registry[name].Options
    return {f.name: f.default if f.default is not dataclasses.MISSING else None for f in dataclasses.fields(cls)}


__all__ = [
    "ConnectionOptions",
    "Equivalence",
    "Facts",
    "GroupHint",
    "InputError",
    "Mixing",
    "Requirements",
    "Site",
    "Stream",
    "StreamSite",
    "TokenMemory",
    "Tokens",
    "create",
    "entries",
    "make_options",
    "names",
    "option_defaults",
    "register",
    "registry",
]
