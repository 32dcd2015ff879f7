"""The report of a study of edits: verdict first, cost second, then every scale, position and layer."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.reports import page
from thalweg.reports.figures import Figure, Line, lines
from thalweg.reports.study import planned, verdict_row
from thalweg.reports.symlog import Spread, between, spreads
from thalweg.reports.tables import Table
from thalweg.reports.text import NONE, big, counted, listed, moment, number, words
from thalweg.studies.edits.observe import Found, Records, measured
from thalweg.studies.edits.plan import EditArm, EditPlan
from thalweg.studies.judging import StudyVerdict
from thalweg.studies.statistics import paired

LINEAR = {"loss_change": 0.1, "embedding_change": 0.01}  # up to where the axis of a sweep is linear
NAMES = {
    "loss_change": "change of the loss [nats/token]",
    "embedding_change": "1 − cosine to the no-op's embedding",
    "order_change": "1 − Spearman of a text's similarities",
}
LAYERS = {
    "applied": (
        "Strength of the edit where it acts",
        "|change| / |output|",
        "Mean over tokens of the audited documents, at one and the same input.",
    ),
    "drift": (
        "Drift of the states",
        "|edited − unedited| / |unedited|",
        "State after each layer against the unedited model, mean over tokens of the audited documents.",
    ),
}
MOST = 7  # curves that one figure holds


@dataclass(frozen=True)
class EditStudyRecords:
    """Everything a report on edits is made from; no model is opened. found: arm -> its record, of those that are complete; done: what was done
    to the subject.
    """

    plan: Any  # of edits, or of compressions, which has the same shape
    scale: str
    verdict: StudyVerdict
    found: Records
    locked: str = ""
    version: str = ""
    plan_text: str = ""
    plan_path: str = ""
    citations: Sequence[str] = field(default_factory=tuple)
    done: str = "edit"


def write_edit_report(records: EditStudyRecords, path: str | Path) -> Path:
    """Write the report of a study of edits to ``path``. Raises: InputError (disk full, no permission)."""
    plan, verdict, found = records.plan, records.verdict, records.found
    return page.write(
        path,
        "edits.html",
        **planned(records),
        verdicts=[_row(records, v) for v in verdict.verdicts],
        cost=cost_table(
            records, [n for n, f in records.found.items() if f.row.role == "no-op" or n in _chosen(records)]
        ),
        every=cost_table(records, list(records.found)),
        families=_families(records),
        subjects=subject_table(records),
        sweeps=[f for name in plan.arms if (f := sweep_figure(records, name)) is not None],
        positions=_positions(records),
        layers=[*_by_layer(records), *_single_layers(records)],
        limits=limit_lines(records),
        provenance=provenance_of(records, found),
    )


def _row(records: EditStudyRecords, v) -> dict:
    row, h = verdict_row(v, records.plan), next(h for h in records.plan.hypotheses if h.id == v.hypothesis)
    return row | {"measure": f"Spearman over layers of {h.measure} with {h.against}"} if h.against else row


def main_measure(plan: EditPlan) -> str:
    """What figures and costs show."""
    return "loss_change" if plan.text.evaluation == "likelihood" else "embedding_change"


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % t-interval over documents; NaN bounds for a single one."""
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan, math.nan
    if len(values) < 2:
        return values[0], math.nan, math.nan
    found = paired(values)
    return found.estimate, found.low, found.high


def scales_of(arm: EditArm) -> tuple[str, float]:
    """Which part of an update an arm scales, and by how much."""
    part = "perpendicular" if arm.options.parallel == 1 else "parallel"
    scale = getattr(arm.options, part)
    return part, float(scale) if isinstance(scale, int | float) else math.nan


def sweep_figure(records: EditStudyRecords, family: str) -> Figure | None:
    """The cost of every scale of a family; None where it has no grid."""
    plan, measure = records.plan, main_measure(records.plan)
    own, arms = plan.arms[family], [arm for arm in plan.members[family] if arm.alone is None and not arm.noop]
    if len(arms) < 3:
        return None
    curves = []
    for look, part in enumerate(("parallel", "perpendicular")):
        points = sorted((scales_of(a)[1], a.name) for a in arms if scales_of(a)[0] == part and a.name in records.found)
        if not points:
            continue
        spread = [interval(measured(measure, "all", records.found[name])) for _, name in points]
        x, columns = [s for s, _ in points], list(zip(*spread, strict=True))
        at = next((i for i, s in enumerate(x) if s > 1), len(x))
        x.insert(at, 1.0)  # the no-op, zero by definition
        y, low, high = ([*column[:at], 0.0, *column[at:]] for column in columns)
        curves.append(Spread(f"{part} part scaled", x, y, low, high, look))
    if not curves:
        return None
    documents = len(next(iter(records.found.values())).record.tokens)
    return spreads(
        f"{family}: {own.edit.get('site', '')}, {plan.subject_of(family)}",
        curves,
        x_label="retained scale (1: the matched no-op)",
        y_label=NAMES[measure],
        caption=f"Edited minus matched no-op, mean over {counted(documents, 'document')}; bands: 95 % t-interval over documents.",
        linear=LINEAR[measure],
    )


