"""Training: one configuration, one loop, one run folder; exact to resume, on one process or many. Importing it loads no torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thalweg.training.config import TrainConfig
    from thalweg.training.engine import load_decoder
    from thalweg.training.events import Event
    from thalweg.training.loop import train
    from thalweg.training.plan import TrainPlan, plan_of
    from thalweg.training.progress import Progress
    from thalweg.training.result import RunResult
    from thalweg.training.signals import Interrupted

_HOME = {
    "Event": "events",
    "Interrupted": "signals",
    "Progress": "progress",
    "RunResult": "result",
    "TrainConfig": "config",
    "TrainPlan": "plan",
    "load_decoder": "engine",
    "plan_of": "plan",
    "train": "loop",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


__all__ = [
    "Event",
    "Interrupted",
    "Progress",
    "RunResult",
    "TrainConfig",
    "TrainPlan",
    "load_decoder",
    "plan_of",
    "train",
]
