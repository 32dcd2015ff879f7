"""The report of one run: what it reached, what it cost, what its stream looks like."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from thalweg.config import to_toml
from thalweg.records.files import has_lines
from thalweg.records.measurements import Measurements
from thalweg.records.run import RunFolder
from thalweg.reports import page, provenance
from thalweg.reports.curves import training_figures, unit_of
from thalweg.reports.datasets import notes_of
from thalweg.reports.depth import INTRODUCTION, geometry
from thalweg.reports.tables import Table, moved_table, nulls_of, scalar_table
from thalweg.reports.text import NONE, big, counted, moment, number
from thalweg.studies.observe import unlearned
from thalweg.studies.store import RunRecord

SHOWN = ("val/", "task/", "train/loss")
MEASURED = "measured.jsonl"  # in a run folder: what ``thalweg measure`` found
UNITS = {"peak_memory": "B", "seconds": "s"}
COST_NAMES = {"peak_memory": "peak memory (on a CPU of the whole process with its libraries, on a GPU of tensors)"}
# What a row of the quality table means, where its name does not say it; the first of a group of rows says it.
MEANINGS = {
    "task/accuracy_low": "accuracy_low and accuracy_high: the 95 % Wilson interval of the accuracy.",
    "null: uniform": "Null uniform: the loss of a guess that holds every class or token equally likely.",
    "null: chance": "Null chance: the loss of a guess by the shares of the classes in the training data.",
    "null: unigram entropy": "Null unigram entropy: the loss of a guess by the frequencies of the tokens.",
    "null: xz": "xz: what this general compressor needs for the same text, by itself or after the training text.",
}


def record_of(run: RunFolder, status: str, nulls: Mapping[str, float]) -> RunRecord:
    """A run folder as the record that figures and tables read. nulls: of the data, for a run whose record has none yet."""
    result = {**run.result, "nulls": run.result.get("nulls") or dict(nulls)}
    return RunRecord(
        "",
        run.config,
        run.seed or 0,
        status,
        result,
        run.series(),
        _measures(run),
        run.units(),
        run.provenance,
        run.versions,
        tuple(run.notes),
    )


def name_of(run: RunFolder) -> str:
    """Its connection, or the folder where the record names none."""
    return str(run.config.get("connection", run.path.name))


def title_of(run: RunFolder) -> str:
    seed = run.seed if run.seed is not None else run.config.get("seed", "?")
    depth = run.config.get("depth")
    return f"{name_of(run)}, {counted(depth, 'layer') if isinstance(depth, int) else '? layers'}, seed {seed}"


def _measures(run: RunFolder) -> Measurements:
    """What the run measured, and what was measured of it later and not by itself."""
    rows, later = run.measures(), run.path / MEASURED
    if has_lines(later):
        own = {row.measure for row in rows}
        rows.extend(row for row in Measurements.load(later) if row.measure not in own)
    return rows


def write_run_report(
    run: RunFolder,
    path: str | Path,
    citations: Sequence[str] = (),
    deviations: Sequence[str] = (),
    nulls: Mapping[str, float] | None = None,
) -> Path:
    """Write the report of the run folder ``run`` to ``path``. nulls: of its data, for a record that holds none.

    Raises: InputError (disk full, no permission).
    """
    # A study leaves diverged runs out of its means; here the one run is what the reader asked for, however it ended.
    record = record_of(run, "shown", nulls or {})
    arms = {name_of(run): [record]}
    dull = f"Has not learned: {why}." if run.status != "diverged" and (why := unlearned(record)) else ""
    limits = [*filter(None, [dull]), *notes_of([("", record)]), *deviations]
    return page.write(
        path,
        "run.html",
        title=title_of(run),
        status=run.status,
        headline=f"{headline_of(run)} {dull}".strip() if run.status != "running" else headline_of(run),
        quality=quality_of_run(record),
        cost={COST_NAMES.get(k, k.replace("_", " ")): big(v, UNITS.get(k, "")) for k, v in record.cost.items()},
        training=training_figures(arms),
        introduction=INTRODUCTION,
        geometry=geometry(arms),
        moved=moved_table(arms),
        scalars=scalar_table(arms),
        limits=limits or ["None recorded."],
        config=to_toml(run.config),
        provenance={
            "started": moment(run.record.get("started")) or NONE,
            "ended": moment(run.record.get("ended")) or NONE,
            **provenance.machine([record]),
        },
        citations="\n\n".join(citations),
    )


def quality_of_run(record: RunRecord) -> Table:
    """The last value of what was evaluated, then the nulls of the data; what their names mean."""
    rows = [
        (key, number(series[-1][1], 5), record.units.get(key) or NONE, number(series[-1][0]))
        for key, series in sorted(record.metrics.items())
        if series and key.startswith(SHOWN)
    ]
    for name, found in nulls_of(record).items():
        rows += [(f"null: {name}", number(value, 5), unit_of(record, series), NONE) for series, value in found.items()]
    said = [meaning for start, meaning in MEANINGS.items() if any(name.startswith(start) for name, *_ in rows)]
    return Table(("measure", "value", "unit", "step"), rows, " ".join(said))


def headline_of(run: RunFolder) -> str:
    result = run.result
    loss, step = result.get("final_loss"), result.get("step")
    if run.status == "done" and loss is not None:
        return f"validation loss {number(loss, 5)} {run.units().get('val/loss') or 'nats/token'} after {number(step)} steps."
    if step is None:
        last = max((steps[-1][0] for steps in run.series().values() if steps), default=None)
        return "it has not ended" + (f"; the last step logged is {number(last)}." if last is not None else ".")
    steps = result.get("steps") or run.config.get("steps")  # a run that failed left no result to speak of
    of = f" of {number(steps)}" if steps is not None else ""
    return f"{result.get('reason') or 'no reason recorded'} (step {number(step)}{of})."
