"""Drawing: axes, curves, bands and marks as small SVG in the colours of the page.

Written here because of size and time: a page has dozens of figures of up to 21 curves, which a plotting library draws
in a quarter of a second and 20 to 80 kB each, with fixed colours and element ids that repeat over the page.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import escape

from thalweg.reports.text import clean

COLOURS = 7  # classes c0 to c6 of the style sheet
DASHES = ("", "7 3", "2 2.5")  # tell the 8th from the 1st colour
START, NULL = "1.5 3", "5 4"
TINY, HUGE = 1e-290, 1e300  # beyond them differences overflow or vanish
ALIKE = 1e-6  # relative; values of float32 models that differ by less are one value with its rounding
MARKS = ("circle", "square", "triangle", "diamond", "star", "down", "bar")


@dataclass(frozen=True)
class Axis:
    """From values to places. low, high: of the values; start, end: of the drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (
            (math.log10(self.low), math.log10(self.high), math.log10(max(value, self.low)))
            if self.log
            else (self.low, self.high, value)
        )
        place = self.start + (value - low) / (high - low) * (self.end - self.start)
        return min(max(place, min(self.start, self.end)), max(self.start, self.end))


def axis(values: Iterable[float], start: float, end: float, *, log: bool = False, pad: float = 0.05) -> Axis:
    """An axis that holds all finite ``values``, with room of the share ``pad`` at both ends."""
    found = [v for v in values if math.isfinite(v) and abs(v) < HUGE and (v > 0 or not log)]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    if log:
        room = max((math.log10(high) - math.log10(low)) * pad, 0.02)
        return Axis(10 ** (math.log10(low) - room), 10 ** (math.log10(high) + room), start, end, True)
    if high - low <= max(ALIKE * max(abs(low), abs(high)), TINY):  # one value only: shown against zero
        low, high = (min(0.0, 1.5 * low), max(0.0, 1.5 * high)) if abs(high) > TINY else (0.0, 1.0)
    room = (high - low) * pad
    return Axis(low - room, high + room, start, end)


def ticks(along: Axis, most: int = 6, whole: bool = False) -> list[tuple[float, str]]:
    """Round values inside an axis, with their labels."""
    if along.log and len(found := _log_ticks(along, most)) > 1:
        return found
    raw = (along.high - along.low) / most
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw * 0.999)
    if whole:
        step = max(1.0, step)
    found = [k * step for k in range(math.ceil(along.low / step - 1e-9), math.floor(along.high / step + 1e-9) + 1)]
    return [(v, _label(v, step)) for v in found]


def _log_ticks(along: Axis, most: int) -> list[tuple[float, str]]:
    """1-2-5 ticks if they are not too many, else powers of ten, else evenly chosen powers."""
    low, high = math.log10(along.low) - 1e-9, math.log10(along.high) + 1e-9
    decades = range(math.floor(low), math.ceil(high) + 1)
    for steps in ((1, 2, 5), (1,)):
        found = [(m, k) for k in decades for m in steps if low <= math.log10(m) + k <= high]
        if len(found) <= most:
            break
    return [(m * 10.0**k, _power(m, k)) for m, k in found[:: max(1, math.ceil(len(found) / most))]]


def _power(m: int, k: int) -> str:
    """The label of m times the k-th power of ten."""
    return f"{m * 10.0**k:,.{max(0, -k)}f}" if -4 <= k <= 4 else f"{m}e{k}"


def _label(value: float, step: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or step < 1e-5:
        return f"{value:.4g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def picture(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """One ``<svg>`` element that scales with the page; ``title`` is read aloud in its place."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" role="img" '
        f'aria-label="{escape(clean(title))}">{"".join(parts)}</svg>'
    )


def neighbours(indices: Iterable[int]) -> Iterable[list[int]]:
    """Runs of indices that follow one another: the pieces of a line with gaps."""
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        yield [index for _, index in run]


def text(x: float, y: float, content: str, *, anchor: str = "start", kind: str = "", most: int = 0) -> str:
    """Text, cut to ``most`` characters if given; escaped here."""
    if most and len(content) > most:
        content = content[: most - 1] + "…"
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{where}{name}>{escape(clean(content))}</text>'


def line(points: Sequence[tuple[float, float]], kind: str, dash: str = "") -> str:
    """An open line through places."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path class="{kind}" d="{_path(points)}"{dashed}/>'


def area(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]], kind: str) -> str:
    """The area between two lines."""
    return f'<path class="{kind}" d="{_path([*upper, *reversed(lower)])}Z"/>'


def box(x: float, y: float, width: float, height: float, kind: str, opacity: float | None = None) -> str:
    """A filled rectangle, as the style sheet has it or with an ``opacity`` in [0, 1] of its own."""
    own = "" if opacity is None else f' fill-opacity="{opacity:.3f}"'
    return f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"{own}/>'


def marks(points: Iterable[tuple[float, float]], shape: str, kind: str, size: float = 2.7) -> str:
    """One mark at each place, all in one path."""
    return f'<path class="{kind}" d="{"".join(_mark(x, y, shape, size) for x, y in points)}"/>'


def _mark(x: float, y: float, shape: str, r: float) -> str:
    if shape == "circle":
        return f"M{_n(x - r)} {_n(y)}a{_n(r)} {_n(r)} 0 1 0 {_n(2 * r)} 0a{_n(r)} {_n(r)} 0 1 0 {_n(-2 * r)} 0Z"
    outline = {
        "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
        "triangle": ((0, -1.25), (1.15, 0.85), (-1.15, 0.85)),
        "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        "star": ((0, -1.5), (0.45, -0.45), (1.5, 0), (0.45, 0.45), (0, 1.5), (-0.45, 0.45), (-1.5, 0), (-0.45, -0.45)),
        "down": ((0, 1.25), (1.15, -0.85), (-1.15, -0.85)),
        "bar": ((-0.5, -1.3), (0.5, -1.3), (0.5, 1.3), (-0.5, 1.3)),
    }[shape]
    return _path([(x + a * r, y + b * r) for a, b in outline]) + "Z"


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
