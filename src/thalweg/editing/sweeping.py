"""A grid of edits, each evaluated beside its matched no-op; every point is kept as soon as it is computed."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from thalweg.capture.proof import dtype_name
from thalweg.editing.editor import edit
from thalweg.editing.options import EditOptions, site_of
from thalweg.errors import InputError, UnknownNameError
from thalweg.evaluation.paired import Difference, Role, check_drift, differences, drift
from thalweg.evaluation.scores import Scores, interval_words
from thalweg.records import Measurements, jsonl
from thalweg.records.files import append_line, atomic_write_text

SCHEMA, KIND = 1, "sweep"
COMPONENTS = ("parallel", "perpendicular")
# The scales of the published figure (He et al. 2026, arXiv 2609.15975); of the last two perpendicular ones values only.
PUBLISHED = {
    "parallel": (-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0),
    "perpendicular": (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0),
}
SAME = 1e-6  # relative; by which the unedited model may differ from a record that is gone on with

Evaluate = Callable[[Role], Scores]


@dataclass(frozen=True)
class Point:
    """One edit of a sweep. component: which scale varies (or what else the series is called); scale: where it stands on its axis."""

    component: str
    scale: float
    options: EditOptions

    @property
    def name(self) -> str:
        """Tells points of one sweep apart."""
        return f"{self.component} {self.scale:g}: {self.options.describe()}"


@dataclass(frozen=True)
class Result:
    """A point evaluated: edited and matched no-op by document, their differences by metric, drift of the no-op, seconds of the edited pass."""

    point: Point
    scores: Scores
    baseline: Scores
    differences: tuple[Difference, ...]
    drift: float | None
    seconds: float

    def difference(self, metric: str) -> Difference:
        """Of one metric. Raises: UnknownNameError."""
        for one in self.differences:
            if one.metric == metric:
                return one
        raise UnknownNameError("metric", metric, [one.metric for one in self.differences])


@dataclass(frozen=True)
class Sweep:
    """unedited: scores of the model as it is; results: of every point, in order; dtype: of the model; unasked: names of points that the record
    holds beside these."""

    unedited: Scores
    results: tuple[Result, ...]
    dtype: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    unasked: tuple[str, ...] = ()

    def table(self) -> list[dict[str, Any]]:
        """One table per point, for JSON: what was edited, each metric with its difference from the no-op and the interval."""
        return [
            {
                "site": r.point.options.site,
                "component": r.point.component,
                "scale": r.point.scale,
                "edit": r.point.options.plain(),
                "drift": r.drift,
                "seconds": r.seconds,
                "metrics": {one.metric: one.plain() for one in r.differences},
            }
            for r in self.results
        ]

    def measurements(self, **fields: Any) -> Measurements:
        """Rows ``METRIC`` and ``difference.METRIC``: edited minus no-op, bootstrap over documents.

        site: where the edit acts; branch: the component; arm: the scale. ``noop_drift`` by site; the unedited model under the arm
        ``unedited``. fields: stamped on every row.
        """
        rows, seen = Measurements(), set()
        for name, value in self.unedited.values().items():
            rows.add(
                name,
                value,
                unit=self.unedited.metric(name).unit,
                arm="unedited",
                n=len(self.unedited.items),
                split=self.unedited.task,
            )
        for r in self.results:
            where: dict[str, Any] = {
                "site": r.point.options.site,
                "split": r.scores.task,
                "n": len(r.scores.items),
                "dtype": self.dtype,
            }
            if r.drift is not None and r.point.options.site not in seen:
                seen.add(r.point.options.site)
                rows.add("noop_drift", r.drift, null=0.0, null_kind="no hooks", **where)
            where |= {"branch": r.point.component, "arm": f"{r.point.scale:g}"}
            for one in r.differences:
                words = interval_words(one.interval)
                between = {"low": one.interval.low, "high": one.interval.high, "interval": words}
                between = between if np.isfinite(one.interval.low) or np.isfinite(one.interval.high) else {}
                rows.add(one.metric, one.edited, unit=one.unit, **where)
                rows.add(
                    f"difference.{one.metric}",
                    one.value,
                    unit=one.unit,
                    null=0.0,
                    null_kind="the edit at scales 1",
                    **between,
                    **where,
                )
        return rows.stamped(**fields) if fields else rows


def grid(
    sites: Sequence[str],
    scales: Mapping[str, Sequence[float]] = PUBLISHED,
    **common: Any,
) -> tuple[Point, ...]:
    """Every site by every scale of every component. common: further options of every edit; those of values go to the site ``value`` only.

    Raises: InputError, UnknownNameError.
    """
    for component in scales:
        if component not in COMPONENTS:
            raise UnknownNameError("component of an update", component, COMPONENTS)
    sites = list(dict.fromkeys(map(site_of, sites)))
    if not sites or not any(scales.values()):
        raise InputError("a sweep needs at least one site and one scale; give sites and scales")
    of_values = ("exclude_self", "group", "heads", "route")
    return tuple(
        Point(
            component,
            float(scale),
            EditOptions(
                site=site,
                **{component: float(scale)},  # type: ignore[arg-type]  # a name that was checked
                **{name: value for name, value in common.items() if site == "value" or name not in of_values},
            ),
        )
        for site in sites
        for component, along in scales.items()
        for scale in along
    )


def each_layer(depth: int, options: EditOptions | None = None, **values: Any) -> tuple[Point, ...]:
    """The same edit in every layer alone, for correlations with its geometry; without options the layer is dropped. scale: its number."""
    if options is None:
        options = EditOptions(**({"site": "block", "parallel": 0.0, "perpendicular": 0.0} | values))
    return tuple(Point("layer", float(i), dataclasses.replace(options, layers=(i,))) for i in range(depth))


def sweep(
    model: nn.Module,
    evaluate: Evaluate,
    points: Iterable[Point],
    *,
    record: str | Path | None = None,
    subject: Mapping[str, Any] | None = None,
    on_point: Callable[[int, int, Point, Result | None], None] | None = None,
    map: Any = None,
    calibration: Any = None,
    **intervals: Any,
) -> Sweep:
    """Evaluate every point beside the no-op of its site: same hooks, same backend, scales 1, computed and not skipped.

    evaluate(role): scores by document of the model as it stands (:mod:`thalweg.evaluation`), role ``unedited``, ``no-op`` or ``edited``.
    record: file that keeps every point as soon as it is computed; a record that is there is gone on with, by other points too, if the
    unedited model still gives what it holds. subject: what the record says it is about. on_point(done, of, point, result): before each
    (result None) and after.
    intervals: options of :func:`thalweg.evaluation.differences`.
    Raises: ProofError for a no-op that drifts; InputError for a record of another model, text or rule, and where ``evaluate`` gives no scores.
    """
    points = tuple(points)
    kept = _Record(record, dict(subject or {}))
    unedited = kept.check(_scores(evaluate, "unedited"))
    baselines: dict[str, Scores] = {}
    results: list[Result] = []

    def scored(name: str, role: Role, enter: Any) -> tuple[Scores, float]:
        if (found := kept.find(name, unedited)) is not None:
            return found
        start = time.perf_counter()
        with enter:
            scores = _scores(evaluate, role)
        return kept.keep(name, scores, time.perf_counter() - start)

    for i, point in enumerate(points):
        if on_point is not None:
            on_point(i, len(points), point, None)
        noop = point.options.as_noop()
        name = f"no-op: {noop.describe()}"
        if name not in baselines:
            baselines[name], _ = scored(name, "no-op", edit(model, noop, map=map, forced=True))
            check_drift(name, baselines[name], unedited)
        if point.options.is_identity:
            scores, seconds = baselines[name], 0.0
        else:
            scores, seconds = scored(point.name, "edited", edit(model, point.options, map=map, calibration=calibration))
        moved = tuple(differences(scores, baselines[name], **intervals))
        results.append(Result(point, scores, baselines[name], moved, drift(baselines[name], unedited), seconds))
        if on_point is not None:
            on_point(i + 1, len(points), point, results[-1])
    asked = {"unedited", *(f"no-op: {p.options.as_noop().describe()}" for p in points), *(p.name for p in points)}
    unasked = tuple(name for name in kept.found if name not in asked and not name.startswith("no-op: "))
    return Sweep(unedited, tuple(results), dtype_name(model), dict(subject or {}), unasked)


def _scores(evaluate: Evaluate, role: Role) -> Scores:
    """Raises: InputError for anything but the scores of one task."""
    found = evaluate(role)
    if not isinstance(found, Scores):
        got = f"{type(found).__name__} ({found!r:.40})"
        raise InputError(
            f"evaluate({role!r}) must return the Scores of one task, got {got}; return what thalweg.evaluation gives, as "
            "perplexity(model, tokenizer, documents)"
        )
    return found


def recorded(record: str | Path) -> set[str]:
    """The names of the evaluations that a record holds, none where there is no record: ``no-op: EDIT``, and those of points.

    Raises: CheckpointError for a broken one; what it is the record of, :func:`sweep` checks.
    """
    path = Path(record)
    return (
        {str(row["name"]) for _, row in jsonl.read_lines(path, "record of a sweep") if "name" in row}
        if path.exists()
        else set()
    )


class _Record:
    """A file of JSON lines: a header, then the columns of every evaluation. Without a path nothing is kept."""

    def __init__(self, path: str | Path | None, subject: dict[str, Any]):
        self.path = None if path is None else Path(path)
        self.header = {"schema": SCHEMA, "kind": KIND, "subject": jsonl.plain(subject)}
        self.found: dict[str, dict[str, Any]] = {}
        if self.path is None or not self.path.exists():
            self.fresh = True
            return
        self.fresh = False
        lines = [row for _, row in jsonl.read_lines(self.path, "record of a sweep")]
        if not lines or lines[0].get("kind") != KIND:
            raise InputError(f"{self.path} is no record of a sweep; choose another name")
        jsonl.check_schema(lines[0].get("schema"), SCHEMA, str(self.path), "record of a sweep")
        theirs = lines[0].get("subject") or {}
        other = [
            f"its {name} is {theirs.get(name)!r}, now {value!r}"
            for name, value in self.header["subject"].items()
            if theirs.get(name) != value
        ]
        if other:
            raise InputError(
                f"{self.path} is the record of another sweep: {'; '.join(other)}; choose another name, or remove it"
            )
        self.found = {row["name"]: row for row in lines[1:]}

    def check(self, unedited: Scores) -> Scores:
        """Begin the file, or compare the unedited model with what it holds. Raises: InputError."""
        if self.path is None:
            return unedited
        if self.fresh:
            atomic_write_text(self.path, jsonl.encode(self.header) + "\n")
        row = self.found.get("unedited")
        if row is None:
            self.keep("unedited", unedited, 0.0)
            return unedited
        for name, column in unedited.columns.items():
            before = np.asarray(jsonl.numbers(row["columns"].get(name, [])), dtype=np.float64)
            if before.shape != column.shape or not np.allclose(before, column, rtol=SAME, atol=0, equal_nan=True):
                raise InputError(
                    f"{self.path} was made with another model, text or machine: its {name} of the unedited model differ; "
                    "choose another name, or remove it"
                )
        return unedited

    def find(self, name: str, like: Scores) -> tuple[Scores, float] | None:
        """What was kept under a name."""
        row = self.found.get(name)
        if row is None:
            return None
        columns = {key: np.asarray(jsonl.numbers(value), dtype=np.float64) for key, value in row["columns"].items()}
        return dataclasses.replace(like, columns=columns), float(row["seconds"])

    def keep(self, name: str, scores: Scores, seconds: float) -> tuple[Scores, float]:
        """Append an evaluation."""
        if self.path is not None:
            columns = {key: column.tolist() for key, column in scores.columns.items()}
            append_line(self.path, jsonl.encode({"name": name, "seconds": round(seconds, 3), "columns": columns}))
        return scores, seconds
