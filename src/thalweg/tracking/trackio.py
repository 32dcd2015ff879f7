"""Trackio: a local, offline dashboard with the interface of wandb."""

from thalweg.tracking import register
from thalweg.tracking.base import Tracker, require


@register("trackio", summary="local dashboard without an account", source="https://github.com/gradio-app/trackio")
class TrackioTracker(Tracker):
    """Logs to the local Trackio store; look at it with ``trackio show``."""

    def __init__(self, run, config, project):
        super().__init__(run, config, project)
        self.module = require("trackio", "track")
        self.module.init(project=project, name=run.name, config=config, resume="allow", embed=False)

    def log(self, step, values):
        self.module.log(dict(values), step=step)

    def close(self):
        self.module.finish()
