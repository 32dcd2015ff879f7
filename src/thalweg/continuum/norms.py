"""The RMSNorms of a model, told by what they do and not by what they are called: their gain and the epsilon that acts.

LayerNorm fails the test (it takes the mean away), so does a norm that a second argument gates.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.capture.evaluating import evaluating
from thalweg.capture.layout import Located

SAID = ("variance_epsilon", "eps", "epsilon")
AGREE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of two estimates of the gain, relative to the largest; else HALF
HALF = 3e-2
TINY = 1e-8  # size of the input at which epsilon decides
TINY_HALF = 1e-3  # float16 has nothing smaller with digits
_SITE = re.compile(r"(?:^|\.)sites\.(\d+)\.")


@dataclass(frozen=True)
class RootMeanSquareNorm:
    """One RMSNorm: y = gain x / sqrt(mean x^2 + epsilon).

    name: dotted module. layer: None of one that stands outside the layers. part: which norm of its layer (last part of the name). gain [width],
    float64, as it acts (Gemma's is one more than its weight). epsilon: that acts; said: that the module states, or None.
    """

    name: str
    module: nn.Module
    layer: int | None
    part: str
    gain: Tensor
    epsilon: float
    said: float | None
    dtype: torch.dtype

    @property
    def largest_gain(self) -> float:
        return float(self.gain.abs().max())


def norms_of(located: Located) -> list[RootMeanSquareNorm]:
    """Every RMSNorm of a model, in the order of its modules."""
    with evaluating(located.model):
        return list(_found(located))


def _found(located: Located) -> Iterator[RootMeanSquareNorm]:
    for name, module in located.model.named_modules():
        said = [getattr(module, key) for key in SAID if isinstance(getattr(module, key, None), float)]
        looks = bool(said) or isinstance(module, nn.RMSNorm)
        if not looks or any(p.ndim != 1 for p in module.parameters()) or next(module.children(), None) is not None:
            continue
        weight = next(module.parameters(), None)
        width = len(weight) if weight is not None else int(getattr(module, "width", located.width))
        first = next(located.model.parameters())
        dtype, device = (first if weight is None else weight).dtype, (first if weight is None else weight).device
        acts = _acts(module, width, dtype, device, said[0] if said else 0.0)
        if acts is not None:
            layer, part = _where(located, name)
            yield RootMeanSquareNorm(name, module, layer, part, *acts, said[0] if said else None, dtype)


def _acts(
    module: Any, width: int, dtype: torch.dtype, device: torch.device, said: float
) -> tuple[Tensor, float] | None:
    """Gain and epsilon by what the module does to three vectors; None where it is no RMSNorm."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 1, width, generator=generator, dtype=torch.float64) + 0.5
    x = torch.where(x.abs() < 0.1, 0.5, x).to(dtype).double()  # nothing near zero: it is divided by
    tiny = TINY_HALF if dtype == torch.float16 else TINY
    try:
        y = module(x.to(device, dtype)).double().cpu()
        small = (x * tiny).to(dtype)
        z = module(small.to(device)).double().cpu()
    except Exception:  # a norm that takes more than a vector is not looked at
        return None
    if y.shape != x.shape or not bool(torch.isfinite(y).all()):
        return None
    gains = (y / x * (x.square().mean(-1, keepdim=True) + said).sqrt())[:, 0]
    gain = gains.mean(0)
    size = float(gain.abs().max())
    if size == 0 or float((gains - gain).abs().max()) > AGREE.get(dtype, HALF) * size:
        return None
    small, strong = small.double(), (gain.abs() > 0.1 * size).expand_as(z)
    squares = (gain * small / z).square()[strong] - small.square().mean(-1, keepdim=True).expand_as(z)[strong]
    return gain, max(float(squares.median()), 0.0)


def _where(located: Located, name: str) -> tuple[int | None, str]:
    part = name.rpartition(".")[2]
    for layer, block in enumerate(located.blocks):
        if name.startswith(f"{block}."):
            return layer, part
    site = _SITE.search(name)
    if site is not None and int(site[1]) < len(located.sites):
        place = located.sites[int(site[1])]
        return place.layer, f"{place.kind} {part}"
    return None, part
