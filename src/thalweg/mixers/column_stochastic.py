"""Column-stochastic: every stream gives itself away once."""

import torch

from thalweg.mixers import register
from thalweg.mixers.base import Claims, MixerFacts, SquareMixer
from thalweg.ops.precision import wide
from thalweg.registry import REFERENCE


@register(
    "column_stochastic",
    summary="softmax over the streams that are given to: every column sums to one, rows are free",
    source="control: the column half of the constraint of mHC (arXiv 2512.24880) Eq. 6",
)
class ColumnStochastic(SquareMixer):
    """Each old stream is shared out among the new ones, so their sum is kept; a stream may receive up to n.

    Shapes: logits [... n*n], row by row as [to, from] -> mix [... to from]. Source: control, after mHC, arXiv 2512.24880, Eq. 6.
    """

    facts = MixerFacts(
        source="control: 1^T M = 1^T and M >= 0 of mHC, arXiv 2512.24880, Eq. 6, without M 1 = 1",
        equation="M[i, j] = exp(z[i, j]) / sum_k exp(z[k, j])",
        words="One logit per entry [n n]; what each stream gives away [from] sums to one. The sum of the streams is kept; one stream may "
        "collect the others, and singular values may reach sqrt(n).",
        coverage="every matrix with positive entries and columns that sum to one; zeros only at infinity",
        cost="n^2 logits, n^2 exponentials",
        start="logits 6 I - 3, the same matrix as Sinkhorn's: diagonal 0.9926, off-diagonal 0.0025 at n = 4; largest derivative of a "
        "diagonal logit 0.0073, of another 0.0025; within 0.05 of the identity up to n = 22",
        chosen=("logits start at 6 I - 3, as for Sinkhorn",),
        verified=(REFERENCE,),
    )

    @property
    def claims(self):
        return Claims(columns="exact", nonnegative=True, equivariant=True, identity=self.starts_near, moves=self.streams > 1,
                      reaches="column_stochastic")  # fmt: skip

    def forward(self, logits):
        self.check(logits)
        return torch.softmax(self.square(wide(logits)), -2)

    def reference(self, logits):
        n = self.streams
        m = [[torch.exp(logits[i * n + j]) for j in range(n)] for i in range(n)]
        return torch.stack(
            [torch.stack([m[i][j] / sum(m[k][j] for k in range(n)) for j in range(n)]) for i in range(n)]
        )
