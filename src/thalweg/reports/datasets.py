"""Which data a run was trained on, and what these said of themselves."""

from collections.abc import Iterable, Mapping
from typing import Any

from thalweg.reports.text import words
from thalweg.studies.store import RunRecord


def data_key(record: RunRecord) -> str:
    """What tells its data from others: their fingerprint, or what the configuration asks for where the run left none."""
    return _data(record).get("fingerprint") or words(
        [record.config.get(k) for k in ("data", "tokenizer", "vocab_size")]
    )


def data_name(record: RunRecord) -> str:
    return str(_data(record).get("name") or record.config.get("data") or "unnamed data")


def notes_of(runs: Iterable[tuple[str, RunRecord]]) -> list[str]:
    """The notes of named runs (one alone needs no name), then what their data said of themselves (cut, filtered ...).

    Each stands once, though a run keeps the notes of its data among its own.
    """
    runs = list(runs)
    said = [(data_name(r), note) for _, r in runs for note in _notes(r)]
    several, known = len({name for name, _ in said}) > 1, {note for _, note in said}
    own = [f"{name}: {note}" if name else note for name, r in runs for note in r.notes if note not in known]
    return [*dict.fromkeys([*own, *(f"Data{f' ({name})' if several else ''}: {note}" for name, note in said)])]


def _notes(record: RunRecord) -> list[str]:
    notes = _data(record).get("notes")
    return [str(note) for note in notes] if isinstance(notes, list | tuple) else []


def _data(record: RunRecord) -> Mapping[str, Any]:
    data = record.result.get("data")
    return data if isinstance(data, Mapping) else {}
