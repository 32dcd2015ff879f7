"""Training: one configuration, one loop, one run folder; exact to resume, on one process or many. Importing it loads no torch."""

from typing import TYPE_CHECKING

from thalweg._lazy import lazy

if TYPE_CHECKING:
    from thalweg.training.config import TrainConfig
    from thalweg.training.engine import load_decoder
    from thalweg.training.events import Event
    from thalweg.training.plan import TrainPlan, plan_of
    from thalweg.training.progress import Progress
    from thalweg.training.result import RunResult
    from thalweg.training.signals import Interrupted
    from thalweg.training.start import train

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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "config": ("TrainConfig",),
        "engine": ("load_decoder",),
        "events": ("Event",),
        "plan": ("TrainPlan", "plan_of"),
        "progress": ("Progress",),
        "result": ("RunResult",),
        "signals": ("Interrupted",),
        "start": ("train",),
    },
)
