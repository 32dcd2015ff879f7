"""Identity: the streams are not mixed."""

import torch

from thalweg.mixers import register
from thalweg.mixers.base import Claims, ConstantMixer, MixerFacts
from thalweg.registry import REFERENCE


@register(
    "identity",
    summary="no mixing: each stream is carried over as it is",
    source="mHC (arXiv 2512.24880), A.4: Identity HC",
)
class Identity(ConstantMixer):
    """The identity matrix at every token.

    Shapes: logits [... 0] -> mix [... to from]. Source: mHC, arXiv 2512.24880, appendix A.4.
    """

    facts = MixerFacts(
        source="mHC, arXiv 2512.24880, appendix A.4 of the camera-ready (Identity HC)",
        equation="M = I",
        words="Every stream [d] is carried over unchanged; streams meet only through what is read and written.",
        coverage="one vertex of the Birkhoff polytope",
        cost="no logits, no arithmetic",
        start="the identity; nothing is learned",
        verified=(REFERENCE,),
    )

    @property
    def claims(self):
        return Claims("exact", "exact", nonnegative=True, spectral=True, orthogonal=True, equivariant=True, moves=False)

    def matrix(self):
        return torch.eye(self.streams, dtype=torch.float64)

    def reference(self, logits):
        n = self.streams
        return torch.stack([torch.stack([logits.new_tensor(float(i == j)) for j in range(n)]) for i in range(n)])
