"""The report of a study of compressions: verdict first, cost second, then which number foretells it, and the errors layer by layer."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from thalweg.reports import page
from thalweg.reports.edits import (
    MOST,
    EditStudyRecords,
    interval,
    limit_lines,
    provenance_of,
    subject_table,
)
from thalweg.reports.figures import Figure, Line, lines
from thalweg.reports.study import planned, verdict_row
from thalweg.reports.symlog import Spread, between, spreads
from thalweg.reports.tables import Table
from thalweg.reports.text import NONE, counted, number, words
from thalweg.studies.compressed.observe import LEAST, fidelity, layerwise, ranks
from thalweg.studies.compressed.plan import (
    BRANCHES,
    FIDELITY,
    PREDICTORS,
    CompressionArm,
    CompressionPlan,
    alone,
)

UNITS = {
    "loss_change": "change of the loss [nats/token]",
    "kl": "KL [nats/token]",
    "accuracy_drop": "drop of cloze accuracy",
}
NAMES = {
    "total": "error, relative to the dense update",
    "perpendicular": "its part across that update",
    "parallel": "its part along it, without sign",
    "noise": "error over all tokens at once (SQNR)",
    "cosine": "1 − cosine of the updates",
    "kl": "KL at the logits, this layer alone compressed",
    "weights": "error of the weights (no data)",
    "chance": "a fixed random order",
}


def write_compression_report(records: EditStudyRecords, path: str | Path) -> Path:
    """Write the report of a study of compressions to ``path``. Raises: InputError (disk full, no permission)."""
    plan, verdict = records.plan, records.verdict
    return page.write(
        path,
        "compressions.html",
        **planned(records),
        verdicts=[_row(plan, v) for v in verdict.verdicts],
        subjects=subject_table(records),
        costs=[(subject, table) for subject in plan.subject if (table := cost_table(records, subject)).rows],
        predictors=[t for subject in plan.subject for t in rank_tables(records, subject)],
        figures=[f for subject in plan.subject for f in _figures(records, subject)],
        limits=limit_lines(records),
        provenance=provenance_of(records, records.found),
    )


def _row(plan: CompressionPlan, v) -> dict:
    row, h = verdict_row(v, plan), next(h for h in plan.hypotheses if h.id == v.hypothesis)
    over = {
        "rank": f"Spearman of {h.branch} errors with {words(h.fidelity)}, over compressions of {h.subject}",
        "layer_rank": f"Spearman of {h.branch} errors with {words(h.fidelity)}, over layers of {h.family}",
        "correlation": f"Spearman of the {h.branch} error with a part of it, over layers of {h.arm}",
        "error": f"{NAMES[h.part]}, {h.branch}, mean over layers",
    }
    return row | {"measure": over[h.measure]} if h.measure in over else row


def _arms(records: EditStudyRecords, subject: str) -> list[CompressionArm]:
    """Those of a subject that were run, no-op and single layers left out."""
    plan: CompressionPlan = records.plan
    return [
        arm
        for name, arm in plan.edits.items()
        if name in records.found and plan.subject_of(arm.family) == subject and arm.alone is None and not arm.noop
    ]


def cost_table(records: EditStudyRecords, subject: str) -> Table:
    """What each compression of a subject saves and costs."""
    rows = []
    for arm in _arms(records, subject):
        found = records.found[arm.name]
        cells = [arm.name.partition(".")[2]]
        layers = found.row.layers
        cells.append(_bits(layers.get("bits", [])))
        for name in ("loss_change", "kl", "accuracy_drop"):
            if name == "accuracy_drop" and "correct" not in found.row.columns:
                cells.append(NONE)
                continue
            mean, low, high = interval(fidelity(name, found))
            cells.append(f"{number(mean)} ({between(low, high)})" if math.isfinite(mean) else number(mean))
        cells += [number(_over_layers(found.row, "block", part)) for part in ("total", "perpendicular", "parallel")]
        cells.append(number(found.row.seconds, 3))
        rows.append(tuple(cells))
    heads = (
        "compression", "bits/weight", UNITS["loss_change"], UNITS["kl"], UNITS["accuracy_drop"],
        "block error", "across", "along", "seconds",
    )  # fmt: skip
    note = (
        "In brackets: 95 % t-intervals over documents. Bits a weight of the linear maps inside blocks, stored natively; protected layers count "
        "at the width of their dtype. Errors relative to the dense update, mean over layers and tokens, every layer on its dense input, "
        "on documents that the losses are not taken from."
    )
    return Table(heads, rows, note)


def rank_tables(records: EditStudyRecords, subject: str) -> Iterable[tuple[str, Table]]:
    """How well each number orders the compressions of a subject, and the single layers."""
    plan: CompressionPlan = records.plan
    groups = [
        (f"{subject}: over compressions", [a for a in plan.ranked(subject, records.scale) if a.name in records.found])
    ]
    for family, arms in plan.members.items():
        if plan.subject_of(family) == subject and (single := [a for a in alone(arms) if a.name in records.found]):
            groups.append((f"{family}: over single layers but the first and the last", single[1:-1]))
    for title, arms in groups:
        if len(arms) < LEAST:
            continue
        rows = []
        for name in PREDICTORS:
            for branch in BRANCHES if name not in ("kl", "weights", "chance") else ("block",):
                if name not in ("chance",) and not _has(records, arms, name, branch):
                    continue
                cells = [NAMES[name], branch if name not in ("kl", "weights", "chance") else NONE]
                for measure in FIDELITY:
                    if measure == "accuracy_drop" and "correct" not in records.found[arms[0].name].row.columns:
                        cells.append(NONE)
                        continue
                    mean, low, high = interval(ranks(name, branch, measure, arms, records.found))
                    cells.append(f"{number(mean, 3)} ({between(low, high)})" if math.isfinite(mean) else NONE)
                rows.append(tuple(cells))
        heads = ("number", "branch", *(UNITS[m].partition(" [")[0] for m in FIDELITY))
        note = (
            f"Spearman's correlation over {counted(len(arms), 'compression')}, one for each document, mean and 95 % t-interval over "
            "documents; the number itself comes from other documents."
        )
        yield title, Table(heads, rows, note)


def _has(records: EditStudyRecords, arms: Sequence[CompressionArm], name: str, branch: str) -> bool:
    rows = [records.found[arm.name].row for arm in arms]
    return all(f"{branch}.{name}" in row.columns or name in row.layers for row in rows)


def _figures(records: EditStudyRecords, subject: str) -> Iterable[Figure]:
    plan: CompressionPlan = records.plan
    arms = _arms(records, subject)
    for start in range(0, len(arms), MOST):
        for branch in BRANCHES:
            curves = []
            for look, arm in enumerate(arms[start : start + MOST]):
                row = records.found[arm.name].row
                if f"{branch}.perpendicular" in row.columns:
                    values = layerwise("perpendicular", branch, row)
                    curves.append(Line(arm.name.partition(".")[2], list(range(len(values))), values, look=look))
            if curves:
                part = f" ({start // MOST + 1})" if len(arms) > MOST else ""
                yield lines(
                    f"{subject}: error across the dense update, {branch}{part}",
                    curves,
                    x_label="layer",
                    y_label="|e across| / |dense update|",
                    caption="Every layer on its dense input; mean over tokens and documents.",
                    log_y=True,
                )
    curves = []
    for family, members in plan.members.items():
        single = [a for a in alone(members) if a.name in records.found]
        if plan.subject_of(family) == subject and single:
            ends = [interval(fidelity("loss_change", records.found[a.name])) for a in single]
            y, low, high = zip(*ends, strict=True)
            curves.append(
                Spread(family.partition(".")[2], [float(a.alone or 0) for a in single], y, low, high, len(curves))
            )
    if curves:
        yield spreads(
            f"{subject}: one layer compressed alone",
            curves,
            x_label="layer",
            y_label=UNITS["loss_change"],
            caption="Against the dense model; bands: 95 % t-interval over documents.",
            linear=0.1,
        )


def _over_layers(row, branch: str, part: str) -> float | None:
    column = row.columns.get(f"{branch}.{part}")
    return float(np.mean(column)) if column else None


def _bits(by_layer: Sequence[float | None]) -> str:
    known = [v for v in by_layer if v is not None]
    return number(sum(known) / len(known), 3) if known else NONE
