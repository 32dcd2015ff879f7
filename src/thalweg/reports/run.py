"""The report of one run: what it reached, what it cost, what its stream looks like."""

import math
from collections.abc import Sequence
from pathlib import Path

from thalweg.config import to_toml
from thalweg.records.run import RunFolder
from thalweg.reports import page
from thalweg.reports.sections import depth_figures, loss_figures, moved_table
from thalweg.reports.text import big, number
from thalweg.studies.store import RunRecord

SHOWN = ("val/", "task/", "train/loss", "stability/")


def write_run_report(run: RunFolder, path: str | Path, citations: Sequence[str] = ()) -> Path:
    """Write the report of the run folder ``run`` to ``path``. Raises: InputError (disk full, no permission)."""
    record = RunRecord(
        "", run.config, run.seed or 0, run.status, run.result, run.series(), run.measures(), run.units(), run.provenance, run.versions, tuple(run.notes)
    )
    name = str(run.config.get("connection", run.path.name))
    arms = {name: [record]}
    moved_columns, moved_rows = moved_table(arms)
    depth = depth_figures(arms)
    diagnostics = [f for f in depth if f.title.startswith(("Gradient", "Distance"))]
    quality = [(key, number(series[-1][1], 5), record.units.get(key, "")) for key, series in sorted(record.metrics.items()) if series and key.startswith(SHOWN)]
    quality += [(f"null: {key.replace('_', ' ')}", number(value, 5), "") for key, value in record.nulls.items() if math.isfinite(value)]
    return page.write(
        path,
        "run.html",
        title=f"{name}, {run.config.get('depth', '?')} layers, seed {run.seed}",
        status=run.status,
        headline=_headline(run),
        quality_rows=quality,
        loss_figures=loss_figures(arms),
        cost={key.replace("_", " "): big(value, "B" if "memory" in key else "") for key, value in record.cost.items()},
        geometry=[f for f in depth if f not in diagnostics],
        moved_columns=moved_columns,
        moved_rows=moved_rows,
        diagnostics=diagnostics,
        limits=list(run.notes) or ["none recorded"],
        reproduce=to_toml(run.config) + "\n# thalweg train CONFIG.toml",
        provenance={**{k: str(v) for k, v in run.provenance.items()}, "versions": ", ".join(f"{k} {v}" for k, v in run.versions.items())},
        citations="\n\n".join(citations) or "none",
    )


def _headline(run: RunFolder) -> str:
    loss = run.result.get("final_loss")
    if run.status == "done" and loss is not None:
        return f"validation loss {number(loss, 5)} nats/token after {number(run.result.get('step'))} steps."
    return f"{run.result.get('reason') or 'it has not ended'} (step {number(run.result.get('step'))} of {number(run.result.get('steps'))})."
