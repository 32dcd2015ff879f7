"""Orthostochastic: squared blocks of a rotation, which are doubly stochastic exactly."""

from dataclasses import dataclass
from typing import Literal

import torch

from thalweg.errors import InputError
from thalweg.mixers import register
from thalweg.mixers._loops import cayley_loops, skew_loops, stacked
from thalweg.mixers.base import Claims, Mixer, MixerFacts, MixerOptions
from thalweg.ops.cayley import cayley, skew, upper
from thalweg.ops.precision import wide
from thalweg.registry import REFERENCE

LARGEST = 48
INSIDE, APART = (
    0.5,
    0.1,
)  # skew entries at the start: between the copies of one stream; between two streams, before scaling


@dataclass(frozen=True)
class OrthostochasticOptions(MixerOptions):
    """s: size of the block that makes one entry; 1 gives orthostochastic matrices, larger ones come closer to the whole Birkhoff polytope.
    start: ``offset`` leaves the identity by 0.04; ``zeros`` is the published one, exactly the identity, where every derivative is zero.
    """

    s: int = 2
    start: Literal["offset", "zeros"] = "offset"

    def __post_init__(self) -> None:
        if self.s < 1:
            raise InputError(f"s, the size of a block, must be at least 1, got {self.s}")


@register(
    "orthostochastic",
    summary="mean squares of the s x s blocks of a rotation: both marginals exact for every logit, without iterations",
    source="Dandachi and Diggs-Galligan 2026, go-mHC (arXiv 2604.02309)",
    aliases=("go_mhc",),
)
class Orthostochastic(Mixer):
    """Generalised orthostochastic matrices: M_ij = |Q_ij|_F^2 / s for the s x s blocks of a rotation Q of n s axes.

    Shapes: logits [... ns(ns-1)/2], the upper triangle of A row by row, axes i s ... i s + s - 1 being stream i -> mix [... to from].
    Source: go-mHC, arXiv 2604.02309 (by the research note; the published code lacks the module that holds it).
    Deviation: the start. At A = 0 the matrix is quadratic in every generator, so the published start has no gradient but zeros.
    """

    Options = OrthostochasticOptions
    options: OrthostochasticOptions
    facts = MixerFacts(
        source="Dandachi and Diggs-Galligan 2026, go-mHC, arXiv 2604.02309: Cayley transform, block Frobenius norms (by a note; the authors' "
        "code, itstorque/go-mHC, lacks the module)",
        equation="A = skew(z) [ns ns];  Q = (I - A)(I + A)^-1;  M_ij = |Q_ij|_F^2 / s, Q_ij the s x s blocks",
        words="One logit per pair of ns axes fills a skew matrix [ns ns]; its Cayley transform is a rotation; the squares of each s x s block, "
        "summed and divided by s, are one entry [n n].",
        coverage="the s-orthostochastic matrices: for s = 1 a part of the Birkhoff polytope whose boundary is curved, filling it as s grows; "
        "at n = 2 all of it for every s",
        cost="ns(ns-1)/2 logits (n = 4: 6, 28, 66 for s = 1, 2, 3); one linear system of size ns a token, about 3 (ns)^3 operations in float64",
        start="n = 4, s = 2: diagonal 0.962, off-diagonal 0.009 to 0.017; over the matrix the derivative has norm 0.23 to 0.25 for a logit "
        "between two streams (entries to 0.14) and 0.042 for one inside a block; start = zeros: the identity, all derivatives zero",
        chosen=(
            "the layout of the logits: upper triangle, row by row",
            "start = offset: skew entries of 0.125 / sqrt((n - 1) s) between streams (s = 1: 0.1 / sqrt(n - 1))",
            "start = offset: 0.5 inside a block; alone it changes nothing, but at zero the derivatives by these would be ten times smaller",
        ),
        deviations=(
            "start = offset instead of zeros, where no logit has a gradient",
            "solved in float64: the condition number of I + A grows with the logits, and the sums must not",
        ),
        verified=(REFERENCE,),
        bibtex="@article{dandachi2026gomhc, title={go-mHC: Direct Parameterization of Manifold-Constrained Hyper-Connections via Generalized "
        "Orthostochastic Matrices}, author={Dandachi, Torque and Diggs-Galligan, Sophia}, journal={arXiv:2604.02309}, year={2026}}",
    )

    @classmethod
    def supports(cls, streams: int, options: OrthostochasticOptions):
        size = streams * options.s
        if size > LARGEST:
            return (
                f"a system of {size} x {size} would be solved for every token, from {size * (size - 1) // 2} logits; streams x s must be at "
                f"most {LARGEST}"
            )
        return None

    @property
    def claims(self):
        return Claims(
            rows="exact",
            columns="exact",
            nonnegative=True,
            spectral=True,
            orthogonal=self.streams == 1,
            equivariant=True,
            moves=self.streams > 1 and self.options.start == "offset",
            reaches="birkhoff" if self.streams <= 2 else "own",
        )

    @property
    def size(self) -> int:
        """Axes of the rotation, n s."""
        return self.streams * self.options.s

    @property
    def generators(self):
        return self.size * (self.size - 1) // 2

    def start(self):
        if self.options.start == "zeros":
            return torch.zeros(self.generators)
        s = self.options.s
        inside = INSIDE if s > 1 else 0.0
        apart = APART * (1 + inside**2) / (max(self.streams - 1, 1) * s) ** 0.5
        stream = [axis // s for axis in range(self.size)]
        pairs = [(i, j) for i in range(self.size) for j in range(i + 1, self.size)]
        return torch.tensor([inside if stream[i] == stream[j] else apart for i, j in pairs])

    def permute(self, logits, order):
        axes = [stream * self.options.s + copy for stream in order for copy in range(self.options.s)]
        return upper(skew(logits, self.size)[axes][:, axes])

    def forward(self, logits):
        self.check(logits)
        z, s = wide(logits), self.options.s
        blocks = cayley(skew(z, self.size)).unflatten(-2, (self.streams, s)).unflatten(-1, (self.streams, s))
        return (blocks.square().sum((-3, -1)) / s).to(z.dtype)

    def reference(self, logits):
        n, s = self.streams, self.options.s
        q = cayley_loops(skew_loops(list(logits), self.size, logits.new_zeros(())))
        return stacked(
            [
                [
                    sum((q[i * s + a][j * s + b] ** 2 for b in range(s) for a in range(s)), logits.new_zeros(())) / s
                    for j in range(n)
                ]
                for i in range(n)
            ]
        )

    @classmethod
    def variants(cls):
        return [{"s": 1}, {"s": 3}, {"start": "zeros"}]
