"""A trained run measured again: its checkpoint, on held-out data of its own task, with its mixing replaced."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thalweg import data
from thalweg.data import scored_tokens
from thalweg.errors import InputError
from thalweg.geometry.summaries import LEAST_SEQUENCES
from thalweg.records import Measurements, RunFolder
from thalweg.training.config import from_table
from thalweg.training.determinism import derive_seed, pick_device, reproducible
from thalweg.training.engine import load_decoder
from thalweg.training.evaluation import held_out_length
from thalweg.training.geometry import held_out_batch, measure_model, split_of
from thalweg.training.replacing import PARTS, replacements
from thalweg.training.resumption import same_data

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
        """Where the split holds fewer tokens than were asked for, what was done; else nothing."""
        if self.tokens >= self.asked:
            return ""
        return f"{self.asked:,} tokens were asked for; {self.data} ({self.split}) holds {self.tokens:,}, and all of them are used"


@dataclass(frozen=True)
class Measured:
    """The rows, what they were measured on, and the held-out loss [nats/token] over the same sequences."""

    plan: Plan
    loss: float
    rows: Measurements


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
    model, manifest = load_decoder(folder.path, which)
    config = from_table(folder.config)
    task = data.load(config.data, tokenizer=config.tokenizer, vocab_size=config.vocab_size, cache_dir=cache_dir)
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
    if not sum(scored_tokens(batch["labels"]) for batch in batches):
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
        replaced = replacements(model, batches, on_pass)
        rows.extend(replaced.rows)
    return Measured(plan, replaced.plain.mean, rows.stamped(step=plan.step, split=split))
