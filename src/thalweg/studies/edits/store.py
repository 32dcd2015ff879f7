"""Records of edits: one JSONL file for each subject on each text, one line for each edit that is complete."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.errors import CheckpointError, InputError
from thalweg.records import jsonl
from thalweg.records.files import atomic_write_text
from thalweg.studies.store import check_unchanged, checksum

SCHEMA = 1
KIND = "edit-record"
DIGITS = 7  # of recorded numbers
HEAD = {
    "fingerprint": str,
    "subject": dict,
    "text": dict,
    "evaluation": dict,
    "facts": dict,
    "versions": dict,
    "provenance": dict,
}


@dataclass(frozen=True)
class EditRow:
    """One edit on all documents.

    columns: name -> [documents][buckets]: ``nats`` (summed negative log likelihoods), or ``cosine`` and ``order`` of embeddings. layers:
    name -> one number a layer, means over the tokens of the audited documents: ``applied`` (relative change of the edited output where
    the edit acts), ``drift`` (of the state after the layer, from the unedited model), of the unedited model ``self_share``. drift: of a
    no-op from the unedited model, the worst document. seconds: of computing, audit included.
    """

    identity: str
    edit: dict[str, Any]
    role: str
    columns: dict[str, list[list[float]]]
    layers: dict[str, list[float | None]] = field(default_factory=dict)
    drift: float | None = None
    seconds: float = 0.0
    ended: str = ""
    notes: tuple[str, ...] = ()


@dataclass
class EditRecord:
    """All edits of one subject on one text. facts: ``tokens`` [documents][buckets], names of the documents, digest of the weights ..."""

    fingerprint: str
    subject: dict[str, Any]
    text: dict[str, Any]
    evaluation: dict[str, Any]
    facts: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, EditRow] = field(default_factory=dict)

    @property
    def tokens(self) -> list[list[int]]:
        return self.facts["tokens"]


def path_of(folder: Path, label: str, fingerprint: str) -> Path:
    """Where a record lies; the name is for people, the fingerprint inside decides."""
    return folder / f"{label}-{fingerprint[:12]}.jsonl"


def write(path: Path, record: EditRecord) -> None:
    """Write a record, atomically: a header with the checksum of all the rest, one line for each edit."""
    body = "".join(f"{jsonl.encode(_row(row))}\n" for row in record.rows.values())
    head: dict[str, Any] = {"schema": SCHEMA, "kind": KIND}
    head |= {name: getattr(record, name) for name in HEAD}
    head["sha256"] = checksum(head, body.encode())
    atomic_write_text(path, f"{jsonl.encode(head)}\n{body}")


def _row(row: EditRow) -> dict[str, Any]:
    return {**row.__dict__, "columns": _short(row.columns), "layers": _short(row.layers), "notes": list(row.notes)}


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_short(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def read(path: Path) -> EditRecord:
    """Read a record. Raises: InputError for a foreign file or a newer schema; CheckpointError for one that is broken or was changed."""
    lines = jsonl.read_lines(path, "record of edits")
    if not lines or lines[0][1].get("kind") != KIND:
        raise InputError(f"{path} is no record of edits")
    head = lines[0][1]
    jsonl.check_schema(head.get("schema"), SCHEMA, str(path), "record of edits")
    check_unchanged(path, head)
    try:
        for name, kind in HEAD.items():
            if not isinstance(head[name], kind):
                raise TypeError(f"{name} must not be {head[name]!r:.40}")
        record = EditRecord(**{name: jsonl.numbers(head[name]) for name in HEAD})
        for _, table in lines[1:]:
            row = EditRow(
                **{
                    **table,
                    **{k: jsonl.numbers(table[k]) for k in ("columns", "layers", "drift")},
                    "notes": tuple(table["notes"]),
                }
            )
            _check(row, record)
            record.rows[row.identity] = row
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is a broken record of edits ({type(error).__name__}: {error}); remove it and run the study again"
        ) from None
    return record


def _check(row: EditRow, record: EditRecord) -> None:
    for name, column in row.columns.items():
        if len(column) != len(record.tokens):
            raise ValueError(f"{name} of {row.role} {row.edit} has {len(column)} documents, not {len(record.tokens)}")


def find(folder: Path, label: str, fingerprint: str) -> EditRecord | None:
    """The record, or None. Raises: CheckpointError if the file is broken or of another subject or text."""
    path = path_of(folder, label, fingerprint)
    if not path.exists():
        return None
    record = read(path)
    if record.fingerprint != fingerprint:
        raise CheckpointError(
            f"{path} is of another subject or text (fingerprint {record.fingerprint[:12]}); remove it"
        )
    return record


@contextmanager
def held(folder: Path, label: str, fingerprint: str) -> Iterator[None]:
    """Be the only process that adds to a record; the system gives the lock up when the process ends, however it ends.

    Raises: InputError if another process has it, or if the folder cannot be written.
    """
    from filelock import FileLock, Timeout

    path = path_of(folder, label, fingerprint)
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise InputError(
            f"another process adds to the record {path}; wait for it, then the same command runs what is missing"
        ) from None
    except (OSError, NotImplementedError) as error:
        raise InputError(
            f"{path} cannot be locked for writing: {getattr(error, 'strerror', None) or error}; choose another folder of records"
        ) from error
    try:
        yield
    finally:
        lock.release()


def conflicts(record: EditRecord, facts: Mapping[str, Any]) -> list[str]:
    """What an opened subject says differently from the record."""
    return [name for name in facts if record.facts.get(name) != facts[name]]
