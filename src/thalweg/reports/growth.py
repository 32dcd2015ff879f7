"""What a growing run left: its record of events read again, and the figures and tables made of it and of its rows."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.records import jsonl
from thalweg.records.measurements import Measurement, Measurements
from thalweg.records.run import RunFolder
from thalweg.reports.figures import Figure, Line, lines
from thalweg.reports.tables import Table
from thalweg.reports.text import NONE, counted, number, words
from thalweg.studies.store import RunRecord

RECORD = "growth.jsonl"  # in a run folder
KIND, SCHEMA = "growth", 1
SHARES = tuple(10 ** (i / 20 - 2) for i in range(41))  # thresholds of the curve: 0.01 to 1
OWN = ("growth.", "prototypes.")  # rows that the page of a grown run shows by itself
WORDS = {"capped": "cap reached, not converged", "growing": "growth has not ended"}
TURNS = {"birth": "birth", "layer": "new layer", "prune": "pruned", "restore": "restored", "mask": "mask begins"}


@dataclass(frozen=True)
class Grown:
    """The record of a growing run. about: its header, how it stands as a whole; events: tables in order; rows: what it measured."""

    about: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    rows: Measurements

    @property
    def status(self) -> str:
        return str(self.about.get("status", "growing"))

    @property
    def ending(self) -> str:
        """How growth ended, in words."""
        return WORDS.get(self.status, self.status)

    @property
    def reason(self) -> str:
        return str(self.about.get("reason") or "no look was taken yet")

    @property
    def threshold(self) -> float | None:
        return self.about.get("threshold")

    def series(self, measure: str) -> dict[int | None, list[tuple[int, float]]]:
        """Layer -> (step, value) of a measure, in the order of steps."""
        found: dict[int | None, dict[int, float]] = {}
        for row in self.rows:
            if row.measure == measure and row.step is not None:
                found.setdefault(row.layer, {})[row.step] = row.value
        return {layer: sorted(steps.items()) for layer, steps in sorted(found.items(), key=lambda one: one[0] or 0)}


def without_growth(record: RunRecord) -> RunRecord:
    """A run without the rows of its growth, which have figures and words of their own."""
    rest = Measurements(row for row in record.measures if not row.measure.startswith(OWN))
    return dataclasses.replace(record, measures=rest)


def is_grown(run: RunFolder) -> bool:
    """Whether a run left a record of growth."""
    return (run.path / RECORD).is_file()


def read(run: RunFolder) -> Grown:
    """Raises: InputError for a foreign file; CheckpointError for a broken one."""
    path = run.path / RECORD
    found = [jsonl.numbers(table) for _, table in jsonl.read_lines(path, "growth record")]
    head = found[0] if found else {}
    jsonl.check_schema(head.get("schema") if head.get("kind") == KIND else None, SCHEMA, str(path), "growth record")
    return Grown(head, found[1:], Measurements(row for row in run.measures() if row.measure.startswith(OWN)))


def heads_of(grown: Grown) -> str:
    """``1, 1 → 3, 2, 1``: heads by layer, at the start and now."""
    start, now = grown.about.get("heads_start") or [], grown.about.get("heads") or []
    return f"{words(start)} → {words(now)}" if now else NONE


def growth_figures(grown: Grown) -> list[Figure]:
    """Heads, residual, free energy and threshold curve, those that there are rows for."""
    made = (_heads(grown), _residual(grown), _energy(grown), threshold_curve(grown))
    return [figure for figure in made if figure is not None]


def _heads(grown: Grown) -> Figure | None:
    start = grown.about.get("heads_start") or []
    now = grown.about.get("heads") or []
    curves = []
    last = int(grown.about.get("step") or 0)
    for layer in range(len(now)):
        x: list[int] = [0] if layer < len(start) else []
        y: list[int] = [start[layer]] if layer < len(start) else []
        for event in grown.events:
            if event.get("layer") == layer and event.get("kind") in ("birth", "prune", "layer"):
                if y:
                    x, y = [*x, event["step"]], [*y, y[-1]]
                x, y = [*x, event["step"]], [*y, event["heads_after"]]
        if y:
            curves.append(Line(f"layer {layer}", [*x, last], [*y, y[-1]], look=layer))
    if not curves:
        return None
    cap = (grown.about.get("options") or {}).get("most_heads")
    if cap is not None and any(max(curve.y) >= 0.75 * cap for curve in curves):
        curves.append(Line(f"cap: {cap}", [0, last], [cap, cap], kind="null"))
    return lines(
        "Heads of each layer",
        curves,
        x_label="step",
        y_label="heads",
        whole_y=True,
        caption="Every step upwards is a birth, every step downwards a removal. A head whose mask is falling counts until it is removed.",
    )


def _residual(grown: Grown) -> Figure | None:
    found = grown.series("growth.top")
    curves = [
        Line(f"layer {layer}", [s for s, _ in points], [v for _, v in points], look=layer or 0)
        for layer, points in found.items()
        if layer is not None
    ]
    if not curves:
        return None
    span = (min(min(c.x) for c in curves), max(max(c.x) for c in curves))
    if grown.threshold is not None:
        curves.append(
            Line(f"threshold: {number(grown.threshold, 3)}", span, (grown.threshold, grown.threshold), kind="null")
        )
    ended = grown.about.get("ended")
    later = (
        f" Growth ended at step {number(ended)}; what follows is looked at and not acted upon."
        if ended is not None
        else ""
    )
    return lines(
        "What is left along the top direction",
        curves,
        x_label="step",
        y_label="largest eigenvalue of the residual, over |S| |M|",
        caption=f"While a layer is above the threshold it gets heads; its null is 0, white input.{later}",
    )


def _energy(grown: Grown) -> Figure | None:
    points = grown.series("growth.free_energy").get(None, [])
    if not points:
        return None
    curves = [Line("free energy", [s for s, _ in points], [v for _, v in points])]
    for look, (kind, name) in enumerate(TURNS.items(), start=1):
        at = [e for e in grown.events if e.get("kind") == kind and e.get("energy_after") is not None]
        if at:
            curves.append(Line(name, [e["step"] for e in at], [e["energy_after"] for e in at], look=look, kind="event"))
    last = points[-1][0]
    earlier = (
        f" Taken at the checks of growth, the last at step {last:,}." if last < (grown.about.get("step") or 0) else ""
    )
    return lines(
        "Free energy",
        curves,
        x_label="step",
        y_label="fit + weight (residual + threshold x heads), nats",
        caption=f"On the fixed probe set. {fallen(grown)} Over training, and where a layer is added, it need not fall.{earlier}",
    )


def fallen(grown: Grown) -> str:
    """Whether the free energy fell where it must."""
    must = [e for e in grown.events if e.get("must_fall") and e.get("energy_before") is not None]
    fell = sum(e["energy_after"] <= e["energy_before"] + 1e-6 * max(1.0, abs(e["energy_before"])) for e in must)
    if not must:
        return "There was no event at which it must fall."
    return f"It must fall at {counted(len(must), 'event')} and fell at {'all of them' if fell == len(must) else f'{fell} of them'}."


def threshold_curve(grown: Grown) -> Figure | None:
    """Heads against threshold, read off the first spectrum: what the user's threshold decides."""
    first = grown.rows.where(measure="growth.forecast.eigenvalue")
    residuals = {row.layer: row.value for row in grown.rows.where(measure="growth.forecast.residual")}
    heads = sum(row.value for row in grown.rows.where(measure="growth.forecast.start"))
    if not len(first) or not residuals:
        return None
    largest = max(residuals.values())
    values = [row.value for row in first]
    share = float((grown.about.get("options") or {}).get("threshold", math.nan))
    now = grown.about.get("heads") or []
    curves = [
        Line("if nothing moved", SHARES, [heads + sum(v > s * largest for v in values) for s in SHARES]),
        Line("this run", [share], [sum(now)], look=1, kind="event"),
    ]
    return lines(
        "The threshold sets the count",
        curves,
        x_label="threshold, as a share of the first residual, log scale",
        y_label="heads in all layers together",
        caption="Curve: heads at the start and eigenvalues of the first spectrum above each threshold. The run leaves the curve as far "
        "as weights and inputs move, and as each head takes more than its own direction.",
        log_x=True,
        whole_x=False,
        whole_y=True,
    )


