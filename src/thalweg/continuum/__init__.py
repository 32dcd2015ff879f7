"""Continuum: read-only probes that turn the continuous picture of transformers into numbers with their nulls and limits.

thalweg.continuum.probe(model, texts, only=["rmsnorm", "rotary"])      # -> Measurements
"""

from typing import TYPE_CHECKING

from thalweg._lazy import lazy

if TYPE_CHECKING:
    from thalweg.continuum.base import (
        Figure,
        Finding,
        Probe,
        ProbeOptions,
        Subject,
        entries,
        names,
        register,
        registry,
    )
    from thalweg.continuum.running import findings, probe
    from thalweg.continuum.trajectory import Trajectory

__all__ = [
    "Figure",
    "Finding",
    "Probe",
    "ProbeOptions",
    "Subject",
    "Trajectory",
    "entries",
    "findings",
    "names",
    "probe",
    "register",
    "registry",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "base": (
            "Figure",
            "Finding",
            "Probe",
            "ProbeOptions",
            "Subject",
            "entries",
            "names",
            "register",
            "registry",
        ),
        "running": ("findings", "probe"),
        "trajectory": ("Trajectory",),
    },
)
