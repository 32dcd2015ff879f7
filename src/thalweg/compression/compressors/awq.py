"""AWQ: scale the inputs that matter before rounding, and back after it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.compression.compressors import register
from thalweg.compression.compressors.base import (
    MUTANTS,
    REFERENCE,
    Compressor,
    CompressorFacts,
    CompressorOptions,
    Made,
    check_whole,
)
from thalweg.compression.rounding import check_group, check_rounding, grouped, rounded, rounding_bits
from thalweg.errors import InputError

LEAST = 1e-4  # of a scale before it is normalised, and what is added to the divisor
BESIDE = 1e-6  # added to the largest weight of a group


@dataclass(frozen=True)
class AwqOptions(CompressorOptions):
    """bits: of a weight, 2 to 8. group: neighbouring inputs that share a scale of the rounding, or ``row`` or ``tensor``. symmetric: of the
    rounding. duo: divide by the mean size of the weights too. grid: number of scales that are tried."""

    bits: int = 4
    group: int | str = 128
    symmetric: bool = False
    duo: bool = True
    grid: int = 20

    def __post_init__(self) -> None:
        check_rounding(self.bits, self.group, self.symmetric)
        check_whole("grid", self.grid, 3)
        if not isinstance(self.duo, bool):
            raise InputError(f"duo must be true or false, got {self.duo!r}")


class Search(NamedTuple):
    """scale [in]: the best; exponent: rho, duo: its kind; error, plain: E|(W^ - W) x|^2 summed over the maps, at it and without scaling."""

    scale: Float[Tensor, " in"]
    exponent: float
    duo: bool
    error: float
    plain: float


@register(
    "awq",
    summary="scales inputs by what they carry before rounding, so that weights that matter lose less; needs a text",
    source="Lin et al. 2024, arXiv 2306.00978, Eq. 4-5; duo scaling and grid as in llm-compressor",
)
class Awq(Compressor):
    """W^ = Q(W diag(s)) diag(s)^-1 with the s of a grid that leaves the smallest error of the outputs.

    Maps that read one input share s. It is folded into W^ itself: as a function W^ x = Q(W s)(s^-1 x), what the deployed model computes with
    s^-1 folded into the norm or map before; nothing but the rounded weight changes.
    """

    Options = AwqOptions
    options: AwqOptions
    facts = CompressorFacts(
        source="Lin et al. 2024, arXiv 2306.00978, Eq. 4 (error) and Eq. 5 (s = s_X^alpha); duo scaling, grid, constants: llm-compressor 0.14",
        equation="x_j = mean |X_j|,  w_j = mean over outputs of |W_ij| / (max of its group + 1e-6)\n"
        "s = x^rho / (w^(1-rho) + 1e-4) (duo), or x^rho;  s = max(s, 1e-4);  s /= sqrt(max s  min s)\n"
        "W^ = Q(W s) s^-1,  Q: round_to_nearest;  rho from the grid with the least sum ||W^ X - W X||^2",
        words="Inputs that are large on the text get larger weights before rounding, so that the levels lie closer to what matters. Maps that "
        "read the same input (queries, keys and values; gate and up) share one scale.",
        calibration="tokens: mean size and products of the inputs (authors: a small set of the Pile)",
        bits="as round_to_nearest; the scales of the inputs are folded into what stands before and cost nothing",
        chosen=("grid: no scaling, then grid - 1 values of rho from 0 to 1 (duo), or grid values from 0 to 1",),
        deviations=(
            (
                "the error is that of the maps' own outputs (the paper's Eq. 4), from X X^T over all tokens; llm-compressor and the authors' "
                "code compare the outputs of the whole sublayer for queries, keys, values, gate and up"
            ),
            "s is folded into W^ and not into the norm before, so maps without one (o, down) are scaled too; no clipping of weights",
        ),
        verified=(
            REFERENCE,
            MUTANTS,
            "scales of llm-compressor on a toy model (optional tier)",
        ),
        bibtex="""@inproceedings{lin2024awq,
  title = {AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration},
  author = {Lin, Ji and Tang, Jiaming and Tang, Haotian and Yang, Shang and Chen, Wei-Ming and Wang, Wei-Chen and Xiao, Guangxuan and
    Dang, Xingyu and Gan, Chuang and Han, Song},
  booktitle = {MLSys}, year = {2024}, eprint = {2306.00978}, archivePrefix = {arXiv}
}""",
    )

    @property
    def needs_calibration(self):
        return True

    def check(self, shapes):
        check_group(self.options.group, shapes)

    def compress(self, names, weights, inputs):
        o = self.options
        found = self.search(weights, inputs)
        facts = {
            "exponent": found.exponent,
            "duo": found.duo,
            "error_before_scaling": found.plain,
            "error": found.error,
            "shares_scale_with": len(names) - 1,
        }
        return [
            Made(self.fold(w, found.scale), rounding_bits(tuple(w.shape), o.bits, o.group, o.symmetric), facts)
            for w in weights
        ]

    def search(self, weights: Sequence[Float[Tensor, "out in"]], inputs) -> Search:
        """The scale of maps that read one input. Of equal errors the first of the grid is taken."""
        best: Search | None = None
        plain = float("nan")
        for exponent, duo, scale in self.scales(weights, inputs.mean_absolute):
            error = float(sum(inputs.energy(self.fold(w, scale) - w) for w in weights))
            if best is None:
                plain = error
            if best is None or error < best.error:
                best = Search(scale, exponent, duo, error, plain)
        assert best is not None
        return best

    def scales(
        self, weights: Sequence[Float[Tensor, "out in"]], x: Float[Tensor, " in"]
    ) -> Iterator[tuple[float, bool, Float[Tensor, " in"]]]:
        """Exponent, kind and scale [in] of every point of the grid; the first is no scaling. x: mean |X_j|, float64."""
        n = self.options.grid
        points = (
            [(0.0, False), *((i / (n - 2), True) for i in range(n - 1))]
            if self.options.duo
            else [(i / (n - 1), False) for i in range(n)]
        )
        w = self.weight_means(weights) if self.options.duo else None
        for exponent, duo in points:
            raw = x**exponent
            if duo and w is not None:
                raw = raw / (w ** (1 - exponent) + LEAST)
            raw = raw.clamp(min=LEAST)
            yield exponent, duo, (raw / (raw.max() * raw.min()).sqrt()).to(weights[0])

    def weight_means(self, weights: Sequence[Float[Tensor, "out in"]]) -> Float[Tensor, " in"]:
        """Mean over all outputs of |W_ij| over the largest of its group, float64."""
        total = torch.zeros(weights[0].shape[1], dtype=torch.float64, device=weights[0].device)
        for weight in weights:
            parts = grouped(weight.abs(), self.options.group)
            total += (parts / (parts.amax(-1, keepdim=True) + BESIDE)).reshape(weight.shape).sum(0, dtype=torch.float64)
        return total / sum(map(len, weights))

    def fold(self, weight: Float[Tensor, "out in"], scale: Float[Tensor, " in"]) -> Float[Tensor, "out in"]:
        """Q(W s) s^-1."""
        o = self.options
        return rounded(weight * scale, o.bits, o.group, o.symmetric) / scale
