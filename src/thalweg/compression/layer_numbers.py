"""Numbers over the layers: means, and whether another number ranks the layers as the total error does."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from thalweg.capture.tables import LEVEL
from thalweg.compression.error_statistics import MEASURES, ErrorTable, PairStatistics, unit_sums
from thalweg.records import Measurements

RESAMPLES = 999
LEAST_LAYERS = 4
LEAST_UNITS = 3
NAMES = tuple(name.removeprefix("error.") for name in MEASURES)
AGREEMENTS = ("pearson", "spearman")


def layer_rows(
    statistics: PairStatistics,
    others: Mapping[str, Mapping[int, tuple[np.ndarray, np.ndarray]]],
    *,
    ends: bool,
    seed: int = 0,
) -> Measurements:
    """Of every branch: means over layers (``error.NAME.MODE`` at the site ``layers``), and Pearson and Spearman of every number with the total
    error over layers (``agreement.KIND.NAME.MODE``), with intervals over resampled units of the text.

    others: more numbers by layer, as sums above and below the line by unit (``weights``, ``kl``). ends: with the first and the last layer.
    """
    rows = Measurements()
    for branch, tables in statistics.by_branch().items():
        first, last = min(layer for layer, _ in tables), max(layer for layer, _ in tables)
        chosen = [(layer, table) for layer, table in tables if ends or layer not in (first, last)]
        if not chosen:
            continue
        layers = [layer for layer, _ in chosen]
        values = {name: drawn([t for _, t in chosen], name, seed) for name in NAMES}
        for name, found in others.items():
            if all(layer in found for layer in layers):
                values[name] = _values([found[layer] for layer in layers], seed)
        where = {"site": "layers", "branch": branch, "n": len(layers), "dtype": statistics.dtype}
        words = "the layers" if ends else "the layers but the first and the last"
        _means(rows, values, statistics.mode, words, where)
        _agreements(rows, values, statistics.mode, words, where)
    return rows


def drawn(tables: Sequence[ErrorTable], name: str, seed: int) -> np.ndarray:
    """A number of every layer [1 + resamples, layers]: as it is, then with the units of the text resampled."""
    top, bottom = unit_sums(tables, name)
    found = _over(top, bottom, seed)
    if name in ("pooled", "sqnr"):
        with np.errstate(divide="ignore"):
            found = np.sqrt(found) if name == "pooled" else -10 * np.log10(found)
    return found


def _values(series: Sequence[tuple[np.ndarray, np.ndarray]], seed: int) -> np.ndarray:
    return _over(np.stack([top for top, _ in series], 1), np.stack([bottom for _, bottom in series], 1), seed)


def _over(top: np.ndarray, bottom: np.ndarray, seed: int) -> np.ndarray:
    units = len(top)
    times = np.ones((1, units))
    if units >= LEAST_UNITS:
        more = np.random.default_rng(seed).multinomial(units, np.full(units, 1 / units), size=RESAMPLES)
        times = np.concatenate([times, more])
    with np.errstate(divide="ignore", invalid="ignore"):
        return (times @ top) / (times @ bottom)


def _means(
    rows: Measurements, values: Mapping[str, np.ndarray], mode: str, words: str, where: Mapping[str, Any]
) -> None:
    for name in NAMES:
        if name == "sqnr":  # infinite for a layer without an error
            continue
        found = values[name].mean(1)
        rows.add(f"error.{name}.{mode}", float(found[0]), **_ends(found, f"mean over {words}"), **where)


def _agreements(
    rows: Measurements, values: Mapping[str, np.ndarray], mode: str, words: str, where: Mapping[str, Any]
) -> None:
    total, n = values["total"], where["n"]
    if n < LEAST_LAYERS or np.ptp(total[0]) == 0:
        return
    chance = {"null": 0.0, "null_kind": f"permuted layers; beyond {1.96 / (n - 1) ** 0.5:.2f} in one of 20"}
    for name, found in values.items():
        if name == "total" or not np.isfinite(found[0]).all() or np.ptp(found[0]) == 0:
            continue
        for kind in AGREEMENTS:
            rho = correlations(total, found, ranks=kind == "spearman")
            ends = _ends(rho, f"over {words}")
            rows.add(f"agreement.{kind}.{name}.{mode}", float(rho[0]), **ends, **chance, **where)


def correlations(x: np.ndarray, y: np.ndarray, *, ranks: bool) -> np.ndarray:
    """Pearson (of ranks: Spearman) of every row of two [rows layers]; NaN where a row does not vary. One row stands for all."""
    x, y = np.broadcast_arrays(x, y) if 1 in (len(x), len(y)) else (x, y)
    if ranks:
        x, y = stats.rankdata(x, axis=1), stats.rankdata(y, axis=1)
    x, y = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (x * y).sum(1) / np.sqrt((x * x).sum(1) * (y * y).sum(1))


def _ends(found: np.ndarray, words: str) -> dict[str, Any]:
    drawn = found[1:][np.isfinite(found[1:])]
    if len(drawn) < RESAMPLES // 2:
        return {"interval": words}
    outside = (1 - LEVEL) / 2
    low, high = np.quantile(drawn, [outside, 1 - outside])
    return {
        "low": float(low),
        "high": float(high),
        "interval": f"{LEVEL:.0%} percentile bootstrap over units of the text, {words}",
    }
