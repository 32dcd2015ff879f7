"""How likely a plan is to decide: simulated power, and the smallest effect it could see."""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from thalweg.errors import InputError


@dataclass(frozen=True)
class Power:
    """Simulated probability that the interval of ``pairs`` paired runs lies beyond the margin when the true effect is ``effect``."""

    power: float
    pairs: int
    effect: float
    sd: float
    margin: float
    alpha: float
    detectable: float  # the smallest effect, beyond the margin, that is seen with probability 0.8
    simulations: int


def simulate(
    *, effect: float, sd: float, margin: float, pairs: int, alpha: float, simulations: int = 20_000, seed: int = 0
) -> Power:
    """Power of the paired t-interval with a margin, by simulation of normal differences.

    effect, margin, sd: in the unit of the measure, signed so that the expected direction is positive; sd is that of one paired
    difference. The rule simulated is the one that :func:`thalweg.studies.statistics.paired` applies.
    Raises: InputError for a standard deviation that is not positive or fewer than two pairs.
    """
    if not sd > 0 or not np.isfinite([effect, sd, margin]).all():
        raise InputError(f"power needs a positive, finite standard deviation of the paired difference, got {sd}")
    if pairs < 2:
        raise InputError(f"power needs at least 2 pairs, got {pairs}")
    draws = np.random.default_rng(seed).standard_normal((simulations, pairs))
    means, sds = draws.mean(1), draws.std(1, ddof=1)
    half = stats.t.ppf(1 - alpha / 2, pairs - 1) * sds / np.sqrt(pairs)
    # In units of sd an interval lies above the margin when (effect - margin)/sd exceeds half - mean of the noise.
    needed = half - means
    return Power(
        power=float(np.mean((effect - margin) / sd > needed)),
        pairs=pairs,
        effect=effect,
        sd=sd,
        margin=margin,
        alpha=alpha,
        detectable=float(margin + sd * np.quantile(needed, 0.8)),
        simulations=simulations,
    )
