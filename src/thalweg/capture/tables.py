"""Sums over tokens of many quantities at once: mean, spread, quantiles, and intervals over the units that the tokens come from."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from thalweg.capture.histogram import Bins
from thalweg.geometry.catalog import Null
from thalweg.records import Measurements
from thalweg.statistics import ratio_intervals

QUANTILES = (0.1, 0.5, 0.9)
LEVEL = 0.95


class Units(NamedTuple):
    """What intervals are taken over: ``count`` groups of tokens (``documents``, ``windows`` ...)."""

    count: int
    name: str


class Spread(NamedTuple):
    """sd over tokens, and their p10, p50, p90."""

    sd: float
    low: float
    middle: float
    high: float


class Table:
    """Columns of numbers, one number a token: summed in float64, by unit; some of them binned too.

    Memory: (columns + 1) * units + binned * bins numbers of 8 bytes, whatever the number of tokens.
    """

    def __init__(self, columns: Mapping[str, Bins | None], units: Units):
        self.columns, self.units = tuple(columns), units
        self.bins = [(i, bins) for i, bins in enumerate(columns.values()) if bins is not None]
        size = sum(bins.count for _, bins in self.bins)
        self.starts = np.cumsum([0, *(bins.count for _, bins in self.bins)])[:-1].tolist()
        self.sums = torch.zeros(units.count, len(columns), dtype=torch.float64)
        self.squares = torch.zeros(len(columns), dtype=torch.float64)
        self.counts = torch.zeros(units.count, dtype=torch.float64)
        self.histogram = torch.zeros(size, dtype=torch.int64)

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in (self.sums, self.squares, self.counts, self.histogram))

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    def add(self, values: Float[Tensor, "columns n"], unit: Int[Tensor, " n"]) -> None:
        """Count n tokens of the given units."""
        if self.sums.device != values.device:
            for name in ("sums", "squares", "counts", "histogram"):
                setattr(self, name, getattr(self, name).to(values.device))
        wide = values.double()
        self.sums.index_add_(0, unit, wide.T)
        self.squares += wide.square().sum(1)
        self.counts.index_add_(0, unit, torch.ones_like(unit, dtype=torch.float64))
        if self.bins:
            places = [bins.place(values[i]) + start for (i, bins), start in zip(self.bins, self.starts, strict=True)]
            self.histogram += torch.bincount(torch.cat(places), minlength=len(self.histogram))

    def total(self, column: str) -> np.ndarray:
        """The sums of a column by unit."""
        return self.sums[:, self.columns.index(column)].cpu().numpy()

    def spread(self, column: str) -> Spread | None:
        """None for a column without bins."""
        index = self.columns.index(column)
        for (i, bins), start in zip(self.bins, self.starts, strict=True):
            if i == index:
                here = self.histogram[start : start + bins.count].cpu()
                n, total = self.tokens, float(self.sums[:, i].sum())
                square = float(self.squares[i])
                variance = (square - total * total / n) / (n - 1) if n > 1 else math.nan
                sd = math.nan if math.isnan(variance) else math.sqrt(max(variance, 0.0))
                return Spread(sd, *(bins.quantile(here, q) for q in QUANTILES))
        return None


class Entry(NamedTuple):
    """One measure of a table: the root, if ``root``, of (sum of ``top``) / (sum of ``bottom``, or of tokens) over ``divisor``."""

    name: str
    top: str
    bottom: str | None = None
    root: bool = False
    divisor: float = 1.0
    null: Null | None = None
    unit: str = ""
    fields: Mapping[str, Any] | None = None
    spread: str = ""  # the column whose quantiles stand beside; "" for ``top``


def add_rows(rows: Measurements, table: Table, entries: Sequence[Entry], fields: Mapping[str, Any]) -> None:
    """For every entry its mean with an interval over units; and where it is binned, ``.sd`` and ``.median`` over tokens.

    The row of the mean counts units in ``n``, the others tokens; low and high of ``.median`` are p10 and p90.
    """
    if not entries or not table.tokens:
        return
    top = np.stack([table.total(entry.top) for entry in entries], 1)
    counts = table.counts.cpu().numpy()
    bottom = np.stack([counts if entry.bottom is None else table.total(entry.bottom) for entry in entries], 1)
    low, high = ratio_intervals(top, bottom, level=LEVEL)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = top.sum(0) / bottom.sum(0)
    seen, tokens = int((counts > 0).sum()), table.tokens
    words = f"{LEVEL:.0%} percentile bootstrap over {seen} {table.units.name} of {tokens} tokens"
    for i, entry in enumerate(entries):
        where = {**fields, **(entry.fields or {}), "unit": entry.unit}
        null = {} if entry.null is None else {"null": entry.null.value, "null_kind": entry.null.kind}
        ends = (
            {"low": _end(low[i], entry), "high": _end(high[i], entry), "interval": words} if np.isfinite(low[i]) else {}
        )
        rows.add(entry.name, _end(value[i], entry), n=seen, **ends, **null, **where)
        spread = table.spread(entry.spread or entry.top)
        if spread is not None:
            rows.add(f"{entry.name}.sd", spread.sd, n=tokens, **where)
            ends = {"low": spread.low, "high": spread.high, "interval": "p10 to p90 over tokens"}
            rows.add(f"{entry.name}.median", spread.middle, n=tokens, **ends, **null, **where)


def _end(value: float, entry: Entry) -> float:
    value = float(value) / entry.divisor
    return math.sqrt(value) if entry.root and value >= 0 else value
