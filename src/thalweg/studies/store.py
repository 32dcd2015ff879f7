"""Records of study runs: one compact JSONL file per run, named by what was run, shared by all plans of a folder and committed."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from thalweg.errors import CheckpointError, InputError
from thalweg.records import jsonl
from thalweg.records.files import atomic_write_text, read_bytes
from thalweg.records.measurements import Measurement, Measurements
from thalweg.records.run import RunFolder

STORE_SCHEMA = 2  # 1: the checksum, where there is one, covers the lines after the header only
KIND = "study-run"
ENDED = ("done", "diverged")  # results; anything else is no record

# Logged series that verdicts and reports read; the rest stays in the run folder, which is not committed.
KEPT = ("train/loss", "val/", "task/", "moved/", "gradient/")
# Of one series, evenly thinned, first and last kept; its lowest and its highest value are kept beside them.
MOST_POINTS = 80

# What a checksum would say of the records that were written before there were any, so that no other record can do without one.
FROM_BEFORE_CHECKSUMS = (
    "f2c349516245387b7875f1e17c1f6a39a7aa3b118bc41beead5e27f5beed0041",
    "46ccfcf74f3153a90d1229625eae1e14e9af9671da264b9aed6c5cbeefade5ac",
    "5a929f9b586b1ccfbea2dc3fd5d118ec3bf6ae19e915c5ff65b6853dd73f1464",
    "ab10376a69a9b184b763beb11ed179f32ea3bb42772dc10171a478f7523d9ffc",
    "1eaff11658232f26103fd1e2874446c6176cf3c254b8f92d9d8e6a9dc206dc42",
    "7dca30744314be9149ce45a2f9c9efd88cfe20f306a3eaf2267715db2a273eb7",
)


@dataclass(frozen=True)
class RunRecord:
    """What one finished run left: its configuration, how it ended, its series, its measurements by depth, its cost."""

    fingerprint: str
    config: dict[str, Any]
    seed: int
    status: str
    result: dict[str, Any]
    metrics: dict[str, list[tuple[int, float]]]
    measures: Measurements
    units: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def nulls(self) -> Mapping[str, float]:
        """Null values of the data: ``unigram_entropy`` (nats/token), ``xz_bits_per_byte``, ``uniform`` ..."""
        return self.result.get("nulls", {})

    @property
    def cost(self) -> Mapping[str, float]:
        """Parameters, FLOPs per token, peak memory, tokens per second."""
        return self.result.get("cost", {})

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a logged series, empty if it was not logged."""
        return self.metrics.get(name, [])

    def last(self, name: str) -> float | None:
        """The last value of a logged series."""
        series = self.series(name)
        return series[-1][1] if series else None

    def depth_profile(self, measure: str, step: int | None = None) -> dict[int, float]:
        """layer -> value of a measure at ``step`` (default: the last one measured).

        Measures of states (those with a row at ``stream.end``): the state that enters each layer, and under the number of layers the one
        that leaves the last, before the final norm. Others: the mean over the sites of a layer.
        """
        rows = [
            row
            for row in self.measures
            if row.measure == measure and row.layer is not None and row.site != "stream.left"
        ]
        steps = {row.step for row in rows if row.step is not None}
        wanted = step if step is not None else max(steps, default=None)
        rows = [row for row in rows if row.step == wanted]
        of_states = any(row.site == "stream.end" for row in rows)
        if of_states and rows[0].site == "stream.end":  # products up to the end are made, and written, from there on
            rows.reverse()
        by_layer: dict[int, list[float]] = {}
        for row in rows:
            by_layer.setdefault(cast("int", row.layer), []).append(row.value)
        return {layer: values[0] if of_states else sum(values) / len(values) for layer, values in by_layer.items()}


