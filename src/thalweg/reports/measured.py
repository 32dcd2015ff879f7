"""The report of a run that was measured again: held-out loss, geometry, what its mixing is worth."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from thalweg.records.measurements import Measurements
from thalweg.records.run import RunFolder
from thalweg.reports import page, provenance
from thalweg.reports.depth import INTRODUCTION, geometry
from thalweg.reports.measures import shown
from thalweg.reports.run import name_of, record_of, title_of
from thalweg.reports.shown import TABLE
from thalweg.reports.tables import moved_table, scalar_table
from thalweg.reports.text import moment


def write_measured_report(
    run: RunFolder,
    rows: Measurements,
    path: str | Path,
    *,
    facts: Mapping[str, str],
    command: str,
    citations: Sequence[str] = (),
    deviations: Sequence[str] = (),
) -> Path:
    """Write what was measured of ``run`` to ``path``. facts: on what, by name; command: that repeats it.

    Whether the coefficients moved is taken from the run's own record, which knows where they started.
    Raises: InputError (disk full, no permission).
    """
    record = record_of(run, "shown", {})
    moved = [
        row for row in record.measures if shown(row.measure).group == TABLE and row.measure.startswith("coefficient")
    ]
    record = dataclasses.replace(record, measures=Measurements([*rows, *moved]))
    arms = {name_of(run): [record]}
    return page.write(
        path,
        "measured.html",
        title=f"{title_of(run)}: measured",
        status=run.status,
        facts=facts,
        introduction=INTRODUCTION,
        geometry=geometry(arms),
        moved=moved_table(arms),
        scalars=scalar_table(arms),
        limits=[*run.notes, *deviations] or ["None recorded."],
        command=command,
        provenance={"trained": moment(run.record.get("started")), **provenance.machine([record])},
        citations="\n\n".join(citations),
    )
