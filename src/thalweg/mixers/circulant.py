"""Circulant: a softmax over the cyclic shifts of the streams."""

from dataclasses import dataclass

import torch

from thalweg.errors import InputError
from thalweg.mixers import register
from thalweg.mixers.base import Claims, Mixer, MixerFacts, MixerOptions
from thalweg.ops.precision import wide
from thalweg.registry import REFERENCE


@dataclass(frozen=True)
class CirculantOptions(MixerOptions):
    """share: weight of the softmax, in (0, 1]; what is left stays with the identity. The authors' code takes 2 / number of sublayers."""

    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"share must lie in (0, 1], got {self.share}")


@register(
    "circulant",
    summary="softmax over the n cyclic shifts: doubly stochastic to rounding with n logits",
    source="C-mHC, from the author's code (contactsebi/circulant-hyper-connections)",
    aliases=("c_mhc",),
)
class Circulant(Mixer):
    """A convex combination of cyclic shifts.

    Shapes: logits [... n], one per shift -> mix [... to from]; shift k lets stream i receive stream i + k (mod n).
    Source: C-mHC, reconstructed from the author's code; not reviewed.
    """

    Options = CirculantOptions
    options: CirculantOptions
    facts = MixerFacts(
        source="C-mHC, unreviewed; reconstructed from the author's code (contactsebi/circulant-hyper-connections, 69d54a99)",
        equation="a = (1 - share) e_0 + share softmax(z);  M[i, j] = a[(j - i) mod n]",
        words="Each of n logits [n] weighs one cyclic shift [n n] of the streams; all streams are treated alike.",
        coverage="circulant doubly stochastic matrices, n - 1 dimensions; they commute, so a product over depth is circulant too",
        cost="n logits; n exponentials and one gather of n^2",
        start="logits 3 for the shift by 0, -3 for the others: the very matrix at which Sinkhorn starts, diagonal 0.9926, off-diagonal "
        "0.0025 at n = 4; largest derivative 0.0073 for the shift by 0, 0.0025 for another; within 0.05 of the identity up to n = 22",
        chosen=("logits start at 3 and -3 (the code: 0, with share = 2 / number of sublayers)", "share = 1"),
        verified=(REFERENCE,),
    )

    @property
    def claims(self):
        near = self.options.share * (self.streams - 1) <= 0.05 * (self.streams - 1 + 403.4)  # exp(6) = 403.4
        return Claims("exact", "exact", nonnegative=True, spectral=True, identity=near, moves=self.streams > 1)

    @property
    def generators(self):
        return self.streams

    def start(self):
        return torch.where(torch.arange(self.streams) == 0, 3.0, -3.0)

    def forward(self, logits):
        self.check(logits)
        n, share = self.streams, self.options.share
        weights = torch.softmax(wide(logits), -1)
        if share < 1:
            weights = share * weights + (1 - share) * torch.eye(1, n, device=weights.device, dtype=weights.dtype)[0]
        # row i is the weights rolled by i: stacked slices, whose gradients are sums; an index would scatter
        twice = torch.cat([weights, weights], -1)
        return torch.stack([twice[..., n - i : 2 * n - i] for i in range(n)], -2)

    def reference(self, logits):
        n, share = self.streams, self.options.share
        total = sum(torch.exp(z) for z in logits)
        a = [share * torch.exp(logits[k]) / total + (1 - share if k == 0 else 0.0) for k in range(n)]
        return torch.stack([torch.stack([a[(j - i) % n] for j in range(n)]) for i in range(n)])

    @classmethod
    def variants(cls):
        return [{"share": 0.25}]
