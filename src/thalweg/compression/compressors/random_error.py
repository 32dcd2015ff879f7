"""Random error: a change of a given size in a direction that nothing chose, to compare others with."""

import math
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import torch

from thalweg.compression.compressors import register
from thalweg.compression.compressors.base import (
    Compressor,
    CompressorFacts,
    CompressorOptions,
    Made,
    check_whole,
    dense_bits,
)
from thalweg.compression.record import read_record
from thalweg.errors import InputError


@dataclass(frozen=True)
class RandomOptions(CompressorOptions):
    """size: norm of the error over the norm of the weight, of every matrix. like: a folder with the record of a compression, whose error every
    matrix gets in its place. seed: of the directions."""

    size: float | None = None
    like: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.size is None) == (self.like is None):
            raise InputError(
                "random needs one of size (0.1: a tenth of the weight's norm) and like (a folder that thalweg compress wrote)"
            )
        if self.size is not None and not (math.isfinite(self.size) and self.size >= 0):
            raise InputError(f"size is the norm of the error over that of the weight, at least 0, got {self.size}")
        check_whole("seed", self.seed, 0, 2**63 - 1)


@register(
    "random",
    summary="control: a Gaussian error of a given norm, or of the norm that another compression left in each matrix",
    source="definition",
)
class RandomError(Compressor):
    """W^ = W + size ||W||_F E / ||E||_F with E Gaussian."""

    Options = RandomOptions
    options: RandomOptions
    facts = CompressorFacts(
        source="definition; the norm-matched control of what compressors do",
        equation="W^ = W + size ||W||_F E / ||E||_F,  E_ij ~ N(0, 1);  like: size^2 = relative_error of that matrix in the record",
        words="Every matrix moves by the same share of its norm, or by as much as another compression moved it, in a random direction.",
        calibration="none; with a text the error of the outputs is measured too",
        bits="16: nothing is compressed",
        chosen=("what a matrix gets depends on the seed and its name, whatever else is compressed",),
        verified=("the norm of its error", "that seed and name alone decide the direction"),
    )

    @cached_property
    def _sizes(self) -> dict[str, float]:
        record = read_record(self.options.like or "")
        if record is None:
            raise InputError(
                f"{self.options.like} holds no record of a compression; give a folder that thalweg compress wrote"
            )
        return {row.name: math.sqrt(row.relative_error) for row in record.linears}

    def check(self, shapes):
        if self.options.like is not None and (missing := [name for name in shapes if name not in self._sizes]):
            raise InputError(
                f"the record in {self.options.like} says nothing of {missing[0]} and {len(missing) - 1} others; "
                "choose the same layers and sites"
            )

    def one(self, name, weight, inputs):
        size = self._sizes[name] if self.options.size is None else self.options.size
        generator = torch.Generator().manual_seed(crc32(f"{self.options.seed} {name}".encode()))
        error = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)
        error *= size * weight.norm() / error.norm()
        return Made(weight + error, dense_bits(weight), {"size": size})
