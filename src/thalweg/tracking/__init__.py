"""Live views of a run in other people's tools. The record itself is always the run folder; trackers only show it while it grows."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from thalweg.registry import Registry
from thalweg.tracking.base import Tracker, Trackers

registry: Registry[type[Tracker]] = Registry("tracker", package="thalweg.tracking", group="thalweg.trackers")
register = registry.register


def names() -> list[str]:
    """Names of all trackers, those of third parties included."""
    return registry.names()


def create(chosen: Iterable[str], *, run: str | Path, config: Mapping[str, Any], project: str = "thalweg") -> Trackers:
    """The trackers called ``chosen``, as one listener to give to ``train(..., on_event=...)``.

    run: the run folder, whose name is the name shown; config: the plain configuration that the tool displays.
    Raises: UnknownNameError for an unknown tracker; MissingExtraError if its package is not installed.
    """
    return Trackers([registry[name](Path(run), dict(config), project) for name in chosen])


__all__ = ["Tracker", "Trackers", "create", "names", "register", "registry"]
