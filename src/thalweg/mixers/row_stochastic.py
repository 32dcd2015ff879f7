"""Row-stochastic: what every stream receives is an average of all streams."""

import torch

from thalweg.mixers import register
from thalweg.mixers.base import Claims, MixerFacts, SquareMixer
from thalweg.ops.precision import wide
from thalweg.registry import REFERENCE


@register(
    "row_stochastic",
    summary="softmax over the streams that are received from: every row sums to one, columns are free",
    source="control: the row half of the constraint of mHC (arXiv 2512.24880) Eq. 6",
)
class RowStochastic(SquareMixer):
    """Each new stream is a convex combination of the old ones; a stream may be copied to all, or to none.

    Shapes: logits [... n*n], row by row as [to, from] -> mix [... to from]. Source: control, after mHC, arXiv 2512.24880, Eq. 6.
    """

    facts = MixerFacts(
        source="control: M 1 = 1 and M >= 0 of mHC, arXiv 2512.24880, Eq. 6, without 1^T M = 1^T",
        equation="M[i, j] = exp(z[i, j]) / sum_k exp(z[i, k])",
        words="One logit per entry [n n]; what each stream receives [to] is an average. No entry of a product over depth exceeds one, but "
        "its singular values may (up to sqrt(n)), and streams can die out.",
        coverage="every matrix with positive entries and rows that sum to one; zeros only at infinity",
        cost="n^2 logits, n^2 exponentials",
        start="logits 6 I - 3, the same matrix as Sinkhorn's: diagonal 0.9926, off-diagonal 0.0025 at n = 4; largest derivative of a "
        "diagonal logit 0.0073, of another 0.0025; within 0.05 of the identity up to n = 22",
        chosen=("logits start at 6 I - 3, as for Sinkhorn",),
        verified=(REFERENCE,),
    )

    @property
    def claims(self):
        return Claims(rows="exact", nonnegative=True, equivariant=True, identity=self.starts_near, moves=self.streams > 1,
                      reaches="row_stochastic")  # fmt: skip

    def forward(self, logits):
        self.check(logits)
        return torch.softmax(self.square(wide(logits)), -1)

    def reference(self, logits):
        n = self.streams
        m = [[torch.exp(logits[i * n + j]) for j in range(n)] for i in range(n)]
        return torch.stack([torch.stack([m[i][j] / sum(m[i]) for j in range(n)]) for i in range(n)])
