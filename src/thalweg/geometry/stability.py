"""How calmly a run trains: spikes, variation of the gradient norm, the largest learning rate that survives."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thalweg.errors import InputError
from thalweg.geometry.catalog import measure


@dataclass(frozen=True)
class Spikes:
    """Steps that stand out of the recent past. share: of the steps judged; null: the one expected by chance."""

    steps: tuple[int, ...]
    judged: int
    share: float
    null: float


@measure(
    "stability.spikes",
    summary="share of steps whose loss or gradient norm exceeds a high quantile of the steps just before",
    source="ours",
    takes="values by step",
    range=(0.0, 1.0),
    direction="lower",
    null="k / (window + 1) with the k-th largest as the threshold: exchangeable steps, any distribution",
)
def spikes(values: Sequence[float], *, window: int = 100, quantile: float = 0.99, factor: float = 1.0) -> Spikes:
    """Steps whose value exceeds ``factor`` times the running quantile of the ``window`` finite values before it.

    The threshold is the k-th largest of the window, k = max(1, round((1 - quantile) (window + 1))), so that a series
    whose order means nothing gives the null k / (window + 1) at factor 1, whatever its distribution; a larger factor
    (for positive values) only lowers it. A value that is not finite is a spike and never enters a window. Steps
    before the window is full are not judged unless they are not finite.
    Raises: InputError.
    """
    if window < 1 or not 0 < quantile < 1 or factor < 1:
        raise InputError(
            f"window must be 1 or more, quantile in (0, 1) and factor 1 or more, got {window}, {quantile} and {factor}"
        )
    rank = max(1, round((1 - quantile) * (window + 1)))
    recent: list[float] = []
    found, judged = [], 0
    for step, value in enumerate(values):
        if not math.isfinite(value):
            found.append(step)
            judged += 1
            continue
        if len(recent) == window:
            judged += 1
            if value > factor * sorted(recent)[-rank]:
                found.append(step)
            recent.pop(0)
        recent.append(value)
    return Spikes(tuple(found), judged, len(found) / judged if judged else 0.0, rank / (window + 1))


@measure(
    "stability.gradient_variation",
    summary="standard deviation over mean of the gradient norm along training",
    source="ours",
    takes="gradient norms by step",
    range=(0.0, None),
    direction="lower",
)
def variation(values: Sequence[float], *, skip: int = 0) -> float:
    """Coefficient of variation (sd / mean) of a positive series after its first ``skip`` values (warm-up).

    A series that leaves the finite numbers varies infinitely; one of zeros not at all.
    Raises: InputError for fewer than two values or a negative one.
    """
    kept = list(values[skip:])
    if len(kept) < 2 or any(value < 0 for value in kept):
        raise InputError(
            f"a variation needs two values or more, none negative, after the first {skip}; got {len(kept)}"
        )
    if not all(math.isfinite(value) for value in kept):
        return math.inf
    mean = statistics.fmean(kept)
    return statistics.stdev(kept) / mean if mean else 0.0


@dataclass(frozen=True)
class StableRate:
    """lr: the largest rate such that it and all smaller ones are stable; None when not even the smallest is.

    at_edge: it is the largest tried, so the true limit lies higher. isolated: stable rates above an unstable one.
    """

    lr: float | None
    at_edge: bool
    diverged: tuple[float, ...]
    isolated: tuple[float, ...]


@measure(
    "stability.largest_lr",
    summary="largest learning rate of a grid that does not diverge, nor any smaller one",
    source="ours; as in Wortsman et al. 2023, arXiv 2309.14322",
    takes="final losses by learning rate",
    range=(0.0, None),
    direction="higher",
)
def largest_stable_lr(losses: Mapping[float, float | Sequence[float]], *, limit: float) -> StableRate:
    """The largest learning rate that does not diverge, from the final losses of a grid.

    losses: learning rate -> final loss, or one for each seed. limit: losses above it (the unigram entropy of the
    data, say) or not finite have diverged; a rate is stable when none of its seeds did.
    Raises: InputError for an empty grid, a rate that is not positive, a rate without a loss, or a limit that is not
    finite.
    """
    if not losses or not math.isfinite(limit):
        raise InputError(f"a grid of learning rates and a finite limit are needed, got {len(losses)} rates and {limit}")
    runs = {rate: list(loss) if isinstance(loss, Sequence) else [loss] for rate, loss in sorted(losses.items())}
    if any(not rate > 0 or not math.isfinite(rate) or not seeds for rate, seeds in runs.items()):
        raise InputError(f"learning rates must be positive and each have a loss, got {runs}")
    stable = {rate: all(loss <= limit for loss in seeds) for rate, seeds in runs.items()}  # NaN <= limit is False
    best, broken, isolated = None, False, []
    for rate, held in stable.items():
        broken = broken or not held
        if held and not broken:
            best = rate
        elif held:
            isolated.append(rate)
    diverged = tuple(rate for rate, held in stable.items() if not held)
    return StableRate(best, best == max(stable), diverged, tuple(isolated))
