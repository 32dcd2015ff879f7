"""Resampling of paired values: the sign-flip test and bootstrap intervals. Pure numpy and scipy."""

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import stats

from thalweg.errors import InputError

METHODS = ("BCa", "percentile")
RESAMPLES = 9999
SMALLEST = 3  # items; of fewer the resamples say nothing


@dataclass(frozen=True)
class Interval:
    """A two-sided bootstrap interval. method: of :data:`METHODS`; n: the items that were resampled. NaN bounds: too few items."""

    estimate: float
    low: float
    high: float
    level: float
    method: str
    resamples: int
    n: int

    @property
    def words(self) -> str:
        """What a row of measurements says of its interval."""
        return f"{self.level:.0%} {self.method} bootstrap, {self.resamples} resamples of {self.n}"


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


def spearman(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray, *, constant: float = np.nan) -> float:
    """Spearman's rank correlation, ties by their mean rank; ``constant`` where one of the two does not vary or there are fewer than two.

    NaN where a value is NaN. Bit for bit ``scipy.stats.spearmanr``, at a tenth of its time and without its warnings.
    """
    pair = np.array([x, y], dtype=np.float64)
    if np.isnan(pair).any():
        return float("nan")
    ranked = np.column_stack([stats.rankdata(values) for values in pair])
    if pair.shape[1] < 2 or not np.ptp(ranked, axis=0).all():
        return float(constant)
    return float(np.corrcoef(ranked, rowvar=False)[1, 0])


def bootstrap(
    columns: Sequence[np.ndarray],
    statistic: Callable[..., np.ndarray],
    *,
    level: float = 0.95,
    method: str = "BCa",
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The interval of a statistic of *sums* over items, the items resampled with replacement.

    columns: one array [n] each, aligned, so that what belongs to an item stays together; ``statistic(*sums)`` takes their sums as arrays
    of one shape (every resample at once) and returns the statistic in that shape. A ratio, a perplexity or a difference of two is such a
    statistic. method: ``BCa`` (bias-corrected and accelerated; Efron 1987) or ``percentile``. Where every resample gives one value the
    interval is that value; of fewer than three items there is none (NaN).
    Raises: InputError for columns of different lengths or none, an unknown method or a level outside (0, 1).
    """
    data = [np.asarray(column, dtype=np.float64) for column in columns]
    sizes = {column.shape for column in data}
    if len(sizes) != 1 or data[0].ndim != 1 or data[0].size < 1:
        raise InputError(f"a bootstrap needs columns of one length of at least 1, got {sorted(sizes)}")
    if method not in METHODS:
        raise InputError(f"the interval must be {' or '.join(METHODS)}, got {method!r}")
    if not 0 < level < 1:
        raise InputError(f"level must lie between 0 and 1, got {level}")

    def of_items(*items: np.ndarray, axis: int = -1) -> np.ndarray:
        return statistic(*(item.sum(axis=axis) for item in items))

    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        estimate, n = float(of_items(*data)), data[0].size
        low = high = float("nan")
        if n >= SMALLEST and np.isfinite(estimate):
            low, high = _interval(data, of_items, level, method, resamples, seed)
    return Interval(estimate, low, high, level, method, resamples, n)


def ratio_intervals(
    top: np.ndarray, bottom: np.ndarray, *, level: float = 0.95, resamples: int = 1999, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile bootstrap intervals of many ratios sum(top) / sum(bottom) over the same items at once.

    Shapes: [items columns] twice -> low and high [columns]. All columns share their resamples; an item without weight in a column
    (bottom 0) takes no part there. NaN where fewer than three items have weight. For a single number :func:`bootstrap` is finer (BCa).
    Source: Efron 1979.
    """
    columns = top.shape[1]
    enough = (bottom != 0).sum(0) >= SMALLEST
    low, high = np.full(columns, np.nan), np.full(columns, np.nan)
    if not enough.any():
        return low, high
    times = _drawn(len(top), resamples, seed)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        drawn = (times @ top[:, enough]) / (times @ bottom[:, enough])
    outside = (1 - level) / 2
    good = np.isfinite(drawn).all(0)
    drawn = np.where(good, drawn, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column of NaN stays one
        low[enough], high[enough] = np.quantile(drawn, [outside, 1 - outside], axis=0)
    return low, high


@lru_cache(maxsize=4)
def _drawn(items: int, resamples: int, seed: int) -> np.ndarray:
    """How often each item is drawn in each resample [resamples items]."""
    return np.random.default_rng(seed).multinomial(items, np.full(items, 1 / items), size=resamples).astype(np.float64)


def _interval(data, of_items, level, method, resamples, seed) -> tuple[float, float]:
    options = {"vectorized": True, "paired": True, "confidence_level": level, "n_resamples": resamples}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # answered below
        warnings.simplefilter("ignore", RuntimeWarning)  # a resample may overflow: then the bound is infinite
        found = stats.bootstrap(
            data,
            of_items,
            method=method,
            rng=np.random.default_rng(seed),
            batch=max(1, 2**21 // len(data[0])),
            **options,
        )
    drawn = found.bootstrap_distribution
    if np.ptp(drawn) == 0:
        return float(drawn[0]), float(drawn[0])
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
