"""Sinkhorn: rows and columns of exp(logits) normalised in turn."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from thalweg.errors import InputError
from thalweg.mixers import register
from thalweg.mixers.base import Claims, MixerFacts, MixerOptions, SquareMixer
from thalweg.ops.doubly_stochastic import LEAST_EPS, sinkhorn
from thalweg.ops.precision import wide
from thalweg.registry import REFERENCE

MOST_ITERATIONS = 10_000  # far more than helps; birkhoff_projection has the limit in 40 steps


@dataclass(frozen=True)
class SinkhornOptions(MixerOptions):
    """iterations: column and row normalisations, as pairs. eps: added to the first softmax and to every sum; 0 in the paper, 1e-6 in the
    released code. exact: the marginal that is normalised last: ``rows`` (what every stream receives), or ``columns`` (what it gives away),
    which is the released code's matrix applied without its transpose, a common error, here to be studied. start: the untrained matrix, near
    the ``identity``, or ``uniform``, all entries 1/n (an ablation of the source).
    """

    iterations: int = 20
    eps: float = 0.0
    exact: Literal["rows", "columns"] = "rows"
    start: Literal["identity", "uniform"] = "identity"

    def __post_init__(self) -> None:
        if not 1 <= self.iterations <= MOST_ITERATIONS:
            raise InputError(
                f"iterations must lie between 1 and {MOST_ITERATIONS}, got {self.iterations}; the source takes 20"
            )
        if not (self.eps == 0 or LEAST_EPS <= self.eps < 1):
            raise InputError(f"eps must be 0 or lie in [{LEAST_EPS}, 1), got {self.eps}")


@register(
    "sinkhorn",
    summary="exp(logits), columns and rows normalised in turn 20 times; rows last, so what each stream receives sums to one",
    source="Xie et al. 2025, mHC (arXiv 2512.24880) Eq. 8-9",
)
class Sinkhorn(SquareMixer):
    """Towards the Birkhoff polytope by finitely many Sinkhorn iterations.

    Shapes: logits [... n*n], row by row as [to, from] -> mix [... to from].
    The marginal that is not normalised last is off by an amount that grows with the spread of the logits: with independent normal logits
    of standard deviation 1 the 99 % quantile after 20 iterations is about 1e-6, at 5 about 0.05.
    Source: mHC, arXiv 2512.24880 v2, Eq. 9; initial values: appendix A.6 of the camera-ready.
    """

    Options = SinkhornOptions
    options: SinkhornOptions
    facts = MixerFacts(
        source="Xie et al. 2025, mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880 v2, Eq. 8-9",
        equation="M = exp(Z);  20 times: M <- M / column sums, M <- M / row sums",
        words="One logit per entry [n n] is exponentiated; columns and rows are divided by their sums in turn, the rows [to] last.",
        coverage="every doubly stochastic matrix with positive entries, in the limit of the iterations; vertices only at infinity",
        cost="n^2 logits; 2 n^2 exponentials and sums for each of the iterations (20)",
        start="logits 6 I - 3: diagonal 0.9926, off-diagonal 0.0025 at n = 4; derivatives of the entries up to 0.0023; within 0.05 of the "
        "identity up to n = 22; start='uniform': logits 0, all entries 1/n, derivative of an entry by its own logit (1 - 1/n)^2 / n",
        chosen=("logits start at 6 I - 3 for every n",),
        deviations=("in the log domain, which the exponential domain equals where it is finite",),
        verified=(REFERENCE,),
        bibtex="@article{xie2025mhc, title={mHC: Manifold-Constrained Hyper-Connections}, author={Xie, Zhenda and Wei, Yixuan and Cao, "
        "Huanqi and others}, journal={arXiv:2512.24880}, year={2025}}",
    )

    @property
    def claims(self):
        exact = "exact" if self.options.eps == 0 else "converging"  # eps takes 1e-6 from every sum
        rows = self.options.exact == "rows"
        return Claims(
            rows=exact if rows else "converging",
            columns="converging" if rows else exact,
            nonnegative=True,
            equivariant=True,
            identity=self._near(),
            moves=self.streams > 1,
            reaches="birkhoff",
        )

    def start(self):
        return super().start() if self.options.start == "identity" else torch.zeros(self.generators)

    def _near(self) -> bool:
        """Whether the start is the identity to within 0.05: every row and column sums to s, and each division leaves s / (s + eps)."""
        n, eps, peak = self.streams, self.options.eps, 6 if self.options.start == "identity" else 0
        on, off = (math.exp(x) / (math.exp(peak) + n - 1) + eps for x in (peak, 0))
        for _ in range(2 * self.options.iterations - 1):
            total = on + (n - 1) * off + eps
            on, off = on / total, off / total
        return max(abs(1 - on), off if n > 1 else 0.0) <= 0.05

    def forward(self, logits):
        self.check(logits)
        last = -1 if self.options.exact == "rows" else -2
        return sinkhorn(self.square(wide(logits)), self.options.iterations, last, self.options.eps)

    def reference(self, logits):
        n, eps = self.streams, self.options.eps
        swap = self.options.exact == "columns"
        m = [[torch.exp(logits[j * n + i] if swap else logits[i * n + j]) for j in range(n)] for i in range(n)]
        for step in range(self.options.iterations):
            first = eps if step else 0.0  # the first normalisation is a softmax: eps is added after it, not to its sum
            sums = [sum(m[i][j] for i in range(n)) + first for j in range(n)]
            m = [[m[i][j] / sums[j] + (0.0 if step else eps) for j in range(n)] for i in range(n)]
            sums = [sum(m[i][j] for j in range(n)) + eps for i in range(n)]
            m = [[m[i][j] / sums[i] for j in range(n)] for i in range(n)]
        return torch.stack([torch.stack([m[j][i] if swap else m[i][j] for j in range(n)]) for i in range(n)])

    @classmethod
    def variants(cls):
        return [
            {"iterations": 1},
            {"eps": 1e-6},
            {"exact": "columns", "iterations": 3},
            {"start": "uniform", "iterations": 2},
        ]
