"""The report of a sweep: what every scale of every site costs against its matched no-op, from rows alone."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thalweg.errors import InputError
from thalweg.records.measurements import Measurement, Measurements
from thalweg.reports import page
from thalweg.reports.figures import Figure
from thalweg.reports.provenance import here
from thalweg.reports.symlog import Spread, between, spreads
from thalweg.reports.tables import Table
from thalweg.reports.text import NONE, counted, number

PREFIX = "difference."
# metric that is drawn, the first that the rows have -> what it is called, and up to where the axis is linear
DRAWN = {
    "word_perplexity": ("word perplexity", 1.0),
    "token_perplexity": ("token perplexity", 1.0),
    "masked_loss": ("masked loss", 0.1),
    "embedding_cosine": ("cosine to the unedited embedding", 0.1),
    "loss": ("loss", 0.1),
}
LOOKS = {"parallel": 0, "perpendicular": 1}
TITLES = {
    "value": "Values: what heads read",
    "attention": "Attention: its update",
    "mlp": "Feed-forward: its update",
    "block": "Whole layers: both updates together",
}
NOOP = 1.0  # the scale that changes nothing
MEANING = (
    "Every update is split into its part along a reference (parallel) and the rest (perpendicular); a scale multiplies one of the two "
    "(1 keeps it, 0 removes it) in all edited layers. What is drawn is the edited model minus the matched no-op: the same hooks and "
    "attention backend at scales of 1. Intervals are over documents, which stay paired; nothing here is a verdict."
)


def write_sweep_report(
    rows: Measurements,
    path: str | Path,
    *,
    title: str,
    facts: Mapping[str, str],
    limits: Sequence[str] = (),
    command: str = "",
    provenance: Mapping[str, Any] | None = None,
    citations: str = "",
) -> Path:
    """Write the page of a sweep. rows: as ``Sweep.measurements`` gives them (site, branch = component, arm = scale).

    Raises: InputError for rows without a sweep in them; for a full disk.
    """
    metric = drawn_metric(rows)
    sites = list(dict.fromkeys(row.site for row in rows if row.measure == PREFIX + metric))
    return page.write(
        path,
        "sweep.html",
        title=title,
        facts=dict(facts),
        meaning=MEANING,
        figures=[figure(rows, site, metric) for site in sites],
        costs=cost_table(rows, sites, metric),
        noops=noop_table(rows, sites),
        limits=list(limits) or ["None recorded."],
        command=command,
        provenance=here(provenance or {}),
        citations=citations,
    )


def drawn_metric(rows: Measurements) -> str:
    """The metric that is drawn. Raises: InputError for rows without one."""
    found = {row.measure.removeprefix(PREFIX) for row in rows if row.measure.startswith(PREFIX)}
    if not found:
        raise InputError("these rows hold no sweep: no measure begins with 'difference.'")
    return next((name for name in DRAWN if name in found), min(found))


def figure(rows: Measurements, site: str, metric: str) -> Figure:
    """One site: a curve for each component over its scales."""
    name, linear = DRAWN.get(metric, (metric, 1.0))
    chosen = [row for row in rows if row.site == site and row.measure == PREFIX + metric]
    curves = []
    for component in dict.fromkeys(row.branch for row in chosen):
        points = sorted((_scale(row), row) for row in chosen if row.branch == component)
        curves.append(
            Spread(
                component,
                [scale for scale, _ in points],
                [row.value for _, row in points],
                [_or_nan(row.low) for _, row in points],
                [_or_nan(row.high) for _, row in points],
                LOOKS.get(component, 2),
            )
        )
    first = chosen[0]
    caption = f"Edited minus no-op over {counted(first.n or 0, 'document')}; bands: {first.interval or 'too few documents for an interval'}."
    by_layer = {r.branch for r in chosen} == {"layer"}
    if not by_layer and any(_scale(row) == NOOP for row in chosen):
        caption += " The point at scale 1 is the no-op itself, drawn at a change of 0."
    columns, table = _data(rows, site)
    return spreads(
        TITLES.get(site, site),
        curves,
        x_label="layer" if by_layer else "scale (1: the no-op)",
        y_label=f"change of the {name}{f' [{first.unit}]' if first.unit else ''}",
        caption=caption,
        linear=linear,
        columns=columns,
        rows=table,
    )


def _data(rows: Measurements, site: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Every metric of a site, each value with its change and interval."""
    metrics = list(
        dict.fromkeys(r.measure.removeprefix(PREFIX) for r in rows if r.site == site and r.measure.startswith(PREFIX))
    )
    found: dict[tuple[str, float], dict[str, Measurement]] = {}
    for row in rows:
        if row.site == site and row.branch:
            found.setdefault((row.branch, _scale(row)), {})[row.measure] = row
    table = []
    for (component, scale), by in sorted(found.items()):
        cells = [component, number(scale)]
        for metric in metrics:
            change = by[PREFIX + metric]
            cells += [
                number(by[metric].value),
                number(change.value),
                between(_or_nan(change.low), _or_nan(change.high)),
            ]
        table.append(tuple(cells))
    heads = tuple(head for m in metrics for head in (m.replace("_", " "), "change", "interval"))
    return ("component", "scale", *heads), table


def cost_table(rows: Measurements, sites: Sequence[str], metric: str) -> Table:
    """What every scale that was given costs, one line for each site and component; the no-op is left out."""
    found = {(r.site, r.branch, _scale(r)): r for r in rows if r.measure == PREFIX + metric}
    scales = sorted({scale for _, component, scale in found if component != "layer"} - {NOOP})
    lines = []
    for site in sites:
        for component in dict.fromkeys(key[1] for key in found if key[0] == site and key[1] != "layer"):
            cells = []
            for scale in scales:
                row = found.get((site, component, scale))
                cells.append(
                    NONE if row is None else f"{number(row.value)} ({between(_or_nan(row.low), _or_nan(row.high))})"
                )
            lines.append((site, component, *cells))
    name = DRAWN.get(metric, (metric, 0.0))[0]
    return Table(
        ("site", "part", *(f"scale {number(scale)}" for scale in scales)),
        lines,
        f"Change of the {name} against the matched no-op (scale 1), with its interval.",
    )


def noop_table(rows: Measurements, sites: Sequence[str]) -> Table:
    """How far the no-op of every site is from the model without hooks."""
    found = {row.site: row.value for row in rows if row.measure == "noop_drift"}
    return Table(
        ("site", "relative drift of the log likelihood"),
        [(site, number(found.get(site))) for site in sites],
        "The no-op computes the edit at scales of 1 through the same hooks; a drift above 1e-3 stops a sweep.",
    )


def _scale(row: Measurement) -> float:
    try:
        return float(row.arm)
    except ValueError:
        raise InputError(f"a row of a sweep has its scale as arm, got {row.arm!r} in {row.measure}") from None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
