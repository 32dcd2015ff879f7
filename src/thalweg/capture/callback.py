"""The probe as a callback of the Hugging Face Trainer."""

import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from thalweg.capture.probe import Probe
from thalweg.errors import InputError, ThalwegWarning
from thalweg.records import Measurements
from thalweg.records.export import check_format, export

FILE = "probe.jsonl"


class ProbeCallback(TrainerCallback):
    """``Trainer(..., callbacks=[ProbeCallback(every=100)])``: a :class:`~thalweg.capture.probe.Probe` on the trained model.

    Rows are appended to ``path`` (``probe.jsonl`` in the output folder where None) as they come; a training that begins at step 0 sets an
    earlier file aside as ``probe.1.jsonl`` and so on, with a warning, one that goes on appends to it. Every measured step is logged, with the
    means by kind of site as ``probe/MEASURE/KIND``. A reporter that comes before the callback (TensorBoard, W&B) sees them
    only after :meth:`attach`. ``step`` of a row: updates that the optimizer had made before the measured pass. Other arguments: of Probe.
    """

    def __init__(
        self,
        every: int = 100,
        *,
        measures: Sequence[str] | None = None,
        map: Any = None,
        path: str | Path | None = None,
        ranks: str = "first",
        name: str = "",
        tolerance: float | None = None,
    ):
        self.options = {
            "every": every,
            "measures": measures,
            "map": map,
            "ranks": ranks,
            "name": name,
            "tolerance": tolerance,
        }
        self.path = path
        self.probe: Probe | None = None
        self._unlogged: dict[str, float] = {}

    def attach(self, trainer: Any) -> "ProbeCallback":
        """Stand first among the callbacks of ``trainer``, so that every reporter sees what is logged."""
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        return self

    @property
    def measurements(self) -> Measurements:
        """All rows so far. Raises: InputError before training."""
        if self.probe is None:
            raise InputError("nothing is measured yet; train first")
        return self.probe.measurements

    def save(self, path: str | Path) -> None:
        """All rows as ``.jsonl``, ``.parquet`` or ``.csv``. Raises: as :meth:`Probe.save`, and InputError before training."""
        check_format(path)
        export(self.measurements, path)

    def stop(self) -> None:
        """Take the hooks away; for a training that ended by an exception, of which callbacks are not told."""
        if self.probe is not None:
            self.probe.stop()

    def on_train_begin(self, args, state, control, model: Any = None, **more):
        """Start the probe at the step where training begins or goes on."""
        self.stop()
        path = Path(args.output_dir or ".") / FILE if self.path is None else Path(self.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not state.global_step:  # another training; one that goes on appends
            _set_aside(path)
        self.probe = Probe(model, path=path, first_step=state.global_step, **self.options).start()

    def on_step_end(self, args, state, control, **more):
        """Close the step; a measured one is logged."""
        if self.probe is not None and self.probe.step() is not None:
            self._unlogged = {f"probe/{key}": value for key, value in self.probe.summary().items()}
            control.should_log = True

    def on_log(self, args, state, control, logs=None, **more):
        """Add what was measured to the log, in memory and for the reporters that come after."""
        if self._unlogged:
            fresh, self._unlogged = self._unlogged, {}
            if state.log_history:
                state.log_history[-1].update(fresh)
            if logs is not None:
                logs.update(fresh)

    def on_train_end(self, args, state, control, **more):
        """Take the hooks away."""
        self.stop()


def _set_aside(path: Path) -> None:
    """Give the rows of an earlier training the first free name."""
    kept = next(p for n in itertools.count(1) if not (p := path.with_suffix(f".{n}{path.suffix}")).exists())
    path.rename(kept)
    warnings.warn(
        f"{path} holds the rows of another training; they are now in {kept.name}", ThalwegWarning, stacklevel=2
    )
