"""A growing run: the training loop, with a controller that is asked after every update."""

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thalweg import config as configs
from thalweg.capture.saving import save_folder
from thalweg.data import Batch, Task
from thalweg.errors import CheckpointError, InputError, ThalwegError
from thalweg.geometry.summaries import LEAST_SEQUENCES
from thalweg.growth.checks import check_inputs, check_labels
from thalweg.growth.controller import Controller
from thalweg.growth.forecasting import forecast
from thalweg.growth.network import TransformerNetwork
from thalweg.growth.options import GrowthOptions, from_table
from thalweg.growth.prototypes import collapse_panel
from thalweg.growth.reading import look
from thalweg.models.config import DecoderConfig
from thalweg.models.hf import in_shell
from thalweg.models.sublayers.prototypes import dictionaries, start_dictionaries
from thalweg.models.transformer import Transformer
from thalweg.records import Measurements, RunFolder, jsonl
from thalweg.surgery.carrying import carry_optimizer
from thalweg.surgery.change import Change as Reshaped
from thalweg.surgery.depth import grow_depth
from thalweg.training import RunResult, TrainConfig, train
from thalweg.training.changing import Change
from thalweg.training.cost import train_flops
from thalweg.training.determinism import derive_seed
from thalweg.training.engine import Engine, load_model
from thalweg.training.evaluation import held_out_length
from thalweg.training.events import Listener
from thalweg.training.geometry import split_of
from thalweg.training.loop import Measure
from thalweg.training.parallel import is_main
from thalweg.training.tasks import load_task

RECORD = "growth.jsonl"  # in a run folder: how growth stands, then every event
MODEL = "model"  # in the folder of a run that is done: what Hugging Face loads
TOKENS_PER_WIDTH, MOST_SEQUENCES = 8, 512  # of the probe set: fewer tokens make a second moment of noise
SEED = 3  # of the stream of random numbers that growth draws from; training has those before it


@dataclass(frozen=True)
class GrownRun:
    """What a growing run came to: of training, and of growth (status, reason, heads ...: the header of ``growth.jsonl``)."""

    result: RunResult
    growth: dict[str, Any]

    def to_plain(self) -> dict[str, Any]:
        return {**self.result.to_plain(), "growth": self.growth}


def grow(
    config: TrainConfig,
    run: str | Path,
    *,
    resume: bool = False,
    on_event: Listener | None = None,
    stop: Callable[[], bool] | None = None,
    measure: Measure | None = None,
    task: Task | None = None,
    cache_dir: str | Path | None = None,
) -> GrownRun:
    """Train a model that begins as ``config`` says and adds and removes heads (and layers) by its table ``growth``, in the folder ``run``.

    All else as :func:`thalweg.training.train`: the run can be stopped at any moment and resumed bitwise, ends in a normal run folder, and its
    growth record is written at every event, into ``growth.jsonl``. A run that is done holds its model for Hugging Face in ``model/``.
    Raises: InputError for what cannot grow (FSDP2, a probe set without directions, one class, ...); ProofError when an event changed the
    outputs; else as ``train``.
    """
    from_table({"head_width": 2, **(config.growth or {})})  # before data is read
    changer = Grower(config)
    result = train(
        config,
        run,
        resume=resume,
        on_event=on_event,
        stop=stop,
        measure=measure,
        task=task,
        cache_dir=cache_dir,
        changer=changer,
    )
    folder = RunFolder.open(run)
    if result.status == "done" and is_main() and not list((folder.path / MODEL).glob("*.safetensors")):
        model, _ = load_model(folder.path, "last")  # a run that was done before, whose model somebody took away
        hand_on(model, load_task(config, cache_dir) if task is None else task, folder)
    return GrownRun(result, about_of(folder))


def hand_on(model: Transformer, task: Task, folder: RunFolder) -> None:
    """Write what Hugging Face loads, in the place of what stands there."""
    target = folder.path / MODEL
    shutil.rmtree(target, ignore_errors=True)  # of a run that was killed between this and its last word
    save_folder(in_shell(model, **task.portable_settings()), target, tokenizer=task.saved_tokenizer())


