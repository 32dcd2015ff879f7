"""Held-out loss and bits per byte, and the shares that a task gives, on the same batches for every arm."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from thalweg.data import Task, bits_per_byte
from thalweg.training.config import TrainConfig
from thalweg.training.parallel import Wrapped

UNITS = {"bits_per_byte": "bits/byte"}


def held_out_length(task: Task, split: str, config: TrainConfig) -> int:
    """Tokens of a held-out sequence: those of training, or more where a split holds longer ones."""
    return max(config.sequence_length, task.natural_length(split) or 0)


def unit_of(name: str, of_loss: str = "nats/token") -> str:
    """The unit of a metric of this file, and of a loss. of_loss: as the task has it."""
    if name.endswith("loss"):
        return of_loss
    if name.startswith("task/"):
        return "share"
    return next((unit for suffix, unit in UNITS.items() if name.endswith(suffix)), "")


@torch.no_grad()
def evaluate(
    wrapped: Wrapped,
    task: Task,
    config: TrainConfig,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
) -> dict[str, float]:
    """The held-out splits that training looks at: ``val/loss``, for text ``val/bits_per_byte``, of what a task measures ``task/NAME``.

    Splits other than ``valid`` put their name first: ``val/longer_loss``, ``task/longer_exact_match``. Losses are weighted by what is
    scored, shares by sequences.
    """
    model = wrapped.model
    was_training = model.training
    model.eval()
    values: dict[str, float] = {}
    try:
        for split in task.watched:
            label = "" if split == "valid" else f"{split}_"
            values |= evaluate_split(wrapped, task, split, label, config, device, autocast)
    finally:
        model.train(was_training)
    return values


@torch.no_grad()
def evaluate_split(
    wrapped: Wrapped,
    task: Task,
    split: str,
    label: str,
    config: TrainConfig,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
    *,
    whole: bool = False,
) -> dict[str, float]:
    """One split, or the part of it that the configuration asks for; ``label`` stands before the names."""
    micro = config.batch_size // config.accumulation
    most = None if whole or task.evaluated_whole else config.eval_batches * config.accumulation
    batches = task.eval_batches(split, held_out_length(task, split, config), micro, most)
    mine: defaultdict[str, float] = defaultdict(float)
    for batch in wrapped.share(batches):
        inputs = {name: values.to(device) for name, values in batch.items()}
        scored, sequences = task.scored(batch), len(batch["input_ids"])
        with autocast():
            out = wrapped.model(inputs["input_ids"], **{name: x for name, x in inputs.items() if name != "input_ids"})
        if scored:
            mine["scored"] += scored
            mine["nats"] += out.loss.double().item() * scored
            if task.has_metrics:
                mine["sequences"] += sequences
                for name, share in task.metrics(out.logits, inputs["labels"]).items():
                    mine[f"share {name}"] += share * sequences
    sums: dict[str, float] = {}
    for part in wrapped.evaluated(dict(mine)):
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    loss = sums["nats"] / sums["scored"]
    values = {f"val/{label}loss": loss}
    size = task.bytes_per_token(split)
    if size is not None:
        values[f"val/{label}bits_per_byte"] = bits_per_byte(loss, size)
    parts = {name.removeprefix("share "): value for name, value in sums.items() if name.startswith("share ")}
    if not parts:
        return values
    count = sums["sequences"]
    shares = task.summary({name: value / count for name, value in parts.items()}, round(count))
    return values | {f"task/{label}{name}": value for name, value in shares.items()}
