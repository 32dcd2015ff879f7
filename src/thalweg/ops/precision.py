"""Float32 islands: coefficients and reductions stay wide under mixed precision."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """``x`` in float32, or unchanged when it is float32 or float64 already."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def full_precision(x: Tensor) -> torch.autocast:
    """A region without autocast on the device of ``x``: matrix products inside keep the dtype of their operands."""
    return torch.autocast(device_type=x.device.type, enabled=False)
