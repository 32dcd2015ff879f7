"""The libraries whose compressors can be asked for, by the name before the colon: ``llmcompressor:wanda``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thalweg.compression.compressors.base import STORED, CompressorOptions
from thalweg.compression.compressors.round_to_nearest import RoundToNearestOptions
from thalweg.compression.compressors.wanda import WandaOptions
from thalweg.compression.pruning import Structure
from thalweg.compression.rounding import rounding_bits
from thalweg.errors import InputError, UnknownNameError

TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class AwqOutsideOptions(CompressorOptions):
    """bits: of a weight, 4 or 8. group: neighbouring inputs that share a scale. symmetric: of the rounding. duo: divide by the mean size of
    the weights too. grid: number of scales that are tried."""

    bits: int = 4
    group: int = 128
    symmetric: bool = False
    duo: bool = True
    grid: int = 20

    def __post_init__(self) -> None:
        RoundToNearestOptions(self.bits, self.group, self.symmetric)
        if self.bits not in (4, 8):
            raise InputError(f"llmcompressor:awq stores 4 or 8 bits, got {self.bits}; awq of our own takes 2 to 8")


@dataclass(frozen=True)
class TorchaoRoundingOptions(CompressorOptions):
    """group: neighbouring inputs that share a scale, or ``row``."""

    group: int | str = "row"

    def __post_init__(self) -> None:
        RoundToNearestOptions(4, self.group)


@dataclass(frozen=True)
class TorchaoWandaOptions(CompressorOptions):
    """sparsity: 2:4 or 4:8, or a share of the whole matrix (scores are compared across outputs, not within one as in the paper)."""

    sparsity: float | str = "2:4"

    def __post_init__(self) -> None:
        structure = Structure.of(self.sparsity)
        if structure.m and 2 * structure.n != structure.m:
            raise InputError(f"torchao:wanda takes half of every run away (2:4, 4:8), got {self.sparsity}")


@dataclass(frozen=True)
class Method:
    """One compressor of a library. summary: in a line. bits: of a weight when it rounds, else None. calibrated: it needs a text."""

    summary: str
    options: type[CompressorOptions]
    calibrated: bool
    bits: int | None = None


@dataclass(frozen=True)
class Library:
    """packages: what its environment must have, in the versions that were tested. imports: its module. script: file that runs there."""

    packages: tuple[str, ...]
    imports: str
    script: str
    methods: Mapping[str, Method] = field(default_factory=dict)

    @property
    def install(self) -> str:
        """How its environment is made."""
        packages = " ".join((*self.packages, TORCH))
        return (
            f"python3 -m venv ENV && ENV/bin/python -m pip install {packages} (without a GPU: torch from its CPU index first), "
            "then --environment ENV/bin/python"
        )


LIBRARIES = {
    "llmcompressor": Library(
        ("llmcompressor==0.14.0.1",),
        "llmcompressor",
        "llmcompressor_script.py",
        {
            "wanda": Method("Wanda of llm-compressor", WandaOptions, True),
            "awq": Method(
                "AWQ of llm-compressor, its scales folded into the norms and maps before", AwqOutsideOptions, True, 4
            ),
        },
    ),
    "torchao": Library(
        ("torchao==0.18.0", "transformers==5.24.0", "safetensors"),
        "torchao",
        "torchao_script.py",
        {
            "int8": Method("symmetric rounding to 8 bits by torchao", TorchaoRoundingOptions, False, 8),
            "int4": Method("symmetric rounding to 4 bits by torchao", TorchaoRoundingOptions, False, 4),
            "wanda": Method(
                "pruning by torchao: |W| times the squared norm of the input, calibrated on the dense model",
                TorchaoWandaOptions,
                True,
            ),
        },
    ),
}


def is_external(method: str) -> bool:
    """Whether a method names a library."""
    return isinstance(method, str) and ":" in method


def external(method: str) -> tuple[Library, str, Method]:
    """Library, name and method of ``llmcompressor:wanda``. Raises: UnknownNameError."""
    library, _, name = method.partition(":")
    if library not in LIBRARIES:
        raise UnknownNameError("library of compressors", library, LIBRARIES)
    methods = LIBRARIES[library].methods
    if name not in methods:
        raise UnknownNameError(f"compressor of {library}", name, methods)
    return LIBRARIES[library], name, methods[name]


def names() -> list[str]:
    """All of them, as they are asked for."""
    return [f"{library}:{name}" for library, found in LIBRARIES.items() for name in found.methods]


def bits_of(method: Method, options: Any, weight: Any) -> float:
    """Bits of a weight that came back, as ours are counted."""
    if method.bits is not None:
        symmetric = getattr(options, "symmetric", True)
        return rounding_bits(tuple(weight.shape), getattr(options, "bits", method.bits), options.group, symmetric)
    sparsity = getattr(options, "sparsity", None)
    return Structure.of(sparsity).bits(weight) if sparsity is not None else float(STORED * weight.numel())
