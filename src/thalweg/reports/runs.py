"""The report of several runs: curves in one figure, results and cost in one table, geometry by depth, and what differs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thalweg.config import to_toml
from thalweg.records.run import RunFolder
from thalweg.reports import page, provenance
from thalweg.reports.curves import Arms, dull, training_figures
from thalweg.reports.depth import INTRODUCTION, geometry
from thalweg.reports.run import record_of
from thalweg.reports.study import data_notes
from thalweg.reports.tables import (
    COST_NOTE,
    COSTS,
    Table,
    cost_cells,
    moved_table,
    null_rows,
    quality_of,
    scalar_table,
    scale_of,
)
from thalweg.reports.text import counted, listed, moment, number, words

UNSET = "unset"


def write_runs_report(
    runs: Sequence[RunFolder],
    path: str | Path,
    citations: Sequence[str] = (),
    deviations: Sequence[str] = (),
    nulls: Sequence[Mapping[str, float]] = (),
    settled: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write one report of several run folders to ``path``. nulls: of the data of each run, for records that hold none.
    settled: the configuration of each run with what it leaves to its defaults, to tell what differs (none: as they are saved).

    Raises: InputError (disk full, no permission).
    """
    names = labels(runs)
    given = [*nulls, *({} for _ in runs[len(nulls) :])]
    # Loss curves as in a study, where a diverged run does not set the scale; geometry of every run that the reader asked for.
    arms: Arms = {name: [record_of(run, run.status, n)] for name, run, n in zip(names, runs, given, strict=True)}
    shown: Arms = {name: [record_of(run, "shown", n)] for name, run, n in zip(names, runs, given, strict=True)}
    ended = {status: sum(run.status == status for run in runs) for status in dict.fromkeys(run.status for run in runs)}
    return page.write(
        path,
        "runs.html",
        title=f"{counted(len(runs), 'run')} side by side",
        names=listed(names),
        headline=f"{listed(f'{n} {status}' for status, n in ended.items())}. {scale_of(shown)}.",
        status="done" if set(ended) == {"done"} else "running",
        cost=_results(names, runs, shown),
        differences=_differences(names, settled or [run.config for run in runs]),
        training=training_figures(arms),
        introduction=INTRODUCTION,
        geometry=geometry(shown),
        moved=moved_table(shown),
        scalars=scalar_table(shown),
        limits=_limits(names, runs, shown, deviations),
        configs={f"{name}.toml".replace("/", "-"): to_toml(run.config) for name, run in zip(names, runs, strict=True)},
        provenance={
            "started": listed(dict.fromkeys(moment(run.record.get("started")) for run in runs), 3),
            **provenance.machine([r for records in shown.values() for r in records]),
        },
        citations="\n\n".join(citations),
    )


def labels(runs: Sequence[RunFolder]) -> list[str]:
    """A name for each run: its folder, with as many folders above it as it takes to tell the runs apart."""
    parts = [run.path.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run.path) for run in runs]


def _results(names: Sequence[str], runs: Sequence[RunFolder], arms: Arms) -> Table:
    """Quality and cost, one row per run, then the nulls of the data."""
    quality = quality_of(arms) | {"val/loss": "last loss [nats/token]"}
    blank = dull(arms)
    rows = []
    for name, run in zip(names, runs, strict=True):
        (record,) = arms[name]
        last = max((series[-1][0] for series in record.metrics.values() if series), default=None)
        status = f"{run.status}, not learned" if name in blank else run.status
        rows.append((f"{name}: {status} at step {number(last)}", *cost_cells([record], quality)))
    nulls = [(name, *cells) for name, _, *cells in null_rows(arms, quality)]
    note = f"Each at its last evaluation. {COST_NOTE.format(those='those')}"
    return Table(("run", *quality.values(), *COSTS), [*rows, *nulls], note)


def _differences(names: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> Table:
    """The keys of the configurations in which the runs differ."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = []
    for key in keys:
        values = [words(config[key]) if key in config else UNSET for config in configs]
        if len(set(values)) > 1:
            rows.append((key, *(value or "none" for value in values)))
    return Table(("configuration", *names), rows, "" if rows else "The runs have the same configuration.")


def _limits(names: Sequence[str], runs: Sequence[RunFolder], arms: Arms, deviations: Sequence[str]) -> list[str]:
    found = []
    data = {(run.result.get("data") or {}).get("fingerprint") or words(_data_of(run)) for run in runs}
    if len(data) > 1:
        found.append("The runs were not trained on the same data: their losses cannot be compared.")
    found += [f"{name} has not learned: {listed(why, 3)}." for name, why in dull(arms).items()]
    for name, run in zip(names, runs, strict=True):
        if run.status not in ("done", "running"):
            found.append(f"{name} is {run.status}: {run.result.get('reason') or 'no reason recorded'}.")
        found += [f"{name}: {note}" for note in run.notes]
        found += [f"Data: {note}" for note in data_notes(arms[name][0])]
    found += deviations
    return [*dict.fromkeys(found), "One run each: how much seeds differ is not known here."]


def _data_of(run: RunFolder) -> list:
    return [run.config.get(key) for key in ("data", "tokenizer", "vocab_size")]
