"""Training: one configuration, one loop, one run folder; exact to resume, on one process or many. Importing it loads no torch."""

from typing import TYPE_CHECKING

from thalweg._lazy import lazy

if TYPE_CHECKING:
    from thalweg.training.baselines import Baseline, bag_of_embeddings, classification_baselines, majority
    from thalweg.training.config import TrainConfig
    from thalweg.training.engine import load_decoder, load_model
    from thalweg.training.events import Event
    from thalweg.training.measuring import evaluate_run
    from thalweg.training.plan import TrainPlan, plan_of
    from thalweg.training.progress import Progress
    from thalweg.training.result import RunResult
    from thalweg.training.signals import Interrupted
    from thalweg.training.start import train

__all__ = [
    "Baseline",
    "Event",
    "Interrupted",
    "Progress",
    "RunResult",
    "TrainConfig",
    "TrainPlan",
    "bag_of_embeddings",
    "classification_baselines",
    "evaluate_run",
    "load_decoder",
    "load_model",
    "majority",
    "plan_of",
    "train",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "baselines": ("Baseline", "bag_of_embeddings", "classification_baselines", "majority"),
        "config": ("TrainConfig",),
        "engine": ("load_decoder", "load_model"),
        "events": ("Event",),
        "measuring": ("evaluate_run",),
        "plan": ("TrainPlan", "plan_of"),
        "progress": ("Progress",),
        "result": ("RunResult",),
        "signals": ("Interrupted",),
        "start": ("train",),
    },
)
