"""Orthogonal: a rotation of the streams, by the Cayley transform of a skew matrix."""

from thalweg.mixers import register
from thalweg.mixers._loops import cayley_loops, skew_loops, stacked
from thalweg.mixers.base import Claims, Mixer, MixerFacts
from thalweg.ops.cayley import cayley, skew, upper
from thalweg.ops.precision import wide
from thalweg.registry import REFERENCE


@register(
    "orthogonal",
    summary="a rotation of the streams: (I - A)(I + A)^-1 with A skew; keeps the norm of what the streams hold",
    source="Sengupta et al. 2026, JPmHC (arXiv 2602.18308); Cayley 1846",
    aliases=("cayley",),
)
class Orthogonal(Mixer):
    """The streams are rotated; sums over streams are not kept.

    Shapes: logits [... n(n-1)/2], the upper triangle of A row by row -> mix [... to from].
    Source: the Cayley mixer of JPmHC, arXiv 2602.18308, from its abstract alone (its text was not available); oHC and EDelta-mHC-Geo
    are other orthogonal schemes.
    """

    facts = MixerFacts(
        source="JPmHC, Sengupta, Wang, Brunswic 2026, arXiv 2602.18308 (abstract; the text was not available); the transform: Cayley 1846",
        equation="A = skew(z);  M = (I - A)(I + A)^-1",
        words="One logit per pair of streams [n(n-1)/2] fills a skew matrix [n n]; its Cayley transform is a rotation of the streams.",
        coverage="every rotation without the eigenvalue -1, and the rest of the rotations in the limit of large logits; no reflection, so no "
        "swap of two streams without a change of sign",
        cost="n(n-1)/2 logits (6 at n = 4); one linear system of size n with n right sides a token, about 3 n^3 operations in float64",
        start="logits 0: exactly the identity; the entries ij and ji move by -2 and +2 times the logit of the pair",
        chosen=("all logits start at 0", "the transform in closed form, where the abstracts speak of an iterated one"),
        deviations=(
            "in float64, with two steps of Newton and Schulz after the solution: the condition number of I + A grows with the logits",
            "logits beyond 1e10 count as 1e10",
        ),
        verified=(REFERENCE,),
        bibtex="@article{sengupta2026jpmhc, title={JPmHC Dynamical Isometry via Orthogonal Hyper-Connections}, author={Sengupta, Biswa and "
        "Wang, Jinhua and Brunswic, Leo}, journal={arXiv:2602.18308}, year={2026}}",
    )

    @property
    def claims(self):
        one = self.streams == 1  # then the matrix is the number 1
        sums = "exact" if one else "none"
        return Claims(
            sums,
            sums,
            nonnegative=one,
            spectral=True,
            orthogonal=True,
            equivariant=True,
            moves=not one,
            reaches="orthogonal",
        )

    @property
    def generators(self):
        return self.streams * (self.streams - 1) // 2

    def permute(self, logits, order):
        return upper(skew(logits, self.streams)[order][:, order])

    def forward(self, logits):
        self.check(logits)
        z = wide(logits)
        return cayley(skew(z, self.streams)).to(z.dtype)

    def reference(self, logits):
        return stacked(cayley_loops(skew_loops(list(logits), self.streams, logits.new_zeros(()))))
