"""Figures: curves and effects drawn as SVG, each with the table of its data."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

from thalweg.reports import svg
from thalweg.reports.text import NONE, number, spread, within

WIDTH, HEIGHT = 440.0, 236.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 428.0, 24.0, 202.0
MOST_MARKED = 30  # points of a curve that still get marks

Kind = Literal["arm", "start", "median", "lost", "null", "event"]
DOTTED = ("start", "median")  # which the caption explains, not the legend
NULLS = (svg.NULL, "9 3 2 3", "2 3", "14 4")  # dashes that tell the nulls of one figure apart, which have one colour
LONE = 13.0  # half the length of the line that stands for a null at one place
SHADES, SHADE = 6, 16.0  # boxes of the scale of a heat map, and their width


@dataclass(frozen=True)
class Key:
    """One entry of a legend: ``svg`` is markup made here, the label is text that the page escapes."""

    label: str
    svg: str


@dataclass(frozen=True)
class Figure:
    """One figure: ``svg`` is markup made here, everything else is text that the page escapes."""

    title: str
    svg: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    legend: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Line:
    """A curve. x, y and ``sd`` (a band of one standard deviation, None where there is none) have one length; so have ``low`` and ``high``, an
    interval in place of it.

    look: number of the arm, which keeps its colour on the whole page. kind: ``arm`` (bold, with marks), ``start`` (the same arm before
    training, dotted), ``median`` (the same arm, dotted, where the bold curve is a mean), ``lost`` (one diverged run, thin), ``null``
    (grey, dashed; several in one figure each in their own way, whatever ``look`` says) or ``event`` (marks alone).
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    sd: Sequence[float | None] = field(default_factory=tuple)
    look: int = 0
    kind: Kind = "arm"
    low: Sequence[float | None] = field(default_factory=tuple)
    high: Sequence[float | None] = field(default_factory=tuple)

    def interval(self, index: int) -> tuple[float, float] | None:
        """Of the point at ``index``, if it has one."""
        if len(self.low) != len(self.y) or len(self.high) != len(self.y):
            return None
        low, high = self.low[index], self.high[index]
        return None if low is None or high is None else (low, high)

    def deviation(self, index: int) -> float | None:
        """Of the point at ``index``, if it has one."""
        return self.sd[index] if len(self.sd) == len(self.y) else None


@dataclass(frozen=True)
class Effect:
    """One row of the effect plot, in the measure's own sign. direction: ``greater`` or ``less`` favours the statement."""

    label: str
    estimate: float
    low: float
    high: float
    margin: float
    direction: str
    points: Sequence[float]
    unit: str
    status: str


