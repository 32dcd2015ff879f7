"""Curves with intervals over a signed axis: linear round zero, logarithmic beyond."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thalweg.reports import svg
from thalweg.reports.figures import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Figure, Key
from thalweg.reports.text import NONE, number

MOST_TICKS = 7


@dataclass(frozen=True)
class Spread:
    """A curve: x, y and the interval of each y (NaN where there is none). look: its colour and mark."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    look: int = 0


def bent(value: float, linear: float) -> float:
    """``value / linear`` up to size 1, beyond it sign * (1 + log10 of that)."""
    ratio = value / linear
    return ratio if abs(ratio) <= 1 else math.copysign(1 + math.log10(abs(ratio)), ratio)


def spreads(
    title: str,
    curves: Sequence[Spread],
    *,
    x_label: str,
    y_label: str,
    caption: str,
    linear: float,
    columns: tuple[str, ...] = (),
    rows: Sequence[tuple[str, ...]] = (),
) -> Figure:
    """Curves over x with their intervals; a dashed line at zero. Linear up to ``linear``, logarithmic beyond, if anything lies beyond.

    columns, rows: a table to fold under the picture; without them x and, of each curve, value and interval. Points that are not finite leave a
    gap in the picture and stay in the table.
    """
    ends = [v for c in curves for v in (*c.y, *c.low, *c.high) if math.isfinite(v)]
    bends = bool(ends) and max(map(abs, ends)) > linear

    def place(value: float) -> float:
        return bent(value, linear) if bends else value

    x = svg.axis((v for c in curves for v in c.x), LEFT, RIGHT, pad=0.03)
    y = svg.axis([place(v) for v in (*ends, 0.0)], BOTTOM, TOP, pad=0.06)
    parts = list(
        _frame(x, y, x_label, f"{y_label}, linear to ±{number(linear)}, then log" if bends else y_label, linear, bends)
    )
    if y.low <= 0 <= y.high:
        parts.append(svg.line([(LEFT, y(0)), (RIGHT, y(0))], "null", svg.NULL))
    for curve in curves:
        parts += _drawn(curve, x, y, place)
    lost = sum(not math.isfinite(v) for c in curves for v in c.y)
    caption = f"{caption} {lost} of the values not finite: a gap in the picture." if lost else caption
    return Figure(
        title,
        svg.picture(WIDTH, HEIGHT, title, parts),
        caption,
        columns or (x_label, *(f"{c.label}{part}" for c in curves for part in ("", " (interval)"))),
        tuple(rows) or tuple(_table(curves)),
        tuple(Key(c.label, _key(c)) for c in curves),
    )


def _frame(x: svg.Axis, y: svg.Axis, x_label: str, y_label: str, linear: float, bends: bool) -> Iterable[str]:
    yield svg.text(6, 12, y_label, kind="name", most=72)
    yield svg.text((LEFT + RIGHT) / 2, HEIGHT - 4, x_label, anchor="middle", kind="name")
    for value, label in _ticks(y, linear) if bends else svg.ticks(y, 5):
        yield svg.line([(LEFT, y(value)), (RIGHT, y(value))], "grid")
        yield svg.text(LEFT - 6, y(value) + 3.5, label, anchor="end")
    for value, label in svg.ticks(x, 8):
        yield svg.line([(x(value), BOTTOM), (x(value), BOTTOM + 3)], "axis")
        yield svg.text(x(value), BOTTOM + 14, label, anchor="middle")
    yield svg.line([(LEFT, BOTTOM), (RIGHT, BOTTOM)], "axis")


def _ticks(y: svg.Axis, linear: float) -> list[tuple[float, str]]:
    """Zero and signed powers of ten times ``linear``, thinned from the inside."""
    powers = [k for k in range(300) if 1 + k <= max(abs(y.low), abs(y.high))]
    shown = (
        powers[:: max(1, math.ceil(2 * len(powers) / MOST_TICKS))]
        if y.low < -1
        else powers[:: max(1, math.ceil(len(powers) / MOST_TICKS))]
    )
    found = [(0.0, "0")]
    for k in shown:
        for sign in (1, -1):
            if y.low <= sign * (1 + k) <= y.high:
                size = linear * 10**k
                label = (
                    f"{size:,.0f}"
                    if 1 <= size < 1e5
                    else f"{size:.0e}".replace("e+0", "e").replace("e-0", "e-")
                    if size >= 1e5
                    else f"{size:g}"
                )
                found.append((sign * (1.0 + k), f"{'−' if sign < 0 else ''}{label}"))
    return found


def _drawn(curve: Spread, x: svg.Axis, y: svg.Axis, place) -> Iterable[str]:
    colour = f"c{curve.look % svg.COLOURS}"
    for piece in svg.neighbours([i for i in range(len(curve.x)) if _finite(curve.low[i], curve.high[i])]):
        if len(piece) > 1:
            upper = [(x(curve.x[i]), y(place(curve.high[i]))) for i in piece]
            lower = [(x(curve.x[i]), y(place(curve.low[i]))) for i in piece]
            yield svg.area(upper, lower, f"band {colour}")
    shown = [i for i in range(len(curve.x)) if _finite(curve.y[i])]
    for piece in svg.neighbours(shown):
        if len(piece) > 1:
            yield svg.line([(x(curve.x[i]), y(place(curve.y[i]))) for i in piece], f"arm {colour}")
    mark = svg.MARKS[curve.look % len(svg.MARKS)]
    yield svg.marks([(x(curve.x[i]), y(place(curve.y[i]))) for i in shown], mark, f"mark {colour}")


def _finite(*values: float) -> bool:
    return all(map(math.isfinite, values))


def _key(curve: Spread) -> str:
    colour, mark = f"c{curve.look % svg.COLOURS}", svg.MARKS[curve.look % len(svg.MARKS)]
    parts = [svg.line([(0, 5), (26, 5)], f"arm {colour}"), svg.marks([(13, 5)], mark, f"mark {colour}")]
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 26 10" aria-hidden="true">{"".join(parts)}</svg>'


def between(low: float, high: float) -> str:
    """An interval in words, a dash for none."""
    return NONE if math.isnan(low) or math.isnan(high) else f"{number(low)} to {number(high)}"


def _table(curves: Sequence[Spread]) -> Iterable[tuple[str, ...]]:
    for at in sorted({v for c in curves for v in c.x}):
        row = [number(at)]
        for curve in curves:
            i = next((i for i, v in enumerate(curve.x) if v == at), None)
            row += [NONE, NONE] if i is None else [number(curve.y[i]), between(curve.low[i], curve.high[i])]
        yield tuple(row)
