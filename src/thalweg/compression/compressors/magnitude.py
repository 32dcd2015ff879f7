"""Magnitude pruning: the smallest weights go."""

from dataclasses import dataclass

from thalweg.compression.compressors import register
from thalweg.compression.compressors.base import REFERENCE, Compressor, CompressorFacts, CompressorOptions, Made
from thalweg.compression.pruning import Structure, lowest
from thalweg.errors import UnknownNameError


@dataclass(frozen=True)
class MagnitudeOptions(CompressorOptions):
    """sparsity: share of the weights that go (0.5), or N of every M neighbours (2:4, 4:8). within: what a weight is compared with: those of
    its own output (``row``) or of the whole matrix (``matrix``); of N:M it has no say."""

    sparsity: float | str = 0.5
    within: str = "matrix"

    def __post_init__(self) -> None:
        Structure.of(self.sparsity)
        if self.within not in ("row", "matrix"):
            raise UnknownNameError("value for within:", self.within, ("row", "matrix"))


@register(
    "magnitude",
    summary="prunes the smallest weights of every matrix; needs no text",
    source="Han et al. 2015, arXiv 1506.02626, Section 3; layer by layer as in arXiv 2306.11695",
)
class Magnitude(Compressor):
    """S_ij = |W_ij|, the lowest go."""

    Options = MagnitudeOptions
    options: MagnitudeOptions
    facts = CompressorFacts(
        source="Han et al. 2015, arXiv 1506.02626, Section 3; the baseline of Sun et al. 2024, arXiv 2306.11695",
        equation="S_ij = |W_ij|;  within the matrix (or each row): the floor(n share) lowest -> 0; N:M: of every M inputs the N lowest",
        words="The smallest weights of a matrix go, whatever they are multiplied by; none is updated.",
        calibration="none; with a text the error of the outputs is measured too",
        bits="16 for each weight that is left; and one bit a weight (unstructured), or log2 M bits for each that is left (N:M)",
        chosen=("of equal weights the one further left (and up) goes", "no training afterwards, one step"),
        deviations=("the source sets a threshold by layer and trains again",),
        verified=(REFERENCE,),
    )

    def check(self, shapes):
        Structure.of(self.options.sparsity).check(shapes)

    def one(self, name, weight, inputs):
        structure = Structure.of(self.options.sparsity)
        whole = self.options.within == "matrix" and not structure.m
        score = weight.abs().reshape(1, -1) if whole else weight.abs()
        made = weight.masked_fill(lowest(score, structure).reshape(weight.shape), 0.0)
        return Made(made, structure.bits(made))
