"""Low rank: every matrix is replaced by the product of two thinner ones."""

import math
from dataclasses import dataclass

import torch

from thalweg.compression.compressors import register
from thalweg.compression.compressors.base import (
    STORED,
    Compressor,
    CompressorFacts,
    CompressorOptions,
    Made,
    check_whole,
)
from thalweg.errors import InputError, UnknownNameError

TINY = 1e-6  # of the largest scale: what keeps a feature that is never seen from dividing by zero


@dataclass(frozen=True)
class LowRankOptions(CompressorOptions):
    """ratio: numbers of the two factors over those of the matrix. rank: instead of a ratio, the same of every matrix. weighting: what is kept
    best: the weight itself (``none``), each input by its mean size (``absolute``), or the outputs over the tokens seen (``products``)."""

    ratio: float | None = None
    rank: int | None = None
    weighting: str = "none"

    def __post_init__(self) -> None:
        if self.rank is None and self.ratio is None:
            object.__setattr__(self, "ratio", 0.5)
        elif self.rank is not None and self.ratio is not None:
            raise InputError(f"rank and ratio say the same thing, got {self.rank} and {self.ratio}; give one of them")
        if self.rank is not None:
            check_whole("rank", self.rank, 1)
        elif self.ratio is not None and not 0 < self.ratio <= 1:
            raise InputError(f"ratio is the share of the numbers that is left, above 0 and at most 1, got {self.ratio}")
        if self.weighting not in ("none", "absolute", "products"):
            raise UnknownNameError("value for weighting:", self.weighting, ("none", "absolute", "products"))


@register(
    "low_rank",
    summary="every matrix as the product of two thinner ones, by SVD, weighted by the inputs or not",
    source="Eckart and Young 1936; ASVD, Yuan et al. 2023, arXiv 2312.05821; SVD-LLM, Wang et al. 2024, arXiv 2403.12403",
)
class LowRank(Compressor):
    """W^ = (W S)_r S^-1, the best approximation of rank r of W S."""

    Options = LowRankOptions
    options: LowRankOptions
    facts = CompressorFacts(
        source="Eckart and Young 1936 (no weighting); ASVD, arXiv 2312.05821, Eq. 5-7 with alpha = 1/2 (absolute); SVD-LLM, arXiv 2403.12403, "
        "Section 3.1 (products)",
        equation="W S = U D V^T,  W^ = U_r D_r V_r^T S^-1\n"
        "none: S = I;  absolute: S = diag(mean|X_j|^(1/2));  products: S S^T = X X^T, so that W^ minimises ||W^ X - W X||",
        words="The r largest directions of a matrix are kept, of the matrix itself or of what it does to the inputs that it sees.",
        calibration="none, unless weighting is absolute or products",
        bits="16 for every number of the factors: r (in + out)",
        chosen=(
            "r = floor(ratio in out / (in + out)), at least 1",
            "products: eigenvalues of X X^T below 1e-12 of the largest are raised to that, so that unseen directions can be divided by",
        ),
        deviations=(
            "SVD-LLM takes a Cholesky factor of X X^T; the symmetric root is used, which has the same product and the same W^",
        ),
        verified=(
            "its error is what the singular values left out say, in float64",
            "steps from it that keep the rank, and the other weightings: all with a larger error",
        ),
    )

    @property
    def needs_calibration(self):
        return self.options.weighting != "none"

    def check(self, shapes):
        rank = self.options.rank
        for name, shape in shapes.items():
            if rank is not None and rank > min(shape):
                raise InputError(
                    f"rank {rank} is more than {name} has, a matrix {list(shape)}; give at most {min(min(s) for s in shapes.values())}"
                )

    def rank_of(self, out: int, inputs: int) -> int:
        """The rank that the options ask of a matrix [out in]."""
        if self.options.rank is not None:
            return self.options.rank
        assert self.options.ratio is not None
        return max(1, min(math.floor(self.options.ratio * out * inputs / (out + inputs)), out, inputs))

    def one(self, name, weight, inputs):
        rank = self.rank_of(*weight.shape)
        root, inverse = self._scales(weight, inputs)
        u, d, v = torch.linalg.svd(weight.double() @ root, full_matrices=False)
        made = (u[:, :rank] * d[:rank]) @ v[:rank] @ inverse
        kept = float(d[:rank].square().sum() / d.square().sum().clamp(min=torch.finfo(d.dtype).tiny))
        return Made(made.to(weight), float(STORED * rank * sum(weight.shape)), {"rank": rank, "kept_energy": kept})

    def _scales(self, weight, inputs):
        """S and its inverse [in in], float64."""
        width = weight.shape[1]
        if self.options.weighting == "products":
            values, vectors = torch.linalg.eigh(inputs.products.double())
            root = values.clamp(min=float(values[-1]) * TINY**2).clamp(min=torch.finfo(values.dtype).tiny).sqrt()
            return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
        scale = torch.ones(width, dtype=torch.float64, device=weight.device)
        if self.options.weighting == "absolute":
            scale = inputs.mean_absolute.sqrt()
            scale = scale.clamp(min=float(scale.max()) * TINY).clamp(min=torch.finfo(scale.dtype).tiny)
        return torch.diag(scale), torch.diag(1 / scale)
