"""Birkhoff projection: the limit of Sinkhorn's iterations, reached by Newton's method and differentiated as a limit."""

import math
from dataclasses import dataclass

import torch

from thalweg.errors import InputError
from thalweg.mixers import register
from thalweg.mixers._loops import solve_loops, stacked
from thalweg.mixers.base import Claims, MixerFacts, MixerOptions, SquareMixer
from thalweg.ops.birkhoff import birkhoff
from thalweg.ops.precision import wide
from thalweg.registry import REFERENCE

MOST = 1000
LEAST = 8  # steps for logits of standard deviation 1
SETTLED, MEASURED = (
    40,
    16,
)  # steps from which on, and streams up to which, both marginals were exact at every logit tried


@dataclass(frozen=True)
class BirkhoffOptions(MixerOptions):
    """steps: damped Newton steps, always all of them, at least 8. Rows are exact at any number; for the columns see the table of the class."""

    steps: int = SETTLED

    def __post_init__(self) -> None:
        if self.steps > MOST:
            raise InputError(
                f"steps must be at most {MOST}, got {self.steps}; {SETTLED} suffice for every logit that was tried"
            )
        if self.steps < LEAST:
            raise InputError(
                f"steps must be at least {LEAST}, got {self.steps}: with fewer the columns do not sum to one even at logits of size 1"
            )


