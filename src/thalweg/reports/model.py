"""The report of a measured model: how its layers write to the stream, and what becomes of the stream, from rows alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg.errors import InputError
from thalweg.records.measurements import Measurement, Measurements
from thalweg.reports import page
from thalweg.reports.figures import Figure, Line, heat, lines
from thalweg.reports.provenance import here
from thalweg.reports.tables import Table
from thalweg.reports.text import counted, listed, number

PROOF = "capture_error"
CHANGED = (
    "Here the change of the stream at a sublayer is not what the sublayer returns (a norm follows the addition, or streams are mixed). "
    "Curves of sublayers show what they return; the change stands in the rows, as .step."
)
MEDIAN = "Dotted: the median over tokens; a few tokens decide the mean somewhere."
FEW = 3.0  # mean over median from which a few tokens are said to decide a mean
BRANCHES = {"attention": "attention", "feed_forward": "feed-forward", "layer": "whole layer"}
MEANING = (
    "Every update that a sublayer adds to the residual stream is split, token by token, into its part along the stream before the addition and "
    "the rest. Values are means over tokens; bands are intervals over {units}. Dashed: what the measure gives where there is nothing to find."
)


@dataclass(frozen=True)
class Drawn:
    """A figure: its measure, title, what stands on the axis, what a reader should know."""

    measure: str
    title: str
    axis: str
    caption: str
    log: bool = False
    of_updates: bool = False


UPDATES = (
    Drawn(
        "parallel_coefficient",
        "Update along the stream",
        "coefficient",
        "In units of the stream: -1 removes it, above 0 strengthens it. Of a whole layer: both updates together, along its input.",
        of_updates=True,
    ),
    Drawn(
        "parallel_fraction",
        "Share of the update along the stream",
        "|cos| of update and stream",
        "Not its square (the energy share), nor the ratio of the two parts; both stand in the rows.",
        of_updates=True,
    ),
    Drawn("token_relative_update", "Size of the updates", "update / stream", "Ratio of norms, token by token.", True, True),
    Drawn("update_angle", "Angle between update and stream", "degrees", "90: across; above 90: against the stream.", of_updates=True),
)  # fmt: skip
STATES = (
    Drawn("rms", "Size of the stream", "root mean square", "Of the state that enters each sublayer; last: before the final norm.", log=True),
    Drawn(
        "layer_drop_cosine",
        "Cosine of the stream before and after a layer",
        "cosine",
        "1: the layer turns nothing, as far as the stream itself tells; what that costs in loss is another question.",
        of_updates=True,
    ),
    Drawn("entered_cosine", "Direction kept from the embedding", "cosine", "Of each state with the state that enters the first layer."),
    Drawn("anisotropy", "Anisotropy", "mean cosine of two tokens", "1: all tokens point the same way."),
    Drawn(
        "pooled_effective_rank.without_first",
        "Effective rank, first tokens left out",
        "share of the largest possible",
        "Entropy of the singular values of all tokens' states; the first token, a sink in many models, would hide the others.",
    ),
    Drawn(
        "outlier_channels.share",
        "Outlier channels",
        "share of the energy in the 4 largest channels",
        "Over all tokens: a first token far larger than the others decides it. Quantisation suffers from them.",
    ),
    Drawn(
        "first_token.ratio", "The first token", "its norm over the mean norm", "Far above 1: a sink.", log=True
    ),
)  # fmt: skip
HEADS = (
    Drawn("value_fraction", "What heads read, along the token's own value", "head", "|cos| of a head's output and the own value."),
    Drawn("own_weight", "Attention to oneself", "head", "Mean weight of a token on itself."),
)  # fmt: skip
INNER = (
    Drawn(
        "inner_fraction.hidden",
        "Blocks of the hidden vector, along what the sublayer is given",
        "block",
        "|cos| of each block of the stream's width and the sublayer's (normalised) input; coordinates are identified by their number alone.",
    ),
    Drawn(
        "inner_fraction.output",
        "What each block writes, along the block",
        "block",
        "|cos| of a block and its part of the sublayer's output (bias left out); coordinates are identified by their number alone.",
    ),
)
MOST_ROWS = 40  # layers of a heat map that are drawn


def write_model_report(
    rows: Measurements,
    path: str | Path,
    *,
    title: str,
    facts: Mapping[str, str],
    limits: Sequence[str] = (),
    command: str = "",
    provenance: Mapping[str, Any] | None = None,
    citations: Sequence[str] = (),
) -> Path:
    """Write the page of :func:`thalweg.measure`. Raises: InputError for rows of something else; for a full disk."""
    proof = next((row for row in rows if row.measure == PROOF), None)
    if proof is None:
        raise InputError(f"these rows are not of a measured model: there is no row {PROOF!r}")
    proved = math.isfinite(proof.value)
    return page.write(
        path,
        "model.html",
        title=title,
        proved=proved,
        proof=_proof(proof),
        after=CHANGED if any(r.measure.endswith(".step") and r.branch not in ("layer", "") for r in rows) else "",
        meaning=MEANING.format(units=_units(rows)),
        facts=dict(facts),
        extremes=extremes(rows),
        few=decided_by_few(rows),
        updates=drawn(rows, UPDATES),
        states=drawn(rows, STATES),
        heads=[f for d in HEADS if (f := by_part(rows, d, "head")) is not None],
        inner=[f for d in INNER if (f := by_part(rows, d, "stream")) is not None],
        likeness=[f for f in (pairs(rows, "linear_cka"), pairs(rows, "layer_cosine")) if f is not None],
        limits=[*limits] or ["None recorded."],
        command=command,
        provenance=here(provenance or {}),
        citations="\n\n".join(citations),
    )


def _proof(row: Measurement) -> str:
    if not math.isfinite(row.value):
        return f"NOT VERIFIED: the capture could not be proved ({row.null_kind.removeprefix('not verified: ')}). Do not rely on these numbers."
    where = f", at {row.site}" if row.value > 0 and row.site else ""
    return (
        f"The capture is proved: replayed on {counted(row.n or 0, 'token')}, every write gives the next state, and the last state the "
        f"model's own output, with a relative error of at most {number(row.value)}{where} (allowed {number(row.null)}, {row.dtype})."
    )


def _units(rows: Measurements) -> str:
    said = next((row.interval for row in rows if "over" in row.interval), "")
    return said.partition(" over ")[2].partition(" of ")[0] or "documents"


def drawn(rows: Measurements, wanted: Sequence[Drawn]) -> list[Figure]:
    """A figure for each measure that was taken."""
    found, told = [], decided(rows)
    for one in wanted:
        if traces := traces_of(rows, one):
            curves = [trace.line for trace in traces]
            dotted = medians(rows, [trace for trace in traces if trace.rows[0].measure in told])
            every = [*curves, *dotted, *_null(rows, one.measure, curves)]
            caption = f"{one.caption} {MEDIAN}" if dotted else one.caption
            found.append(lines(one.title, every, x_label="layer", y_label=one.axis, caption=caption, log_y=one.log))
    return found


@dataclass(frozen=True)
class Trace:
    """A curve before it is drawn: its rows and their places on the axis."""

    label: str
    x: Sequence[float]
    rows: Sequence[Measurement]
    look: int

    @property
    def line(self) -> Line:
        low, high = [r.low for r in self.rows], [r.high for r in self.rows]
        return Line(self.label, self.x, [r.value for r in self.rows], look=self.look, low=low, high=high)


def medians(rows: Measurements, traces: Sequence[Trace]) -> list[Line]:
    """The median over tokens beside each mean."""
    value = {(r.measure, r.site): r.value for r in rows if r.measure.endswith(".median") and r.head is None}
    found = []
    for trace in traces:
        middle = [value.get((f"{r.measure}.median", r.site), math.nan) for r in trace.rows]
        found.append(Line(f"{trace.label}, median", trace.x, middle, look=trace.look, kind="median"))
    return found


def curves_of(rows: Measurements, one: Drawn) -> list[Line]:
    """The curves of a measure, empty where it was not taken."""
    return [trace.line for trace in traces_of(rows, one)]


def traces_of(rows: Measurements, one: Drawn) -> list[Trace]:
    """What is drawn of a measure, empty where it was not taken."""
    return by_branch(rows, one.measure) if one.of_updates else of_states(rows, one.measure)


def by_branch(rows: Measurements, measure: str) -> list[Trace]:
    """A curve for each kind of sublayer (what it returned), and for whole layers (their step)."""
    taken = {f"{measure}.raw": False, f"{measure}.step": True, measure: True}
    chosen = [r for r in rows if r.branch and taken.get(r.measure) == (r.branch == "layer") and r.layer is not None]
    by_kind: dict[str, list[Measurement]] = {}
    for row in chosen:
        by_kind.setdefault(row.branch, []).append(row)
    return [
        Trace(BRANCHES.get(kind, kind), [float(r.layer or 0) for r in found], found, look)
        for look, (kind, found) in enumerate(by_kind.items())
    ]


def of_states(rows: Measurements, measure: str) -> list[Trace]:
    """One curve over the places of the stream; the sublayers of a layer share its step of the axis."""
    chosen = [r for r in rows if r.measure == measure and r.layer is not None and r.head is None]
    if not chosen:
        return []
    kinds = kinds_of(rows)
    places = [(row.layer or 0) + (kinds.index(row.branch) / len(kinds) if row.branch else 0.0) for row in chosen]
    return [Trace("stream", places, chosen, 0)]


def kinds_of(rows: Measurements) -> list[str]:
    """The kinds of sublayers in the order of a layer."""
    sites = [r for r in rows if r.measure == "rms" and r.branch]
    return list(dict.fromkeys(r.branch for r in (sites or rows) if r.branch and r.branch != "layer"))


def _null(rows: Measurements, measure: str, curves: Sequence[Line]) -> list[Line]:
    chosen = [
        r
        for r in rows
        if r.measure.removesuffix(".raw").removesuffix(".step") == measure and r.null is not None and r.head is None
    ]
    if not chosen:
        return []
    last = max(x for curve in curves for x in curve.x)
    values = {r.null for r in chosen}
    if len(values) == 1:
        only = values.pop()
        return [Line(f"null: {chosen[0].null_kind}", [0.0, last], [only or 0.0] * 2, kind="null")]
    return [
        Line(
            f"null: {chosen[0].null_kind}",
            [float(r.layer or 0) for r in chosen],
            [r.null or 0.0 for r in chosen],
            kind="null",
        )
    ]


def by_part(rows: Measurements, one: Drawn, field: str) -> Figure | None:
    """Layers down; across the parts of a sublayer (heads, blocks), whose number stands in ``field``."""
    chosen = [
        (r.layer, part, r)
        for r in rows
        if r.measure == one.measure and r.layer is not None and isinstance(part := getattr(r, field), int)
    ]
    if not chosen:
        return None
    layers, parts = sorted({layer for layer, *_ in chosen}), sorted({part for _, part, _ in chosen})
    value = {(layer, part): r.value for layer, part, r in chosen}
    null = next((r.null for *_, r in chosen if r.null is not None), None)
    beside = f" Null (random direction): {number(null)}." if null is not None else ""
    shown = layers[:: max(1, math.ceil(len(layers) / MOST_ROWS))]
    caption = f"{one.caption}{beside}" + ("" if len(shown) == len(layers) else " Not every layer is drawn.")
    table = [[value.get((layer, part), math.nan) for part in parts] for layer in shown]
    return heat(
        one.title,
        [f"{one.axis} {p}" for p in parts],
        [f"layer {i}" for i in shown],
        table,
        x_label=one.axis,
        caption=caption,
    )


LIKENESS = {
    "linear_cka": (
        "Likeness of states: linear CKA",
        "Unbiased estimate on a sample of tokens, 1: alike up to a rotation and a scale; null 0.",
    ),
    "layer_cosine": ("Likeness of states: cosine", "Mean cosine of the same token's states at two places; null 0."),
}


def pairs(rows: Measurements, measure: str) -> Figure | None:
    """Every two places of the stream."""
    chosen = {tuple(r.site.split(":")): r.value for r in rows if r.measure == measure and r.site.count(":") == 1}
    if not chosen:
        return None
    names = list(dict.fromkeys(name for pair in chosen for name in pair))
    every = {(name, name): 1.0 for name in names} | chosen | {(b, a): v for (a, b), v in chosen.items()}
    shown = names[:: max(1, math.ceil(len(names) / MOST_ROWS))]
    title, caption = LIKENESS[measure]
    table = [[every.get((a, b), math.nan) for b in shown] for a in shown]
    return heat(title, [_short(n) for n in shown], [_short(n) for n in shown], table, x_label="place", caption=caption)


def _short(name: str) -> str:
    """``layers.3.attention`` -> ``3``."""
    parts = name.split(".")
    return next((p for p in parts if p.isdecimal()), parts[-1])


def extremes(rows: Measurements) -> Table:
    """The layers that stand out, one line for each measure and kind of sublayer."""
    found, kinds = [], kinds_of(rows)
    last = max((r.layer for r in rows if r.layer is not None and r.site == "stream.end"), default=None)

    def place(x: float, of_states: bool) -> str:
        if not of_states or not kinds:
            return f"layer {int(x)}"
        if x == last:
            return "the end"
        kind = kinds[round((x - int(x)) * len(kinds))]
        return f"{BRANCHES.get(kind, kind)} {int(x)}"

    for one in (*UPDATES, *STATES):
        for curve in curves_of(rows, one):
            points = [(y, x) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
            if points:
                middle = sorted(y for y, _ in points)[len(points) // 2]
                ends = (f"{number(y)} ({place(x, not one.of_updates)})" for y, x in (min(points), max(points)))
                found.append(
                    (f"{one.title} [{one.axis}]" if one.axis else one.title, curve.label, number(middle), *ends)
                )
    return Table(
        ("measure", "of", "middle", "lowest", "highest"),
        found,
        "Middle: the median over layers. Of states: the one that enters the sublayer.",
    )


def decided_by_few(rows: Measurements) -> list[str]:
    """For people: where the mean over tokens and their median tell different things."""
    return [f"{measure}: {listed(sites, 4)}" for measure, sites in decided(rows).items()]


def decided(rows: Measurements) -> dict[str, list[str]]:
    """Measures whose mean over tokens a few of them decide, often the first: where mean and median differ in sign or threefold."""
    value = {(r.measure, r.site): r.value for r in rows if r.head is None and not isinstance(r.stream, int)}
    found: dict[str, list[str]] = {}
    for (measure, site), mean in value.items():
        median = value.get((f"{measure}.median", site))
        if median is None or not math.isfinite(mean) or measure.startswith("first_token"):
            continue
        if mean * median < 0 or abs(mean) > FEW * abs(median) > 0:
            found.setdefault(measure, []).append(f"{site} ({number(mean, 3)}, median {number(median, 3)})")
    return found
