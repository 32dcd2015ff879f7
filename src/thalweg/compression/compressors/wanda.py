"""Wanda: prune by the size of a weight times the norm of its input."""

from dataclasses import dataclass

from thalweg.compression.compressors import register
from thalweg.compression.compressors.base import (
    MUTANTS,
    REFERENCE,
    Compressor,
    CompressorFacts,
    CompressorOptions,
    Made,
)
from thalweg.compression.pruning import Structure, lowest


@dataclass(frozen=True)
class WandaOptions(CompressorOptions):
    """sparsity: share of the weights of every output that go (0.5), or N of every M neighbours (2:4, 4:8)."""

    sparsity: float | str = 0.5

    def __post_init__(self) -> None:
        Structure.of(self.sparsity)


@register(
    "wanda",
    summary="prunes the weights of every output with the smallest |W| times norm of the input; needs a text",
    source="Sun et al. 2024, arXiv 2306.11695, Eq. 1",
)
class Wanda(Compressor):
    """S_ij = |W_ij| ||X_j||_2, compared within an output; the lowest go, the others stay as they are."""

    Options = WandaOptions
    options: WandaOptions
    facts = CompressorFacts(
        source="Sun et al. 2024, arXiv 2306.11695, Eq. 1 and Algorithm 1; N:M as in their Section 4",
        equation="S_ij = |W_ij| ||X_j||_2;  per output i: the floor(in share) lowest S_ij -> 0, or of every M inputs the N lowest",
        words="||X_j|| is the norm of input feature j over all calibration tokens. Weights compete with the other weights of their own output, "
        "and none is updated. Layers are pruned in order; the next one sees what the pruned ones give.",
        calibration="tokens: the norm of every input feature (authors: C4, 128 samples of 2,048 tokens)",
        bits="16 for each weight that is left; and one bit a weight (unstructured), or log2 M bits for each that is left (N:M)",
        chosen=("of equal scores the one further left goes, in N:M too",),
        verified=(
            REFERENCE,
            MUTANTS,
            "masks of llm-compressor on a toy model (optional tier)",
        ),
        bibtex="""@inproceedings{sun2024wanda,
  title = {A Simple and Effective Pruning Approach for Large Language Models},
  author = {Sun, Mingjie and Liu, Zhuang and Bair, Anna and Kolter, J. Zico},
  booktitle = {ICLR}, year = {2024}, eprint = {2306.11695}, archivePrefix = {arXiv}
}""",
    )

    @property
    def needs_calibration(self):
        return True

    def check(self, shapes):
        Structure.of(self.options.sparsity).check(shapes)

    def one(self, name, weight, inputs):
        assert inputs is not None
        structure = Structure.of(self.options.sparsity)
        made = weight.masked_fill(lowest(weight.abs() * inputs.norms.to(weight), structure), 0.0)
        return Made(made, structure.bits(made))
