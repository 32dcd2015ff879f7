"""TensorBoard: event files in the run folder."""

from thalweg.tracking import register
from thalweg.tracking.base import Tracker, require


@register("tensorboard", summary="event files under RUN/tensorboard", source="https://www.tensorflow.org/tensorboard")
class TensorBoardTracker(Tracker):
    """Writes ``RUN/tensorboard``; look at it with ``tensorboard --logdir RUN``."""

    def __init__(self, run, config, project):
        super().__init__(run, config, project)
        require("tensorboard", "track")
        writer = require("torch.utils.tensorboard", "track").SummaryWriter
        self.writer = writer(str(run / "tensorboard"))
        self.writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()), 0)

    def log(self, step, values):
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self):
        self.writer.close()
