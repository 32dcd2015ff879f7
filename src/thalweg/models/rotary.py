"""Rotary positions (Su et al. 2021, arXiv 2104.09864, Eq. 34), with the two halves of a head as the pairs (the convention of Llama)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def angles(
    positions: Int[Tensor, "b t"], width: int, base: float = 10000.0, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "b t half"], Float[Tensor, "b t half"]]:
    """Cosine and sine of position * base^(-2i/width) for i < width / 2, in float32, or float64 for a float64 model.

    Computed anew in every call: a table would be a buffer to shard, cast and load, for microseconds.
    """
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=dtype) / width
    phase = positions.to(dtype)[..., None] * base**-exponents
    return phase.cos(), phase.sin()


def rotate(
    x: Float[Tensor, "b h t w"], cos: Float[Tensor, "b t half"], sin: Float[Tensor, "b t half"]
) -> Float[Tensor, "b h t w"]:
    """Turn the pairs (x[i], x[i + w/2]) of every head; the product runs in the dtype of the angles, the result has that of ``x``."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
