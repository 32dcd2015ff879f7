"""The report of a study: verdict first, cost second, geometry third, then all that a sceptic asks for."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from thalweg.reports import page, provenance
from thalweg.reports.contrasts import contrast_figures
from thalweg.reports.curves import Arms, dull, training_figures
from thalweg.reports.datasets import notes_of
from thalweg.reports.depth import INTRODUCTION, geometry
from thalweg.reports.figures import Effect, Figure, effects
from thalweg.reports.tables import (
    Table,
    arm_table,
    cost_table,
    loss_units,
    moved_table,
    record_table,
    scalar_table,
    scale_of,
    tuning_table,
    unlike,
)
from thalweg.reports.text import NONE, counted, listed, moment, number
from thalweg.studies.judging import StudyVerdict, Verdict
from thalweg.studies.plan import Plan
from thalweg.studies.store import RunRecord

if TYPE_CHECKING:
    from thalweg.studies.plan import AnyPlan

SEVERAL = {
    "supported": "every primary hypothesis lies beyond its margin.",
    "refuted": "at least one primary hypothesis is excluded by its interval.",
    "inconclusive": "the data cannot decide every primary hypothesis.",
}
DEMO = "demo: too small to judge"


@dataclass(frozen=True)
class StudyRecords:
    """Everything a study report is made from; no model and no data is opened.

    runs: arm -> seed -> record, of those that exist. tuning: arm -> learning rate -> final loss; rates: arm -> the one
    chosen. deviations: of the code from its sources, one line each. citations: BibTeX entries.
    """

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
    deviations: Sequence[str] = ()


def write_study_report(records: StudyRecords, path: str | Path) -> Path:
    """Write the report of a study to ``path``. Raises: InputError (disk full, no permission)."""
    arms: Arms = {arm: [found[seed] for seed in sorted(found)] for arm, found in records.runs.items() if found}
    plan, verdict = records.plan, records.verdict
    return page.write(
        path,
        "study.html",
        **planned(records, f" Has not learned: {listed(blank)}." if (blank := dull(arms)) else ""),
        verdicts=[verdict_row(v, plan) for v in verdict.verdicts],
        cost=cost_table(arms, {name: arm.role for name, arm in plan.arms.items()}),
        arms=arm_table(plan, records.scale),
        training=[*training_figures(arms), *contrast_figures(plan.hypotheses_at(records.scale), arms)],
        introduction=INTRODUCTION,
        geometry=geometry(arms, {h.measure for h in plan.hypotheses}),
        moved=moved_table(arms),
        scalars=scalar_table(arms),
        tuning=tuning_table(records.tuning, records.rates, loss_units(arms)),
        limits=_limits(records, arms),
        provenance=_provenance(records, arms),
        records=record_table(arms),
    )


class PlanRecords(Protocol):
    """What the page of a plan, of whatever kind, is made from beside its records."""

    @property
    def plan(self) -> Any: ...
    @property
    def scale(self) -> str: ...
    @property
    def verdict(self) -> StudyVerdict: ...
    @property
    def locked(self) -> str: ...
    @property
    def plan_text(self) -> str: ...
    @property
    def plan_path(self) -> str: ...
    @property
    def citations(self) -> Sequence[str]: ...


def planned(records: PlanRecords, more: str = "") -> dict[str, Any]:
    """The fields that the pages of all plans share: head, effects, notes, how to reproduce. more: after the headline."""
    plan, verdict = records.plan, records.verdict
    return {
        "title": plan.title,
        "plan": plan.name,
        "scale": records.scale,
        "kind": verdict.kind,
        "locked": moment(records.locked),
        "plan_hash": verdict.plan_hash,
        "status": verdict.status,
        "headline": headline(verdict) + more,
        "question": plan.question,
        "effects": effect_figure(verdict),
        "values": value_table(verdict),
        "notes": note_lines(verdict, plan),
        "reproduce": reproduce(records.plan_path, plan.name, records.scale),
        "plan_text": records.plan_text,
        "citations": "\n\n".join(records.citations),
        "source": plan.source,
    }


def headline(verdict: StudyVerdict) -> str:
    """The sentence beside the status."""
    primary = [v for v in verdict.verdicts if v.primary] or list(verdict.verdicts)
    if verdict.status == "void":
        reasons = sorted({v.reason for v in verdict.verdicts if v.status == "void"})
        why = listed(reasons, 3) or "no hypothesis can be judged at this scale"
        return f"no verdict, the protocol is not fulfilled: {why}."
    if verdict.kind == "demo":
        return f"{DEMO}."
    if len(primary) == 1 and (only := primary[0]).statistics is not None:
        return f"{only.statement} ({_found(only)})."
    if len(primary) == 1:
        return f"{primary[0].statement}: {primary[0].reason}."
    counts = [(s, sum(v.status == s for v in primary)) for s in SEVERAL]
    return f"{SEVERAL[verdict.status]} Of {len(primary)}: {', '.join(f'{n} {s}' for s, n in counts if n)}."


def _found(v: Verdict) -> str:
    s, unit = v.statistics, f" {v.unit}" if v.unit else ""
    if s is None or v.interval is None:
        return "no estimate"
    low, high = map(number, v.interval)
    noun = "pair" if v.sample == "seed" else v.sample
    return (
        f"{number(v.estimate)}{unit}, {s.level:.1%} interval {low} to {high}, margin {v.margin:g}, {counted(s.n, noun)}"
    )


def contrast_of(contrast: Mapping[str, float]) -> str:
    """``mgt − additive``: the arms with their factors."""
    terms = (f"{'−' if w < 0 else '+'} {'' if abs(w) == 1 else f'{abs(w):g} × '}{arm}" for arm, w in contrast.items())
    return " ".join(terms).removeprefix("+ ")


def bound(direction: str, margin: float) -> str:
    """What a contrast must be for the statement to hold."""
    return f"{'>' if direction == 'greater' else '<'} {margin:g}"


def correction_of(plan: "AnyPlan", primary: int) -> str:
    """How so many primary hypotheses share the error rate."""
    name = "none" if plan.multiplicity == "none" else plan.multiplicity.capitalize()
    over = counted(primary, "primary hypothesis")
    return f"Correction over {over}: {name}, alpha {plan.alpha:g}"


def verdict_row(v: Verdict, plan: "AnyPlan") -> dict:
    """One line of the table of verdicts."""
    contrast = next((h.contrast for h in plan.hypotheses if h.id == v.hypothesis), {})
    s = v.statistics
    return {
        "id": v.hypothesis,
        "primary": v.primary,
        "statement": v.statement,
        "measure": f"{v.measure}{f' [{v.unit}]' if v.unit else ''}",
        "contrast": contrast_of(contrast),
        "status": v.status,
        "reason": v.reason,
        "estimate": number(v.estimate),
        "interval": NONE if v.interval is None else f"{number(v.interval[0])} to {number(v.interval[1])}",
        "level": NONE if s is None else f"{s.level:.1%}",
        "margin": bound(v.direction, v.margin),
        "pairs": NONE if s is None else str(s.n),
        "sign_flip": NONE if s is None else number(s.sign_flip, 3),
        "least": "" if s is None else f"least {number(s.smallest_sign_flip, 3)}",
    }


def effect_figure(verdict: StudyVerdict) -> Figure | None:
    """Every contrast against its margin. Of a claim over layers only the estimate is drawn: its units are no contrasts."""
    rows = [
        Effect(v.hypothesis, v.estimate, *v.interval, v.margin, v.direction, _dots(v), _unit(v), v.status)
        for v in verdict.verdicts
        if v.statistics is not None and v.estimate is not None and v.interval is not None
    ]
    caption = (
        f"Diamond: mean contrast; bar: its interval; dots: one for each {verdict.sample}; dashed: the margin; solid: zero; shaded: where "
        "the statement holds. Green: supported, orange: refuted."
    )
    return effects("Effects against their margins", rows, caption) if rows else None


def _unit(v: Verdict) -> str:
    return "Spearman's correlation" if v.sample == "layer" else v.unit


def _dots(v: Verdict) -> list[float]:
    return [] if v.sample == "layer" else list(v.values.values())


def value_table(verdict: StudyVerdict) -> Table | None:
    """What the contrasts were made from: the value of every arm on every unit."""
    chosen = [v for v in verdict.verdicts if v.sample == verdict.sample]
    seeds = sorted({seed for v in chosen for found in v.arms.values() for seed in found})
    rows = [
        (v.hypothesis, arm, *(number(found.get(seed), 6) for seed in seeds))
        for v in chosen
        for arm, found in v.arms.items()
    ]
    return Table(("hypothesis", "arm", *(f"{verdict.sample} {seed}" for seed in seeds)), rows) if seeds else None


def note_lines(verdict: StudyVerdict, plan: "AnyPlan") -> list[str]:
    """What holds for all verdicts of the page."""
    correction = correction_of(plan, sum(v.primary for v in verdict.verdicts))
    return [*(f"{note[:1].upper()}{note[1:]}." for note in verdict.notes), f"{correction}."]


def _limits(records: StudyRecords, arms: Arms) -> list[str]:
    plan, every = records.plan, [(arm, r) for arm, found in arms.items() for r in found]
    found = [f"{arm} has not learned: {listed(why, 3)}." for arm, why in dull(arms).items()]
    found += unlike(plan, records.scale, arms)
    found += [f"Deviation: {text}" for text in plan.deviations] + [f"Our choice: {text}" for text in plan.choices]
    found += [f"{name}: {arm.note}" for name, arm in plan.arms.items() if arm.note]
    found += records.deviations
    found += [f"Rule for divergence applied: {text}" for v in records.verdict.verdicts for text in v.substituted]
    found += [
        f"{arm} seed {r.seed} diverged at step {number(r.result.get('step'))}: {r.result.get('reason') or 'no reason recorded'}"
        for arm, r in every
        if r.status == "diverged"
    ]
    found += notes_of(every)
    expected = {(arm, seed) for arm in plan.arms_at(records.scale) for seed in plan.at(records.scale).seeds}
    if missing := sorted(expected - {(arm, r.seed) for arm, r in every}):
        found.append(
            f"{len(missing)} of {len(expected)} runs are missing: {listed(f'{a} seed {s}' for a, s in missing)}."
        )
    return [*dict.fromkeys(found), f"Everything here holds at this scale only: {scale_of(arms)}."]


def reproduce(plan_path: str, name: str, scale: str) -> str:
    """The commands that make a study anew."""
    # The name of the file alone: where it lies on one machine helps no other.
    plan = shlex.quote(Path(plan_path).name or f"{name}.toml")
    verbs = [f"thalweg study {verb} {plan} --scale {scale}" for verb in ("check", "lock", "run", "verdict")]
    return "\n".join([*verbs, f"thalweg report {plan} --scale {scale} -o report.html"])


def _provenance(records: StudyRecords, arms: Arms) -> dict[str, str]:
    runs = [r for found in arms.values() for r in found]
    return {
        "plan hash": records.verdict.plan_hash,
        "locked": f"{moment(records.locked)} by thalweg {records.version}" if records.locked else "not locked",
        "records": counted(len(runs), "run"),
        **provenance.machine(runs),
    }
