"""Transport: entries chosen one after another, each within what rows and columns still need."""

from dataclasses import dataclass

import torch

from thalweg.errors import InputError
from thalweg.mixers import register
from thalweg.mixers.base import Claims, Mixer, MixerFacts, MixerOptions
from thalweg.ops.precision import wide
from thalweg.ops.transport import logit_within, near_identity, table
from thalweg.registry import REFERENCE


@dataclass(frozen=True)
class TransportOptions(MixerOptions):
    """minorisation: share of the uniform matrix that is blended in, in [0, 1), so that no entry falls below this share of 1 / n."""

    minorisation: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.minorisation < 1:
            raise InputError(f"minorisation must lie in [0, 1), got {self.minorisation}")


@register(
    "transport",
    summary="entries chosen in turn within what rows and columns still need: doubly stochastic to rounding, (n-1)^2 logits",
    source="Lyubinin 2026, TBP-mHC (arXiv 2605.21724), from the author's code",
    aliases=("tbp",),
)
class Transport(Mixer):
    """The Birkhoff polytope as a transport polytope, filled row by row.

    Shapes: logits [... (n-1)*(n-1)], row by row as [to, from] without the last of each -> mix [... to from].
    Rows and columns sum to one to rounding (a few n eps), for logits of any size; entries are never below zero, rounding included.
    Where an interval closes (equal bounds), the derivative is that of one of the bounds: finite, and it keeps the sums.
    Source: TBP-mHC, arXiv 2605.21724, reconstructed from the author's code.
    """

    Options = TransportOptions
    options: TransportOptions
    facts = MixerFacts(
        source="Lyubinin 2026, TBP-mHC, arXiv 2605.21724; reconstructed from the author's code (alyubinin/tbp-mHC, f84d7843)",
        equation="r = c = 1;  for i, j < n:  L = max(0, r_i - sum_{k>j} c_k, c_j - sum_{k>i} r_k),  U = min(r_i, c_j),  "
        "X[i, j] = L + (U - L) sigmoid(z[i, j]),  r_i -= X[i, j],  c_j -= X[i, j];  last column: r, last row: c;  "
        "M = (1 - delta) X + delta / n",
        words="Each logit [n-1 n-1] chooses one entry within the interval that row and column still allow; the last row and column take "
        "what remains.",
        coverage="every doubly stochastic matrix in the interior; the chart depends on the order of the streams",
        cost="(n-1)^2 logits; (n-1)^2 steps in sequence, of about ten operations each",
        start="the logits of a chosen matrix: that of Sinkhorn's start, off-diagonal entries changed by up to 0.3 of themselves; at n = 4 "
        "diagonal 0.9926 to 0.9934, off-diagonal 0.0017 to 0.0028, each logit's largest derivative 0.0010 to 0.0069",
        chosen=(
            "the start: the code's logits 0 are far from the identity (first row .5 .25 .125 .125)",
            "not 8 on and -8 off the diagonal (0.999665, last entry 0.998995), which leaves derivatives down to 1e-7",
            "the change by 0.3: at a symmetric matrix, also at the code's start, min(r_i, c_i) stands at a kink",
        ),
        deviations=(
            "the code lets no interval be narrower than 1e-7, which costs the sums and the sign of the remainders that much",
            "delta is an option, 0 by default; in the code it is learned, from sigmoid(-8)",
            "the third bound of L is left out: r_k = 1 below row i, so it is never above zero",
        ),
        verified=(REFERENCE,),
        bibtex="@article{lyubinin2026tbp, title={TBP-mHC: full expressivity for manifold-constrained hyper connections through "
        "transportation polytopes}, author={Lyubinin}, journal={arXiv:2605.21724}, year={2026}}",
    )

    @property
    def claims(self):
        n, delta = self.streams, self.options.minorisation
        least = min(near_identity(n)[i][i] for i in range(n))  # of the diagonal at the start
        return Claims(
            rows="exact",
            columns="exact",
            nonnegative=True,
            spectral=True,
            identity=(1 - delta) * least + delta / n >= 0.95,
            moves=n > 1,
            reaches="own" if delta else "birkhoff",
        )

    @property
    def generators(self):
        return (self.streams - 1) ** 2

    def start(self):
        n, x, found = self.streams, near_identity(self.streams), []
        for i in range(n - 1):
            columns = [1 - sum(x[k][j] for k in range(i)) for j in range(n)]
            for j in range(n - 1):
                found.append(logit_within(x[i][j], 1 - sum(x[i][:j]), columns[j], sum(columns[j + 1 :])))
        return torch.tensor(found, dtype=torch.get_default_dtype())

    def forward(self, logits):
        self.check(logits)
        n, delta = self.streams, self.options.minorisation
        z = wide(logits)
        if n == 1:
            return z.new_ones(*z.shape[:-1], 1, 1)
        z = z.movedim(-1, 0).contiguous()  # token-last: each step reads contiguous memory
        up, down = torch.sigmoid(z).unbind(), torch.sigmoid(-z).unbind()
        one = torch.ones_like(up[0])
        columns, rows = [one] * n, []
        for i in range(n - 1):
            rests = [columns[-1]]  # what the columns after j still need
            for column in columns[-2:0:-1]:
                rests.insert(0, rests[0] + column)
            row, entries, last = one, [], one
            for j in range(n - 1):
                at = i * (n - 1) + j
                entry, row, columns[j], last = table(up[at], down[at], row, columns[j], rests[j])
                entries.append(entry)
            columns[-1] = last
            rows.append(torch.stack([*entries, row], -1))
        mix = torch.stack([*rows, torch.stack(columns, -1)], -2)
        return (1 - delta) * mix + delta / n if delta else mix

    def reference(self, logits):
        n, delta = self.streams, self.options.minorisation
        r, c = [logits.new_ones(()) for _ in range(n)], [logits.new_ones(()) for _ in range(n)]
        x = [[logits.new_zeros(()) for _ in range(n)] for _ in range(n)]
        for i in range(n - 1):
            for j in range(n - 1):
                low = max(logits.new_zeros(()), r[i] - sum(c[j + 1 :]), c[j] - sum(r[i + 1 :]))
                high = min(r[i], c[j])
                x[i][j] = low + (high - low) / (1 + torch.exp(-logits[i * (n - 1) + j]))
                r[i], c[j] = r[i] - x[i][j], c[j] - x[i][j]
            x[i][n - 1] = r[i]
            c[n - 1] = c[n - 1] - r[i]
        x[n - 1] = c
        return torch.stack([torch.stack([(1 - delta) * x[i][j] + delta / n for j in range(n)]) for i in range(n)])

    @classmethod
    def variants(cls):
        return [{"minorisation": 0.02}, {"minorisation": 0.3}]
