"""Bounded: entries between zero and a bound, without marginals."""

from dataclasses import dataclass

import torch

from thalweg.errors import InputError
from thalweg.mixers import register
from thalweg.mixers.base import Claims, MixerFacts, MixerOptions, SquareMixer
from thalweg.ops.precision import wide
from thalweg.registry import REFERENCE

MOST_BOUND = 1e6  # a few sites of more overflow float32


@dataclass(frozen=True)
class BoundedOptions(MixerOptions):
    """bound: largest value of an entry, above 1 so that the identity lies inside."""

    bound: float = 2.0

    def __post_init__(self) -> None:
        if not 1 < self.bound <= MOST_BOUND:
            raise InputError(f"bound must be above 1 and at most {MOST_BOUND:g}, got {self.bound}")


@register(
    "bounded",
    summary="every entry is 2 sigmoid(logit): positive and bounded, near the identity at first, no sums are kept",
    source="control: 2 sigmoid, the map of the write weights of mHC (arXiv 2512.24880) Eq. 8, for every entry",
)
class Bounded(SquareMixer):
    """Positive and bounded without marginals: what the sums add to positivity can be told from it.

    Shapes: logits [... n*n], row by row as [to, from] -> mix [... to from] in (0, bound).
    Source: control; the map is that of H_post in mHC, arXiv 2512.24880, Eq. 8.
    """

    Options = BoundedOptions
    options: BoundedOptions
    facts = MixerFacts(
        source="control: no published scheme; the map is that of H_post in mHC, arXiv 2512.24880, Eq. 8",
        equation="M[i, j] = bound sigmoid(z[i, j])",
        words="One logit per entry [n n], each entry for itself. Nothing holds the sums: the gain of one site may reach n bound, and over "
        "depth the streams may grow or fade.",
        coverage="every matrix with entries in (0, bound)",
        cost="n^2 logits, n^2 exponentials",
        start="the same matrix as Sinkhorn's, diagonal 0.9926, off-diagonal 0.0025 at n = 4, whose sums are one, so that a deep network "
        "starts with gain one; derivatives 0.50 on the diagonal, 0.0025 off it; within 0.05 of the identity up to n = 22",
        chosen=(
            "bound = 2: 1 lies in the middle, where the slope is largest, as for H_post",
            "start at Sinkhorn's matrix: sums above one would raise the gain of a deep product exponentially",
        ),
        verified=(REFERENCE,),
    )

    @property
    def claims(self):
        reaches = "positive" if self.options.bound >= 2 else "own"
        return Claims(nonnegative=True, equivariant=True, identity=self.starts_near, reaches=reaches)

    def start(self):
        n = self.streams
        wanted = torch.softmax(6 * torch.eye(n, dtype=torch.float64) - 3, -1)
        return torch.logit(wanted / self.options.bound).to(torch.get_default_dtype()).flatten()

    def forward(self, logits):
        self.check(logits)
        return self.options.bound * torch.sigmoid(self.square(wide(logits)))

    def reference(self, logits):
        n, bound = self.streams, self.options.bound
        return torch.stack(
            [torch.stack([bound / (1 + torch.exp(-logits[i * n + j])) for j in range(n)]) for i in range(n)]
        )

    @classmethod
    def variants(cls):
        return [{"bound": 1.25}]
