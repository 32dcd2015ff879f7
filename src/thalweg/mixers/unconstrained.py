"""Unconstrained: the logits are the matrix."""

import torch

from thalweg.mixers import register
from thalweg.mixers.base import Claims, MixerFacts, SquareMixer
from thalweg.ops.precision import wide
from thalweg.registry import REFERENCE


@register(
    "unconstrained",
    summary="the logits are the matrix: any real numbers, the hyper-connections of the first paper",
    source="Zhu et al. 2024, Hyper-Connections (arXiv 2409.19606)",
    aliases=("free",),
)
class Unconstrained(SquareMixer):
    """No constraint: mix = logits.

    Shapes: logits [... n*n], row by row as [to, from] -> mix [... to from].
    Source: Hyper-Connections, arXiv 2409.19606: A_r, transposed here so that rows are ``to``.
    """

    facts = MixerFacts(
        source="Zhu et al. 2024, Hyper-Connections, arXiv 2409.19606 (A_r); mHC, arXiv 2512.24880, Eq. 5 (H_res)",
        equation="M = Z",
        words="One logit per entry [n n] is that entry.",
        coverage="every real matrix",
        cost="n^2 logits, no arithmetic",
        start="the identity; every derivative is one",
        verified=(REFERENCE,),
        bibtex="@inproceedings{zhu2025hyper, title={Hyper-Connections}, author={Zhu, Defa and Huang, Hongzhi and Huang, Zihao and "
        "Zeng, Yutao and Mao, Yunyao and Wu, Banggu and Min, Qiyang and Zhou, Xun}, booktitle={ICLR}, year={2025}}",
    )

    @property
    def claims(self):
        return Claims(equivariant=True, reaches="any")

    def start(self):
        return torch.eye(self.streams).flatten()

    def forward(self, logits):
        self.check(logits)
        return self.square(wide(logits))

    def reference(self, logits):
        n = self.streams
        return torch.stack([torch.stack([logits[i * n + j] for j in range(n)]) for i in range(n)])