def lines(
    title: str,
    curves: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    caption: str,
    log_y: bool = False,
    log_x: bool = False,
    whole_x: bool = True,
    whole_y: bool = False,
) -> Figure:
    """Curves over one axis. Points that are not finite leave a gap in the picture and stay in the table.

    log_x: a logarithmic axis if every x is positive.
    log_y: a logarithmic axis if every value is positive and they span a factor of ten or more; the label says so. A null of 0 does not stand
    in its way: it is left out of the picture, and the caption names it.
    whole_x, whole_y: marked at whole numbers only.
    """
    curves = _told_apart(curves)
    values = [y for curve in curves for y in curve.y if math.isfinite(y)]
    placed = [y for curve in curves for y in curve.y if math.isfinite(y) and (y > 0 or curve.kind != "null")]
    log = log_y and bool(placed) and min(placed) > 0 and max(placed) >= 10 * min(placed)
    lost = [curve.label for curve in curves if log and curve.kind == "null" and all(y <= 0 for y in curve.y)]
    if lost:
        named = " and ".join(f'"{label.removeprefix("null: ")}"' for label in lost)
        caption = f"{caption} Left out, as 0 has no place on a log scale: the null {named}."
    if log:
        values = placed
    framed = [curve for curve in curves if curve.kind != "lost"] or curves  # a diverged run does not set the scale
    seen = [y for curve in framed for y in curve.y if math.isfinite(y)]
    edges = [end for curve in framed for i in range(len(curve.y)) for end in _ends(curve, i)]
    wide = log_x and all(v > 0 for curve in curves for v in curve.x)
    x = svg.axis((v for curve in curves for v in curve.x), LEFT, RIGHT, log=wide, pad=0.03)
    y = svg.axis(seen if log else [*seen, *edges], BOTTOM, TOP, log=log)
    parts = [*_frame(x, y, x_label, f"{y_label}, log scale" if log else y_label, whole_x, whole_y, bool(values))]
    for kind in ("null", "start", "median", "lost", "arm", "event"):  # what matters most is drawn last
        chosen = [curve for curve in curves if curve.kind == kind]
        parts += [part for curve in chosen for part in _band(curve, x, y)]
        parts += [part for curve in chosen for part in _curve(curve, x, y)]
    if any(not y.low <= v <= y.high for v in values):
        caption = f"{caption} A curve on the edge lies beyond it."
    left_out = sum(not math.isfinite(v) for curve in curves for v in curve.y)
    if left_out:
        caption = f"{caption} {left_out} of the values not finite: a gap in the picture."
    return Figure(
        title,
        svg.picture(WIDTH, HEIGHT, title, parts),
        caption,
        (x_label.partition(",")[0], *(curve.label for curve in curves)),
        tuple(_table(curves)),
        tuple(Key(c.label, _key(c)) for c in curves if c.kind not in DOTTED and c.label not in lost),
    )


def effects(title: str, rows: Sequence[Effect], caption: str) -> Figure:
    """Estimates with intervals, the value of each seed, and the margin that decides; each row has its own unit."""
    step, parts = 66.0, []
    for index, row in enumerate(rows):
        top = index * step
        seen = (0.0, row.margin, row.low, row.high, row.estimate, *row.points)
        x = svg.axis(seen, 12.0, WIDTH - 12.0, pad=0.07)
        floor, favoured = top + 48, (x(row.margin), x.end) if row.direction == "greater" else (x.start, x(row.margin))
        parts.append(svg.text(x.start, top + 13, f"{row.label}  [{row.unit or 'no unit'}]", kind="name", most=68))
        parts.append(svg.box(favoured[0], top + 19, favoured[1] - favoured[0], floor - top - 19, "favoured"))
        parts.append(svg.line([(x.start, floor), (x.end, floor)], "axis"))
        for value, label in svg.ticks(x):
            parts.append(svg.line([(x(value), floor), (x(value), floor + 3)], "axis"))
            parts.append(svg.text(x(value), floor + 13, label, anchor="middle"))
        parts.append(svg.line([(x(0), top + 19), (x(0), floor)], "axis"))
        parts.append(svg.line([(x(row.margin), top + 19), (x(row.margin), floor)], "margin", svg.NULL))
        if math.isfinite(row.low) and math.isfinite(row.high):
            parts.append(svg.line([(x(row.low), top + 37), (x(row.high), top + 37)], f"interval {_status(row.status)}"))
        finite = [v for v in row.points if math.isfinite(v)]
        parts.append(svg.marks([(x(v), top + 26) for v in finite], "circle", "seed", 2.4))
        if math.isfinite(row.estimate):
            parts.append(svg.marks([(x(row.estimate), top + 37)], "diamond", f"estimate {_status(row.status)}", 3.8))
    columns = ("hypothesis", "estimate", "low", "high", "margin", "favoured", "per seed", "unit")
    table = [
        (
            row.label,
            *map(number, (row.estimate, row.low, row.high, row.margin)),
            row.direction,
            ", ".join(map(number, row.points)),
            row.unit or NONE,
        )
        for row in rows
    ]
    return Figure(title, svg.picture(WIDTH, step * len(rows), title, parts), caption, columns, tuple(table))


