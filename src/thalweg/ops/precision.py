"""Float32 islands: coefficients and reductions stay wide under mixed precision."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """``x`` in float32, or unchanged when it is float32 or float64 already."""
    return x.to(wide_dtype(x.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What :func:`wide` would make of it: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def full_precision(x: Tensor) -> torch.autocast:
    """A region without autocast on the device of ``x``: matrix products inside keep the dtype of their operands."""
    return torch.autocast(device_type=x.device.type, enabled=False)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A region in which floating-point tensors are made in ``dtype`` where nobody says otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
