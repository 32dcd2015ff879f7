"""The training loop: updates, evaluations, the record, checkpoints, and every way in which a run may end."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from thalweg import config as configs
from thalweg.errors import InputError, ThalwegError
from thalweg.models.making import kind_of
from thalweg.models.transformer import Transformer
from thalweg.records import RunFolder
from thalweg.records.measurements import Measurement
from thalweg.training import checkpoint
from thalweg.training.changing import Change, Changer
from thalweg.training.cost import Meter, train_flops
from thalweg.training.diagnostics import largest
from thalweg.training.divergence import DivergenceRule
from thalweg.training.engine import Engine, Gradients
from thalweg.training.evaluation import unit_of
from thalweg.training.events import Event, EventKind, Listener
from thalweg.training.geometry import stability_measurements
from thalweg.training.result import RunResult
from thalweg.training.resumption import check_state, differences, environment, same_config, same_data
from thalweg.training.signals import Interrupted, StopRequests
from thalweg.training.trajectory import RunTrajectory

Measure = Callable[[Transformer, int], Iterable[Measurement]]
CALLER = "the caller asked"
UNITS = {
    "train/tokens_per_second": "tokens/s",
    "train/step_time": "s",
    "train/peak_memory": "bytes",
}


class Loop:
    """One run from its first update, or from a checkpoint, to its end."""

    def __init__(
        self,
        engine: Engine,
        folder: RunFolder,
        requests: StopRequests,
        stop: Callable[[], bool] | None,
        measure: Measure | None,
        on_event: Listener | None,
        changer: Changer | None = None,
    ):
        self.engine, self.folder, self.requests, self.stop, self.measure = engine, folder, requests, stop, measure
        self.changer = changer
        self.config, self.ranks = engine.config, engine.ranks
        self.on_event = on_event if self.ranks.first else None
        self.steps = self.config.total_steps
        self.rule = DivergenceRule(self.config)
        self.meter = Meter(engine.device)
        self.trajectory = RunTrajectory(engine, folder)
        self.environment = environment(self.config, str(engine.device), self.ranks)
        self.step = 0
        self.saved_step: int | None = None
        self.best_loss: float | None = None
        self.best_step: int | None = None
        self.train_loss: float | None = None
        self.evaluation: dict[str, float] = {}

    def run(self, resume: bool, notes: Iterable[str]) -> RunResult:
        try:
            if resume:
                self.resume()
            else:
                self.note_all(notes)
            self.tell(
                "start",
                text=f"{self.engine.parameters:,} parameters on {self.engine.device}, {self.ranks.world} process(es)",
            )
            if self.saved_step is None:
                if self.changer is not None:
                    self.changed(self.changer.begin())
                self.evaluate()
                self.take_measures()
                self.meter.restart_peak()  # what measuring took is not what training takes
                self.save()
            return self.updates()
        except Interrupted:
            raise
        except KeyboardInterrupt:  # the second one: at once, without saving
            self.finish("interrupted", "stopped at once; the last checkpoint stands")
            raise
        except Exception as error:
            if self.ranks.first:
                with suppress(
                    ThalwegError
                ):  # on a full disk the record stays as it was; the first error is the one to show
                    self.folder.finish("failed", {"reason": str(error), "step": self.step})
            raise

    def updates(self) -> RunResult:
        while self.step < self.steps:
            began = time.perf_counter()
            gradients = self.engine.gradients()
            reason = self.rule.check_update(gradients.loss, gradients.norm)
            self.step += 1
            due = self.step % self.config.eval_every == 0 or self.step == self.steps
            if reason is None:
                self.engine.update(self.step)
                self.trajectory.see(self.step)
            self.train_loss = gradients.loss
            self.meter.add(time.perf_counter() - began, self.config.tokens_per_step)
            self.log_update(gradients, force=due or reason is not None)
            if reason is None and due:
                reason = self.look(gradients)
            if reason is not None:
                if self.changer is not None:
                    self.changed(self.changer.diverged(self.step, reason))
                self.log_stability()
                return self.finish("diverged", reason)
            if self.changer is not None:
                self.changed(self.changer.look(self.step, last=self.step == self.steps))
            if due:
                self.evaluate()
            if self.step == self.steps:
                self.log_stability()
            self.take_measures()
            asked = self.asked_to_stop()
            if self.save_due() or asked:
                self.save()
            if asked and self.step < self.steps:
                return self.interrupt(asked)
        if self.changer is not None and self.ranks.first:
            self.changer.end(self.folder)
        return self.finish("done")

    def changed(self, change: Change | None) -> None:
        """Record a look at the structure at once, and say what it did."""
        if change is None:
            return
        self.log(change.values)
        self.add_measures(change.rows)
        if self.changer is not None and self.ranks.first:
            self.changer.write(self.folder)
        for line in change.lines:
            self.tell("change", text=line)

    # what is recorded

    def log(self, values: Mapping[str, float]) -> None:
        if self.ranks.first:
            for name, value in values.items():
                self.folder.log(self.step, name, value, UNITS.get(name) or unit_of(name, self.engine.task.unit))

    def log_update(self, gradients: Gradients, force: bool) -> None:
        if not force and self.step > 1 and self.step % self.config.log_every:
            return
        values = {
            "train/loss": gradients.loss,
            "gradient/norm": gradients.norm,
            "train/learning_rate": self.engine.learning_rate(self.step),
            "train/tokens_per_second": self.meter.tokens_per_second,
            "train/peak_memory": float(self.meter.peak_memory),
        }
        self.log(values)
        self.tell("step", values)

    def look(self, gradients: Gradients) -> str | None:
        """Record the diagnostics of the update just made; the reason if the stream has grown past the bound."""
        values, rows, stream = self.engine.look(self.step, gradients)
        self.log(values)
        self.add_measures([*rows, *stream])
        self.tell("step", values)
        return self.rule.check_stream(largest(stream))

    def log_stability(self) -> None:
        """How smoothly the run went, from the series that it logged."""
        if self.ranks.first:
            losses = [value for _, value in self.folder.metrics("train/loss")]
            norms = [value for step, value in self.folder.metrics("gradient/norm") if step > self.config.warmup_steps]
            self.add_measures(stability_measurements(losses, norms, warmup=0).stamped(step=self.step))

    def evaluate(self) -> None:
        self.evaluation = self.engine.evaluate()
        loss = self.evaluation["val/loss"]
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss, self.best_step = loss, self.step
        self.log(self.evaluation)
        self.tell("evaluation", self.evaluation)

    def take_measures(self) -> None:
        every = self.config.measure_every
        due = self.step in (0, self.steps) or (every is not None and self.step % every == 0)
        if self.measure is not None and due and (self.ranks.first or self.engine.wrapped.kind == "fsdp"):
            self.meter.hold_peak()
            try:
                self.add_measures(self.measure(self.engine.model, self.step))
            except InputError as error:  # a stream of infinities, say: no reason to lose the run
                self.note_all([f"not measured at step {self.step}: {error}"])

    def add_measures(self, rows: Iterable[Measurement]) -> None:
        rows = list(rows)
        if self.ranks.first:
            self.folder.add_measures(rows)

    def note_all(self, texts: Iterable[str]) -> None:
        for text in texts:
            if self.ranks.first:
                self.folder.note(text)
            self.tell("note", text=text)

    def tell(self, kind: EventKind, values: Mapping[str, float] | None = None, text: str = "") -> None:
        if self.on_event is not None:
            self.on_event(Event(kind, self.step, self.steps, values or {}, text))

    # checkpoints

    def save_due(self) -> bool:
        every = self.config.save_every or self.config.eval_every
        return self.step % every == 0 or self.step == self.steps or self.best_step == self.step

    def save(self) -> None:
        self.trajectory.save()
        weights = self.engine.weights()
        state = {
            **self.engine.state(),
            "rule": self.rule.state_dict(),
            "meter": self.meter.state_dict(),
            "best": [self.best_loss, self.best_step],
            "train_loss": self.train_loss,
            "evaluation": self.evaluation,
            **({} if self.changer is None else {"changer": self.changer.state_dict()}),
        }
        manifest = {
            "config": configs.to_plain(self.config),
            "architecture": kind_of(self.engine.model.config),
            "model": configs.to_plain(self.engine.model.config),
            "data": self.engine.task.describe(),
            "best_step": self.best_step,
            "environment": self.environment,
        }
        path = self.ranks.first_does(
            lambda: checkpoint.save(self.folder.checkpoints, self.step, weights=weights, state=state, manifest=manifest)
        )
        self.saved_step = self.step
        self.tell("checkpoint", text=str(path))

    def resume(self) -> None:
        """Take up the last checkpoint and cut the record back to its step."""
        folder = self.folder.checkpoints
        if not checkpoint.list_steps(folder):
            if self.ranks.first:
                self.folder.restart()
                self.folder.truncate_after(-1)
            return
        saved = checkpoint.read(checkpoint.find(folder, "last"))
        with checkpoint.understood(saved.path / checkpoint.MANIFEST):
            same_config(saved.manifest["config"], self.config, saved.path)
            same_data(saved.manifest["data"], self.engine.task.describe(), saved.path)
            different = differences(saved.manifest["environment"], self.environment)
        state = saved.state()
        changes = state.pop("changer", None)
        check_state(state, saved.path / checkpoint.STATE)
        with checkpoint.understood(saved.path / checkpoint.STATE):
            self.engine.load(saved, state)
            if self.changer is not None:
                self.changer.load_state_dict({} if changes is None else changes)
            self.rule.load_state_dict(state["rule"])
            self.meter.load_state_dict(state["meter"])
            self.best_loss, self.best_step = state["best"]
            self.train_loss, self.evaluation = state["train_loss"], state["evaluation"]
        self.step = self.saved_step = saved.step
        if self.ranks.first:
            self.folder.restart()
            self.folder.truncate_after(self.step)
            if self.changer is not None:
                self.changer.write(self.folder)
        lost = self.trajectory.resume(self.step)
        if lost:
            self.note_all([lost])
        if different:
            self.note_all([f"resumed at step {self.step}: not bitwise because {'; '.join(different)}"])

    # ends

    def asked_to_stop(self) -> str:
        """Who asked this run to stop, on whatever rank; the same on all ranks, empty if nobody did."""
        mine = self.requests.asked or (CALLER if self.stop is not None and self.stop() else "")
        if not self.ranks.any(bool(mine), device=self.engine.device):
            return ""
        return next(asked for asked in self.ranks.collect(mine) if asked)

    def interrupt(self, asked: str) -> RunResult:
        result = self.finish("interrupted", asked)
        if asked == CALLER:
            return result
        self.ranks.wait()  # all of them raise, and no rank waits for another after an error
        raise Interrupted(
            f"interrupted ({asked}) after step {self.step} of {self.steps}; saved, go on with: "
            f"thalweg {'train' if self.changer is None else 'grow'} --resume {self.folder.path}"
        )

    def finish(self, status: str, reason: str = "") -> RunResult:
        result = RunResult(
            status,
            self.step,
            self.steps,
            train_loss=self.train_loss,
            final_loss=self.evaluation.get("val/loss") if status == "done" else None,
            best_loss=self.best_loss,
            best_step=self.best_step,
            evaluation=self.evaluation,
            nulls=self.engine.task.nulls(),
            cost=self.cost(),
            data=self.engine.task.describe(),
            reason=reason,
        )
        if self.ranks.first:
            self.folder.finish(status, result.to_plain())
        self.tell("end", text=f"{status}: {reason}" if reason else status)
        return result

    def cost(self) -> dict[str, float]:
        return {
            "parameters": self.engine.parameters,
            "connection_parameters": self.engine.connection_parameters,
            "flops_per_token": train_flops(self.engine.model.config, self.config.sequence_length),
            "tokens": self.meter.tokens,
            "seconds": self.meter.seconds,
            "tokens_per_second": self.meter.tokens_per_second,
            "peak_memory": self.meter.peak_memory,
        }
