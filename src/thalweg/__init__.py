"""Thalweg: the residual stream of deep transformers. Its parts load when they are first used; importing it loads no torch."""

from typing import TYPE_CHECKING

from thalweg import _auto
from thalweg._lazy import lazy
from thalweg._version import __version__

if TYPE_CHECKING:
    from thalweg import (
        capture,
        connections,
        continuum,
        data,
        editing,
        errors,
        evaluation,
        geometry,
        growth,
        mixers,
        models,
        ops,
        records,
        studies,
        surgery,
        testing,
        training,
    )
    from thalweg.capture.measure import measure
    from thalweg.capture.probe import Probe

__all__ = [
    "Probe",
    "__version__",
    "capture",
    "connections",
    "continuum",
    "data",
    "editing",
    "errors",
    "evaluation",
    "geometry",
    "growth",
    "measure",
    "mixers",
    "models",
    "ops",
    "records",
    "studies",
    "surgery",
    "testing",
    "training",
]

__getattr__, __dir__ = lazy(
    __name__,
    {"capture.measure": ("measure",), "capture.probe": ("Probe",)},
    parts=(name for name in __all__ if not name.startswith("_") and name not in ("Probe", "measure")),
)

_auto.install()