@register(
    "birkhoff_projection",
    summary="the limit of Sinkhorn's iterations by Newton's method: both marginals exact, the gradient is that of the limit",
    source="Wang & Qiu 2026, mHC-proj (arXiv 2606.07574)",
    aliases=("newton",),
)
class BirkhoffProjection(SquareMixer):
    """The one doubly stochastic matrix of the form diag(a) exp(logits) diag(b), where ``sinkhorn`` ends after infinitely many iterations.

    Shapes: logits [... n*n], row by row as [to, from] -> mix [... to from].
    Largest error of a column sum in float64 (20 000 matrices at n = 4; 5000 at 8), beside the 20 iterations of ``sinkhorn``; in float32 it is
    the rounding of the result, 5e-8, for all of these with 40 steps, since the work is done in float64:

        logits            n = 4: 40     20     12      8   sinkhorn | n = 8: 40     20     12      8   sinkhorn
        normal, sd 1         7e-16  9e-16  7e-16  7e-16   8e-4      |    1e-15  1e-15  1e-15  1e-15   1e-4
        normal, sd 3         9e-16  9e-16  9e-16  2e-10   5e-2      |    1e-15  1e-15  1e-15  2e-7    5e-2
        normal, sd 10        3e-15  2e-15  2e-15  6e-3    0.8       |    3e-15  4e-15  2e-6   2e-2    0.5
        normal, sd 50        8e-15  8e-15  7e-4   0.1     2         |    2e-14  3e-10  2e-2   0.3     2
        normal, sd 1e4       3e-14  4e-14  5e-2   0.4     2         |    7e-14  3e-5   0.3    2       3
        -50 or 50            1e-14  9e-15  3e-6   3e-2    2         |    2e-14  6e-6   0.2    0.9     1
        -1e4 or 1e4          9e-14  8e-14  2e-3   0.2     2         |    1e-13  4e-3   2      3       1
        normal, sd 1e30      3e-14  3e-14  5e-2   0.4     2         |    6e-14  3e-5   0.3    2       3
    Logits with a spread above 1000, the means of rows and columns taken out, are scaled down to it; the largest error found there, with sizes
    that differ by decades from entry to entry at n = 16, is 1e-9.
    Source: Wang & Qiu 2026, arXiv 2606.07574; see :func:`thalweg.ops.birkhoff.birkhoff` for what is ours.
    """

    Options = BirkhoffOptions
    options: BirkhoffOptions
    facts = MixerFacts(
        source="Wang & Qiu 2026, Accelerating Birkhoff Projection for Manifold-Constrained Hyper-Connections, arXiv 2606.07574 (by the README "
        "of its code, yixuan/mHC-proj; the paper's text was not available); the map: mHC, arXiv 2512.24880, Eq. 8-9, in the limit",
        equation="M = softmax_from(Z + v) with v the least of sum_to logsumexp_from(Z + v) - sum_from v;  dM = M * (dZ - u 1^T - 1 w^T), "
        "u and w such that its marginals are zero",
        words="One logit per entry [n n]. Each column [from] gets one number added, found by Newton's method, so that after a softmax over "
        "every row [to] all columns sum to one too. The derivative comes from one more linear system, not from the steps.",
        coverage="every doubly stochastic matrix with positive entries; vertices only at infinity",
        cost="n^2 logits; for each of 40 steps n^2 exponentials and about 2 n^3 operations in float64; backwards as one step; "
        "with it, on one CPU thread at n = 4: 1.7 times as long as sinkhorn for 4096 tokens, 1.0 with 20 steps, and 11 times for one token",
        start="logits 6 I - 3: diagonal 0.9926, off-diagonal 0.0025 at n = 4; derivatives of the entries up to 0.0037 "
        "(through 20 iterations of sinkhorn, which have not settled there when a logit moves, up to 0.0023); within 0.05 of the identity up "
        "to n = 22",
        chosen=(
            "logits start at 6 I - 3 for every n",
            "40 steps: enough for both marginals at logits of every size, n up to 16",
            "logits wider than 1000 are scaled down to it",
        ),
        deviations=(
            "a fixed number of steps, damped, along growing logits, where the source iterates from the logits as they are to a tolerance",
            "in float64",
            "every number of streams; the source serves 4",
        ),
        verified=(REFERENCE,),
        bibtex="@article{wang2026birkhoff, title={Accelerating Birkhoff Projection for Manifold-Constrained Hyper-Connections}, author={Wang "
        "and Qiu}, journal={arXiv:2606.07574}, year={2026}}",
    )

    @property
    def claims(self):
        exact = self.streams == 1 or (self.options.steps >= SETTLED and self.streams <= MEASURED)
        return Claims(
            rows="exact",
            columns="exact" if exact else "converging",
            nonnegative=True,
            spectral=exact,
            orthogonal=self.streams == 1,
            equivariant=True,
            identity=self.starts_near,
            moves=self.streams > 1,
            reaches="birkhoff",
        )

    def forward(self, logits):
        self.check(logits)
        return birkhoff(self.square(wide(logits)), self.options.steps)

    def reference(self, logits):
        n = self.streams
        z = [[logits[i * n + j] for j in range(n)] for i in range(n)]
        known = [[float(entry.detach()) for entry in row] for row in z]
        f, g = [0.0] * n, [0.0] * n
        for _ in range(20000):  # Sinkhorn's own iterations, to their end; plain numbers
            f = [-_logsumexp([known[i][j] + g[j] for j in range(n)]) for i in range(n)]
            moved = [-_logsumexp([known[i][j] + f[i] for i in range(n)]) for j in range(n)]
            still = max(abs(a - b) for a, b in zip(g, moved, strict=True)) < 1e-13
            g = moved
            if still:
                break
        # One Newton step from there has the derivative of the limit: what the potentials owe to the logits is in the step.
        p = self._rows([[z[i][j] + g[j] for j in range(n)] for i in range(n)])
        sums = [sum((p[i][j] for i in range(n)), logits.new_zeros(())) for j in range(n)]
        hessian = [
            [
                float(j == k) * sums[j] - sum((p[i][j] * p[i][k] for i in range(n)), logits.new_zeros(()))
                for k in range(n - 1)
            ]
            for j in range(n - 1)
        ]
        step = [row[0] for row in solve_loops(hessian, [[1 - sums[j]] for j in range(n - 1)])] if n > 1 else []
        step = [*step, logits.new_zeros(())]
        return stacked(self._rows([[z[i][j] + g[j] + step[j] for j in range(n)] for i in range(n)]))

    def _rows(self, z):
        """exp(z), every row divided by its sum."""
        raised = [[torch.exp(entry - max(float(e.detach()) for e in row)) for entry in row] for row in z]
        return [[entry / sum(row, torch.zeros_like(entry)) for entry in row] for row in raised]

    @classmethod
    def variants(cls):
        return [{"steps": 12}]


def _logsumexp(values: list[float]) -> float:
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values))
