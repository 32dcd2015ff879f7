"""Paired statistics of studies: interval with a margin, exact sign-flip test, step-down correction. Pure numpy and scipy."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from thalweg.errors import InputError


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


def sign_flip(
    values: Sequence[float] | np.ndarray, *, most_exact: int = 16, draws: int = 20_000, seed: int = 0
) -> float:
    """Two-sided p of the sign-flip test of "the values are symmetric about zero".

    Exact over all 2^n sign patterns up to ``most_exact`` values, else ``draws`` random ones (with the observed pattern counted).
    Source: Fisher 1935, The Design of Experiments, section 21.
    """
    x = np.asarray(values, dtype=np.float64)
    observed = abs(x.sum())
    tolerance = 1e-12 * np.abs(x).sum()
    if x.size <= most_exact:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=x.size)))
        return float(np.mean(np.abs(signs @ x) >= observed - tolerance))
    flips = np.random.default_rng(seed).choice((1.0, -1.0), size=(draws, x.size))
    return float((1 + np.sum(np.abs(flips @ x) >= observed - tolerance)) / (draws + 1))


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
