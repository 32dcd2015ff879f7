"""The report of two models side by side: how far compression moved the updates, in which direction, and what to protect; from rows alone."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thalweg.errors import InputError
from thalweg.records.measurements import Measurement, Measurements
from thalweg.reports import page
from thalweg.reports.figures import Figure, Line, heat, lines
from thalweg.reports.tables import Table
from thalweg.reports.text import NONE, big, listed, number, words

BRANCHES = {
    "attention": "attention",
    "value": "heads (value space)",
    "feed_forward": "feed-forward",
    "layer": "whole layer",
}
MODES = {
    "local": "every compressed layer on the dense input of that layer",
    "isolated": "every compressed sublayer on its dense input",
    "global": "both models on the text, errors of earlier layers included",
}
PARTS = {"total": "whole error", "across": "across the dense update", "along": "along it"}
AGREED = {
    "across": "part across",
    "along": "part along",
    "signed": "part along, signed",
    "across_share": "share across",
    "cosine": "cosine",
    "pooled": "pooled over tokens",
    "sqnr": "SQNR",
    "weights": "error of the weights (no text needed)",
    "kl": "KL of the layer alone",
}
MEANING = (
    "The error e of an update is what the compressed model adds to the stream minus what the dense one adds. It is split, token by token, "
    "along and across the dense update, and given in units of that update's norm. Values are means over tokens, intervals over {units}. "
    "Dashed: a random error of the same size at the same tokens. "
    "In a wide stream that lies across almost entirely: a large part across alone says nothing."
)
PROTECTED = 6  # layers that are named
PROTECT_NOTE = (
    "Layers in the order of {by}. It says where the updates moved most, not what the loss would gain; "
    "that takes a run with the layers left dense. {seen}"
    "Bytes: {rule}."
)
SEEN = (  # of the study compression-predicts, docs/comparing.md
    "Where we tried it (SmolLM2-135M in 3 bits, +0.93 nats/token), six layers of 30 named by the error saved 0.14, six drawn at random 0.07, "
    "and six named by the KL of the layer alone 0.45: --layer-kl measures it. "
)
HEAD_ROWS = 40


def write_pair_report(
    rows: Measurements,
    path: str | Path,
    *,
    title: str,
    names: tuple[str, str],
    facts: Mapping[str, str],
    models: Mapping[str, Mapping[str, Any]],
    bytes_rule: str = "",
    limits: Sequence[str] = (),
    command: str = "",
    provenance: Mapping[str, Any] | None = None,
    citations: Sequence[str] = (),
) -> Path:
    """Write the page of :func:`thalweg.compression.diagnose`. names: of the dense and the compressed model. models: provenance of each.

    Raises: InputError for rows of something else; for a full disk.
    """
    modes = [mode for mode in MODES if any(row.measure == f"error.total.{mode}" for row in rows)]
    if not modes:
        raise InputError(
            "these rows are not of two compared models: there is no row 'error.total.local' or of another mode"
        )
    proofs = [row for row in rows if row.measure == "capture_error"]
    proved = bool(proofs) and all(math.isfinite(row.value) for row in proofs)
    return page.write(
        path,
        "pair.html",
        title=title,
        proved=proved,
        verdict=verdict(rows, names, modes),
        proof=_proof(proofs),
        meaning=MEANING.format(units=_units(rows)),
        facts=dict(facts),
        protect=protect_table(rows, modes[0], bytes_rule),
        ranking=ranking_table(rows, modes[0]),
        sections=[(f"{mode}: {MODES[mode]}", by_depth(rows, mode)) for mode in modes],
        heads=[f for mode in modes if (f := by_head(rows, mode)) is not None],
        agreement=[t for mode in modes if (t := agreement_table(rows, mode)) is not None],
        kl=kl_figure(rows),
        models={name: {k: words(v) for k, v in about.items()} for name, about in models.items()},
        limits=[*limits] or ["None recorded."],
        command=command,
        provenance={k.replace("_", " "): words(v) for k, v in (provenance or {}).items() if v is not None},
        citations="\n\n".join(citations),
    )


def verdict(rows: Measurements, names: tuple[str, str], modes: Sequence[str]) -> list[str]:
    """What a reader should take away, a sentence each."""
    found = []
    change, kl = _only(rows, "loss.change"), _only(rows, "kl")
    if kl is not None:
        cost = f"KL {_with_interval(kl)} nats/token"
        if change is not None:
            verb = "loses" if change.value >= 0 else "gains"
            cost = f"{names[1]} {verb} {_with_interval(change, size=True)} nats/token against {names[0]}; {cost}"
        found.append(f"{cost}.")
    mode = modes[0]
    totals = [
        f"{number(100 * row.value, 3)} % at {BRANCHES.get(b, b)}"
        for b, row in _over_layers(rows, "total", mode).items()
    ]
    if totals:
        found.append(
            f"Errors ({mode}: {MODES[mode]}), in units of the dense update, mean over layers: {listed(totals)}."
        )
    for branch, row in _over_layers(rows, "across_share", mode).items():
        null = next((r.null for r in _layers(rows, f"error.across_share.{mode}", branch) if r.null is not None), None)
        signed = _over_layers(rows, "signed", mode).get(branch)
        if branch == "layer" and null is not None and signed is not None and row.value > 0:
            found.append(
                f"Of the norm of a whole layer's error {number(100 * row.value, 4)} % lies across the dense update; "
                f"an error in a random direction would have {number(100 * null, 5)} %. "
                f"Along it the update became {'longer' if signed.value > 0 else 'shorter'} by "
                f"{number(100 * abs(signed.value), 3)} %."
            )
    first = [str(row.layer) for row in _worst(rows, mode)[:PROTECTED]]
    if first and any(row.value > 0 for row in _worst(rows, mode)):
        found.append(f"Largest errors of whole layers: {', '.join(first)} (of {len(_worst(rows, mode))}).")
    if not any(row.value for row in _worst(rows, mode)):
        found.append("No update differs by a single bit.")
    return found


def protect_table(rows: Measurements, mode: str, rule: str) -> Table:
    """The layers to leave as they were, first those with the largest error, and what that costs."""
    sizes = {row.layer: row.value for row in rows if row.measure == "protect.bytes"}
    kl = {row.layer: row for row in rows if row.measure == "kl.layer"}
    ranked = _worst(rows, mode)
    by = f"the error of the whole layer ({mode})"
    if kl:
        ranked, by = sorted(ranked, key=lambda r: -kl[r.layer].value), "the KL of the layer alone"
    found, together = [], 0.0
    for place, row in enumerate(ranked[:PROTECTED], 1):
        size = sizes.get(row.layer)
        together += size or 0.0
        cells = [f"{place}", f"layer {row.layer}", _with_interval(row)]
        cells += [_with_interval(kl[row.layer])] if kl else []
        found.append((*cells, *((big(size, "B"), big(together, "B")) if size is not None else ("unknown", "unknown"))))
    columns = ("place", "protect", "error", *(("KL alone",) if kl else ()), "costs", "with those above")
    return Table(columns, found, PROTECT_NOTE.format(by=by, rule=rule or "unknown", seen="" if kl else SEEN))


def ranking_table(rows: Measurements, mode: str) -> Table:
    """Every layer, by its whole error, with the other numbers beside."""
    kinds = [b for b in _branches(rows, mode) if b != "layer"]
    columns = [
        "rank",
        "layer",
        "whole layer",
        *(BRANCHES.get(kind, kind) for kind in kinds),
        "signed along",
        "share across",
        "cosine",
        "SQNR [dB]",
    ]
    by = {
        (row.measure, row.branch, row.layer): row
        for row in reversed(list(rows))
        if row.layer is not None and row.head is None and row.measure.startswith(("error.", "kl.layer"))
    }
    weights = any(row.measure == "error.weights" for row in rows)
    columns += ["weights"] if weights else []
    main = "layer" if "layer" in _branches(rows, mode) else kinds[0]
    found = []
    for place, row in enumerate(_worst(rows, mode), 1):

        def cell(name: str, branch: str = main, layer: int = row.layer or 0, of: str = f".{mode}") -> str:
            one = by.get((f"error.{name}{of}", branch, layer))
            return NONE if one is None else number(one.value, 3)

        cells = [f"{place}", f"layer {row.layer}", _with_interval(row), *(cell("total", kind) for kind in kinds)]
        cells += [cell("signed"), cell("across_share"), cell("cosine"), cell("sqnr")]
        cells += [cell("weights", "layer", of="")] if weights else []
        found.append(tuple(cells))
    return Table(
        tuple(columns),
        found,
        f"Mode {mode}, in units of the dense update's norm; the columns behind those of sublayers are of the {BRANCHES[main]}.",
    )


def by_depth(rows: Measurements, mode: str) -> list[Figure]:
    """The error of every branch over depth, its parts and what chance would give; then the share across."""
    found = []
    for branch in _branches(rows, mode):
        curves = [
            _line(label, _layers(rows, f"error.{part}.{mode}", branch), look)
            for look, (part, label) in enumerate(PARTS.items())
        ]
        curves.append(_null("random error of the same size: along", _layers(rows, f"error.along.{mode}", branch)))
        caption = (
            "Norms over the norm of the dense update, mean over tokens; whole error^2 = across^2 + along^2 at every token. "
            "Where nearly all of it lies across, as of a random error, both curves are one."
        )
        found.append(
            lines(
                f"Error: {BRANCHES.get(branch, branch)}",
                [c for c in curves if c.y],
                x_label="layer",
                y_label="error / dense update",
                caption=caption,
                log_y=True,
            )
        )
    shares = [
        _line(BRANCHES.get(b, b), _layers(rows, f"error.across_share.{mode}", b), look)
        for look, b in enumerate(_branches(rows, mode))
    ]
    nulls = [
        _null("isotropic: sqrt(1 - 1/width)", _layers(rows, f"error.across_share.{mode}", b))
        for b in _branches(rows, mode)[-1:]
    ]
    if any(curve.y for curve in shares):
        found.append(
            lines(
                "Share of the error that lies across",
                [c for c in (*shares, *nulls) if c.y],
                x_label="layer",
                y_label="across / whole error",
                caption="Below the dashed line the error prefers the direction of the update itself, which shortens or lengthens it.",
            )
        )
    return found


def by_head(rows: Measurements, mode: str) -> Figure | None:
    """The error of every head in value space."""
    chosen = {
        (row.layer, row.head): row.value
        for row in rows
        if row.measure == f"error.total.{mode}" and row.head is not None and row.layer is not None
    }
    if not chosen:
        return None
    layers, heads = sorted({layer for layer, _ in chosen}), sorted({head for _, head in chosen})
    shown = layers[:: max(1, math.ceil(len(layers) / HEAD_ROWS))]
    return heat(
        f"Error of heads before the output projection ({mode})",
        [f"head {h}" for h in heads],
        [f"layer {i}" for i in shown],
        [[chosen.get((layer, head), math.nan) for head in heads] for layer in shown],
        x_label="head",
        caption="Whole error in units of the head's dense output."
        + ("" if shown == layers else " Not every layer is drawn."),
    )


def agreement_table(rows: Measurements, mode: str) -> Table | None:
    """Whether another number ranks the layers as the whole error does."""
    found, counts = (
        [],
        {row.branch: row.n for row in rows if row.measure.startswith("agreement.") and row.measure.endswith(mode)},
    )
    for name, label in AGREED.items():
        for branch in _branches(rows, mode):
            both = [_only(rows, f"agreement.{kind}.{name}.{mode}", branch) for kind in ("spearman", "pearson")]
            if both[0] is not None:
                cells = [_with_interval(row) if row is not None else NONE for row in both]
                found.append((label, BRANCHES.get(branch, branch), *cells, number(both[0].n)))
    if not found:
        return None
    chance = next((row.null_kind for row in rows if row.measure.startswith("agreement.")), "")
    note = (
        f"Mode {mode}: correlation over {listed(sorted({str(n) for n in counts.values()}))} layers with the whole error of the same branch, "
        f"with intervals over units of the text; null 0 ({chance}). Near 1 (SQNR and cosine: near -1) it says the same."
    )
    return Table(("number", "of", "Spearman", "Pearson", "layers"), found, note)


def kl_figure(rows: Measurements) -> list[Figure]:
    """What every layer alone does to the predictions, where that was measured."""
    chosen = [row for row in rows if row.measure == "kl.layer"]
    if not chosen:
        return []
    caption = "The output of one compressed layer, on its dense input, put through the remaining dense network."
    curve = _line("one layer compressed", chosen, 0)
    return [lines("KL of one layer alone", [curve], x_label="layer", y_label="nats/token", caption=caption, log_y=True)]


def _proof(proofs: Sequence[Measurement]) -> str:
    if not proofs:
        return "NOT VERIFIED: the rows hold no proof of the capture."
    said = []
    for row in proofs:
        if math.isfinite(row.value):
            said.append(f"{row.model}: worst error {number(row.value, 2)} (allowed {number(row.null)}, {row.dtype})")
        else:
            said.append(
                f"{row.model}: NOT VERIFIED ({row.null_kind.removeprefix('not verified: ')}); do not rely on these numbers"
            )
    return f"The stream of both models was replayed at every write before anything was measured. {'; '.join(said)}."


def _units(rows: Measurements) -> str:
    said = next((row.interval for row in rows if "bootstrap over" in row.interval and row.layer is not None), "")
    return said.partition(" over ")[2].partition(" of ")[0] or "documents"


def _branches(rows: Measurements, mode: str) -> list[str]:
    found = {row.branch for row in rows if row.measure == f"error.total.{mode}" and row.layer is not None}
    return [*(b for b in BRANCHES if b in found), *sorted(found - BRANCHES.keys())]


def _layers(rows: Measurements, measure: str, branch: str) -> list[Measurement]:
    """One row for each layer, in order."""
    found: dict[int, Measurement] = {}
    for row in rows:
        if row.measure == measure and row.branch == branch and row.layer is not None and row.head is None:
            found.setdefault(row.layer, row)
    return [found[layer] for layer in sorted(found)]


def _over_layers(rows: Measurements, name: str, mode: str) -> dict[str, Measurement]:
    """Means over layers, by branch."""
    found = {row.branch: row for row in rows if row.measure == f"error.{name}.{mode}" and row.site == "layers"}
    return {branch: found[branch] for branch in _branches(rows, mode) if branch in found}


def _worst(rows: Measurements, mode: str) -> list[Measurement]:
    """Whole layers (the last branch, where layers were not measured whole), the largest error first."""
    branches = _branches(rows, mode)
    found = _layers(rows, f"error.total.{mode}", "layer" if "layer" in branches else branches[0])
    return sorted(found, key=lambda row: (-row.value if math.isfinite(row.value) else -math.inf, row.layer))


def _only(rows: Measurements, measure: str, branch: str = "") -> Measurement | None:
    return next((row for row in rows if row.measure == measure and row.branch == branch), None)


def _with_interval(row: Measurement, size: bool = False) -> str:
    value, low, high = row.value, row.low, row.high
    if size and value < 0:
        value, low, high = -value, None if high is None else -high, None if low is None else -low
    return (
        number(value, 3)
        if low is None or high is None
        else f"{number(value, 3)} ({number(low, 3)} to {number(high, 3)})"
    )


def _line(label: str, rows: Sequence[Measurement], look: int) -> Line:
    x = [float(row.layer or 0) for row in rows]
    return Line(label, x, [r.value for r in rows], look=look, low=[r.low for r in rows], high=[r.high for r in rows])


def _null(label: str, rows: Sequence[Measurement]) -> Line:
    chosen = [row for row in rows if row.null is not None]
    return Line(label, [float(r.layer or 0) for r in chosen], [r.null or 0.0 for r in chosen], kind="null")
