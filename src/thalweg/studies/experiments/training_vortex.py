"""Does training circulate? Real training runs with a recorded trajectory, one optimiser at a time, looked at by the probe of vortices."""

import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.errors import InputError
from thalweg.records import Measurements
from thalweg.studies.experiments.base import HAS_LEARNED, Progress, check_train, ended, nothing, register
from thalweg.studies.observe import why_unlearned

ARMS = ("weights",)
COLUMNS = {
    "vortex.circulates": ARMS,
    "vortex.stationary": ARMS,
    "vortex.beats_reversal": ARMS,
    "vortex.beats_shuffle": ARMS,
    "vortex.walks": ("walks",),
}


@dataclass(frozen=True)
class VortexClaimOptions:
    """train: fields of the training configuration, optimizer among them; records: steps between two records; skip, surrogates, walks: of the
    probe of vortices."""

    train: dict[str, Any] = field(default_factory=dict)
    records: int = 4
    skip: float = 0.3
    surrogates: int = 199
    walks: int = 20


@register(
    "training_vortex",
    options=VortexClaimOptions,
    columns=COLUMNS,
    summary="whether a training run circulates in any block of weights: stationary, against time reversed, shuffled blocks and random walks",
    source="Liang 2026, arXiv 2607.17146 (a vortex for AdamW and pure SGD, in words; how it was measured is not readable); tests derived by us",
)
def training_vortex(options: VortexClaimOptions, seed: int, progress: Progress) -> Measurements:
    """vortex.circulates: 1 where a vortex is called in any block, else 0; NaN where no block has come back within the records, so that nothing
    can be said. vortex.stationary: share of blocks that have. vortex.beats_*: share of stationary blocks whose area beats that null at 5 % and
    turns the right way. vortex.walks: share of random walks, made of the run's own increments, that would be called.
    """
    from thalweg import continuum
    from thalweg.continuum import Trajectory
    from thalweg.continuum.vortex import DICKEY_FULLER
    from thalweg.records.run import RunFolder
    from thalweg.training import train
    from thalweg.training.config import from_table

    check_train("training_vortex", options.train, ("seed", "trajectory"), "seeds and records say")
    made = from_table({**options.train, "seed": seed, "trajectory": options.records})
    with tempfile.TemporaryDirectory() as folder:
        train(made, Path(folder) / "run")
        run = RunFolder.open(Path(folder) / "run")
        last = {name: values[-1][1] for name, values in run.series().items()}
        nulls = run.result.get("nulls", {})
        why = why_unlearned(last.get("val/loss"), last.get("val/bits_per_byte"), nulls)
        if last.get("val/loss", 0.0) >= nulls.get("chance", math.inf):
            why = f"loss {last['val/loss']:.3f} is not below chance, {nulls['chance']:.3f}"
        rows = Measurements()
        if not ended(run.status, "the training that is looked at", seed):
            return nothing(rows, COLUMNS)
        path = Trajectory.read(run.path)
    probe = {"skip": options.skip, "surrogates": options.surrogates, "walks": options.walks, "seed": seed}
    found = continuum.findings(path, only=["vortex"], options={"vortex": probe})[0]
    if found.failed:
        raise InputError(f"the probe of vortices says nothing of seed {seed}: {found.failed}")
    blocks = {r.site: r.value for r in found.rows.where(measure="vortex.relaxations")}
    back = [site for site, value in blocks.items() if value > DICKEY_FULLER]
    (called,) = [r for r in found.rows.where(measure="vortex.found") if not r.site and not r.branch]
    (walks,) = [r for r in found.rows.where(measure="vortex.found") if r.branch]
    level = {"null": 0.05, "null_kind": "level of the test"}
    rows.add("vortex.circulates", called.value if back else math.nan, arm="weights", n=len(blocks), **level)
    rows.add(
        "vortex.stationary",
        len(back) / len(blocks),
        arm="weights",
        n=len(blocks),
        null=0.0,
        null_kind="nothing comes back",
    )
    rates = {r.site: r.value for r in found.rows.where(measure="vortex.area_rate", branch="")}
    for name, branch in (("beats_reversal", "sign_flip"), ("beats_shuffle", "block_shuffle")):
        p = {r.site: r.value for r in found.rows.where(measure="vortex.p", branch=branch)}
        beaten = [p[site] <= 0.05 and rates[site] > 0 for site in back]
        rows.add(
            f"vortex.{name}", sum(beaten) / len(beaten) if beaten else math.nan, arm="weights", n=len(beaten), **level
        )
    rows.add("vortex.walks", walks.value, arm="walks", n=walks.n, **level)
    for site in back:
        rows.add(
            "vortex.rate", rates[site], arm="weights", site=site, unit="1/step", null=0.0, null_kind="no circulation"
        )
    loss = last.get("val/loss", math.nan)
    rows.add("vortex.loss", loss, arm="weights", unit="nats/token")
    rows.add(HAS_LEARNED, float(not why), arm="weights", null_kind=why)
    progress(f"{made.optimizer}, momentum {made.momentum:g}: {found.summary}; loss {loss:.3f}")
    return rows
