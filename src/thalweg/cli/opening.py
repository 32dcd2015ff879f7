"""MODEL on the command line: what :func:`thalweg.capture.opening.open_model` takes, or the folder of a run."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg.capture.opening import Kind, Opened, open_model
from thalweg.errors import InputError
from thalweg.records.run import RunFolder

if TYPE_CHECKING:
    from thalweg.data import Task

KINDS: dict[str, Kind] = {"next_token": "decoder", "masked": "masked-lm", "classification": "encoder"}


def open_any(
    where: str, *, which: str | None = None, default: str = "best", quiet: bool = False, **options: Any
) -> Opened:
    """The model that ``where`` names. which: checkpoint, of a run (``best``, ``last``; None: ``default``). options: of ``open_model``.

    A run is opened as it was trained (dtype and backend are its own), with the tokenizer of its task, one of ours. A model that was saved
    with edits of its own has them on.
    Raises: InputError for ``which`` of a model that is no run; as ``open_model``.
    """
    hush_bars(quiet)
    if RunFolder.is_run(where):
        return open_run(where, which or default)
    check_which(where, which)
    from thalweg.editing import attach_from

    return open_model(where, edited=attach_from, **options)


def check_which(where: str, which: str | None) -> None:
    """Raises: InputError for the checkpoint of a model that has no checkpoints."""
    if which is not None and not RunFolder.is_run(where):
        raise InputError(f"--which names a checkpoint of a run, and {where} is no run; leave it out")


def hush_bars(quiet: bool) -> None:
    """Progress bars of transformers are for a terminal."""
    from transformers.utils import logging

    if quiet or not sys.stderr.isatty():
        logging.disable_progress_bar()


def open_run(where: str | Path, which: str) -> Opened:
    """The model of a run. Raises: InputError, CheckpointError."""
    return open_run_and_task(where, which)[0]


def open_run_and_task(where: str | Path, which: str) -> "tuple[Opened, Task]":
    """The model of a run, and the data that it was trained on. Raises: InputError, CheckpointError."""
    from thalweg.training import load_model
    from thalweg.training.config import from_table
    from thalweg.training.tasks import load_task

    config = from_table(RunFolder.open(where).config)
    task = load_task(config)
    model, _ = load_model(where, which)
    kind = KINDS[task.objective]
    told = f"{which} checkpoint of a run on {config.data}, trained on {config.sequence_length} tokens at a time: longer windows are new to it"
    return Opened(model, task.tokenizer, str(Path(where)), kind, (told,)), task
