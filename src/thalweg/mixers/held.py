"""Held: a constant matrix whose differences between streams shrink by a chosen factor."""

from dataclasses import dataclass

import torch

from thalweg.errors import InputError
from thalweg.mixers import register
from thalweg.mixers.base import Claims, ConstantMixer, MixerFacts, MixerOptions
from thalweg.registry import REFERENCE


@dataclass(frozen=True)
class HeldOptions(MixerOptions):
    """sigma_2: the factor by which differences between streams shrink at every site: 1 keeps them (identity), 0 erases them (uniform)."""

    sigma_2: float = 0.98

    def __post_init__(self) -> None:
        if not 0 <= self.sigma_2 <= 1:
            raise InputError(f"sigma_2 must lie in [0, 1], got {self.sigma_2}")


@register(
    "held",
    summary="constant: sigma_2 I + (1 - sigma_2) J, every difference between streams shrinks by the same chosen factor",
    source="control: the segment between the identity and the centre of the Birkhoff polytope",
)
class Held(ConstantMixer):
    """sigma_2 I + (1 - sigma_2) 1 1^T / n at every token: the memory of the streams, held at a value instead of learned.

    Shapes: logits [... 0] -> mix [... to from]. Source: control; what is varied is the quantity that Li, Sha and Yang (arXiv 2610.06653)
    find to decide how long a stream remembers.
    """

    Options = HeldOptions
    options: HeldOptions
    facts = MixerFacts(
        source="control; the contraction of the difference channel after Li, Sha, Yang 2026, arXiv 2610.06653",
        equation="M = sigma_2 I + (1 - sigma_2) 1 1^T / n",
        words="Every stream [d] moves towards the mean of all n; what it holds beyond the mean is multiplied by sigma_2.",
        coverage="one point on the segment from the identity to the uniform matrix",
        cost="no logits, no arithmetic",
        start="the constant itself: at 0.98 and n = 4 diagonal 0.985, off-diagonal 0.005; nothing is learned",
        chosen=("sigma_2 0.98: differences last about 50 sites",),
        verified=(REFERENCE,),
    )

    @property
    def claims(self):
        sigma = 1.0 if self.streams == 1 else self.options.sigma_2
        return Claims("exact", "exact", nonnegative=True, spectral=True, orthogonal=sigma == 1, equivariant=True,
                      identity=(1 - sigma) * (1 - 1 / self.streams) <= 0.05, moves=False)  # fmt: skip

    def matrix(self):
        n, sigma = self.streams, self.options.sigma_2
        return sigma * torch.eye(n, dtype=torch.float64) + (1 - sigma) / n

    def reference(self, logits):
        n, sigma = self.streams, self.options.sigma_2
        rows = [[sigma * (i == j) + (1 - sigma) / n for j in range(n)] for i in range(n)]
        return torch.stack([torch.stack([logits.new_tensor(value) for value in row]) for row in rows])

    @classmethod
    def variants(cls):
        return [{"sigma_2": 0.5}, {"sigma_2": 0.0}]
