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
# of two estimates of the gain, relative to the largest; in float64 too norms of transformers take the mean square in float32; else HALF
AGREE = {torch.float64: 1e-5, torch.float32: 1e-4}
HALF = 3e-2
SAME = 0.05  # of an epsilon that is stated: up to this far from it another one is the same
TINY = 1e-8  # size of the input at which epsilon decides
TINY_HALF = 1e-3  # float16 has nothing smaller with digits
ZERO = "give zero for every vector, as their gain is zero"
BROKEN = "give numbers that are not finite"
OTHER = "take the mean away or do nothing"
UNSEEN = "were not looked at: they state no epsilon, hold more than a gain, or take more than a vector"
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
    """Every RMSNorm of a model whose gain is not zero, in the order of its modules."""
    return [found for _, found in _judged(located) if isinstance(found, RootMeanSquareNorm)]


def refused_of(located: Located) -> dict[str, list[str]]:
    """The other norms: what they do (``ZERO``, ``BROKEN``, ``OTHER``, ``UNSEEN``) -> their dotted names."""
    refused: dict[str, list[str]] = {}
    for name, found in _judged(located):
        if isinstance(found, str):
            refused.setdefault(found, []).append(name)
    return refused


def _judged(located: Located) -> Iterator[tuple[str, RootMeanSquareNorm | str]]:
    with evaluating(located.model):
        for name, module in located.model.named_modules():
            stated = (getattr(module, key, None) for key in SAID)
            said = next((value for value in stated if isinstance(value, float)), None)
            looks = said is not None or isinstance(module, nn.RMSNorm)
            if not looks or any(p.ndim != 1 for p in module.parameters()) or next(module.children(), None) is not None:
                if "norm" in type(module).__name__.lower():
                    yield name, UNSEEN
                continue
            weight = next(module.parameters(), None)
            width = len(weight) if weight is not None else int(getattr(module, "width", located.width))
            first = next(located.model.parameters()) if weight is None else weight
            acts = _acts(module, width, first.dtype, first.device, said)
            if isinstance(acts, str):
                yield name, acts
            else:
                place = _where(located, name)
                yield name, RootMeanSquareNorm(name, module, *place, *acts, said, first.dtype)


def _acts(
    module: Any, width: int, dtype: torch.dtype, device: torch.device, said: float | None
) -> tuple[Tensor, float] | str:
    """Gain and epsilon by what the module does to three vectors, large and small; what it does instead where it is no RMSNorm."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 1, width, generator=generator, dtype=torch.float64) + 0.5
    x = torch.where(x.abs() < 0.1, 0.5, x).to(dtype).double()  # nothing near zero: it is divided by
    small = (x * (TINY_HALF if dtype == torch.float16 else TINY)).to(dtype).double()
    try:
        y, z = (module(given.to(device, dtype)).double().cpu() for given in (x, small))
    except Exception:  # a norm that takes more than a vector is not looked at
        return UNSEEN
    if y.shape != x.shape:
        return UNSEEN
    if not bool(torch.isfinite(y).all() and torch.isfinite(z).all()):
        return BROKEN
    if not bool(y.any() or z.any()):
        return ZERO
    # g^2 = large (ms + epsilon) = little (ms' + epsilon): so the gain asks for no stated epsilon, but takes it where it is the one that acts
    large, little = (y / x).square(), (z / small).square()
    ms, least = (v.square().mean(-1, keepdim=True) for v in (x, small))
    solved = float(((large * ms - little * least) / (little - large))[large > 0.01 * large.max()].median())
    epsilon = said if said is not None and abs(solved - said) <= SAME * said else solved
    gains = (y / x * (ms + epsilon).sqrt())[:, 0]
    gain = gains.mean(0)
    size = float(gain.abs().max())
    if not float((gains - gain).abs().max()) <= AGREE.get(dtype, HALF) * size:
        return OTHER
    strong = (gain.abs() > 0.1 * size).expand_as(z)
    squares = (gain * small / z).square()[strong] - least.expand_as(z)[strong]
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
