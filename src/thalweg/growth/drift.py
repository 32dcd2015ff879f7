"""How far an event moved what the network computes."""

import math

from torch import Tensor


def drift(before: Tensor, after: Tensor) -> float:
    """Largest change of an output over the largest output (at least 1), in float64; infinite for another shape, NaN where an output is NaN."""
    a, b = before.detach().double(), after.detach().double()
    if a.shape != b.shape:
        return math.inf
    return ((b - a).abs().max() / a.abs().max().clamp(min=1)).item()
