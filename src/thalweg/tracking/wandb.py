"""Weights & Biases."""

from thalweg.tracking import register
from thalweg.tracking.base import Tracker, require


@register("wandb", summary="Weights & Biases (WANDB_MODE=offline keeps it local)", source="https://docs.wandb.ai")
class WandbTracker(Tracker):
    """Logs to Weights & Biases under the account of the environment; a resumed run goes on under the same id."""

    def __init__(self, run, config, project):
        super().__init__(run, config, project)
        self.handle = require("wandb", "wandb").init(
            project=project, name=run.name, id=run.name, dir=str(run), config=config, resume="allow"
        )

    def log(self, step, values):
        self.handle.log(dict(values), step=step)

    def close(self):
        self.handle.finish()
