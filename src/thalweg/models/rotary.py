"""Rotary positions (Su et al. 2021, arXiv 2104.09864, Eq. 34), with the two halves of a head as the pairs (the convention of Llama)."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from thalweg.errors import InputError, UnknownNameError
from thalweg.ops.precision import wide_dtype

Rule = Literal["linear", "llama3"]


@dataclass(frozen=True)
class RotaryScaling:
    """A rule that slows the rotary angles down, for sequences longer than those a model was trained on.

    kind: ``linear`` divides every angle by ``factor`` (Chen et al. 2023, arXiv 2306.15595); ``llama3`` does so where a full turn takes more
    than ``original_length / low_factor`` tokens, leaves those alone that turn in fewer than ``original_length / high_factor``, and goes
    linearly in the number of turns between the two (as released with Llama 3.1; transformers is the reference). original_length: tokens of
    the first training.

    Raises: UnknownNameError for another kind; InputError for values that are not allowed.
    """

    kind: Rule
    factor: float
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in get_args(Rule):
            raise UnknownNameError("kind of rotary_scaling", self.kind, get_args(Rule))
        if not 1 <= self.factor < math.inf:
            raise InputError(f"the factor of rotary_scaling must be at least 1, got {self.factor}")
        if not 0 < self.low_factor < self.high_factor < math.inf or self.original_length < 1:
            raise InputError(
                "rotary_scaling needs 0 < low_factor < high_factor and a positive original_length, got "
                f"{self.low_factor}, {self.high_factor} and {self.original_length}"
            )

    def __call__(self, frequencies: Float[Tensor, " half"]) -> Float[Tensor, " half"]:
        """Angles of one step of position, slowed down."""
        slow = frequencies / self.factor
        if self.kind == "linear":
            return slow
        turns = self.original_length * frequencies / (2 * math.pi)  # over the first training length
        share = ((turns - self.low_factor) / (self.high_factor - self.low_factor)).clamp(0, 1)
        return (1 - share) * slow + share * frequencies


def angles(
    positions: Int[Tensor, "b t"],
    width: int,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    scaling: RotaryScaling | None = None,
) -> tuple[Float[Tensor, "b t half"], Float[Tensor, "b t half"]]:
    """Cosine and sine of position / base^(2i/width) for i < width / 2, in float32, or float64 for a float64 model.

    Computed anew in every call: a table would be a buffer to shard, cast and load, for microseconds. The order of operations is that of
    transformers, so that angles at far positions round alike.
    """
    dtype = wide_dtype(dtype)
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=dtype) / width
    frequencies = 1.0 / base**exponents
    if scaling is not None:
        frequencies = scaling(frequencies)
    phase = positions.to(dtype)[..., None] * frequencies
    return phase.cos(), phase.sin()


def rotate(
    x: Float[Tensor, "b h t w"], cos: Float[Tensor, "b t half"], sin: Float[Tensor, "b t half"]
) -> Float[Tensor, "b h t w"]:
    """Turn the pairs (x[i], x[i + w/2]) of every head; the product runs in the dtype of the angles, the result has that of ``x``."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
