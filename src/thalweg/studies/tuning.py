"""The learning rate of each arm: the best of one grid on a separate seed, and never in silence at its edge."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thalweg.studies.plan import Scale
from thalweg.studies.store import RunRecord
from thalweg.training.config import TrainConfig


@dataclass(frozen=True)
class Tuning:
    """State of the search for one arm.

    losses: rate -> final loss, the mean over the tuning seeds (inf if one diverged), of rates whose runs are all there. pending: the next
    runs. edge: the grid ended there.
    """

    losses: dict[float, float]
    pending: tuple[TrainConfig, ...]
    best: float | None
    edge: bool


def search(base: TrainConfig, scale: Scale, look_up: Callable[[TrainConfig], RunRecord | None]) -> Tuning:
    """Where the search of the arm ``base`` stands, from the records alone.

    The grid of the scale comes first. While the best rate lies at an edge, one rate is added beyond it, at the ratio of the two nearest,
    at most ``scale.extend`` times. Ties go to the smaller rate.
    """
    grid = sorted(scale.learning_rates)
    for extension in range(scale.extend + 1):
        runs = {rate: tuning_runs(base, scale, rate) for rate in grid}
        records = {rate: [look_up(run) for run in tries] for rate, tries in runs.items()}
        losses = {rate: mean for rate, found in records.items() if (mean := _mean_loss(found)) is not None}
        pending = tuple(
            run for rate in grid for run, found in zip(runs[rate], records[rate], strict=True) if found is None
        )
        if pending:
            return Tuning(losses, pending, None, False)
        best = min(grid, key=lambda rate: (losses[rate], rate))
        if math.isinf(losses[best]):
            return Tuning(losses, (), grid[0], True)  # every rate diverged; the gentlest is run and recorded
        at_edge = best in (grid[0], grid[-1])
        if not at_edge or extension == scale.extend:
            return Tuning(losses, (), best, at_edge)
        grid = [_round(grid[0] ** 2 / grid[1]), *grid] if best == grid[0] else [*grid, _round(grid[-1] ** 2 / grid[-2])]
    raise AssertionError("unreachable")


def tuning_runs(base: TrainConfig, scale: Scale, rate: float) -> list[TrainConfig]:
    """The shortened runs that try ``rate``, one for each tuning seed."""
    steps = max(1, math.ceil(base.total_steps * scale.tuning_fraction))
    return [dataclasses.replace(base, lr=rate, seed=seed, steps=steps, tokens=None) for seed in scale.tuning_seeds]


def _mean_loss(records: Sequence[RunRecord | None]) -> float | None:
    """None unless all are there."""
    losses = [_loss(record) for record in records if record is not None]
    return sum(losses) / len(losses) if len(losses) == len(records) else None


def _loss(record: RunRecord) -> float:
    loss = record.last("val/loss")
    return math.inf if record.status == "diverged" or loss is None or not math.isfinite(loss) else loss


def _round(rate: float) -> float:
    return float(f"{rate:.3g}")
