"""Quantiles of a stream of numbers in bounded memory: histograms over fixed bins.

A bin of a bounded measure is 1/2048 of its range wide. Unbounded ones are binned by asinh(x / 1e-4): beyond 1e-3 a bin is 2.8 % of the value
wide, so an interpolated quantile is off by less than that; below 1e-4 bins are 2.7e-6 wide. What lies beyond 1e8 counts at 1e8.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

BINS = 2048
SMALLEST, LARGEST = 1e-4, 1e8


@dataclass(frozen=True)
class Bins:
    """``count`` bins from ``low`` to ``high``, of equal width in x, or in asinh(x / 1e-4) where ``wide``."""

    low: float
    high: float
    wide: bool = False
    count: int = BINS

    def place(self, values: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
        """The bin of every value; beyond the ends the last one. NaN counts in the middle (its mean is NaN and says so)."""
        low, high, x = self._ends(values)
        at = (x - low) * (self.count / (high - low))
        return torch.nan_to_num(at, nan=self.count / 2).clamp_(0, self.count - 1).long()

    def quantile(self, histogram: Int[Tensor, " bins"], q: float) -> float:
        """The value below which a share ``q`` lies, interpolated within its bin; NaN of an empty histogram."""
        below = histogram.cumsum(0)
        total = int(below[-1])
        if not total:
            return math.nan
        place = int(torch.searchsorted(below, q * total, right=False))
        inside = (q * total - int(below[place]) + int(histogram[place])) / max(int(histogram[place]), 1)
        low, high = (math.asinh(end / SMALLEST) if self.wide else end for end in (self.low, self.high))
        x = low + (place + min(max(inside, 0.0), 1.0)) * (high - low) / self.count
        return SMALLEST * math.sinh(x) if self.wide else x

    def _ends(self, values: Tensor) -> tuple[float, float, Tensor]:
        if not self.wide:
            return self.low, self.high, values
        low, high = (math.asinh(end / SMALLEST) for end in (self.low, self.high))
        return low, high, torch.asinh(values / SMALLEST)


SIGNED = Bins(-LARGEST, LARGEST, wide=True)
POSITIVE = Bins(0.0, LARGEST, wide=True)
SHARE = Bins(0.0, 1.0)
COSINE = Bins(-1.0, 1.0)
ANGLE = Bins(0.0, 180.0)
