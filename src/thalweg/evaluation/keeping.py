"""What an evaluation leaves on the disk: every row as it comes, and the measurements that reports read; it is gone on with from there."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from thalweg._words import counted
from thalweg.config import check_new, check_writable, checked_path
from thalweg.errors import InputError
from thalweg.evaluation.paired import Outcome
from thalweg.evaluation.scores import Scores
from thalweg.records import Measurements, append_lines, jsonl
from thalweg.records.provenance import collect

SCHEMA_VERSION = 1
KIND = "evaluation"
ITEMS, MEASUREMENTS = "items.jsonl", "measurements.jsonl"
SAME = 1e-5  # relative; by which the witness of a model may differ from that of the record that is gone on with


class Kept:
    """A folder with ``items.jsonl`` (a header, then one row for each item of each run, written as it is scored) and ``measurements.jsonl``
    (replaced whenever a run or a comparison is finished).

    subject: what is evaluated, by name; a folder that holds rows of the same subject is gone on with. witness: a number of the model that
    another one would not give. tell: gets lines for people. On a full disk what is scored stays in memory, is written as soon as it can be,
    and ``failed`` holds the error until then. Raises: InputError for a folder that holds anything else.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: str,
        dtype: str,
        subject: Mapping[str, Any] | None = None,
        witness: float | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ):
        self.folder = place(folder)
        self.items = self.folder / ITEMS
        self.rows = Measurements()
        self.failed: InputError | None = None
        self._fields = {"model": model, "dtype": dtype}
        self._header = {
            "schema": SCHEMA_VERSION,
            "kind": KIND,
            **self._fields,
            "witness": witness,
            "subject": jsonl.plain(subject or {}),
        }
        self._tell = tell
        self._waiting: list[str] = []
        self._there = 0  # rows in the file
        self._known: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
        if self.items.exists():
            self._read()

    def __enter__(self) -> "Kept":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder} cannot be made: {error.strerror or error}") from None
        append_lines(self.items, [], header=jsonl.encode({**self._header, "provenance": collect()}))
        if self._known:
            self._tell(f"going on with {self.folder}: {sum(map(len, self._known.values())):,} rows are there")
        return self

    def __exit__(self, *_: Any) -> None:
        self._write()
        self._save()

    @property
    def left(self) -> str:
        """What an evaluation that stops now leaves, for people."""
        lost = f" ({len(self._waiting):,} more found no room)" if self._waiting else ""
        return f"{counted(self._there, 'row')}{lost} kept in {self.folder}"

    def known(self, arm: str, job: str) -> Mapping[str, Mapping[str, Any]]:
        """The rows of one job of one run that an earlier call left, by the names of their items."""
        return self._known.get((arm, job), {})

    def listener(self, arm: str, role: str, job: str) -> Callable[[dict[str, Any]], None]:
        """Takes the rows of one job of one run."""

        def on_row(row: dict[str, Any]) -> None:
            self._waiting.append(jsonl.encode({"arm": arm, "role": role, "job": job, **row}))
            self._write()

        return on_row

    def finished(self, arm: str, role: str, scores: Mapping[str, Scores], **options: Any) -> None:
        """Keep the metrics of a run."""
        for one in scores.values():
            self.rows.extend(one.measurements(options=options, arm=arm, **self._fields))
        self._save()

    def outcome(self, outcome: Outcome) -> None:
        """Keep a comparison."""
        self.rows.extend(outcome.measurements(**self._fields))
        self._save()

    def _write(self) -> None:
        def write() -> None:
            append_lines(self.items, self._waiting)
            self._there += len(self._waiting)
            self._waiting.clear()

        if self._waiting:
            self._tried(write)

    def _save(self) -> None:
        self._tried(lambda: self.rows.save(self.folder / MEASUREMENTS))

    def _tried(self, write: Callable[[], None]) -> None:
        try:
            write()
            self.failed = self.failed if self._waiting else None
        except InputError as error:
            if self.failed is None:
                self._tell(f"{error}; going on, what is scored is written when there is room")
            self.failed = error

    def _read(self) -> None:
        """Raises: InputError for rows of something else."""
        found = jsonl.read_lines(self.items, "record of an evaluation")
        if not found:
            return
        (_, header), *rows = found
        if header.get("kind") != KIND:
            raise InputError(f"{self.items} is no record of an evaluation; choose another folder")
        jsonl.check_schema(header.get("schema"), SCHEMA_VERSION, str(self.items), "record of an evaluation")
        ours, theirs = (
            {"model": h.get("model"), "dtype": h.get("dtype"), **(h.get("subject") or {})}
            for h in (self._header, header)
        )
        for name in ours | theirs:
            if ours.get(name) != theirs.get(name):
                was, now = theirs.get(name), ours.get(name)
                raise InputError(
                    f"{self.folder} holds another evaluation: its {name} was {was!r}, now {now!r}; choose another folder"
                )
        mine, seen = self._header["witness"], jsonl.number(header.get("witness"))
        if mine is not None and not (isinstance(seen, float) and abs(mine - seen) <= SAME * abs(mine)):
            raise InputError(
                f"{self.folder} was made with other weights or on another machine: on the same few tokens the model gave {seen}, now {mine}; "
                "choose another folder"
            )
        self._there = len(rows)
        for _, row in rows:
            self._known.setdefault((str(row.get("arm")), str(row.get("job"))), {})[str(row.get("item"))] = (
                jsonl.numbers(row)
            )


def place(folder: str | Path) -> Path:
    """The folder, if it is new or holds an evaluation. Raises: InputError."""
    if str(folder) and (path := checked_path(folder, expand=True)).is_dir() and (path / ITEMS).is_file():
        check_writable(path)
        return path
    return check_new(folder)


def reserved(folder: Path) -> Path:
    """``folder``, made; where it is there already the first free one of FOLDER-2, FOLDER-3, ..., so that no two calls share one.

    Raises: InputError.
    """
    path, tried = folder, 1
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with suppress(FileExistsError):
                path.mkdir()
                return path
            tried += 1
            path = folder.with_name(f"{folder.name}-{tried}")
    except OSError as error:
        raise InputError(f"{path} cannot be made: {error.strerror or error}; choose another place by -o") from None
