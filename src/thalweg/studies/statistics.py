"""Paired statistics of studies: interval with a margin, sign-flip test beside it, step-down correction. Pure numpy and scipy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from thalweg.errors import InputError
from thalweg.statistics import sign_flip


@dataclass(frozen=True)
class Paired:
    """A contrast over seeds: its mean, the two-sided t-interval at ``level``, and the p-values against the margin.

    p_above: one-sided p of "the effect is at most the margin" (small: the effect lies above it); p_below: the mirror image.
    sign_flip: exact two-sided p of "the contrast is symmetric about zero"; smallest_sign_flip: the least that n pairs can reach.
    """

    estimate: float
    low: float
    high: float
    level: float
    sd: float
    n: int
    margin: float
    p_above: float
    p_below: float
    sign_flip: float
    smallest_sign_flip: float

    @property
    def decisive_p(self) -> float:
        """Two-sided p against the margin: what the correction for several hypotheses orders by."""
        return min(1.0, 2 * min(self.p_above, self.p_below))


def paired(values: Sequence[float], *, margin: float = 0.0, level: float = 0.95) -> Paired:
    """Judge one contrast, one value per seed, against ``margin``.

    A contrast without spread (all values equal) has a degenerate interval at its value.
    Raises: InputError for fewer than two values, values that are not finite, or a level outside (0, 1).
    Source: Student's paired t; the margin is a minimum effect of interest, as in equivalence testing (Schuirmann 1987).
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or x.size < 2:
        raise InputError(f"a paired interval needs at least 2 seeds, got {x.size}")
    if not np.isfinite(x).all():
        raise InputError(
            "a paired interval needs finite values; a diverged arm must be given the value its rule states"
        )
    if not 0 < level < 1:
        raise InputError(f"level must lie between 0 and 1, got {level}")
    n, mean, sd = x.size, float(x.mean()), float(x.std(ddof=1))
    error = sd / np.sqrt(n)
    if error > 0:
        t = (mean - margin) / error
        p_above, p_below = float(stats.t.sf(t, n - 1)), float(stats.t.cdf(t, n - 1))
        half = float(stats.t.ppf(0.5 + level / 2, n - 1)) * error
    else:
        p_above, p_below = (0.0, 1.0) if mean > margin else (1.0, 0.0) if mean < margin else (1.0, 1.0)
        half = 0.0
    return Paired(mean, mean - half, mean + half, level, sd, n, margin, p_above, p_below, sign_flip(x), 2.0 ** (1 - n))


def ranked(x: Sequence[float], y: Sequence[float], *, margin: float = 0.0, level: float = 0.95) -> Paired:
    """Spearman's correlation of two columns against ``margin``, in the form of a paired contrast.

    The interval is by Fisher's transformation with standard error sqrt((1 + rho^2/2) / (n - 3)) (Bonett and Wright 2000); ``sd`` is that of
    one item on the transformed scale. ``sign_flip`` is the two-sided p of the permutation test over 20,000 drawn permutations.
    Raises: InputError for fewer than five items, values that are not finite, or a column without spread.
    """
    a, b = (stats.rankdata(np.asarray(column, dtype=np.float64)) for column in (x, y))
    n = a.size
    if n < 5 or b.size != n or not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise InputError(f"a rank correlation needs at least 5 pairs of finite values, got {n}")
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        raise InputError("a rank correlation needs values that differ; all of a column are equal")
    a, b = (a - a.mean()) / a.std(), (b - b.mean()) / b.std()
    rho = float(np.clip(a @ b / n, -1, 1))
    most = 1 - 1e-9
    spread = float(np.sqrt(1 + rho**2 / 2))
    error, z, limit = (
        spread / np.sqrt(n - 3),
        np.arctanh(np.clip(rho, -most, most)),
        np.arctanh(np.clip(margin, -most, most)),
    )
    half = float(stats.norm.ppf(0.5 + level / 2)) * error
    drawn = np.random.default_rng(0).permuted(np.broadcast_to(b, (20_000, n)), axis=1) @ a / n
    p = float((1 + np.sum(np.abs(drawn) >= abs(rho) - 1e-12)) / 20_001)
    above, below = float(stats.norm.sf((z - limit) / error)), float(stats.norm.cdf((z - limit) / error))
    return Paired(
        rho, float(np.tanh(z - half)), float(np.tanh(z + half)), level, spread, n, margin, above, below, p, 1 / 20_001
    )


def levels(decisive: Sequence[float], *, alpha: float, method: str) -> list[tuple[float, bool]]:
    """The error rate that each hypothesis may use, and whether it may be decided, under a correction for several hypotheses.

    decisive: two-sided p of each hypothesis. method: ``holm`` (step-down; Holm 1979), ``bonferroni`` or ``none``.
    Returns (rate, open) in the order given: a hypothesis is decided when it is open and its interval at 1 - rate excludes the margin.
    """
    m = len(decisive)
    if method == "none":
        return [(alpha, True)] * m
    if method == "bonferroni":
        return [(alpha / m, True)] * m
    if method != "holm":
        raise InputError(f"multiplicity must be holm, bonferroni or none, got {method!r}")
    result: list[tuple[float, bool]] = [(alpha / m, False)] * m
    still = True
    for rank, index in enumerate(sorted(range(m), key=lambda i: decisive[i])):
        rate = alpha / (m - rank)
        result[index] = (rate, still)
        still = still and decisive[index] <= rate
    return result
