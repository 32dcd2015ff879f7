"""What a model is trained on: text in a memory-mapped cache and synthetic tasks, both with the nulls they must beat."""

from collections.abc import Iterator
from pathlib import Path

from thalweg.config import cache_folder, checked_path
from thalweg.data import tasks
from thalweg.data.masking import with_objective
from thalweg.data.sampler import Sampler
from thalweg.data.task import IGNORED, Batch, EvalBatches, Task, scored_tokens
from thalweg.data.tasks import Opener, Request
from thalweg.data.units import bits_per_byte, nats_per_token
from thalweg.errors import InputError, UnknownNameError
from thalweg.registry import Entry


def names() -> list[str]:
    """Names that a spec may begin with."""
    return tasks.registry.names()


def entries() -> Iterator[Entry[Opener]]:
    """Every kind of data with its summary and source."""
    return tasks.registry.entries()


def load(
    spec: str,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int | None = None,
    cache_dir: str | Path | None = None,
    max_bytes: int | None = None,
    max_tokens: int | None = None,
    objective: str | None = None,
) -> Task:
    """The task that ``spec`` names.

    spec: ``austen`` (six novels, shipped), ``text:FILE[,valid=0.05]``, ``hf:NAME[:CONFIG]`` or one of its presets (``wikitext-2``,
    ``wikitext-103``, ``openwebtext``, ``fineweb-edu``), ``copy``, ``overwrite`` or ``forget`` with parameters: ``copy:vocab=16,half=12``;
    ``sentiment`` (shipped) and ``sst2``, which are classifications.
    tokenizer (text only): ``bpe`` (the default: the shipped one for ``austen``, else trained on the train split), ``byte``, or the path of
    a ``tokenizer.json``. vocab_size: size of a BPE to train on the train split.
    cache_dir: where tokens are kept; default ``$THALWEG_CACHE``, else ``~/.cache/thalweg``.
    max_bytes: how much text is read of every split that the data comes with, or of the whole where the split is made here.
    max_tokens: how many train tokens are kept.
    objective: what is learned from a text: ``next_token``, or ``masked`` tokens (None: the task's own).
    Raises: UnknownNameError for an unknown name or parameter; InputError for text or values that cannot be used; OfflineError where a hub
    is needed and not reached; MissingExtraError without ``datasets`` for ``hf:``.
    """
    if not isinstance(spec, str):
        raise InputError(f"data is named by a string such as 'austen', got {type(spec).__name__}")
    name, colon, rest = spec.strip().partition(":")
    request = Request(
        spec=spec.strip(),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        cache_dir=cache_dir,
        max_bytes=max_bytes,
        max_tokens=max_tokens,
    )
    if name not in tasks.registry:
        is_file = not colon and checked_path(spec.strip(), expand=True).is_file()
        more = f"For the file write text:{spec.strip()}" if is_file else "For a file write text:FILE."
        raise UnknownNameError("data", name, names(), more=more)
    return with_objective(tasks.registry[name](rest.strip(), request), objective)


__all__ = [
    "IGNORED",
    "Batch",
    "EvalBatches",
    "Request",
    "Sampler",
    "Task",
    "bits_per_byte",
    "cache_folder",
    "entries",
    "load",
    "names",
    "nats_per_token",
    "scored_tokens",
]
