"""The report of a run that grew: how growth ended first, what it cost second, then the growth record and who decided what."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thalweg.config import to_toml
from thalweg.records.run import RunFolder
from thalweg.reports import page, provenance
from thalweg.reports.curves import training_figures
from thalweg.reports.datasets import notes_of
from thalweg.reports.depth import INTRODUCTION, geometry
from thalweg.reports.growth import (
    RECORD,
    Grown,
    collapse_table,
    decision_table,
    event_table,
    growth_figures,
    read,
    without_growth,
)
from thalweg.reports.run import COST_NAMES, UNITS, headline_of, name_of, quality_of_run, record_of, title_of
from thalweg.reports.tables import Table
from thalweg.reports.text import NONE, big, counted, listed, moment, number
from thalweg.studies.observe import unlearned

# How growth ended -> the look of its badge. A cap is no convergence and does not look like one.
LOOKS = {
    "converged": "done",
    "capped": "inconclusive",
    "isotropic": "inconclusive",
    "unstable": "failed",
    "growing": "running",
}
STOPPED = ("failed", "interrupted", "diverged")  # a run that ended so has not grown as far as it was to
DICTIONARY = "dictionary size"  # the decision that a model without dictionaries does not have


def write_grown_report(
    run: RunFolder,
    path: str | Path,
    citations: Sequence[str] = (),
    deviations: Sequence[str] = (),
    nulls: Mapping[str, float] | None = None,
) -> Path:
    """Write the report of a run that has a growth record to ``path``. nulls: of its data, for a record that holds none.

    Raises: InputError (disk full, no permission; a foreign growth record); CheckpointError for a broken one.
    """
    grown = read(run)
    record = record_of(run, "shown", nulls or {})
    arms = {name_of(run): [without_growth(record)]}
    collapse = collapse_table(grown)
    dull = f"Has not learned: {why}." if run.status != "diverged" and (why := unlearned(record)) else ""
    limits = [*filter(None, [dull]), *notes_of([("", record)]), *deviations]
    stopped = run.status in STOPPED and grown.status != "unstable"
    trained = f"{headline_of(run)} {dull}".strip()
    until = "not ended" if grown.status == "growing" else grown.ending
    return page.write(
        path,
        "grown.html",
        title=f"{title_of(run)}: grown",
        look=run.status if stopped else LOOKS.get(grown.status, "open"),
        ended=run.status if stopped else grown.ending,
        reason=trained if stopped else grown.reason,
        beside=f"Growth until then: {until}: {grown.reason}" if stopped else f"Training: {run.status}: {trained}",
        count=_count(grown),
        later=_later(grown),
        cost=_cost(grown, record.cost),
        quality=quality_of_run(record),
        events=event_table(grown),
        record=RECORD,
        figures=growth_figures(grown),
        collapse=collapse,
        decisions=_decisions(grown, collapse is not None or _has_dictionaries(run.config)),
        training=training_figures(arms),
        introduction=INTRODUCTION,
        geometry=geometry(arms),
        limits=[*LIMITS, *([LAST] if (run.path / "model").is_dir() else []), *limits],
        config=to_toml(run.config),
        provenance={
            "started": moment(run.record.get("started")) or NONE,
            "ended": moment(run.record.get("ended")) or NONE,
            **provenance.machine([record]),
        },
        citations="\n\n".join([SOURCE, *citations]),
    )


LIMITS = (
    "The texts of the papers on growth were not available: what is done here is reconstructed from abstracts, reviews and public code.",
    "A residual that is small says that no direction of the antisymmetric part is left over; it does not say that the task is solved.",
)
LAST = (
    "The folder model of the run holds the weights of the last step. thalweg eval and generate read the best checkpoint of the run, which "
    "may be of an earlier step with fewer heads, unless given --which last."
)
SOURCE = "Cirrincione 2026: DDCL-INCRT, arXiv 2604.01880; INCRT, arXiv 2604.10703; DDCL, arXiv 2604.01740 (reconstructed, see docs/growth.md)"


def _decisions(grown: Grown, dictionaries: bool) -> Table:
    """Who decided what this model has."""
    found = decision_table(grown)
    return dataclasses.replace(found, rows=[row for row in found.rows if dictionaries or row[:1] != (DICTIONARY,)])


def _has_dictionaries(config: Mapping[str, Any]) -> bool:
    """Whether the configuration of a run asks for dictionaries of prototypes, looked at or not."""
    return bool((config.get("model") or {}).get("head_prototypes")) or "prototypes" in (config.get("layers") or ())


def _count(grown: Grown) -> str:
    start, now = grown.about.get("heads_start") or [], grown.about.get("heads") or []
    if not now:
        return ""
    births = sum(len(e.get("heads") or ()) for e in grown.events if e.get("kind") == "birth")
    gone = sum(len(e.get("heads") or ()) for e in grown.events if e.get("kind") == "prune")
    layers = len(now) - len(start)
    parts = [counted(births, "birth"), f"{gone} removed", *([counted(layers, "new layer")] if layers else [])]
    return f"Heads by layer: {listed(map(str, start))} at the start, {listed(map(str, now))} now ({', '.join(parts)})."


def _later(grown: Grown) -> str:
    """What the last look found, where it came after the end of growth: training goes on, and so may the residual."""
    ended, theta = grown.about.get("ended"), grown.threshold
    last = {layer: points[-1] for layer, points in grown.series("growth.top").items() if points}
    step = max((at for at, _ in last.values()), default=0)
    if ended is None or theta is None or step <= ended:
        return ""
    over = [
        f"{number(value, 3)} in layer {layer}" for layer, (at, value) in last.items() if at == step and value > theta
    ]
    was_below = grown.status == "converged"  # in every layer, which no other end says
    if over:
        found = f"is above the threshold{' again' if was_below else ''}: {listed(over, 4)}"
    else:
        found = f"is {'still ' if was_below else ''}below the threshold in every layer"
    return f"Growth ended at step {number(ended)} and training went on. At step {number(step)} what is left {found}."


def _cost(grown: Grown, cost: Mapping[str, Any]) -> dict[str, str]:
    """What the model costs, beside where it began and beside having been this large from the start."""
    about = grown.about
    found = {COST_NAMES.get(name, name.replace("_", " ")): big(v, UNITS.get(name, "")) for name, v in cost.items()}
    if about.get("parameters_start") is not None:
        found["parameters"] = f"{big(about['parameters_start'])} at the start, {big(about.get('parameters'))} now"
    if about.get("flops_start") is not None:
        found["flops per token"] = (
            f"{big(about['flops_start'])} at the start, {big(about.get('flops'))} now, of training"
        )
    spent, tokens, now = about.get("flops_spent"), cost.get("tokens"), about.get("flops")
    if isinstance(spent, int | float) and tokens and now:
        found["FLOPs of the run"] = (
            f"{big(spent)}; {spent / (tokens * now):.0%} of those of the last shape trained from the start"
        )
    if about.get("looks"):
        share = f", {about['seconds'] / cost['seconds']:.0%} of the training" if cost.get("seconds") else ""
        found["looking"] = f"{counted(int(about['looks']), 'look')} in {number(about.get('seconds'), 3)} s{share}"
    return found
