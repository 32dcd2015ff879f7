"""The report of a study: verdict first, cost second, geometry third, then all that a sceptic asks for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thalweg.reports import page
from thalweg.reports.figures import Effect, Figure, effects
from thalweg.reports.sections import Arms, depth_figures, loss_figures, moved_table
from thalweg.reports.text import big, mean_sd, number
from thalweg.studies.judging import StudyVerdict, Verdict
from thalweg.studies.plan import Plan
from thalweg.studies.store import RunRecord

HEADLINES = {
    "supported": "every primary hypothesis lies beyond its margin.",
    "refuted": "at least one primary hypothesis is excluded by its interval.",
    "inconclusive": "the data cannot decide at least one primary hypothesis.",
    "void": "no verdict: the protocol is not fulfilled.",
}


@dataclass(frozen=True)
class StudyRecords:
    """Everything a study report is made from; no model and no data is opened."""

    plan: Plan
    scale: str
    verdict: StudyVerdict
    runs: Mapping[str, Mapping[int, RunRecord]]
    tuning: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    rates: Mapping[str, float | None] = field(default_factory=dict)
    locked: str = ""
    version: str = ""
    plan_text: str = ""
    plan_path: str = ""
    citations: Sequence[str] = ()


def write_study_report(records: StudyRecords, path: str | Path) -> Path:
    """Write the report of a study to ``path``. Raises: InputError (disk full, no permission)."""
    arms: Arms = {arm: [by_seed[s] for s in sorted(by_seed)] for arm, by_seed in records.runs.items() if by_seed}
    moved_columns, moved_rows = moved_table(arms)
    depth = depth_figures(arms)
    diagnostics = [f for f in depth if f.title.startswith(("Gradient", "Distance"))]
    plan, verdict = records.plan, records.verdict
    return page.write(
        path,
        "study.html",
        title=plan.title,
        plan=plan.name,
        scale=records.scale,
        kind=verdict.kind,
        locked=records.locked,
        plan_hash=verdict.plan_hash,
        status=verdict.status,
        headline=_headline(verdict),
        question=plan.question,
        verdicts=[_row(v, plan) for v in verdict.verdicts],
        effects=_effects(verdict),
        notes=[*verdict.notes, f"Correction over the primary hypotheses: {plan.multiplicity}, alpha {plan.alpha:g}."],
        cost_columns=COST_COLUMNS,
        cost_rows=_cost_rows(arms, plan),
        cost_note=COST_NOTE,
        loss_figures=loss_figures(arms),
        geometry=[f for f in depth if f not in diagnostics],
        moved_columns=moved_columns,
        moved_rows=moved_rows,
        diagnostics=diagnostics,
        tuning_columns=("arm", "chosen", "final loss by rate"),
        tuning_rows=_tuning_rows(records),
        limits=_limits(records, arms),
        reproduce=_reproduce(records),
        plan_text=records.plan_text,
        provenance=_provenance(records, arms),
        record_columns=("arm", "seed", "status", "final loss", "fingerprint"),
        record_rows=[
            (arm, str(r.seed), r.status, number(r.last("val/loss")), r.fingerprint[:16]) for arm, found in arms.items() for r in found
        ],
        citations="\n\n".join(records.citations) or "none",
    )


def _headline(verdict: StudyVerdict) -> str:
    if verdict.kind == "demo":
        return "demo: too small to judge."
    reasons = {v.reason for v in verdict.verdicts if v.status == "void"}
    return HEADLINES[verdict.status] + (f" {'; '.join(sorted(reasons))}." if reasons else "")


def _row(v: Verdict, plan: Plan) -> dict:
    hypothesis = next(h for h in plan.hypotheses if h.id == v.hypothesis)
    terms = " ".join(f"{'+' if w > 0 else '−'} {'' if abs(w) == 1 else format(abs(w), 'g') + ' '}{arm}" for arm, w in hypothesis.contrast.items())
    s = v.statistics
    return {
        "id": v.hypothesis,
        "primary": v.primary,
        "statement": v.statement,
        "measure": f"{v.measure}{', ' + v.unit if v.unit else ''}",
        "contrast": terms.removeprefix("+ "),
        "status": v.status,
        "reason": v.reason,
        "estimate": number(v.estimate),
        "interval": "–" if v.interval is None or s is None else f"{number(v.interval[0])} to {number(v.interval[1])} ({s.level:.1%})",
        "margin": f"{'>' if v.direction == 'greater' else '<'} {v.margin:g}",
        "pairs": "–" if s is None else str(s.n),
        "sign_flip": "–" if s is None else f"{number(s.sign_flip, 3)} (least {number(s.smallest_sign_flip, 3)})",
    }


def _effects(verdict: StudyVerdict) -> Figure | None:
    rows = [
        Effect(f"{v.hypothesis} ({v.direction} than the margin)", v.estimate, *v.interval, v.margin, list(v.values.values()), v.unit, v.status)
        for v in verdict.verdicts
        if v.statistics is not None and v.estimate is not None and v.interval is not None
    ]
    caption = "Diamond: mean contrast; bar: interval; dots: one per seed; dashed: the margin; thin line: zero."
    return effects("Effects against their margins", rows, caption) if rows else None


COST_COLUMNS = (
    "arm",
    "final loss [nats/token]",
    "bits/byte",
    "parameters",
    "of the connection",
    "FLOPs/token (training)",
    "tokens/s",
    "peak memory",
    "tokens",
    "diverged",
)
COST_NOTE = (
    "Loss: mean ± standard deviation over seeds that did not diverge. Tokens per second and peak memory are those of this machine, with whatever ran "
    "beside; compare them within this table only. The last rows are nulls: a model below them has learned something."
)


def _cost_rows(arms: Arms, plan: Plan) -> list[tuple[str, ...]]:
    rows = []
    for arm, records in arms.items():
        done = [r for r in records if r.status == "done"]

        def every(name: str, found: Sequence[RunRecord] = records) -> list[float]:
            return [r.cost[name] for r in found if r.cost.get(name) is not None]

        def middle(values: list[float]) -> float | None:
            return sorted(values)[len(values) // 2] if values else None

        role = plan.arms[arm].role if arm in plan.arms else ""
        rows.append(
            (
                f"{arm}{f' ({role})' if role and role != 'treatment' else ''}",
                mean_sd([v for r in done if (v := r.last("val/loss")) is not None]),
                mean_sd([v for r in done if (v := r.last("val/bits_per_byte")) is not None]),
                big(middle(every("parameters"))),
                big(middle(every("connection_parameters"))),
                big(middle(every("flops_per_token"))),
                number(middle(every("tokens_per_second")), 3),
                big(middle(every("peak_memory")), "B"),
                big(middle(every("tokens"))),
                f"{len(records) - len(done)} of {len(records)}",
            )
        )
    nulls = next((r.nulls for records in arms.values() for r in records if r.nulls), {})
    names = {"unigram_entropy": "null: unigram entropy", "xz_bits_per_byte": "null: xz", "uniform": "null: uniform", "chance": "null: chance"}
    for key, label in names.items():
        if key in nulls:
            loss, bits = ("–", number(nulls[key])) if key.endswith("byte") else (number(nulls[key]), "–")
            rows.append((label, loss, bits, *("–" for _ in COST_COLUMNS[3:])))
    return rows


def _tuning_rows(records: StudyRecords) -> list[tuple[str, str, str]]:
    return [
        (arm, number(records.rates.get(arm)), "; ".join(f"{rate:g}: {number(loss)}" for rate, loss in sorted(losses.items())))
        for arm, losses in records.tuning.items()
        if losses
    ]


def _limits(records: StudyRecords, arms: Arms) -> list[str]:
    plan = records.plan
    found = [f"Deviation: {text}" for text in plan.deviations] + [f"Our choice: {text}" for text in plan.choices]
    found += [f"{name}: {arm.note}" for name, arm in plan.arms.items() if arm.note]
    found += [f"Rule for divergence applied: {text}" for v in records.verdict.verdicts for text in v.substituted]
    found += [f"{arm} seed {r.seed}: diverged at step {r.result.get('step')}: {r.result.get('reason')}" for arm, found_ in arms.items() for r in found_ if r.status == "diverged"]
    found += sorted({f"{arm}: {note}" for arm, found_ in arms.items() for r in found_ for note in r.notes})
    found.append(f"Everything here holds at this scale only: {describe_scale(arms)}.")
    return found


def describe_scale(arms: Arms) -> str:
    """Depth, width, length and tokens of the runs, in words."""
    configs = [r.config for records in arms.values() for r in records]
    if not configs:
        return "no run yet"
    first = configs[0]
    tokens = [r.cost.get("tokens", 0) for records in arms.values() for r in records]
    return (
        f"{first.get('depth')} layers, width {first.get('width', 'by depth')}, sequences of {first.get('sequence_length')} tokens, "
        f"{big(max(tokens))} training tokens on {first.get('data')}"
    )


def _reproduce(records: StudyRecords) -> str:
    plan, scale = records.plan_path or f"{records.plan.name}.toml", records.scale
    return "\n".join(
        f"thalweg study {verb} {plan} --scale {scale}" for verb in ("check", "lock", "run", "verdict")
    ) + f"\nthalweg report {plan} --scale {scale} -o report.html"


def _provenance(records: StudyRecords, arms: Arms) -> dict[str, str]:
    runs = [r for found in arms.values() for r in found]
    machines = sorted({", ".join(f"{k} {v}" for k, v in r.provenance.items() if isinstance(v, str | int | float)) for r in runs})
    versions = sorted({", ".join(f"{k} {v}" for k, v in r.versions.items()) for r in runs})
    data = sorted({f"{r.result.get('data', {}).get('name', '?')} {str(r.result.get('data', {}).get('fingerprint', ''))[:16]}" for r in runs})
    return {
        "plan hash": records.verdict.plan_hash,
        "locked": f"{records.locked} by thalweg {records.version}" if records.locked else "not locked",
        "records": f"{len(runs)} runs",
        "data": "; ".join(data) or "–",
        "machine": " | ".join(machines) or "–",
        "versions": " | ".join(versions) or "–",
    }
