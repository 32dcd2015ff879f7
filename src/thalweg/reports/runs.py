"""The report of several runs: curves in one figure, results and cost in one table, geometry by depth, and what differs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thalweg.config import to_toml
from thalweg.records.run import RunFolder
from thalweg.reports import page, provenance
from thalweg.reports.curves import Arms, dull, training_figures
from thalweg.reports.datasets import data_key, notes_of
from thalweg.reports.depth import INTRODUCTION, geometry
from thalweg.reports.growth import Grown, heads_of, is_grown, read, without_growth
from thalweg.reports.run import record_of
from thalweg.reports.tables import (
    COSTS,
    Table,
    cost_cells,
    cost_note,
    moved_table,
    null_rows,
    quality_of,
    scalar_table,
    scale_of,
)
from thalweg.reports.text import NONE, counted, listed, moment, number, words

UNSET = "unset"
MOST_BESIDE_COST = 5  # columns of quality that a page has room for


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

    Raises: InputError (disk full, no permission; a foreign growth record); CheckpointError for a broken one.
    """
    names = labels(runs)
    grown = {name: read(run) for name, run in zip(names, runs, strict=True) if is_grown(run)}
    given = [*nulls, *({} for _ in runs[len(nulls) :])]
    # Loss curves as in a study, where a diverged run does not set the scale; geometry of every run that the reader asked for.
    arms: Arms = {name: [record_of(run, run.status, n)] for name, run, n in zip(names, runs, given, strict=True)}
    shown: Arms = {
        name: [without_growth(record_of(run, "shown", n))] for name, run, n in zip(names, runs, given, strict=True)
    }
    ended = {status: sum(run.status == status for run in runs) for status in dict.fromkeys(run.status for run in runs)}
    return page.write(
        path,
        "runs.html",
        title=f"{counted(len(runs), 'run')} side by side",
        names=listed(names),
        headline=f"{listed(f'{n} {status}' for status, n in ended.items())}. {scale_of(shown)}.",
        status="done" if set(ended) == {"done"} else "running",
        cost=_results(names, runs, shown),
        differences=_differences(names, settled or [run.config for run in runs], grown),
        training=training_figures(arms),
        introduction=INTRODUCTION,
        geometry=geometry(shown),
        moved=moved_table(shown),
        scalars=scalar_table(shown),
        limits=_limits(names, runs, shown, deviations),
        configs={_file(name): to_toml(run.config) for name, run in zip(names, runs, strict=True)},
        grown=listed(map(_file, grown), len(grown)),
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


def _results(names: Sequence[str], runs: Sequence[RunFolder], arms: Arms) -> list[Table]:
    """Quality and cost, one row per run, then the nulls of the data; cost in a table of its own where one is too wide for the page."""
    quality = quality_of(arms, "last loss")
    blank = dull(arms)
    rows = []
    for name, run in zip(names, runs, strict=True):
        (record,) = arms[name]
        last = max((series[-1][0] for series in record.metrics.values() if series), default=None)
        status = f"{run.status}, not learned" if name in blank else run.status
        rows.append((f"{name}: {status} at step {number(last)}", *cost_cells([record], quality)))
    nulls = [(name, *cells) for name, _, *cells in null_rows(arms, quality)]
    note = f"Each at its last evaluation. {cost_note(arms, 'those')}"
    if len(quality) <= MOST_BESIDE_COST:
        return [Table(("run", *quality.values(), *COSTS), [*rows, *nulls], note)]
    width = 1 + len(quality)
    first = Table(("run", *quality.values()), [row[:width] for row in (*rows, *nulls)])
    return [first, Table(("run", *COSTS), [(row[0], *row[width:]) for row in rows], note)]


def _differences(names: Sequence[str], configs: Sequence[Mapping[str, Any]], grown: Mapping[str, Grown]) -> Table:
    """The keys of the configurations in which the runs differ, then how those that grew have grown."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = []
    for key in keys:
        values = [words(config[key]) if key in config else UNSET for config in configs]
        if len(set(values)) > 1:
            rows.append((key, *(value or "none" for value in values)))
    note = "" if rows else "The runs have the same configuration."
    if grown:
        rows.append(
            ("how growth ended", *(_ending(grown[name]) if name in grown else "did not grow" for name in names))
        )
        rows.append(("heads by layer", *(heads_of(grown[name]) if name in grown else NONE for name in names)))
    return Table(("configuration and growth" if grown else "configuration", *names), rows, note)


def _ending(grown: Grown) -> str:
    at = grown.about.get("ended")
    return f"{grown.ending}{f' (step {number(at)})' if at is not None else ''}"


def _file(name: str) -> str:
    """Where a reader may save the configuration of a run."""
    return f"{name}.toml".replace("/", "-")


def _limits(names: Sequence[str], runs: Sequence[RunFolder], arms: Arms, deviations: Sequence[str]) -> list[str]:
    found = []
    records = [(name, arms[name][0]) for name in names]
    if len({data_key(record) for _, record in records}) > 1:
        found.append("The runs were not trained on the same data: their losses cannot be compared.")
    found += [f"{name} has not learned: {listed(why, 3)}." for name, why in dull(arms).items()]
    for name, run in zip(names, runs, strict=True):
        if run.status not in ("done", "running"):
            found.append(f"{name} is {run.status}: {run.result.get('reason') or 'no reason recorded'}.")
    found += notes_of(records)
    found += deviations
    return [*dict.fromkeys(found), "One run each: how much seeds differ is not known here."]
