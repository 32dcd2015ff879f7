"""What an evaluation leaves on the disk: every row as it comes, and the measurements that reports read."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thalweg.config import check_new
from thalweg.errors import InputError
from thalweg.evaluation.paired import Outcome
from thalweg.evaluation.scores import Scores
from thalweg.records import Measurements, append_lines, jsonl
from thalweg.records.provenance import collect

SCHEMA_VERSION = 1
KIND = "evaluation"
ITEMS, MEASUREMENTS = "items.jsonl", "measurements.jsonl"


class Kept:
    """A folder with ``items.jsonl`` (a header, then one row for each item of each run, written as it is scored) and ``measurements.jsonl``
    (replaced whenever a run or a comparison is finished).
    """

    def __init__(self, folder: str | Path, *, model: str, dtype: str):
        self.folder = check_new(folder)
        self.items = self.folder / ITEMS
        self.rows = Measurements()
        self._fields = {"model": model, "dtype": dtype}

    def __enter__(self) -> "Kept":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder} cannot be made: {error.strerror or error}") from None
        header = {"schema": SCHEMA_VERSION, "kind": KIND, **self._fields, "provenance": collect()}
        append_lines(self.items, [jsonl.encode(header)])
        return self

    def __exit__(self, *_: Any) -> None:
        self.rows.save(self.folder / MEASUREMENTS)

    def listener(self, arm: str, role: str, job: str) -> Callable[[dict[str, Any]], None]:
        """Takes the rows of one job of one run."""

        def on_row(row: dict[str, Any]) -> None:
            append_lines(self.items, [jsonl.encode({"arm": arm, "role": role, "job": job, **row})])

        return on_row

    def finished(self, arm: str, role: str, scores: Mapping[str, Scores], **options: Any) -> None:
        """Keep the metrics of a run."""
        for one in scores.values():
            self.rows.extend(one.measurements(options=options, arm=arm, **self._fields))
        self.rows.save(self.folder / MEASUREMENTS)

    def outcome(self, outcome: Outcome) -> None:
        """Keep a comparison."""
        self.rows.extend(outcome.measurements(**self._fields))
        self.rows.save(self.folder / MEASUREMENTS)
