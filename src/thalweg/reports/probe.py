"""The report of probes of the continuous picture: what each found, where it fails to say anything, drawn from rows alone."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg.errors import InputError
from thalweg.records import findings as records
from thalweg.records.findings import Finding
from thalweg.records.measurements import Measurement
from thalweg.reports import page
from thalweg.reports.figures import Figure, Line, heat, lines
from thalweg.reports.provenance import here
from thalweg.reports.tables import Table
from thalweg.reports.text import NONE, counted, listed, number

PROOF = "capture"
MOST_LINES = 7  # curves that one figure holds
MOST_ROWS = 40  # layers of a heat map
X = ("layer", "step", "head", "stream", "seed")
FIELD = {"head": "head", "layer": "layer", "seed": "seed", "stream": "stream", "step": "step"}
SKETCH = (
    "Sketch: fewer than 8,192 tokens, or not all layers. These numbers show that the probe runs and are no evidence."
)


@dataclass(frozen=True)
class Part:
    """One probe on the page."""

    name: str
    title: str
    summary: str
    source: str
    sketch: str
    figures: Sequence[Figure]
    table: Table
    caveats: Sequence[str]


def write_probe_report(
    found: Sequence[Finding],
    path: str | Path,
    *,
    title: str,
    facts: Mapping[str, str],
    command: str = "",
    provenance: Mapping[str, Any] | None = None,
    citations: Sequence[str] = (),
    not_run: Sequence[str] = (),
) -> Path:
    """Write the page of :func:`thalweg.continuum.findings`. citations: none are the sources that the probes name. not_run: names of probes
    that were asked for and did not come to their turn.

    Raises: InputError without a finding; for a full disk.
    """
    probes = [one for one in found if one.probe != PROOF]
    if not probes:
        raise InputError("there is no finding to report; name at least one probe")
    proof = next((one for one in found if one.probe == PROOF), None)
    silent = [f"{one.probe}: not applicable: {one.not_applicable}" for one in probes if one.not_applicable]
    failed = [f"{one.probe}: failed: {one.failed}" for one in probes if one.failed]
    missing = [f"{name}: not run to its end: interrupted" for name in not_run]
    ran = [one for one in probes if not one.not_applicable and not one.failed]
    return page.write(
        path,
        "probe.html",
        title=title,
        proof="" if proof is None else f"{proof.summary[:1].upper()}{proof.summary[1:]}.",
        proved=proof is None or all(math.isfinite(row.value) for row in proof.rows),
        facts=dict(facts),
        overview=_overview(probes),
        parts_found=[part_of(one) for one in ran],
        command=command,
        limits=[*missing, *failed, *silent] or ["Every probe that was asked for applies."],
        provenance=here(provenance or {}),
        citations="\n\n".join(citations or [*dict.fromkeys(one.source for one in ran if one.source)]),
    )


def _overview(probes: Sequence[Finding]) -> dict[str, str]:
    """One line for each probe: what it found, and how long it took."""
    took = {one.probe: "" if one.seconds is None else f" ({one.seconds:.1f} s)" for one in probes}
    return {one.probe: f"{told(one)}{took[one.probe]}" for one in probes}


def told(one: Finding) -> str:
    """What stands beside the name of a probe: its words without the name, with the stamp of a sketch."""
    head, _, text = one.words.partition(": ")
    return text if head == one.probe else f"sketch: {text}"


def part_of(one: Finding) -> Part:
    """A finding as it stands on the page."""
    drawn = [figure for plan in one.figures if (figure := drawing(one, plan)) is not None]
    sketch = SKETCH if one.sketch else ""
    return Part(one.probe, one.title, one.summary, one.source, sketch, drawn, numbers(one.rows), one.caveats)


def drawing(one: Finding, plan: records.Figure) -> Figure | None:
    """A figure of a finding; None where no row of it was measured."""
    chosen = [row for row in one.rows if row.measure in plan.measures and _at(row, plan.x) is not None]
    if not chosen:
        return None
    groups = _groups(chosen, plan)
    note = plan.note
    if (
        plan.lines == "head"
        and plan.x == "layer"
        and len(groups) > MOST_LINES
        and min(row.value for row in chosen) >= 0
    ):
        return _map(chosen, plan)
    if len(groups) > MOST_LINES:
        note = f"{note} {MOST_LINES} of {len(groups)} curves are drawn: those that differ most in their largest value.".strip()
        groups = _spread_out(groups)
    curves = [_line(label, rows, plan, look) for look, (label, rows) in enumerate(groups.items())]
    curves += _nulls(chosen, plan)
    note = f"{note} {_hidden(curves)}".strip()
    fields = {"x_label": plan.x_label, "y_label": plan.y_label, "log_y": plan.log_y, "log_x": plan.log_x}
    return lines(plan.title, curves, caption=note, **fields)


def _groups(chosen: Iterable[Measurement], plan: records.Figure) -> dict[str, list[Measurement]]:
    """Rows by curve: by measure, where there are several, and by the field ``lines``; in the order of x."""
    found: dict[str, list[Measurement]] = {}
    called = dict(zip(plan.measures, plan.names, strict=False))
    for row in chosen:
        value = getattr(row, plan.lines) if plan.lines else None
        names = [] if value in (None, "") else [f"{FIELD.get(plan.lines, '')} {value}".strip()]
        if len(plan.measures) > 1 or not names:
            names.insert(0, called.get(row.measure) or _words(row.measure))
        found.setdefault(", ".join(names), []).append(row)
    return {label: sorted(rows, key=lambda row: _at(row, plan.x) or 0.0) for label, rows in found.items()}


def _words(measure: str) -> str:
    """A measure as a legend says it, without the name of its probe."""
    return (measure.partition(".")[2] or measure).replace(".", " ").replace("_", " ")


def _hidden(curves: Sequence[Line]) -> str:
    """Which curves lie exactly on others and cannot be seen; empty where all can."""
    drawn = [curve for curve in curves if len(curve.x) > 0]
    found = []
    for i, curve in enumerate(drawn):
        under = next((one for one in drawn[:i] if (one.x, one.y) == (curve.x, curve.y)), None)
        if under is not None:
            found.append(f"{curve.label} lies on {under.label}")
    return f"{'; '.join(found)}: they have the same values." if found else ""


def _spread_out(groups: Mapping[str, list[Measurement]]) -> dict[str, list[Measurement]]:
    order = sorted(groups, key=lambda label: max(row.value for row in groups[label]))
    kept = {order[round(i * (len(order) - 1) / (MOST_LINES - 1))] for i in range(MOST_LINES)}
    return {label: rows for label, rows in groups.items() if label in kept}


def _at(row: Measurement, field: str) -> float | None:
    value = getattr(row, field)
    return None if value is None or isinstance(value, str) else float(value)


def _line(label: str, rows: Sequence[Measurement], plan: records.Figure, look: int) -> Line:
    places = [_at(row, plan.x) or 0.0 for row in rows]
    return Line(
        label, places, [r.value for r in rows], look=look, low=[r.low for r in rows], high=[r.high for r in rows]
    )


def _nulls(chosen: Sequence[Measurement], plan: records.Figure) -> list[Line]:
    """One dashed line for each kind of null: the middle of the rows at each place."""
    kinds: dict[str, dict[float, list[float]]] = {}
    for row in chosen:
        if row.null is not None and math.isfinite(row.null):
            kinds.setdefault(row.null_kind, {}).setdefault(_at(row, plan.x) or 0.0, []).append(row.null)
    found = []
    for kind, places in kinds.items():
        x = sorted(places)
        y = [sorted(places[at])[len(places[at]) // 2] for at in x]
        found.append(Line(f"null: {kind}", x, y, kind="null"))
    return found


def _map(chosen: Sequence[Measurement], plan: records.Figure) -> Figure:
    layers, heads = sorted({row.layer or 0 for row in chosen}), sorted({row.head or 0 for row in chosen})
    value = {(row.layer, row.head): row.value for row in chosen}
    nulls = sorted(row.null for row in chosen if row.null is not None)
    shown = layers[:: max(1, math.ceil(len(layers) / MOST_ROWS))]
    beside = f" Null, the middle of all: {number(nulls[len(nulls) // 2], 3)}." if nulls else ""
    left_out = "" if len(shown) == len(layers) else " Not every layer is drawn."
    return heat(
        plan.title,
        [f"head {h}" for h in heads],
        [f"layer {i}" for i in shown],
        [[value.get((i, h), math.nan) for h in heads] for i in shown],
        x_label="head",
        caption=f"{plan.note}{beside}{left_out}",
        scale=plan.y_label,
    )


def numbers(rows: Iterable[Measurement]) -> Table:
    """Every measure in a line: its value, or lowest, middle and highest where there are several; its null and its interval."""
    by: dict[tuple[str, str], list[Measurement]] = {}
    for row in rows:
        by.setdefault((row.measure, row.unit), []).append(row)
    found = []
    for (measure, unit), some in by.items():
        values = sorted(row.value for row in some if math.isfinite(row.value))
        nulls = sorted(row.null for row in some if row.null is not None)
        name = f"{measure} [{unit}]" if unit else measure
        if not values:
            found.append((name, number(len(some)), *["not finite"] * 3, NONE, NONE))
            continue
        ends = ""
        if len(some) == 1 and some[0].low is not None and some[0].high is not None:
            ends = f" ({number(some[0].low)} to {number(some[0].high)})"
        middle = f"{number(values[len(values) // 2])}{ends}"
        kinds = listed(dict.fromkeys(row.null_kind for row in some if row.null_kind), 2)
        null = f"{number(nulls[len(nulls) // 2])}: {kinds}" if nulls else NONE
        counts = sorted({row.n for row in some if row.n is not None})
        n = (
            NONE
            if not counts
            else number(counts[0])
            if len(counts) == 1
            else f"{number(counts[0])} to {number(counts[-1])}"
        )
        found.append((name, number(len(some)), number(values[0]), middle, number(values[-1]), null, n))
    note = f"{counted(sum(map(len, by.values())), 'row')}. Null, of several rows: the middle one."
    return Table(("measure", "rows", "lowest", "middle", "highest", "null", "n"), found, note)