def heat(
    title: str,
    columns: Sequence[str],
    rows: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    x_label: str,
    caption: str,
    scale: str = "",
) -> Figure:
    """Shares in [0, 1] as cells, the darker the larger, against the largest; ``values[row][column]``, one that is not finite is left blank.

    scale: what the shares are; it stands beside the scale, from 0 to the largest.
    """
    left, step = 62.0, 18.0
    numbered = all(name.startswith(f"{x_label} ") for name in columns)  # as head 0, head 1: the axis shows the numbers
    wide = (RIGHT - left) / len(columns)
    top = max((v for row in values for v in row if math.isfinite(v)), default=0.0)
    parts = []
    for i, (name, row) in enumerate(zip(rows, values, strict=True)):
        parts.append(svg.text(left - 6, i * step + 13, name, anchor="end", most=10))
        cells = [(j, v) for j, v in enumerate(row) if math.isfinite(v)]
        parts += [
            svg.box(
                left + j * wide,
                i * step + 1,
                wide - min(1.0, wide / 4),
                step - 2,
                "cell c0",
                v / top if top > 0 else 0.0,
            )
            for j, v in cells
        ]
    floor = len(rows) * step
    parts.append(svg.line([(left, floor + 1), (RIGHT, floor + 1)], "axis"))
    shown = range(0, len(columns), math.ceil(len(columns) / 8))
    names = [name.removeprefix(f"{x_label} ") if numbered else str(j) for j, name in enumerate(columns)]
    parts += [svg.text(left + (j + 0.5) * wide, floor + 14, names[j], anchor="middle") for j in shown]
    along = x_label if numbered else f"{x_label} (0: {columns[0]})"
    parts.append(svg.text((left + RIGHT) / 2, floor + 30, along, anchor="middle", kind="name"))
    parts += _shades(floor + 38, top, scale)
    table = [(name, *(number(row[j], 3) for row in values)) for j, name in enumerate(columns)]
    caption = f"{caption} Darkest: {number(top, 3)}."
    drawn, heading = svg.picture(WIDTH, floor + 54, title, parts), x_label if numbered else "site"
    return Figure(title, drawn, caption, (heading, *rows), tuple(table))


def _shades(y: float, top: float, scale: str) -> Iterable[str]:
    """The scale of a heat map: boxes from 0 to ``top``."""
    if top <= 0:
        return
    start = (WIDTH - SHADES * SHADE) / 2
    yield svg.text(start - 5, y + 9, f"{scale}: 0" if scale else "0", anchor="end")
    for i in range(SHADES):
        yield svg.box(start + i * SHADE, y, SHADE, 11, "cell c0", i / (SHADES - 1))
    yield svg.text(start + SHADES * SHADE + 5, y + 9, number(top, 3))


def _status(status: str) -> str:
    return status if status in ("supported", "refuted") else "open"


