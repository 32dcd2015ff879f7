"""The trajectory of a run: its weights at equal distances, sketched, in one file beside the record."""

from thalweg.continuum.trajectory import NAME, Recorder, Trajectory
from thalweg.errors import ThalwegError
from thalweg.records import RunFolder
from thalweg.training.engine import Engine
from thalweg.training.parallel import whole

FACTS = ("lr", "weight_decay", "schedule", "optimizer", "momentum", "betas", "seed", "connection")


class RunTrajectory:
    """Records every ``config.trajectory`` updates on the first rank; nothing where that is None. All ranks call ``see``."""

    def __init__(self, engine: Engine, folder: RunFolder):
        self.engine, self.path, self.every = engine, folder.path / NAME, engine.config.trajectory
        facts = {name: getattr(engine.config, name) for name in FACTS}
        self.recorder = Recorder(facts=facts)

    def see(self, step: int) -> None:
        """Record the weights after ``step`` updates, where it is due."""
        if self.every is None or step % self.every:
            return
        named = whole(dict(self.engine.model.named_parameters()))
        if self.engine.ranks.first:
            self.recorder.see(step, named.items())

    def save(self) -> None:
        """Write what there is. Before the checkpoint of the same step: records beyond it are dropped when the run is taken up."""
        if self.every is not None and self.engine.ranks.first and len(self.recorder.steps) >= 3:
            self.recorder.trajectory().write(self.path)

    def resume(self, step: int) -> str:
        """Take up the records up to ``step``; what is lost, in words, where the file is gone or broken."""
        if self.every is None or not self.engine.ranks.first or step < 3 * self.every:
            return ""
        try:
            self.recorder.take_up(Trajectory.read(self.path))
        except ThalwegError as error:
            return f"the trajectory begins anew at step {step}: {error}"
        self.recorder.forget_after(step)
        return ""
