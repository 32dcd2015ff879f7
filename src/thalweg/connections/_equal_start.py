"""Starts of streams side by side at which n copies of one stream stay copies of it, to the last bits that a dtype has."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.mixers import Mixer
from thalweg.ops.precision import default_dtype

SCALES, SHIFTS = 40, 10  # neighbours that are tried
STEP = 8  # between two of them, in rounding errors


def unit_read(streams: int, home_logit: float, eps: float) -> tuple[float, float] | None:
    """Sigmoids of the home stream and of every other one that sum to one over all streams, with ``eps`` added to each.

    The others keep sigmoid(-home_logit) where they come to half of the sum at most, and share that half otherwise. None where there is no
    such pair: one stream alone would need a sigmoid of 1.
    """
    other = min(1 / (1 + math.exp(home_logit)), 0.5 / max(streams - 1, 1))
    own = 1 - (streams - 1) * other - streams * eps
    return (own, other) if 0 < own < 1 else None


def logit(share: float) -> float:
    """What the sigmoid makes ``share`` of."""
    return math.log(share / (1 - share))


@torch.no_grad()
def unit_rows(mixer: Mixer, dtype: torch.dtype) -> Float[Tensor, " generators"]:
    """Logits next to the mixer's own start whose rows sum to one as nearly as numbers of ``dtype`` can.

    At the start itself a row of float32 misses one by up to 1e-7, the same in every layer, so that early updates grow or shrink against
    late ones by a multiple of that. Neighbours differ by less than 5e-5 of a logit and miss by some 3e-9.
    """
    with default_dtype(dtype):  # a start that is not a round number has been rounded to it
        start = mixer.start().double()
    step = STEP * torch.finfo(dtype).eps
    scales, shifts = 1 + step * torch.arange(SCALES).double(), step / 2 * torch.arange(SHIFTS).double()
    tried = (start * scales[:, None, None] + shifts[:, None]).flatten(0, 1).to(dtype)
    miss = (mixer(tried).double().sum(-1) - 1).abs().amax(-1)
    return tried[int(miss.argmin())]
