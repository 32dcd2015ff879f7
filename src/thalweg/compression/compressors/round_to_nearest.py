"""Round to nearest: every weight to the nearest of 2^bits levels that its group shares."""

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
from thalweg.compression.rounding import check_group, check_rounding, rounded, rounding_bits


@dataclass(frozen=True)
class RoundToNearestOptions(CompressorOptions):
    """bits: of a weight, 2 to 8. group: neighbouring inputs of one output that share a scale, or ``row`` or ``tensor``. symmetric: levels
    on both sides of zero alike, and no zero point."""

    bits: int = 4
    group: int | str = 128
    symmetric: bool = False

    def __post_init__(self) -> None:
        check_rounding(self.bits, self.group, self.symmetric)


@register(
    "round_to_nearest",
    summary="every weight to the nearest of 2^bits levels, scales by group of inputs; needs no text",
    source="Jacob et al. 2018, arXiv 1712.05877, Section 2.1",
    aliases=("rtn",),
)
class RoundToNearest(Compressor):
    """W^ = s (clamp(round(W / s) + z, 0, 2^bits - 1) - z) for every group."""

    Options = RoundToNearestOptions
    options: RoundToNearestOptions
    facts = CompressorFacts(
        source="Jacob et al. 2018, arXiv 1712.05877, Eq. 1 (r = S (q - Z)) and Section 2.1; groups along the inputs as in GPTQ (arXiv "
        "2210.17323) and AWQ",
        equation="asymmetric: low = min(W, 0), high = max(W, 0), s = (high - low) / (2^b - 1), z = round(-low / s)\n"
        "            W^ = s (clamp(round(W / s) + z, 0, 2^b - 1) - z)\n"
        "symmetric:  s = max|W| / (2^(b-1) - 1), W^ = s clamp(round(W / s), -(2^(b-1) - 1), 2^(b-1) - 1)",
        words="The inputs of every output are cut into runs of `group`; the weights of a run lie between two ends, and each moves to the "
        "nearest of the levels in between. Zero is always a level.",
        calibration="none; with a text the error of the outputs is measured too",
        bits="b a weight, and for every group a scale of 16 bits and, if not symmetric, a zero of b bits",
        chosen=("symmetric: 2^b - 1 levels, so that both ends and zero are levels", "halves are rounded to even"),
        verified=(REFERENCE, MUTANTS),
    )

    def check(self, shapes):
        check_group(self.options.group, shapes)

    def one(self, name, weight, inputs):
        o = self.options
        return Made(
            rounded(weight, o.bits, o.group, o.symmetric),
            rounding_bits(tuple(weight.shape), o.bits, o.group, o.symmetric),
        )