class Store:
    """A folder of run records."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._outcomes: dict[tuple[str, str, int], tuple[tuple[int, int], RunRecord]] = {}

    def path(self, fingerprint: str, label: str, seed: int) -> Path:
        """Where the record of a run lies; the name is for people, the fingerprint inside decides."""
        return self.folder / f"{label}-s{seed}-{fingerprint[:12]}.jsonl"

    def find(self, fingerprint: str, label: str, seed: int, *, measures: bool = True) -> RunRecord | None:
        """The record of a run, or None; measures: as of :func:`read`. Raises: CheckpointError if the file is broken or of another run."""
        path = self.path(fingerprint, label, seed)
        if not path.exists():
            return None
        record = read(path, measures=measures)
        if record.fingerprint != fingerprint or record.seed != seed:
            raise CheckpointError(
                f"{path} belongs to another run (fingerprint {record.fingerprint[:12]}, seed {record.seed}); remove it"
            )
        return record

    def outcome(self, fingerprint: str, label: str, seed: int) -> RunRecord | None:
        """As :meth:`find`, without measurements; a file is read once as long as it stays as it is. Raises: CheckpointError."""
        key = (fingerprint, label, seed)
        try:
            state = self.path(*key).stat()
        except FileNotFoundError:
            return None
        stamp, known = (state.st_mtime_ns, state.st_size), self._outcomes.get(key)
        if known is None or known[0] != stamp:
            record = self.find(*key, measures=False)
            if record is None:
                return None
            known = self._outcomes[key] = (stamp, record)
        return known[1]

    def keep(self, run: RunFolder, fingerprint: str, label: str, seed: int) -> RunRecord:
        """Write the record of a finished run folder. Raises: InputError for a run that has not ended."""
        if run.status not in ENDED:
            raise InputError(f"{run.path} is {run.status}; only runs that are done or diverged leave a record")
        kept = {name: _thin(series) for name, series in run.series().items() if name.startswith(KEPT)}
        record = RunRecord(
            fingerprint,
            run.config,
            seed,
            run.status,
            run.result,
            kept,
            run.measures(),
            {name: unit for name, unit in run.units().items() if name in kept},
            run.provenance,
            run.versions,
            tuple(run.notes),
        )
        write(self.path(fingerprint, label, seed), record)
        return record


def write(path: str | Path, record: RunRecord) -> None:
    """Write a record, atomically: a header with the checksum of all the rest, one line per series, one per group of measurements."""
    lines = []
    for name, series in record.metrics.items():
        steps, values = [s for s, _ in series], [float(f"{v:.9g}") for _, v in series]
        lines.append(
            jsonl.encode({"series": name, "unit": record.units.get(name, ""), "steps": steps, "values": values})
        )
    lines.extend(jsonl.encode(table) for table in _pack(record.measures))
    body = "".join(f"{line}\n" for line in lines)
    head = {
        "schema": STORE_SCHEMA,
        "kind": KIND,
        "fingerprint": record.fingerprint,
        "seed": record.seed,
        "status": record.status,
        "config": record.config,
        "result": record.result,
        "versions": record.versions,
        "provenance": record.provenance,
        "notes": list(record.notes),
    }
    head["sha256"] = checksum(head, body.encode())
    atomic_write_text(path, f"{jsonl.encode(head)}\n{body}")


def checksum(head: Mapping[str, Any], body: bytes, header: bool = True) -> str:
    """Of the header, but for the checksum in it, and the lines after it; the same however a version control system ends lines."""
    digest = hashlib.sha256()
    if header:
        digest.update(f"{jsonl.encode({k: v for k, v in head.items() if k != 'sha256'})}\n".encode())
    digest.update(body.replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def check_unchanged(path: str | Path, head: Mapping[str, Any], header: bool = True) -> None:
    """That header and lines give the checksum; header: whether it covers the header. Raises: CheckpointError."""
    body = read_bytes(path, "study record").partition(b"\n")[2]
    if not header and "sha256" not in head:
        if checksum(head, body) in FROM_BEFORE_CHECKSUMS:
            return
        raise CheckpointError(
            f"{path} was changed by hand: it has no checksum in its header, and is none of the records from before there were any; "
            "restore it from version control, or remove it and run the study again"
        )
    if head.get("sha256") != checksum(head, body, header):
        raise CheckpointError(
            f"{path} was changed by hand: what it says does not give the checksum in its header; restore it from version control, "
            "or remove it and run the study again"
        )


def read(path: str | Path, *, measures: bool = True) -> RunRecord:
    """Read a record; also one of schema 1, whose header is covered by no checksum.

    measures: whether to make the measurements, thousands of rows and most of the time; without them the record has none.
    Raises: InputError for a foreign file or a newer schema; CheckpointError for one that is broken or was changed.
    """
    lines = jsonl.read_lines(path, "study record")
    if not lines or lines[0][1].get("kind") != KIND:
        raise InputError(f"{path} is no record of a study run")
    jsonl.check_schema(lines[0][1].get("schema"), STORE_SCHEMA, str(path), "study record")
    check_unchanged(path, lines[0][1], header=lines[0][1]["schema"] > 1)
    head = jsonl.numbers(lines[0][1])
    metrics: dict[str, list[tuple[int, float]]] = {}
    units: dict[str, str] = {}
    places: list[list[Any]] = []
    found = Measurements()
    try:
        _check_head(head)
        for _, row in lines[1:]:
            if "series" in row:
                steps, values = row["steps"], jsonl.numbers(row["values"])
                _expect(f"the series {row['series']!r}", row["unit"], str)
                for step in steps:
                    _expect(f"a step of {row['series']}", step, int)
                for value in values:
                    _expect(f"a value of {row['series']}", value, int, float)
                metrics[row["series"]] = list(zip(steps, values, strict=True))
                units[row["series"]] = row["unit"]
            elif not measures:
                continue
            elif "places" in row:
                places = row["places"]
                for place in places:
                    _expect("a layer", place[PLACE.index("layer")], int, type(None))
            else:
                found.extend(_unpack(row, places))
        return RunRecord(
            head["fingerprint"],
            head["config"],
            head["seed"],
            head["status"],
            head["result"],
            metrics,
            found,
            units,
            head["provenance"],
            head["versions"],
            tuple(head["notes"]),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is a broken study record ({type(error).__name__}: {error}); remove it and run the study again"
        ) from None


def _check_head(head: Mapping[str, Any]) -> None:
    for name, kind in _HEAD.items():
        _expect(name, head[name], kind)
    if head["status"] not in ENDED:
        raise ValueError(f"status must be {' or '.join(ENDED)}, got {head['status']!r}")
    for name in ("nulls", "cost"):
        _expect(f"result.{name}", head["result"].get(name, {}), dict)
        for key, value in head["result"].get(name, {}).items():
            _expect(f"result.{name}.{key}", value, int, float, type(None))


def _expect(what: str, value: Any, *kinds: type) -> None:
    """Raises: TypeError. A flag is no number."""
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{what} must not be {value!r:.40}")


_HEAD = {
    "fingerprint": str,
    "seed": int,
    "status": str,
    "config": dict,
    "result": dict,
    "versions": dict,
    "provenance": dict,
    "notes": list,
}
PLACE = ("site", "layer", "branch")  # of a row; written as a number into a list of places, since measures share them
_NUMBERS = ("value", "low", "high")


def _pack(measures: Measurements) -> list[dict[str, Any]]:
    """The list of places, then one table for each group of rows that differ in place and numbers only; numbers to 6 digits."""
    places: dict[tuple, int] = {}
    groups: dict[tuple, dict[str, Any]] = {}
    for row in measures:
        table = row.to_row()
        shared = {k: v for k, v in table.items() if k not in (*PLACE, *_NUMBERS) and v not in (None, "")}
        given = [name for name in _NUMBERS if table[name] is not None]
        key = (*given, *sorted((k, str(v)) for k, v in shared.items()))
        group = groups.setdefault(key, {**shared, "at": [], **{name: [] for name in given}})
        group["at"].append(places.setdefault(tuple(table[name] for name in PLACE), len(places)))
        for name in given:
            group[name].append(float(f"{table[name]:.6g}"))
    return [{"places": [list(place) for place in places]}, *groups.values()]


def _unpack(group: dict[str, Any], places: list[list[Any]]) -> list[Measurement]:
    columns = {name: jsonl.numbers(group[name]) for name in _NUMBERS if name in group}
    for name, column in columns.items():
        for value in column:
            _expect(f"{name} of {group['measure']}", value, int, float)
    shared = {k: jsonl.number(v) if k == "null" else v for k, v in group.items() if k not in ("at", *_NUMBERS)}
    rows = zip(group["at"], *columns.values(), strict=True)
    return [
        Measurement(**shared, **dict(zip(PLACE, places[at], strict=True)), **dict(zip(columns, row, strict=True)))
        for at, *row in rows
    ]


def _thin(series: list[tuple[int, float]]) -> list[tuple[int, float]]:
    if len(series) <= MOST_POINTS:
        return series
    kept = {round(i * (len(series) - 1) / (MOST_POINTS - 1)) for i in range(MOST_POINTS)}
    finite = [i for i, (_, value) in enumerate(series) if math.isfinite(value)]
    if finite:  # a hypothesis at best reads one of the two
        kept |= {min(finite, key=lambda i: series[i][1]), max(finite, key=lambda i: series[i][1])}
    return [series[i] for i in sorted(kept)]
