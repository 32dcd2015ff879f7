"""Permutations: a softmax over all n! permutation matrices."""

import itertools
import math

import torch

from thalweg.mixers import register
from thalweg.mixers.base import Claims, Mixer, MixerFacts
from thalweg.ops.permutations import MOST, blend, refusal
from thalweg.ops.precision import wide
from thalweg.registry import REFERENCE


@register(
    "permutation",
    summary="softmax over all n! permutation matrices: doubly stochastic to rounding, up to 5 streams",
    source="Yang & Gao 2026, mHC-lite (arXiv 2601.05732), from the authors' code",
    aliases=("mhc_lite",),
)
class Permutation(Mixer):
    """A convex combination of all permutation matrices.

    Shapes: logits [... n!], one per permutation p in the order of itertools -> mix [... to from], where p lets stream ``to`` receive p(to).
    Source: mHC-lite, arXiv 2601.05732, reconstructed from the authors' code. More than 5 streams are refused.
    """

    facts = MixerFacts(
        source="Yang & Gao 2026, mHC-lite, arXiv 2601.05732; reconstructed from the authors' code (FFTYYY/mhc-lite, ea197752)",
        equation="a = softmax(z);  M = sum_p a_p P_p over all n! permutations,  P_p[i, p(i)] = 1",
        words="Each of n! logits [n!] weighs one permutation matrix [n n]; the weights sum to one, so rows and columns do.",
        coverage="every doubly stochastic matrix (Birkhoff, von Neumann); those with a zero entry only at infinity",
        cost="n! logits (24 at n = 4, 120 at 5, 720 at 6: refused); n! n^2 multiplications",
        start="logits 0 for the identity, -8 for the others: diagonal 0.9940, off-diagonal 0.0020 at n = 4; each logit's largest "
        "derivative is between 0.00033 and 0.0060",
        deviations=(
            "the code applies the transpose, where p sends stream p's index to its value; the logits of p and its inverse change places",
        ),
        verified=(REFERENCE,),
        bibtex="@article{yang2026mhclite, title={mHC-lite: You Don't Need 20 Sinkhorn-Knopp Iterations}, author={Yang, Yongyi and Gao, "
        "Jianyang}, journal={arXiv:2601.05732}, year={2026}}",
    )

    @classmethod
    def supports(cls, streams, options):
        return None if streams <= MOST else refusal(streams)

    @property
    def claims(self):
        return Claims(
            "exact",
            "exact",
            nonnegative=True,
            spectral=True,
            equivariant=True,
            moves=self.streams > 1,
            reaches="birkhoff",
        )

    @property
    def generators(self):
        return math.factorial(self.streams)

    def start(self):
        return torch.where(torch.arange(self.generators) == 0, 0.0, -8.0)

    def forward(self, logits):
        self.check(logits)
        return blend(wide(logits), self.streams)

    def reference(self, logits):
        n = self.streams
        m = [[logits.new_zeros(()) for _ in range(n)] for _ in range(n)]
        total = sum(torch.exp(z) for z in logits)
        for z, p in zip(logits, itertools.permutations(range(n)), strict=True):
            for i in range(n):
                m[i][p[i]] = m[i][p[i]] + torch.exp(z) / total
        return torch.stack([torch.stack(row) for row in m])

    def permute(self, logits, order):
        orders = list(itertools.permutations(range(self.streams)))
        # result[i, j] = mix[order[i], order[j]]: where p takes order[i] to order[j], the renamed permutation takes i to j
        source = {tuple(order.index(p[order[i]]) for i in range(self.streams)): k for k, p in enumerate(orders)}
        return logits[..., [source[q] for q in orders]]
