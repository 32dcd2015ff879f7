"""Uniform: every stream becomes the mean of all."""

import torch

from thalweg.mixers import register
from thalweg.mixers.base import Claims, ConstantMixer, MixerFacts
from thalweg.registry import REFERENCE


@register(
    "uniform",
    summary="every stream becomes the mean of all streams",
    source="control: the centre of the Birkhoff polytope; that start alone: mixer sinkhorn, start=uniform",
)
class Uniform(ConstantMixer):
    """The matrix with all entries 1/n: what streams hold beyond their mean is lost at every site.

    Shapes: logits [... 0] -> mix [... to from]. Source: the centre of the Birkhoff polytope, a control.
    """

    facts = MixerFacts(
        source="control: the centre of the Birkhoff polytope, where long products of doubly stochastic matrices tend",
        equation="M = 1 1^T / n",
        words="Every stream [d] becomes the mean of all n; the differences between streams are erased.",
        coverage="one point, the centre of the Birkhoff polytope",
        cost="no logits, no arithmetic beyond the mean",
        start="the centre; nothing is learned",
        verified=(REFERENCE,),
    )

    @property
    def claims(self):
        return Claims("exact", "exact", nonnegative=True, spectral=True, orthogonal=self.streams == 1, equivariant=True,
                      identity=self.streams == 1, moves=False)  # fmt: skip

    def matrix(self):
        return torch.full((self.streams, self.streams), 1 / self.streams, dtype=torch.float64)

    def reference(self, logits):
        n = self.streams
        return torch.stack([torch.stack([logits.new_tensor(1 / n) for _ in range(n)]) for _ in range(n)])
