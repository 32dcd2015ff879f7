"""Figures as inline SVG that follow the page's colours, each with the table of its data."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

from thalweg.reports.text import number

# Okabe and Ito's palette without its yellow, which is lost on white; styles repeat it for many arms.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
STYLES = ("-", "--", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK = "#0b0c0d"  # replaced by currentColor, so that text and axes follow light and dark
MUTED = "#808485"


@dataclass(frozen=True)
class Figure:
    """One figure: ``svg`` is markup made here, everything else is text that the page escapes."""

    title: str
    svg: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Line:
    """A curve with an optional band. x, y, low, high have one length; ``null`` curves are drawn thin and grey."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = field(default_factory=tuple)
    high: Sequence[float] = field(default_factory=tuple)
    null: bool = False


@dataclass(frozen=True)
class Effect:
    """One row of the effect plot, in the measure's own sign."""

    label: str
    estimate: float
    low: float
    high: float
    margin: float
    points: Sequence[float]
    unit: str
    status: str


def lines(title: str, curves: Sequence[Line], *, x_label: str, y_label: str, caption: str, log_y: bool = False) -> Figure:
    """Curves over one axis; points that are not finite are left out of the picture and stay in the table."""
    canvas, axes = _axes(6.4, 3.4 + 0.16 * max(0, math.ceil(len(curves) / 3) - 2))
    shown = 0
    for curve in curves:
        keep = [i for i, y in enumerate(curve.y) if math.isfinite(y) and (y > 0 or not log_y)]
        if not keep:
            continue
        x, y = [curve.x[i] for i in keep], [curve.y[i] for i in keep]
        if curve.null:
            axes.plot(x, y, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label=curve.label)
            continue
        style = look(shown)
        axes.plot(x, y, linewidth=1.6, label=curve.label, markersize=3.2, **style)
        if len(curve.low) == len(curve.y):
            low, high = [curve.low[i] for i in keep], [curve.high[i] for i in keep]
            if all(map(math.isfinite, (*low, *high))):
                axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
        shown += 1
    axes.set(xlabel=x_label, ylabel=y_label)
    if log_y:
        axes.set_yscale("log")
    if shown:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False, fontsize=8, labelcolor=INK)
    rows = [
        (c.label, number(x), number(y), _band(c, i)) for c in curves for i, (x, y) in enumerate(zip(c.x, c.y, strict=True))
    ]
    return Figure(title, _svg(canvas, title), caption, ("curve", x_label, y_label, "band"), tuple(rows))


def look(index: int) -> dict:
    """Colour, style and marker of the curve at ``index``: different for the first 21."""
    return {
        "color": PALETTE[index % len(PALETTE)],
        "linestyle": STYLES[index // len(PALETTE) % len(STYLES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def effects(title: str, rows: Sequence[Effect], caption: str) -> Figure:
    """Estimates with intervals, the value of each seed, and the margin that decides; one panel per row, since units differ."""
    canvas = Canvas(figsize=(6.4, 0.35 + 0.78 * len(rows)), layout="constrained")
    for index, row in enumerate(rows):
        axes = canvas.add_subplot(len(rows), 1, index + 1)
        _dress(axes)
        colour = {"supported": PALETTE[2], "refuted": PALETTE[1]}.get(row.status, PALETTE[0])
        axes.axvline(0, color=INK, linewidth=0.6)
        axes.axvline(row.margin, color=PALETTE[3], linewidth=1.2, linestyle="--")
        axes.plot([row.low, row.high], [0, 0], color=colour, linewidth=3, solid_capstyle="butt")
        axes.plot(row.points, [0.32] * len(row.points), "o", color=MUTED, markersize=3)
        axes.plot([row.estimate], [0], "D", color=colour, markersize=5)
        axes.set(ylim=(-0.5, 0.6), yticks=[])
        axes.set_title(f"{row.label}  [{row.unit or 'no unit'}]", fontsize=8, loc="left", color=INK)
        axes.spines[["left", "right", "top"]].set_visible(False)
    columns = ("hypothesis", "estimate", "low", "high", "margin", "per seed", "unit")
    table = [
        (r.label, number(r.estimate), number(r.low), number(r.high), number(r.margin), ", ".join(map(number, r.points)), r.unit) for r in rows
    ]
    return Figure(title, _svg(canvas, title), caption, columns, tuple(table))


def bars(title: str, labels: Sequence[str], values: Sequence[float], *, unit: str, caption: str, nulls: dict[str, float] | None = None) -> Figure:
    """Horizontal bars, with vertical lines at null values."""
    canvas, axes = _axes(6.4, 0.9 + 0.24 * len(labels))
    finite = [v if math.isfinite(v) else 0.0 for v in values]
    axes.barh(range(len(labels)), finite, color=[PALETTE[i % len(PALETTE)] for i in range(len(labels))], height=0.62)
    axes.set_yticks(range(len(labels)), labels, fontsize=8, color=INK)
    axes.invert_yaxis()
    for name, value in (nulls or {}).items():
        axes.axvline(value, color=MUTED, linewidth=1, linestyle="--")
        axes.annotate(name, (value, 1.0), xycoords=("data", "axes fraction"), fontsize=7, color=INK, ha="center", va="bottom")
    axes.set(xlabel=unit)
    rows = [(label, number(value)) for label, value in zip(labels, values, strict=True)]
    rows += [(f"null: {name}", number(value)) for name, value in (nulls or {}).items()]
    return Figure(title, _svg(canvas, title), caption, ("", unit), tuple(rows))


def _band(curve: Line, index: int) -> str:
    return f"{number(curve.low[index])} to {number(curve.high[index])}" if len(curve.low) == len(curve.y) else ""


def _axes(width: float, height: float):
    canvas = Canvas(figsize=(width, height), layout="constrained")
    axes = canvas.add_subplot()
    _dress(axes)
    axes.spines[["right", "top"]].set_visible(False)
    return canvas, axes


def _dress(axes) -> None:
    axes.set_facecolor("none")
    axes.tick_params(colors=INK, labelsize=8)
    axes.xaxis.label.set(color=INK, fontsize=9)
    axes.yaxis.label.set(color=INK, fontsize=9)
    for spine in axes.spines.values():
        spine.set(color=INK, linewidth=0.6)


def _svg(canvas: Canvas, title: str) -> str:
    """The figure as one ``<svg>`` element without fixed size, text kept as text, ink as ``currentColor``."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif", "axes.unicode_minus": True}):
        canvas.patch.set_visible(False)
        FigureCanvasSVG(canvas).print_svg(buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    head, rest = text.split(">", 1)
    kept = [part for part in head.split('" ') if not part.startswith(("width=", "height="))]
    return '" '.join(kept) + ' role="img">' + rest if kept[-1].endswith('"') else '" '.join(kept) + '" role="img">' + rest