def _chosen(records: EditStudyRecords) -> list[str]:
    """Arms that hypotheses over documents rest on, as many as one figure holds."""
    names = [n for h in records.plan.hypotheses_at(records.scale) if not h.against for n in h.contrast]
    return [n for n in dict.fromkeys(names) if n in records.found and not records.plan.edits[n].noop]


def _positions(records: EditStudyRecords) -> list[Figure]:
    """Change of the loss by position, in the buckets of the plan."""
    if records.plan.text.evaluation != "likelihood" or records.plan.text.buckets < 2:
        return []
    names = _chosen(records)
    figures = []
    for start in range(0, len(names), MOST):
        curves = []
        for look, name in enumerate(names[start : start + MOST]):
            found = records.found[name]
            columns = _buckets(found)
            ends = [interval(column) for column in columns]
            size = found.record.tokens[0][0]
            x = [size * (i + 0.5) for i in range(len(columns))]
            y, low, high = zip(*ends, strict=True)
            curves.append(Spread(name, x, y, low, high, look))
        figures.append(
            spreads(
                "Change of the loss by position" + (f" ({start // MOST + 1})" if len(names) > MOST else ""),
                curves,
                x_label="position in the document, middle of each part",
                y_label=NAMES["loss_change"],
                caption="Edited minus matched no-op in parts of equal length; bands: 95 % t-interval over documents.",
                linear=LINEAR["loss_change"],
            )
        )
    return figures


def _buckets(found: Found) -> list[list[float]]:
    """[buckets][documents] change of the loss."""
    count = len(found.record.tokens[0])

    def one(row, document: int, bucket: int) -> float:
        return row.columns["nats"][document][bucket] / found.record.tokens[document][bucket]

    documents = range(len(found.record.tokens))
    return [[one(found.row, d, b) - one(found.noop, d, b) for d in documents] for b in range(count)]


def _by_layer(records: EditStudyRecords) -> Iterable[Figure]:
    """Strength and drift by layer, of the arms that hypotheses rest on."""
    names = _chosen(records)
    for measure, (title, label, caption) in LAYERS.items():
        having = [n for n in names if any(v is not None for v in records.found[n].row.layers.get(measure, []))]
        for start in range(0, len(having), MOST):
            curves = []
            for look, name in enumerate(having[start : start + MOST]):
                column = records.found[name].row.layers[measure]
                points = [(i, v) for i, v in enumerate(column) if v is not None]
                curves.append(Line(name, [i for i, _ in points], [v for _, v in points], look=look))
            tail = f" ({start // MOST + 1})" if len(having) > MOST else ""
            yield lines(title + tail, curves, x_label="layer", y_label=label, caption=caption, log_y=True)


def _single_layers(records: EditStudyRecords) -> Iterable[Figure]:
    """What the edit of each layer alone costs."""
    plan, measure = records.plan, main_measure(records.plan)
    curves = []
    for family, arms in plan.members.items():
        alone = [a for a in arms if a.alone is not None and a.name in records.found]
        if not alone:
            continue
        ends = [interval(measured(measure, "all", records.found[a.name])) for a in alone]
        y, low, high = zip(*ends, strict=True)
        curves.append(Spread(family, [float(a.alone or 0) for a in alone], y, low, high, len(curves)))
    if curves:
        yield spreads(
            "One layer edited alone",
            curves,
            x_label="layer",
            y_label=NAMES[measure],
            caption="Edited minus matched no-op; bands: 95 % t-interval over documents.",
            linear=LINEAR[measure],
        )


def cost_table(records: EditStudyRecords, names: Sequence[str]) -> Table:
    """Arms, but not of single layers: what each costs, how strong it is, and the time that it took."""
    plan, measure = records.plan, main_measure(records.plan)
    rows = []
    for name in names:
        arm, found = plan.edits[name], records.found[name]
        if arm.alone is not None:
            continue
        mean, low, high = interval(measured(measure, "all", found))
        tokens = sum(map(sum, found.record.tokens))
        seconds = found.row.seconds
        rows.append(
            (
                name,
                NONE if arm.noop else number(mean),
                NONE if arm.noop else between(low, high),
                number(_mean(found.row.layers.get("applied", []))),
                number(next(reversed(found.row.layers.get("drift", [None])), None)),
                NONE if found.row.drift is None else number(found.row.drift, 2),
                f"{tokens:,}",
                number(seconds, 3),
                number(tokens / seconds, 3) if seconds else NONE,
            )
        )
    columns = (
        "arm", NAMES[measure], "interval", "applied", "drift at the end", "no-op's drift", "tokens", "seconds", "tokens/s",
    )  # fmt: skip
    total = sum(f.row.seconds for f in {id(f.row): f for f in records.found.values()}.values())
    note = (
        "Interval: 95 % t over documents, against the matched no-op (same site, hooks and backend at scales 1). Applied: relative change of "
        "the edited output, mean over layers; drift at the end: of the last state. Seconds include the audit, on a machine with whatever ran "
        f"beside. All edits together: {number(total / 60, 3)} minutes."
    )
    return Table(columns, rows, note if rows else "No edit has left a record yet.")


