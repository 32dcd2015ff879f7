"""Held-out loss in nats per token and bits per byte, and the shares of synthetic tasks, on the same batches for every arm."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from thalweg.data import Task, bits_per_byte, scored_tokens
from thalweg.training.config import TrainConfig
from thalweg.training.parallel import Wrapped

UNITS = {"loss": "nats/token", "bits_per_byte": "bits/byte"}


def held_out_length(task: Task, split: str, config: TrainConfig) -> int:
    """Tokens of a held-out sequence: those of training, or more where a split holds longer ones."""
    return max(config.sequence_length, task.natural_length(split) or 0)


def unit_of(name: str) -> str:
    """The unit of a metric of this file."""
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
    """Every held-out split of ``task``: ``val/loss``, for text ``val/bits_per_byte``, for synthetic tasks ``task/NAME``.

    Splits other than ``valid`` put their name first: ``val/longer_loss``, ``task/longer_exact_match``. Losses are weighted by scored tokens,
    shares by sequences.
    """
    model = wrapped.model
    was_training = model.training
    model.eval()
    values: dict[str, float] = {}
    try:
        for split in task.splits:
            if split != "train":
                label = "" if split == "valid" else f"{split}_"
                values |= _evaluate_split(wrapped, task, split, label, config, device, autocast)
    finally:
        model.train(was_training)
    return values


def _evaluate_split(wrapped, task, split, label, config, device, autocast) -> dict[str, float]:
    micro = config.batch_size // config.accumulation
    batches = task.eval_batches(
        split, held_out_length(task, split, config), micro, config.eval_batches * config.accumulation
    )
    mine: defaultdict[str, float] = defaultdict(float)
    for batch in wrapped.share(batches):
        ids, labels = batch["input_ids"].to(device), batch["labels"].to(device)
        scored = scored_tokens(batch["labels"])
        with autocast():
            out = wrapped.model(ids, labels=labels)
        if scored:
            mine["tokens"] += scored
            mine["nats"] += out.loss.double().item() * scored
            if task.kind == "synthetic":
                mine["sequences"] += len(ids)
                for name, share in task.metrics(out.logits, labels).items():
                    mine[f"share {name}"] += share * len(ids)
    sums: dict[str, float] = {}
    for part in wrapped.evaluated(dict(mine)):
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    loss = sums["nats"] / sums["tokens"]
    values = {f"val/{label}loss": loss}
    size = task.bytes_per_token(split)
    if size is not None:
        values[f"val/{label}bits_per_byte"] = bits_per_byte(loss, size)
    shares = {name.removeprefix("share "): value for name, value in sums.items() if name.startswith("share ")}
    return values | {f"task/{label}{name}": value / sums["sequences"] for name, value in shares.items()}
