"""Thalweg: the residual stream of deep transformers. Its parts load when they are first used; importing it loads no torch."""

from typing import TYPE_CHECKING

from thalweg import _auto
from thalweg._lazy import lazy
from thalweg._version import __version__

if TYPE_CHECKING:
    from thalweg import (
        connections,
        data,
        errors,
        geometry,
        mixers,
        models,
        ops,
        records,
        studies,
        surgery,
        testing,
        training,
    )

__all__ = [
    "__version__",
    "connections",
    "data",
    "errors",
    "geometry",
    "mixers",
    "models",
    "ops",
    "records",
    "studies",
    "surgery",
    "testing",
    "training",
]

__getattr__, __dir__ = lazy(__name__, parts=(name for name in __all__ if not name.startswith("_")))

_auto.install()