def options_of(config: TrainConfig, model: DecoderConfig) -> GrowthOptions:
    """The options of growth in ``config.growth``, for heads of the model's width and caps that it does not exceed at its start.

    Raises: InputError, UnknownNameError.
    """
    table = {} if config.growth is None else dict(config.growth)
    width = table.pop("head_width", model.head_width)
    if width != model.head_width:
        raise InputError(
            f"growth.head_width must be the width of the heads that there are, {model.head_width}, got {width}; give model.head_size"
        )
    options = from_table({"head_width": width, **table})
    most = max(model.heads_of(layer) // model.head_group for layer in range(model.depth))
    if most > options.most_heads:
        raise InputError(
            f"growth.most_heads is {options.most_heads}, but the run starts with {most} heads in a layer; raise the cap or start with fewer"
        )
    if options.most_layers is not None and model.depth > options.most_layers:
        raise InputError(
            f"growth.most_layers is {options.most_layers}, but the run starts with {model.depth} layers; raise the cap or leave it out"
        )
    return options


def about_of(folder: RunFolder) -> dict[str, Any]:
    """The header of a growth record; empty where there is none yet."""
    path = folder.path / RECORD
    return jsonl.numbers(jsonl.read_lines(path, "growth record")[0][1]) if path.exists() else {}


class Grower:
    """The :class:`thalweg.training.changing.Changer` of growth."""

    def __init__(self, config: TrainConfig):
        self.config = config
        self.started: dict[str, Any] = {}
        self.seconds = self.flops_spent = 0.0
        self.looks = self.step = 0
        self.ended: int | None = None
        self.told = 0  # events of the record that the run folder has

    # the parts, once there is a model

    def attach(self, engine: Engine) -> None:
        config = self.config
        if engine.wrapped.kind == "fsdp":
            raise InputError("a sharded model cannot grow; leave parallel at ddp")
        if config.trajectory is not None:
            raise InputError("a trajectory of weights has one shape, and a growing model has not; leave trajectory out")
        self.engine, self.options = engine, options_of(config, engine.model.config)
        self.network = TransformerNetwork(
            engine.model,
            probe_set(config, engine.task),
            changed=self._changed,
            ranks=engine.ranks,
            dictionary_weight=config.dictionary_weight,
            seed=derive_seed(config.seed, SEED),
        )
        self.controller = Controller(self.network, self.options)
        self._measure_shape()
        self.started = {
            "heads_start": self._heads(),
            "parameters_start": self.network.parameters_count(),
            "flops_start": self.flops,
        }

    def _changed(self, model: Transformer, change: Reshaped) -> None:
        self.engine.adopt(model, lambda optimizers: carry_optimizer(optimizers, change))
        self._measure_shape()

    def _measure_shape(self) -> None:
        self.flops = train_flops(self.network.model.config, self.config.sequence_length)

    def _heads(self) -> list[int]:
        return [len(ids) for ids in self.network.ids]

    # what the loop asks

    def ready(self) -> None:
        """Refuse bad input, one line each, and start dictionaries from what reaches them. Raises: InputError."""
        self._check_probe()
        self._check_depth()
        if self.config.dictionary_weight:
            generator = torch.Generator().manual_seed(derive_seed(self.config.seed, SEED + 1))
            start_dictionaries(self.network.model, self.network.run_whole, generator)
            self.network.forget()

    def begin(self) -> Change:
        with self._looking():
            self.ready()
            rows = forecast(self.network, self.options, shown=None).rows().stamped(step=0)
            self.controller.check(0)
            rows.extend(self._panels(0))
        return self._change(0, rows)

    def look(self, step: int, *, last: bool) -> Change | None:
        self.step = step
        self.flops_spent += self.flops * self.config.tokens_per_step
        rows = Measurements()
        looks = last or step % self.config.eval_every == 0
        if not looks and not self.controller.due(step):
            return None
        with self._looking():
            self.network.forget()
            lines: list[str] = []
            if last:
                lines = self._lift_masks(step)
            elif self.controller.due(step):
                self.controller.check(step)
            if looks:
                rows.extend(self._observe(step) if last or self.controller.finished else ())
                rows.extend(self._panels(step))
        return self._change(step, rows, lines)

    def diverged(self, step: int, reason: str) -> Change:
        self.step = step
        self.flops_spent += self.flops * self.config.tokens_per_step  # its gradients were taken
        self.controller.diverged(step, reason)
        return self._change(step, Measurements())

    def write(self, folder: RunFolder) -> None:
        self.controller.record.save(folder.path / RECORD, self.about())

    def end(self, folder: RunFolder) -> None:
        hand_on(self.network.model, self.engine.task, folder)

    def state_dict(self) -> dict[str, Any]:
        return {
            "controller": self.controller.state_dict(),
            "network": self.network.state_dict(),
            "movement": dict(self.engine.movement.start),
            "started": dict(self.started),
            "counts": [self.seconds, self.flops_spent, self.looks, self.step, self.ended],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            raise CheckpointError(
                "this run did not grow so far, its checkpoint holds no controller; resume it by thalweg train"
            )
        self.engine.movement.start = {name: value.to(self.engine.device) for name, value in state["movement"].items()}
        self.network.load_state_dict(state["network"], self.engine.model)
        self.controller.load_state_dict(state["controller"])
        self.started = state["started"]
        self.seconds, self.flops_spent, self.looks, self.step, self.ended = state["counts"]
        self.told = len(self.controller.record)
        self._measure_shape()

    # what is recorded

    def about(self) -> dict[str, Any]:
        """How growth stands, plain values."""
        controller = self.controller
        return {
            "status": controller.status,
            "reason": controller.reason,
            "step": self.step,
            "ended": self.ended,
            "threshold": controller.threshold,
            "heads": self._heads(),
            "parameters": self.network.parameters_count(),
            "flops": self.flops,
            "flops_spent": self.flops_spent,
            "seconds": self.seconds,
            "looks": self.looks,
            **self.started,
            "options": configs.to_plain(self.options),
            "decisions": [list(row) for row in controller.decisions()],
        }

    def _change(self, step: int, rows: Measurements, lines: list[str] | None = None) -> Change:
        """Hand on what the controller saw since the last time; its own copy goes, so that checkpoints stay small."""
        controller, lines = self.controller, list(lines or ())
        rows.extend(controller.observed)
        controller.observed = Measurements()
        for event in controller.record.events[self.told :]:
            rows.extend(event.rows())
            lines.append(event.line())
        self.told = len(controller.record)
        if controller.finished and self.ended is None:
            self.ended = step
            lines.append(f"step {step}: growth ended, {controller.status}: {controller.reason}")
        if controller.threshold is not None:
            rows.add("growth.threshold", controller.threshold, step=step)
        values = {
            "growth/heads": float(sum(self._heads())),
            "growth/parameters": float(self.network.parameters_count()),
        }
        self._agree()
        return Change(rows, values, tuple(lines))

    def _observe(self, step: int) -> Measurements:
        """Look and do nothing: what is left after the end."""
        rows = Measurements()
        for layer in range(self.network.layers()):
            state = self.controller.layers.get(layer)
            try:
                rows.extend(
                    look(self.network, layer, {} if state is None else state.directions, self.options).rows(step=step)
                )
            except InputError:  # a network that has diverged meanwhile: training says so
                return Measurements()
        return rows

    def _panels(self, step: int) -> Measurements:
        rows = Measurements()
        if not any(True for _ in dictionaries(self.network.model)):
            return rows
        seen = self.network.dictionary_tokens()
        for name, layer in dictionaries(self.network.model):
            number = int(name.split(".")[1])
            for head, tokens in enumerate(seen[name]):
                which = {} if layer.heads is None else {"head": self.network.ids[number][head // self.network.group]}
                where = {"layer": number, "branch": "prototypes", **which}
                temperature = layer.width * layer.temperature[head].item()
                with contextlib.suppress(ThalwegError):  # tokens of a network that has diverged
                    panel = collapse_panel(tokens, layer.prototypes[head], temperature, gradient=layer.gradient)
                    rows.extend(panel.rows(step=step, **where))
        return rows

    def _lift_masks(self, step: int) -> list[str]:
        """Masks are no part of a model that is handed on: where the run ends under one, the head is there again."""
        lifted = []
        for layer, head in list(self.network.masks):
            self.network.mask_head(layer, head, 1.0)
            lifted.append(
                f"step {step}, layer {layer}: the run ends before the mask of head {head} had fallen; the head stays"
            )
        return lifted

    def _check_probe(self) -> None:
        batch = self.network.batch
        labels = batch["labels"]
        if labels.ndim == 1:
            check_labels(labels)
        for layer in range(self.network.layers()):
            check_inputs(
                self.network.inputs(layer),
                layer,
                self.network.model.config.prototypes if self.config.dictionary_weight else None,
            )

    def _check_depth(self) -> None:
        """That a layer more changes no number, where layers may be added: tried now, since a run that finds out later cannot go on."""
        if (self.options.most_layers or 0) <= self.network.layers():
            return
        try:
            grow_depth(self.network.model, heads=self.network.group)
        except InputError as error:
            why = str(error).split(";")[0]
            raise InputError(
                f"growth.most_layers is {self.options.most_layers}, but this model cannot get a layer that changes nothing: {why}; "
                "leave most_layers out"
            ) from None

    def _agree(self) -> None:
        """That all ranks grew alike; what they see is gathered, so that they must. Raises: InputError."""
        shapes = self.engine.ranks.collect(self._heads())
        if any(shape != shapes[0] for shape in shapes):
            raise InputError(
                f"ranks grew apart, heads by layer {' and '.join(map(str, shapes))}; run them on machines of one kind"
            )

    @contextlib.contextmanager
    def _looking(self):
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began
        self.looks += 1


def probe_set(config: TrainConfig, task: Task) -> Batch:
    """The fixed held-out sequences that growth looks at: at least 16 and a batch of training, up to 512 until their tokens are eight times the
    width. Raises: InputError for fewer than two.
    """
    split = split_of(task)
    length, count = held_out_length(task, split, config), max(LEAST_SEQUENCES, config.batch_size)
    while True:
        batch = task.eval_batches(split, length, count, 1)[0]
        tokens = int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()
        found = len(batch["input_ids"])
        if tokens >= TOKENS_PER_WIDTH * config.resolved_width or found < count or count >= MOST_SEQUENCES:
            break
        count *= 2
    if found < 2:
        raise InputError(f"{task.name} holds {found} held-out sequences, growth looks at 2 at least; give more data")
    return batch