def _families(records: EditStudyRecords) -> Table:
    """What the families of edits are."""
    plan = records.plan
    rows = []
    for name, family in plan.arms.items():
        if any(arm.name in plan.arms_at(records.scale) for arm in plan.members[name]):
            alone = f", each of {family.each_layer} layers alone" if family.each_layer else ""
            rows.append((name, plan.subject_of(name), words(family.edit) + alone, family.role))
    note = "The arms below are those that hypotheses rest on, and the no-ops; the others are folded under them."
    return Table(("family", "subject", "edit", "role"), rows, note)


def _mean(values: Sequence[float | None]) -> float | None:
    found = [v for v in values if v is not None]
    return sum(found) / len(found) if found else None


def records_of(records: EditStudyRecords) -> list:
    """The records behind a page, each once."""
    return list({id(f.record): f.record for f in records.found.values()}.values())


def subject_table(records: EditStudyRecords) -> Table:
    """The models that were edited and the loss that they have unedited, with the text."""
    rows = []
    for record in records_of(records):
        unedited = record.rows["unedited"]
        where = record.subject.get("model") or f"trained here: {record.subject['train']['connection']}"
        loss = NONE
        if "nats" in unedited.columns:
            tokens = [sum(t) for t in record.tokens]
            mean, low, high = interval([sum(n) / t for n, t in zip(unedited.columns["nats"], tokens, strict=True)])
            loss = f"{number(mean)} ({between(low, high)})"
        facts = record.facts
        rows.append(
            (
                Path(where).name if "/" in where else where,
                big(facts.get("parameters")),
                f"{record.subject['dtype']}, {facts.get('backend')}",
                loss,
                f"{record.text['documents']} × {record.text['tokens']}",
                record.text["source"],
                str(facts.get("weights", ""))[:12],
            )
        )
    heads = (
        "subject",
        "parameters",
        "dtype, attention",
        "unedited loss [nats/token]",
        "documents × " + ("tokens" if records.plan.text.evaluation == "likelihood" else "words"),
        "text",
        "weights (SHA-256)",
    )
    return Table(heads, rows)


def limit_lines(records: EditStudyRecords) -> list[str]:
    """What a reader must know: deviations, choices, what is missing."""
    plan = records.plan
    found = [f"Deviation: {text}" for text in plan.deviations] + [f"Our choice: {text}" for text in plan.choices]
    found += [f"{name}: {family.note}" for name, family in plan.arms.items() if family.note]
    found += [
        f"Rule for values that are not finite applied: {text}"
        for v in records.verdict.verdicts
        for text in v.substituted
    ]
    for record in records_of(records):
        found.append(f"Text: {record.text['source']}; {record.text['rule']}.")
        found += [f"Subject: {note}" for note in record.facts.get("notes", [])]
    found += sorted(
        {
            f"{name}: {note}"
            for name, f in records.found.items()
            if records.plan.edits[name].alone is None
            for note in f.row.notes
        }
    )
    if missing := [a for a in plan.arms_at(records.scale) if a not in records.found]:
        found.append(
            f"{len(missing)} of {len(plan.arms_at(records.scale))} {records.done}s are missing: {listed(missing)}."
        )
    found.append("Documents of one text resemble each other: the intervals say nothing about other texts.")
    return list(dict.fromkeys(found))


def provenance_of(records: EditStudyRecords, found: Mapping[str, Found]) -> dict[str, str]:
    """Plan, lock, machines and versions."""
    shown = {
        "plan hash": records.verdict.plan_hash,
        "locked": f"{moment(records.locked)} by thalweg {records.version}" if records.locked else "not locked",
        "records": counted(len(found), records.done),
    }
    for record in records_of(records):
        for name, value in {
            **record.provenance,
            "versions": record.versions,
            "text sha256": record.text["sha256"],
        }.items():
            text = words(value) if value is not None else ""
            key = name.replace("_", " ")
            if text and text not in shown.get(key, "").split(" | "):
                shown[key] = f"{shown[key]} | {text}" if key in shown else text
    return shown
