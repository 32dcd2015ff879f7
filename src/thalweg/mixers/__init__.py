"""Mixers: parametrisations of the matrix that moves the streams of a token, ``mix[to, from]``. One file is one mixer."""

from collections.abc import Iterator
from typing import Any

from thalweg import config
from thalweg.errors import InputError
from thalweg.mixers.base import Claims, ConstantMixer, Mixer, MixerFacts, MixerOptions, SquareMixer
from thalweg.registry import Entry, Registry

registry: Registry[type[Mixer]] = Registry("mixer", package="thalweg.mixers", group="thalweg.mixers")
register = registry.register


def names() -> list[str]:
    """Names of all mixers, those of third parties included."""
    return registry.names()


def entries() -> Iterator[Entry[type[Mixer]]]:
    """Every mixer with its summary and source."""
    return registry.entries()


def make_options(name: str, options: dict[str, Any]) -> MixerOptions:
    """The typed options of mixer ``name`` from plain values. Raises: UnknownNameError, InputError."""
    return config.build(registry[name].Options, options, where=name)


def create(name: str, streams: int, **options: Any) -> Mixer:
    """A module that turns logits [... generators] into matrices [... to from] of ``streams`` streams.

    The number of logits is its attribute ``generators``; ``start()`` gives those of the untrained network.
    Raises: UnknownNameError for an unknown mixer or option; InputError for a number of streams that the mixer does not serve.
    """
    if not isinstance(streams, int) or isinstance(streams, bool) or streams < 1:
        raise InputError(f"streams must be a whole number of at least 1, got {streams!r}")
    mixer = registry[name](streams, make_options(name, options))
    mixer.reset_parameters()
    return mixer


__all__ = [
    "Claims",
    "ConstantMixer",
    "InputError",
    "Mixer",
    "MixerFacts",
    "MixerOptions",
    "SquareMixer",
    "create",
    "entries",
    "make_options",
    "names",
    "register",
    "registry",
]
