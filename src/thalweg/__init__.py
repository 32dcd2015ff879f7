"""Thalweg: the residual stream of deep transformers. Its parts load when they are first used; importing it loads no torch."""

import importlib
from types import ModuleType

from thalweg import _auto
from thalweg._version import __version__

_PARTS = ("connections", "data", "errors", "geometry", "models", "records", "studies", "testing", "training")

__all__ = [
    "__version__",
    "connections",
    "data",
    "errors",
    "geometry",
    "models",
    "records",
    "studies",
    "testing",
    "training",
]


def __getattr__(name: str) -> ModuleType:
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)


_auto.install()
