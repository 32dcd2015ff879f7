"""Kronecker: a product of small matrices, each a softmax over its permutations."""

import itertools
import math
from dataclasses import dataclass

import torch

from thalweg.errors import InputError
from thalweg.mixers import register
from thalweg.mixers.base import Claims, Mixer, MixerFacts, MixerOptions
from thalweg.ops.permutations import MOST, blend, refusal
from thalweg.ops.precision import wide
from thalweg.registry import REFERENCE


@dataclass(frozen=True)
class KroneckerOptions(MixerOptions):
    """factors: sizes of the factors, U^1 first, each from 2 to 5, with the number of streams as their product; none: the prime factors."""

    factors: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.factors is not None and any(f < 2 for f in self.factors):
            raise InputError(f"every factor must be at least 2, got {list(self.factors)}")


def prime_factors(n: int) -> tuple[int, ...]:
    """The prime factors of n in rising order; none for 1."""
    found = []
    p = 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p = p + 1 if p * p <= n else n
    return tuple(found)


@register(
    "kronecker",
    summary="Kronecker product of small softmaxes over permutations: doubly stochastic to rounding, few logits",
    source="Zhou et al. 2026, KromHC (arXiv 2601.21579)",
    aliases=("kromhc",),
)
class Kronecker(Mixer):
    """M = U^K (x) ... (x) U^1, each U^k a convex combination of the permutation matrices of its size.

    Shapes: logits [... sum_k i_k!], U^1 first, permutations in the order of itertools -> mix [... to from]. All logits share one scale.
    Source: KromHC, arXiv 2601.21579. A prime factor of n above 5 is refused.
    """

    Options = KroneckerOptions
    options: KroneckerOptions
    facts = MixerFacts(
        source="Zhou, Gu, Iacovides, Mandic 2026, KromHC, arXiv 2601.21579 (text, and code at 7b15834f)",
        equation="n = i_1 ... i_K;  U^k = sum_p softmax(z^k)_p P_p over i_k! permutations;  M = U^K (x) ... (x) U^1",
        words="The streams are the cells of a grid [i_K ... i_1]; along each axis a small doubly stochastic matrix [i_k i_k] mixes them.",
        coverage="products of small doubly stochastic matrices: K dimensions at n = 2^K, and there only symmetric matrices that commute",
        cost="sum_k i_k! logits (4 at n = 4, 6 at 8, 8 at 16); about 2 n^2 multiplications",
        start="logits 0 for the identity, -8 for the others, in every factor: at n = 4 diagonal 0.999329, off-diagonal 0.000335 and, "
        "across both axes, 1.1e-7; each logit's largest derivative is 0.00034",
        chosen=("factors: prime factors in rising order",),
        deviations=(
            "the code multiplies U^1 (x) U^2 ...; the paper's order, taken here, is the same up to a renaming of the streams",
        ),
        verified=(REFERENCE,),
        bibtex="@inproceedings{zhou2026kromhc, title={KromHC: Manifold-Constrained Hyper-Connections with Kronecker-Product Residual "
        "Matrices}, author={Zhou, Wuyang and Gu, Yuxuan and Iacovides, Giorgos and Mandic, Danilo}, booktitle={ICML}, year={2026}}",
    )

    def __init__(self, streams, options):
        super().__init__(streams, options)
        self.factors = self.factors_of(streams, options)

    @staticmethod
    def factors_of(streams: int, options: MixerOptions) -> tuple[int, ...]:
        """The sizes of the factors, U^1 first."""
        given = options.factors if isinstance(options, KroneckerOptions) else None
        return prime_factors(streams) if given is None else given

    @classmethod
    def supports(cls, streams, options):
        factors = cls.factors_of(streams, options)
        if math.prod(factors) != streams:
            return f"its factors {list(factors)} multiply to {math.prod(factors)}"
        large = [f for f in factors if f > MOST]
        return f"its factor {large[-1]} is too large: {refusal(large[-1])}" if large else None

    @property
    def claims(self):
        rest = math.exp(
            -8
        )  # weight of a permutation other than the identity; (i - 1)! - 1 of them keep a given stream in its place
        kept = [(1 + (math.factorial(i - 1) - 1) * rest) / (1 + (math.factorial(i) - 1) * rest) for i in self.factors]
        return Claims(
            rows="exact",
            columns="exact",
            nonnegative=True,
            spectral=True,
            identity=math.prod(kept) >= 0.95,
            moves=self.streams > 1,
            reaches="birkhoff" if len(self.factors) < 2 else "own",
        )

    @property
    def generators(self):
        return sum(math.factorial(i) for i in self.factors)

    def start(self):
        first = [torch.arange(math.factorial(i)) == 0 for i in self.factors]
        return torch.where(torch.cat(first), 0.0, -8.0) if first else torch.zeros(0)

    def forward(self, logits):
        self.check(logits)
        z = wide(logits)
        mix = z.new_ones(*z.shape[:-1], 1, 1)
        for size, part in zip(self.factors, z.split([math.factorial(i) for i in self.factors], -1), strict=True):
            u = blend(part, size)
            mix = (u[..., :, None, :, None] * mix[..., None, :, None, :]).flatten(-4, -3).flatten(-2, -1)
        return mix

    def reference(self, logits):
        factors, at = [], 0
        for size in self.factors:
            orders = list(itertools.permutations(range(size)))
            part = [torch.exp(logits[at + k]) for k in range(len(orders))]
            at += len(orders)
            factors.append(
                [
                    [sum(w for w, p in zip(part, orders, strict=True) if p[i] == j) / sum(part) for j in range(size)]
                    for i in range(size)
                ]
            )
        rows = []
        for to in range(self.streams):
            row = []
            for source in range(self.streams):
                entry, i, j = logits.new_ones(()), to, source
                for size, u in zip(
                    self.factors, factors, strict=True
                ):  # U^1 mixes neighbours: the last digit of the index
                    entry = entry * u[i % size][j % size]
                    i, j = i // size, j // size
                row.append(entry)
            rows.append(torch.stack(row))
        return torch.stack(rows)
