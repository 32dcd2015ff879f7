"""A trained run measured again: its checkpoint, on held-out data of its own task, with its mixing replaced."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thalweg.errors import InputError, UnknownNameError
from thalweg.geometry.summaries import LEAST_SEQUENCES
from thalweg.records import Measurements, RunFolder
from thalweg.training.config import from_table
from thalweg.training.determinism import derive_seed, pick_device, reproducible
from thalweg.training.engine import load_model
from thalweg.training.evaluation import evaluate_split, held_out_length
from thalweg.training.geometry import held_out_batch, measure_model, split_of
from thalweg.training.parallel import Ranks, Wrapped
from thalweg.training.replacing import PARTS, replacements
from thalweg.training.resumption import same_data
from thalweg.training.tasks import load_task

TOKENS = 4096  # that are measured on unless it is said otherwise


@dataclass(frozen=True)
class Plan:
    """What will be measured: the checkpoint, and on how much of which split.

    sequences: whose loss is taken, in as many ``passes`` as there are replacements; held: all that the split holds; asked: tokens that were
    asked for; traced: sequences of the geometry, as in training.
    """

    step: int
    split: str
    sequences: int
    length: int
    traced: int
    passes: int
    data: str
    held: int
    asked: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def short(self) -> str:
        """Where the split holds fewer tokens than were asked for, or a spread needs more, what was done; else nothing."""
        if self.tokens >= self.asked:
            if self.asked > (LEAST_SEQUENCES - 1) * self.length:
                return ""
            return (
                f"{self.asked:,} tokens were asked for; a spread needs at least {LEAST_SEQUENCES} sequences of {self.length:,} tokens, "
                f"so {self.tokens:,} are read"
            )
        return f"{self.asked:,} tokens were asked for; {self.data} ({self.split}) holds {self.tokens:,}, and all of them are used"


@dataclass(frozen=True)
class Measured:
    """The rows, what they were measured on, and the held-out loss over the same sequences, in ``unit``."""

    plan: Plan
    loss: float
    unit: str
    rows: Measurements

    @property
    def rounding(self) -> float:
        """A change in loss that float32 does not resolve: its epsilon times the loss."""
        return torch.finfo(torch.float32).eps * abs(self.loss)


def measure_run(
    run: str | Path,
    *,
    which: str | int = "last",
    tokens: int = TOKENS,
    on_plan: Callable[[Plan], None] | None = None,
    on_pass: Callable[[int, int], None] | None = None,
    cache_dir: str | Path | None = None,
) -> Measured:
    """Measure a checkpoint of a run: geometry and gradients as in training, and what its mixing is worth.

    which: ``last``, ``best`` or a step. tokens: about how many held-out tokens losses are taken over, in whole sequences and at least
    16 of them, all that there are where they are fewer (``Plan.short``); the geometry looks at the sequences that it looked at in training,
    with as many threads. on_plan: told what will be done before it is; on_pass: told the replacements done, of how many. Nothing is written.
    Single-stream runs have no rows on mixing.
    Raises: InputError for what is no run, for data that has changed or is too short; CheckpointError.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise InputError(f"tokens must be a whole number of at least 1, got {tokens!r}")
    folder = RunFolder.open(run)
    model, manifest = load_model(folder.path, which)
    config = from_table(folder.config)
    task = load_task(config, cache_dir)
    same_data(manifest["data"], task.describe(), folder.path)
    split = split_of(task)
    length = held_out_length(task, split, config)
    wanted = max(LEAST_SEQUENCES, -(-tokens // length))
    held = len(task.eval_batches(split, length))
    size = min(config.batch_size, wanted)
    count = -(-wanted // size)
    batches = list(task.eval_batches(split, length, size, count if count * size <= held else None))
    found = sum(len(batch["input_ids"]) for batch in batches)
    if found < LEAST_SEQUENCES:
        raise InputError(
            f"{task.name} holds {found} held-out sequences of {length} tokens, {LEAST_SEQUENCES} are needed for a spread; "
            "measure a run with more data or shorter sequences"
        )
    if not sum(map(task.scored, batches)):
        raise InputError(f"the held-out sequences of {task.name} have no scored token: there is no loss to measure")
    traced, mixing = held_out_batch(config, task), sum(site.mixes for site in model.stream.sites)
    passes = 2 * (mixing + PARTS) if mixing else 0
    plan = Plan(
        manifest["step"], split, found, length, len(traced["input_ids"]), passes, task.name, held=held, asked=tokens
    )
    if on_plan is not None:
        on_plan(plan)
    device = pick_device(config.device)
    with reproducible(derive_seed(config.seed, 2), device, config.threads):
        model = model.to(device)
        rows = measure_model(model, traced)
        replaced = replacements(model, batches, on_pass, unit=task.unit)
        rows.extend(replaced.rows)
    return Measured(plan, replaced.plain.mean, task.unit, rows.stamped(step=plan.step, split=split))


def evaluate_run(
    run: str | Path, split: str = "test", *, which: str | int = "best", cache_dir: str | Path | None = None
) -> dict[str, Any]:
    """The loss of a checkpoint of a run over a whole split of its task, and what else the task measures, with its nulls.

    split: ``test`` where there is one, which training does not look at; ``valid``, ``train`` ... which: ``best`` (by the validation loss),
    ``last`` or a step. Returns plain values: ``step``, ``split``, ``sequences``, ``unit`` (of the loss), ``metrics`` (``loss``, and for a
    classification ``accuracy`` with its Wilson interval) and ``nulls``. Nothing is written.
    Raises: UnknownNameError for a split that the task does not have; InputError, CheckpointError.
    """
    folder = RunFolder.open(run)
    model, manifest = load_model(folder.path, which)
    config = from_table(folder.config)
    task = load_task(config, cache_dir)
    same_data(manifest["data"], task.describe(), folder.path)
    if split not in task.splits:
        raise UnknownNameError("split", split, task.splits)
    device = pick_device(config.device)
    with reproducible(derive_seed(config.seed, 2), device, config.threads):
        wrapped = Wrapped(model.to(device), Ranks(), config.parallel)
        found = evaluate_split(wrapped, task, split, "", config, device, nullcontext, whole=True)
    return {
        "run": str(folder.path),
        "data": task.name,
        "step": manifest["step"],
        "split": split,
        "sequences": len(task.eval_batches(split, held_out_length(task, split, config))),
        "unit": task.unit,
        "metrics": {name.partition("/")[2]: value for name, value in found.items()},
        "nulls": task.nulls_of(split),
    }