def event_table(grown: Grown) -> Table:
    """Every event, one row."""
    columns = (
        *("step", "layer", "event", "head", "direction", "taken", "next", "left", "captured"),
        *("drift", "parameters", "F"),
    )
    rows = [cells for event in grown.events for cells in _event(event)]
    threshold = "not set" if grown.threshold is None else number(grown.threshold, 3)
    note = (
        f"Threshold: {threshold}. Direction: the largest component of the unit vector and its share; whole vectors stand in {RECORD}. "
        "Taken: its eigenvalue; next: the following one; left: sum of the positive eigenvalues of the layer, one normaliser on both "
        "sides; captured: what the new head holds along its direction; drift: largest change of an output, relative (a birth or removal above "
        "1e-6 stops the run); F: free energy of the whole run, and where it must fall, whether it fell."
    )
    return Table(columns, rows, note)


def _event(event: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    heads = event.get("heads") or [None]
    for i, head in enumerate(heads):
        first = i == 0
        after = event.get("energy_after")
        fell = ""
        if event.get("must_fall") and after is not None:
            fell = (
                " (fell)"
                if after <= event["energy_before"] + 1e-6 * max(1.0, abs(event["energy_before"]))
                else " (ROSE)"
            )
        yield (
            number(event.get("step")) if first else "",
            number(event.get("layer")) if first else "",
            TURNS.get(str(event.get("kind")), str(event.get("kind"))) if first else "",
            number(head),
            _direction(event, i),
            number(_at(event, "eigenvalues", i), 3),
            number(event.get("next_eigenvalue"), 3) if first else "",
            _pair(event, "positive", 3) if first else "",
            number(_at(event, "captured", i), 3),
            number(event.get("drift"), 2) if first else "",
            number(event.get("parameters_after")) if first else "",
            f"{_pair(event, 'energy', 4)}{fell}" if first else "",
        )


def _direction(event: Mapping[str, Any], i: int) -> str:
    u = _at(event, "directions", i)
    if not u:
        return NONE
    squares = [v * v for v in u]
    largest = max(range(len(squares)), key=squares.__getitem__)
    return f"{largest} ({squares[largest] / sum(squares):.0%})"


def _pair(event: Mapping[str, Any], name: str, digits: int) -> str:
    before, after = event.get(f"{name}_before"), event.get(f"{name}_after")
    return NONE if before is None and after is None else f"{number(before, digits)} → {number(after, digits)}"


def _at(event: Mapping[str, Any], name: str, i: int) -> Any:
    values = event.get(name) or ()
    return values[i] if i < len(values) else None


PANEL = {
    "effective": "effective",
    "closest": "closest pair",
    "farthest": "farthest pair",
    "usage": "usage",
    "hardness": "H / ln K",
    "temperature": "temperature",
    "temperature_ratio": "over critical",
    "force": "separation force",
    "loss": "loss",
    "identity": "fit + variance off by",
}
SAME_POINT = 1e-3  # of sqrt(tr C): a farthest pair below it is one point


def collapse_table(grown: Grown) -> Table | None:
    """Every dictionary of prototypes at the last look; None where the model has none."""
    found = [row for row in grown.rows if row.measure.startswith("prototypes.")]
    if not found:
        return None
    last = max(row.step or 0 for row in found)
    by: dict[tuple[int, int], dict[str, Measurement]] = {}
    for row in found:
        if (row.step or 0) == last:
            by.setdefault((row.layer or 0, -1 if row.head is None else row.head), {})[
                row.measure.removeprefix("prototypes.")
            ] = row
    rows = []
    for (layer, head), named in sorted(by.items()):
        flat = (row := named.get("farthest")) is not None and row.value < SAME_POINT
        name = f"layer {layer}" + ("" if head < 0 else f", head {head}")
        rows.append((name, "collapsed" if flat else "apart", *(_cell(named, key) for key in PANEL)))
    gone = sum(row[1] == "collapsed" for row in rows)
    note = (
        f"At step {last:,}; {gone} of {len(rows)} dictionaries collapsed to one point. Pairs over sqrt(tr C). Usage does not show a collapse: "
        "prototypes at one point are used evenly. Above the critical temperature, points that lie together stay together."
    )
    return Table(("dictionary", "state", *PANEL.values()), rows, note)


def _cell(named: Mapping[str, Measurement], key: str) -> str:
    return number(named[key].value, 3) if key in named else NONE


def decision_table(grown: Grown) -> Table:
    """Who decided each size."""
    found = [tuple(map(str, row)) for row in grown.about.get("decisions") or ()]
    return Table(
        ("what", "who", "how"),
        found,
        "A count that depends on a threshold is not the data's alone: see the threshold curve.",
    )
