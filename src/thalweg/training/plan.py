"""What a run will take, said before its first step: parameters, FLOPs, memory, time."""

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from thalweg._words import counted, duration
from thalweg.data import Task
from thalweg.models.size import readable, size_of
from thalweg.training.config import TrainConfig
from thalweg.training.cost import free_memory
from thalweg.training.determinism import derive_seed, pick_device, reproducible
from thalweg.training.engine import Engine
from thalweg.training.evaluation import held_out_length
from thalweg.training.parallel import Ranks
from thalweg.training.tasks import load_task

PROBE_STEPS = 3  # timed updates after one that warms up
LONG_STEP = 10.0  # seconds; a first update that takes longer is the estimate itself


@dataclass(frozen=True)
class TrainPlan:
    """The cost of a run. ``flops_per_token`` are those of training; memory in bytes per process; times in seconds.

    active_parameters: those that one token uses, fewer than ``parameters`` with experts only.
    memory: weights, gradients, optimiser and activations in float32, an upper bound under bfloat16; the interpreter is not counted.
    seconds_per_step and seconds come from a few timed updates, not compiled, evaluation and saving left out; None without the probe, and
    where more ``memory`` is needed than is free. edits: the edits of updates as text, by the name of their field; ``edit_parameters`` and
    ``edit_flops_per_token`` (of training) are in the totals already.
    """

    connection: str
    depth: int
    width: int
    heads: int
    vocab_size: int
    parameters: int
    active_parameters: int
    non_embedding_parameters: int
    stream_parameters: int
    steps: int
    tokens: int
    train_tokens_per_parameter: float
    flops_per_token: float
    flops: float
    memory: int
    device: str
    seconds_per_step: float | None = None
    seconds: float | None = None
    free_memory: int | None = None
    edits: dict[str, str] = field(default_factory=dict)
    edit_parameters: int = 0
    edit_flops_per_token: float = 0.0

    def __str__(self) -> str:
        lines = [
            f"model       {self.connection}, depth {self.depth}, width {self.width}, {counted(self.heads, 'head')}, {self.vocab_size:,} tokens",
            f"parameters  {self.parameters:,} ({self.non_embedding_parameters:,} without embeddings, {self.stream_parameters:,} of the stream)",
            f"length      {self.steps:,} steps, {self.tokens:,} tokens ({self.train_tokens_per_parameter:.1f} per parameter)",
            f"FLOPs       {self.flops_per_token:.3g} per token, {self.flops:.3g} in all",
            f"memory      {readable(self.memory)} on {self.device} for weights, gradients, optimiser and activations (not the process itself)",
        ]
        if self.edits:
            what = "; ".join(f"{name.replace('_edit', '')} {edit}" for name, edit in self.edits.items())
            cost = f"{self.edit_parameters:,} parameters, {self.edit_flops_per_token:.3g} FLOPs per token in training"
            lines.insert(
                2, f"edits       {what}: {cost}, {self.edit_flops_per_token / self.flops_per_token:.2%} of all"
            )
        if self.active_parameters < self.parameters:
            lines.insert(2, f"active      {self.active_parameters:,} parameters for a token")
        if self.free_memory is not None and self.memory > self.free_memory:
            lines.append(f"time        not measured: {readable(self.free_memory)} are free on this machine")
        if self.seconds is not None:
            lines.append(
                f"time        {duration(self.seconds)} ({self.seconds_per_step:.3g} s a step, without evaluation)"
            )
        return "\n".join(lines)


def plan_of(
    config: TrainConfig, *, task: Task | None = None, cache_dir: str | Path | None = None, probe: bool = True
) -> TrainPlan:
    """The plan of ``config`` for one of the processes that will run it.

    task: the data, loaded already. probe: time a few updates (a throw-away model; nothing is written).
    Raises: InputError as training would.
    """
    if task is None:
        task = load_task(config, cache_dir)
    device = pick_device(config.device)
    longest = max(held_out_length(task, split, config) for split in task.splits)
    model = config.network(task, longest)
    size = size_of(model, length=config.sequence_length)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rows = max(config.batch_size // (config.accumulation * world), 1)
    tokens = config.total_steps * config.tokens_per_step
    memory, free = size.training_bytes(rows), free_memory(device)
    probe = probe and (free is None or memory <= free)
    per_step = _time_a_step(replace(config, batch_size=rows * config.accumulation), task) if probe else None
    return TrainPlan(
        connection=model.connection,
        depth=model.depth,
        width=model.width,
        heads=model.heads,
        vocab_size=model.vocab_size,
        parameters=size.total_parameters,
        active_parameters=size.active_parameters,
        non_embedding_parameters=size.non_embedding_parameters,
        stream_parameters=size.parameters["stream"],
        steps=config.total_steps,
        tokens=tokens,
        train_tokens_per_parameter=tokens / size.total_parameters,
        flops_per_token=size.train_flops,
        flops=size.train_flops * tokens,
        memory=memory,
        device=str(device),
        seconds_per_step=per_step,
        seconds=None if per_step is None else per_step * config.total_steps,
        free_memory=free,
        edits={name: edit.describe() for name, edit in model.edits.items()},
        edit_parameters=size.parameters.get("edits", 0),
        edit_flops_per_token=3 * size.flops.get("edits", 0.0),
    )


def _time_a_step(config: TrainConfig, task: Task) -> float:
    device = pick_device(config.device)
    with reproducible(derive_seed(config.seed, 2), device, config.threads):
        engine = Engine(replace(config, compile=False), task, device, Ranks())

        def update() -> float:
            began = time.perf_counter()
            engine.gradients()
            engine.update(1)
            return time.perf_counter() - began

        first = update()
        return first if first > LONG_STEP else min(update() for _ in range(PROBE_STEPS))
