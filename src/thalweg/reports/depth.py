"""Geometry by depth: one figure per measure, with its null and the same arm before training."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from thalweg.records.measurements import Measurement, Measurements
from thalweg.reports.curves import Arms, lost, sound
from thalweg.reports.figures import Figure, Kind, Line, lines
from thalweg.reports.measures import place, shown
from thalweg.reports.shown import DIAGNOSTIC, GROUPS, HEADLINE, MIXING, STREAMS, TABLE
from thalweg.reports.streams import coefficient_table, replaced_table, usage_figures, window_table
from thalweg.reports.tables import Table
from thalweg.reports.text import counted, deviation, listed, mean, number
from thalweg.studies.store import RunRecord

MOST_USAGE = 4  # pictures of the use of streams that are shown openly, two for each arm
ERRORS = "standard errors over sequences"  # what the interval of a row says whose ends are drawn as a band
MOST_STARTS = 8  # arms up to which the state before training is drawn beside
INTRODUCTION = (
    "By layer, as the verdicts read them: measures of states show the state that enters each layer and, at the last "
    "place, the one that leaves the last layer, before the final norm; others show the mean over the sublayers of a "
    "layer. Every sublayer by itself, and the state after the final norm, stand in the records."
)


@dataclass(frozen=True)
class Geometry:
    """Figures by where they are shown; ``more`` maps the title of a group to its figures.

    streams, tables: of several streams, empty where no arm has them; coefficients: whether what mixes them moved.
    """

    headline: list[Figure]
    more: dict[str, list[Figure]]
    diagnostics: list[Figure]
    streams: list[Figure] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=dict)
    coefficients: Table | None = None


def geometry(arms: Arms, asked: Iterable[str] = ()) -> Geometry:
    """A figure for every measure that was taken by depth. asked: measures shown openly because a hypothesis reads them."""
    split = {arm: [(record, _by_measure(record)) for record in records] for arm, records in arms.items()}
    names = sorted({name for found in split.values() for _, rows in found for name in rows}, key=place)
    more: dict[str, list[Figure]] = {group: [] for group in GROUPS}
    open_to_view: dict[str, list[Figure]] = {group: [] for group in (HEADLINE, STREAMS, DIAGNOSTIC)}
    for name in names:
        group = HEADLINE if name in asked else shown(name).group
        if group == TABLE:
            continue
        parts = {arm: [_only(record, rows.get(name, ())) for record, rows in found] for arm, found in split.items()}
        (more[group] if group in more else open_to_view[group]).append(_figure(name, parts))
    usage = usage_figures(arms)
    tables = {"Replacing the mixing": replaced_table(arms), "Windows of layers": window_table(arms)}
    if len(usage) > MOST_USAGE:
        more[MIXING] += usage
        usage = []
    return Geometry(
        open_to_view[HEADLINE],
        {group: found for group, found in more.items() if found},
        open_to_view[DIAGNOSTIC],
        [*open_to_view[STREAMS], *usage],
        {title: table for title, table in tables.items() if table is not None},
        coefficient_table(arms),
    )


def _by_measure(record: RunRecord) -> dict[str, list[Measurement]]:
    found: dict[str, list[Measurement]] = {}
    for row in record.measures:
        if row.layer is not None:
            found.setdefault(row.measure, []).append(row)
    return found


def _only(record: RunRecord, rows: Sequence[Measurement]) -> RunRecord:
    """The record with the rows of one measure, so that its own reading of depth need not search the others."""
    return dataclasses.replace(record, measures=Measurements(rows))


def _figure(name: str, arms: Arms) -> Figure:
    known = shown(name)
    curves, steps, first_steps, seeds, absent, errors = [], set(), set(), set(), [], False
    rows = [row for records in arms.values() for record in sound(records) for row in record.measures]
    for look, (arm, records) in enumerate(arms.items()):
        found = [record for record in sound(records) if len(record.measures)]
        if not found:
            absent.append(arm)
            continue
        seeds.add(len(found))
        line = _line(arm, [r.depth_profile(name) for r in found], look)
        banded = _with_ends(line, found[0]) if len(found) == 1 else line
        errors |= banded is not line
        curves.append(banded)
        steps |= {step for r in found for step in _steps(r)[-1:]}
        starts = [(r, s[0]) for r in found if len(s := _steps(r)) > 1]
        if starts and len(arms) <= MOST_STARTS:
            first_steps |= {step for _, step in starts}
            profiles = [r.depth_profile(name, step) for r, step in starts]
            curves.append(_line(f"{arm}, {_at(sorted({step for _, step in starts}))}", profiles, look, "start"))
    curves += _nulls(arms)
    unit = next((row.unit for row in rows if row.unit), "")
    caption = [
        known.caption,
        _facts(rows, sorted(steps), sorted(first_steps), sorted(seeds)),
        "Band: two standard errors over sequences (of a layer with several sites their mean)." if errors else "",
        f"Not measured: {listed(absent)}." if absent else "",
        f"Left out, diverged: {listed(gone)}." if (gone := lost(arms)) else "",
    ]
    return lines(
        known.title,
        curves,
        x_label=known.x_label or _place(rows),
        y_label=unit or known.unit or "no unit",
        caption=" ".join(part for part in caption if part),
        log_y=known.log,
    )


def _place(rows: Sequence[Measurement]) -> str:
    """What a place on the axis of depth is, as :meth:`RunRecord.depth_profile` reads the rows."""
    if any(row.site == "stream.end" for row in rows):
        return "layer that the state enters, from 0 (last place: after the last layer)"
    if len({row.site for row in rows}) > len({row.layer for row in rows}):
        return "layer, from 0 (mean over its sublayers)"
    return "layer, from 0"


def _facts(rows: Sequence[Measurement], steps: list[int], starts: list[int], seeds: list[int]) -> str:
    """When, on how much, over how many seeds."""
    parts = [f"At {_at(steps)}"] if steps else []
    if seeds:
        parts.append(counted(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds")
        parts += ["band: their standard deviation"] if seeds[-1] > 1 else []
    counts = sorted({row.n for row in rows if row.n is not None and row.interval})
    if counts:
        split = listed(sorted({row.split for row in rows if row.split}))
        parts.append(f"n = {listed(map(str, counts), 3)} sequences each{f' ({split})' if split else ''}")
        some = {found[1] for row in rows if (found := re.search(r"of (\d+ of \d+ tokens)$", row.interval))}
        parts += [f"{listed(sorted(some), 2)} of each, evenly spaced"] if some else []
    text = "; ".join(parts)
    if not text:
        return ""
    return f"{text[0].upper()}{text[1:]}. {f'Dotted: {_at(starts)}.' if starts else ''}".strip()


def _at(steps: Sequence[int]) -> str:
    return f"step {steps[0]:,}" if len(steps) == 1 else f"steps {', '.join(f'{s:,}' for s in steps)}"


def _steps(record: RunRecord) -> list[int]:
    return sorted({row.step for row in record.measures if row.step is not None})


def _line(label: str, profiles: Sequence[dict[int, float]], look: int, kind: Kind = "arm") -> Line:
    profiles = [profile for profile in profiles if profile]
    layers = sorted(set.intersection(*(set(p) for p in profiles))) if profiles else []
    columns = [[p[layer] for p in profiles] for layer in layers]
    sd = [deviation(c) for c in columns] if kind == "arm" else ()
    return Line(label, layers, [mean(c) for c in columns], sd, look, kind)


def _with_ends(line: Line, record: RunRecord) -> Line:
    """The curve of one run with the ends that its rows carry, of a layer the mean over its sites; as it is where a layer has none."""
    last = max(_steps(record), default=None)
    ends: dict[int, list[tuple[float, float]]] = {}
    for row in record.measures:
        if (
            row.step == last
            and row.layer is not None
            and row.low is not None
            and row.high is not None
            and ERRORS in row.interval
        ):
            ends.setdefault(row.layer, []).append((row.low, row.high))
    if not ends or any(layer not in ends for layer in line.x):
        return line
    low, high = ([mean([pair[side] for pair in ends[int(layer)]]) for layer in line.x] for side in (0, 1))
    return dataclasses.replace(line, sd=(), low=low, high=high)


def _nulls(arms: Arms) -> list[Line]:
    """The null by layer where rows carry one: once, unless arms differ in it (by their width, say)."""
    found: dict[tuple, tuple[dict[int, float], list[str]]] = {}
    for arm, records in arms.items():
        for record in records[:1]:
            last = max((row.step for row in record.measures if row.step is not None), default=None)
            rows = [r for r in record.measures if r.null is not None and r.step == last and r.site != "stream.left"]
            by_layer = {r.layer: r.null for r in rows if r.layer is not None and r.null is not None}
            if by_layer:
                values = [(layer, number(by_layer[layer])) for layer in sorted(by_layer)]
                if len({value for _, value in values}) == 1:  # the same for arms of any depth
                    values = [(0, values[0][1])]
                known = found.setdefault((rows[0].null_kind, *values), ({}, []))
                known[0].update(by_layer)
                known[1].append(arm)
    several = len({tuple(values) for _, *values in found}) > 1
    made = []
    for (kind, *_), (by_layer, names) in found.items():
        label = f"null: {kind or 'as given'}{f' ({listed(names, 3)})' if several else ''}"
        layers = sorted(by_layer)
        made.append(Line(label, layers, [by_layer[layer] for layer in layers], kind="null"))
    return made