def _frame(
    x: svg.Axis, y: svg.Axis, x_label: str, y_label: str, whole_x: bool, whole_y: bool, drawn: bool
) -> Iterable[str]:
    yield svg.text(6, 12, y_label, kind="name", most=72)
    yield svg.text((LEFT + RIGHT) / 2, HEIGHT - 4, x_label, anchor="middle", kind="name")
    if not drawn:
        yield svg.text((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2, "no finite value", anchor="middle")
        yield svg.line([(LEFT, BOTTOM), (RIGHT, BOTTOM)], "axis")
        return
    for value, label in svg.ticks(y, 7 if y.log else 5, whole=whole_y):
        yield svg.line([(LEFT, y(value)), (RIGHT, y(value))], "grid")
        yield svg.text(LEFT - 6, y(value) + 3.5, label, anchor="end")
    for value, label in svg.ticks(x, 8, whole=whole_x):
        yield svg.line([(x(value), BOTTOM), (x(value), BOTTOM + 3)], "axis")
        yield svg.text(x(value), BOTTOM + 14, label, anchor="middle")
    yield svg.line([(LEFT, BOTTOM), (RIGHT, BOTTOM)], "axis")


def _ends(curve: Line, index: int) -> tuple[float, ...]:
    if ends := curve.interval(index):
        return ends if all(map(math.isfinite, (*ends, curve.y[index]))) else ()
    sd, y = curve.deviation(index), curve.y[index]
    return () if sd is None or not math.isfinite(sd) or not math.isfinite(y) else (y - sd, y + sd)


def _told_apart(curves: Sequence[Line]) -> list[Line]:
    """The same with a look of its own for each null."""
    nulls = count()
    return [replace(curve, look=next(nulls)) if curve.kind == "null" else curve for curve in curves]


def _curve(curve: Line, x: svg.Axis, y: svg.Axis) -> Iterable[str]:
    shown = [i for i, v in enumerate(curve.y) if math.isfinite(v) and (v > 0 or not y.log)]
    if curve.kind == "event":
        places = [(x(curve.x[i]), y(curve.y[i])) for i in shown]
        yield svg.marks(places, _shape(curve), f"mark {_colour(curve)}", 4.0)
        return
    kind = "null" if curve.kind == "null" else f"{curve.kind} {_colour(curve)}"
    for piece in svg.neighbours(shown):
        points = [(x(curve.x[i]), y(curve.y[i])) for i in piece]
        if len(points) > 1:
            yield svg.line(points, kind, _dash(curve))
        elif curve.kind == "null":  # as the legend has it
            (middle, height) = points[0]
            ends = (max(middle - LONE, x.start), min(middle + LONE, x.end))
            yield svg.line([(end, height) for end in ends], kind, _dash(curve))
        elif curve.kind != "arm":  # a lone point would be lost
            yield svg.marks(points, "circle", f"mark {kind}", 2)
    if curve.kind == "arm" and 0 < len(shown) <= MOST_MARKED:
        yield svg.marks([(x(curve.x[i]), y(curve.y[i])) for i in shown], _shape(curve), f"mark {_colour(curve)}")


def _band(curve: Line, x: svg.Axis, y: svg.Axis) -> Iterable[str]:
    ends = {i: found for i in range(len(curve.y)) if (found := _ends(curve, i)) and (not y.log or curve.y[i] > 0)}
    for piece in svg.neighbours(ends):
        if len(piece) > 1:
            upper, lower = ([(x(curve.x[i]), y(ends[i][side])) for i in piece] for side in (1, 0))
            yield svg.area(upper, lower, f"band {_colour(curve)}")


def _key(curve: Line) -> str:
    kind = "null" if curve.kind == "null" else f"{curve.kind} {_colour(curve)}"
    parts = [] if curve.kind == "event" else [svg.line([(0, 5), (26, 5)], kind, _dash(curve))]
    if curve.kind in ("arm", "event"):
        parts.append(svg.marks([(13, 5)], _shape(curve), f"mark {_colour(curve)}"))
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 26 10" aria-hidden="true">{"".join(parts)}</svg>'


def _colour(curve: Line) -> str:
    return f"c{curve.look % svg.COLOURS}"


def _shape(curve: Line) -> str:
    return svg.MARKS[curve.look % len(svg.MARKS)]


def _dash(curve: Line) -> str:
    if curve.kind == "null":
        return NULLS[curve.look % len(NULLS)]
    if curve.kind in DOTTED:
        return svg.START
    return svg.DASHES[curve.look // svg.COLOURS % len(svg.DASHES)]


def _table(curves: Sequence[Line]) -> Iterable[tuple[str, ...]]:
    """One row for each x, one column for each curve."""
    columns = [{x: _cell(c, i) for i, x in enumerate(c.x)} for c in curves]
    for x in sorted({x for column in columns for x in column}):
        yield (number(x), *(column.get(x, NONE) for column in columns))


def _cell(curve: Line, index: int) -> str:
    if ends := curve.interval(index):
        return within(curve.y[index], *ends)
    return spread(curve.y[index], curve.deviation(index))
