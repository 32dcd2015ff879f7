"""The run folder: what one run was asked, logged, measured and how it ended; readable without this library."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thalweg.errors import CheckpointError, InputError, InUseError, UnknownNameError
from thalweg.records import jsonl, provenance
from thalweg.records.files import append_line, append_lines, atomic_write_text, has_lines
from thalweg.records.measurements import HEADER, Measurement, Measurements

SCHEMA_VERSION = 1
ENDS = ("done", "diverged", "interrupted", "failed")
STATUSES = ("running", *ENDS)
LOCK = ".lock"


class RunFolder:
    """One run on the disk.

        run.json         what was asked, with what it ran, how it ended (replaced atomically)
        metrics.jsonl    one {"step", "name", "value", "unit"} a line, appended
        measures.jsonl   measurements, appended
        checkpoints/     owned by the training loop
        .lock            locked while a process writes here (:meth:`hold`); empty

    Make one with :meth:`create` or :meth:`open`. Numbers that are not finite are stored as the strings NaN, Infinity,
    -Infinity.
    """

    def __init__(self, path: Path, record: dict[str, Any]):
        self.path = path
        self._record = record

    # made and found

    @classmethod
    def create(
        cls,
        path: str | Path,
        config: dict[str, Any],
        kind: str = "train",
        *,
        plan_hash: str = "",
        arm: str = "",
        seed: int | None = None,
        device: str | None = None,
        origin: Mapping[str, Any] | None = None,
    ) -> "RunFolder":
        """Start a run in a new or empty folder. origin: what else its numbers came from, kept with the provenance.

        Raises: InputError if the folder is in use or cannot be written.
        """
        path = Path(path)
        if not isinstance(config, dict):
            raise InputError(f"the config of a run must be a plain table, got {type(config).__name__}")
        cls.check_new(path)
        where = {**provenance.collect(device), **(origin or {})}
        record = {
            "schema": SCHEMA_VERSION,
            "kind": kind,
            "status": "running",
            "arm": arm,
            "seed": seed,
            "plan_hash": plan_hash,
            "config": config,
            "versions": where.pop("versions"),
            "provenance": where,
            "started": provenance.now(),
            "ended": None,
            "result": {},
            "notes": [],
        }
        run = cls(path, jsonl.plain(record))  # refuses what JSON cannot hold before anything is made on the disk
        run._save()
        try:
            run.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(f"{run.checkpoints} cannot be made: {error.strerror or error}") from error
        return run

    @staticmethod
    def check_new(path: str | Path) -> None:
        """Raises: InputError if a run cannot start in this folder. One that holds nothing but a lock counts as empty."""
        path = Path(path)
        if (path / "run.json").exists():
            raise InputError(f"{path} holds a run already; resume that run or choose another folder")
        if path.is_dir() and any(found.name != LOCK for found in path.iterdir()):
            raise InputError(f"{path} is not empty and holds no run; choose a new folder")
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file; choose a folder for the run")

    @staticmethod
    @contextmanager
    def hold(path: str | Path) -> Iterator[None]:
        """Be the only process that writes into the folder of a run; made if it is missing.

        The system gives the lock up when the process ends, however it ends. Raises: InUseError if another process has it, before anything
        is written; InputError if the folder cannot be written.
        """
        from filelock import FileLock, Timeout

        path = Path(path)
        lock = FileLock(path / LOCK, timeout=0)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            raise InUseError(f"{path} is in use by another process; wait for it or choose another folder") from None
        except (OSError, NotImplementedError) as error:
            raise InputError(
                f"{path} cannot be locked for writing: {getattr(error, 'strerror', None) or error}; choose another place"
            ) from error
        try:
            yield
        finally:
            lock.release()

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Open a run that exists.

        Raises: InputError for a missing folder, one that holds no run, or a newer schema; CheckpointError for a broken
        ``run.json``.
        """
        path = Path(path)
        if not path.is_dir():
            raise InputError(
                f"no such run: {path} is {'a file' if path.exists() else 'missing'}; give the folder of a run"
            )
        if not (path / "run.json").exists():
            raise InputError(f"{path} is no run folder: it has no run.json")
        record = jsonl.read_object(path / "run.json", "run record")
        jsonl.check_schema(record.get("schema"), SCHEMA_VERSION, str(path / "run.json"), "run record")
        _check(record, path / "run.json")
        record["result"] = jsonl.numbers(record["result"])
        return cls(path, record)

    @staticmethod
    def is_run(path: str | Path) -> bool:
        """Whether a folder holds a run record; its content is not read."""
        return (Path(path) / "run.json").is_file()

    # what it says

    @property
    def kind(self) -> str:
        return self._record["kind"]

    @property
    def status(self) -> str:
        """running, done, diverged, interrupted or failed. A killed process leaves ``running``."""
        return self._record["status"]

    @property
    def config(self) -> dict[str, Any]:
        return self._record["config"]

    @property
    def result(self) -> dict[str, Any]:
        return self._record["result"]

    @property
    def notes(self) -> list[str]:
        return list(self._record["notes"])

    @property
    def arm(self) -> str:
        return self._record["arm"]

    @property
    def seed(self) -> int | None:
        return self._record["seed"]

    @property
    def plan_hash(self) -> str:
        return self._record["plan_hash"]

    @property
    def versions(self) -> dict[str, str]:
        return self._record["versions"]

    @property
    def provenance(self) -> dict[str, Any]:
        """What :func:`thalweg.records.provenance.collect` said at the start, versions included."""
        return {**self._record["provenance"], "versions": self.versions}

    @property
    def record(self) -> dict[str, Any]:
        """A copy of everything in ``run.json``."""
        return copy.deepcopy(self._record)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    # how it goes on

    def log(self, step: int, name: str, value: float, unit: str = "") -> None:
        """Append one number to ``metrics.jsonl``. Raises: InputError (disk full)."""
        row = Measurement(name, value, unit=unit, step=step)  # the same checks and conversions as any measured number
        append_line(
            self._metrics, jsonl.encode({"step": row.step, "name": row.measure, "value": row.value, "unit": row.unit})
        )

    def add_measures(self, rows: Iterable[Measurement]) -> None:
        """Append measurements to ``measures.jsonl``, all of them or none. Raises: InputError (disk full)."""
        lines = [row.to_line() for row in Measurements(rows)]
        if lines:
            append_lines(self._measures, lines, header=HEADER)

    def note(self, text: str) -> None:
        """Record a deviation that the report must show ("resumed, not bitwise: threads 1 -> 2")."""
        self._update(notes=[*self._record["notes"], str(text)])

    def finish(self, status: str, result: dict[str, Any] | None = None) -> None:
        """Say how the run ended (one of ``ENDS``), and its result. Raises: UnknownNameError."""
        if status not in ENDS:
            raise UnknownNameError("end of a run", status, ENDS)
        self._update(status=status, ended=provenance.now(), result=jsonl.numbers(jsonl.plain(result or {})))

    def restart(self) -> None:
        """Say that the run goes on after an interruption."""
        self._update(status="running", ended=None)

    def truncate_after(self, step: int) -> None:
        """Forget metrics and measurements of later steps, so that a run resumed from ``step`` logs each step once."""
        if self._metrics.exists():
            kept = [jsonl.encode(row) for _, row in self._metric_rows() if row["step"] <= step]
            atomic_write_text(self._metrics, "".join(f"{line}\n" for line in kept))
        if has_lines(self._measures):
            Measurements(row for row in self.measures() if row.step is None or row.step <= step).save(self._measures)

    # what it holds

    def metrics(self, name: str | None = None) -> list[tuple[int, float]]:
        """(step, value) of one metric in the order logged; of all of them when no name is given."""
        return [(row["step"], row["value"]) for _, row in self._metric_rows() if name is None or row["name"] == name]

    def series(self) -> dict[str, list[tuple[int, float]]]:
        """Every metric by name."""
        found: dict[str, list[tuple[int, float]]] = {}
        for _, row in self._metric_rows():
            found.setdefault(row["name"], []).append((row["step"], row["value"]))
        return found

    def units(self) -> dict[str, str]:
        """The unit of every metric by name."""
        return {row["name"]: row["unit"] for _, row in self._metric_rows()}

    def measures(self) -> Measurements:
        """What was measured; empty if nothing was yet."""
        return Measurements.load(self._measures) if has_lines(self._measures) else Measurements()

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def _measures(self) -> Path:
        return self.path / "measures.jsonl"

    def _metric_rows(self) -> list[tuple[int, dict[str, Any]]]:
        if not self._metrics.exists():
            return []
        rows = jsonl.read_lines(self._metrics, "file of metrics")
        for index, row in rows:
            row["value"], row["unit"] = jsonl.number(row.get("value")), row.get("unit", "")
            try:
                Measurement(row.get("name", ""), row["value"], unit=row["unit"], step=row.get("step"))
            except InputError as error:
                raise CheckpointError(f"{self._metrics}:{index} is no metric: {error}: {jsonl.REMEDY}") from None
            if row.get("step") is None:
                raise CheckpointError(f"{self._metrics}:{index} is no metric: it has no step: {jsonl.REMEDY}")
        return rows

    def _update(self, **fields: Any) -> None:
        before = dict(self._record)
        self._record.update(fields)
        try:
            self._save()
        except BaseException:
            self._record = before  # what this object says stays what the disk says
            raise

    def _save(self) -> None:
        atomic_write_text(self.path / "run.json", jsonl.encode(self._record, indent=1) + "\n")

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r}, {self.kind}, {self.status})"


_TYPES: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "status": (str,),
    "arm": (str,),
    "seed": (int, type(None)),
    "plan_hash": (str,),
    "config": (dict,),
    "versions": (dict,),
    "provenance": (dict,),
    "result": (dict,),
    "notes": (list,),
}


_WHOLE = (
    "depth",
    "width",
    "heads",
    "kv_heads",
    "sequence_length",
    "batch_size",
    "steps",
)  # of a config, where they stand in it


def _check(record: dict[str, Any], path: Path) -> None:
    for name, types in _TYPES.items():
        if name not in record:
            raise InputError(f"{path} is no run record of thalweg: it lacks {name!r}")
        if not isinstance(record[name], types):
            raise InputError(f"{path} is no run record of thalweg: {name!r} is a {type(record[name]).__name__}")
    for name in _WHOLE:
        value = record["config"].get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise InputError(
                f"{path} is no run record of thalweg: {name!r} of its config is {value!r}, which must be a whole number; restore the file"
            )
    if record["status"] not in STATUSES:
        raise InputError(f"{path} is no run record of thalweg: unknown status {str(record['status'])[:40]!r}")
