"""The report of a study of experiments: verdict first, cost second, then every measure of every experiment beside its null."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thalweg.records import Measurement
from thalweg.reports import page, provenance
from thalweg.reports.study import planned, verdict_row
from thalweg.reports.tables import Table
from thalweg.reports.text import NONE, counted, listed, mean_sd, moment, number, words
from thalweg.studies.experiments.plan import ExperimentPlan
from thalweg.studies.judging import StudyVerdict, Verdict
from thalweg.studies.store import RunRecord

JUDGED = "judged by a hypothesis"


@dataclass(frozen=True)
class ExperimentStudyRecords:
    """Everything the report is made from; nothing is run. runs: name in the plan -> seed -> record. summaries: name in the plan -> what its
    experiment says of itself."""

    plan: ExperimentPlan
    scale: str
    verdict: StudyVerdict
    runs: Mapping[str, Mapping[int, RunRecord]]
    summaries: Mapping[str, str] = field(default_factory=dict)
    locked: str = ""
    version: str = ""
    plan_text: str = ""
    plan_path: str = ""
    citations: Sequence[str] = field(default_factory=tuple)


def write_experiment_report(records: ExperimentStudyRecords, path: str | Path) -> Path:
    """Write the report of a study of experiments to ``path``. Raises: InputError (disk full, no permission)."""
    plan, verdict = records.plan, records.verdict
    return page.write(
        path,
        "experiments.html",
        **planned(records),
        verdicts=[_row(plan, v) for v in verdict.verdicts],
        cost=cost_table(records),
        measured=[(name, summary, measure_table(records, name)) for name, summary in _summaries(records).items()],
        limits=_limits(records),
        provenance=_provenance(records),
    )


def _row(plan: ExperimentPlan, v: Verdict) -> dict:
    row, h = verdict_row(v, plan), next(h for h in plan.hypotheses if h.id == v.hypothesis)
    statement = (
        f"{row['statement']} (an identity: it checks the code and is no finding)" if h.identity else row["statement"]
    )
    return row | {"statement": statement}


def _summaries(records: ExperimentStudyRecords) -> dict[str, str]:
    return {name: records.summaries.get(name, "") for name in records.plan.experiments_at(records.scale)}


def cost_table(records: ExperimentStudyRecords) -> Table:
    """What every experiment is and costs."""
    rows = []
    for name in records.plan.experiments_at(records.scale):
        use, runs = records.plan.experiments[name], records.runs.get(name, {})
        seconds = [run.result["seconds"] for run in runs.values() if "seconds" in run.result]
        options = next((words(run.config.get("options", {})) for run in runs.values()), NONE)
        rows.append((name, use.experiment, str(len(runs)), mean_sd(seconds), options))
    return Table(
        ("name", "experiment", "seeds", "seconds of a seed", "options"),
        rows,
        "Seconds on one machine with whatever ran beside: no more than an order of magnitude.",
    )


def measure_table(records: ExperimentStudyRecords, name: str) -> Table:
    """Measure by arm, mean and standard deviation over seeds, with its null; what a hypothesis reads comes first."""
    judged = {
        (h.measure, c.partition(".")[2])
        for h in records.plan.hypotheses
        for c in h.contrast
        if c.partition(".")[0] == name
    }
    groups: dict[tuple[str, str, int | None], list[Measurement]] = {}
    for run in records.runs.get(name, {}).values():
        for row in run.measures:
            if not row.split.startswith("variance"):
                groups.setdefault((row.measure, row.arm, row.step), []).append(row)
    keys = sorted(groups, key=lambda key: key[:2] not in judged)
    rows = [_measured(key, groups[key], key[:2] in judged) for key in keys]
    return Table(("measure", "arm", "mean ± sd over seeds", "null", "", "rows"), rows)


def _measured(key: tuple[str, str, int | None], found: list[Measurement], judged: bool) -> tuple[str, ...]:
    measure, arm, step = key
    unit = f" [{found[0].unit}]" if found[0].unit else ""
    at = f" at {step}" if step is not None else ""
    nulls = sorted({row.null for row in found if row.null is not None})
    ends = NONE if not nulls else number(nulls[0]) if len(nulls) == 1 else f"{number(nulls[0])} to {number(nulls[-1])}"
    kinds = sorted({row.null_kind for row in found if row.null_kind})
    null = f"{ends} ({listed(kinds, 2)})" if kinds else ends
    values = mean_sd([row.value for row in found])
    return (f"{measure}{unit}{at}", arm or NONE, values, null, JUDGED if judged else "", str(len(found)))


def _limits(records: ExperimentStudyRecords) -> list[str]:
    plan = records.plan
    found = [f"Deviation: {text}" for text in plan.deviations] + [f"Our choice: {text}" for text in plan.choices]
    found += [f"{name}: {use.note}" for name, use in plan.experiments.items() if use.note]
    found += [
        f"Rule for values that are not finite applied: {text}"
        for v in records.verdict.verdicts
        for text in v.substituted
    ]
    wanted = [(n, s) for n in plan.experiments_at(records.scale) for s in plan.at(records.scale).seeds]
    if missing := [f"{n} seed {s}" for n, s in wanted if s not in records.runs.get(n, {})]:
        found.append(f"{len(missing)} of {len(wanted)} runs are missing: {listed(missing)}.")
    return list(dict.fromkeys(found))


def _provenance(records: ExperimentStudyRecords) -> dict[str, str]:
    runs = [run for found in records.runs.values() for run in found.values()]
    return {
        "plan hash": records.verdict.plan_hash,
        "locked": f"{moment(records.locked)} by thalweg {records.version}" if records.locked else "not locked",
        "records": counted(len(runs), "run"),
        **provenance.machine(runs),
    }
