"""What a compressor is: a map from the weights of linear maps that read one input to other weights of the same shapes.

    weights [[out in], ...], inputs  --Compressor-->  [Made, ...]

The driver finds the maps, gathers what is known of their inputs and writes the result; the compressor knows no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError

if TYPE_CHECKING:
    from thalweg.compression.calibration import Inputs

REFERENCE = "loop-written reference in float64"  # what most of our own are tested against
MUTANTS = "mutants of it, each rejected"
STORED = 16  # bits of a number that is kept as it is, and of a scale: the width that compressed models are stored in


@dataclass(frozen=True)
class CompressorFacts:
    """What ``thalweg show compressor`` and the documentation say.

    source: paper and equation. equation: one line per step. words: the same in plain words. calibration: what it needs of a text. bits: how
    the bits of a weight are counted. chosen: values that the source does not state. deviations: where the code leaves it. verified:
    against what it was checked, in the words of its author: nothing unless said.
    """

    source: str
    equation: str
    words: str
    calibration: str
    bits: str
    chosen: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()
    verified: tuple[str, ...] = ()
    bibtex: str = ""


@dataclass(frozen=True)
class CompressorOptions:
    """Options of a compressor; each compressor's own dataclass extends it."""


@dataclass(frozen=True)
class Made:
    """weight [out in]: what takes the place of the weight, dense and in its dtype. bits: of all of it, stored natively. facts: what is worth
    knowing of this map, as plain values."""

    weight: Float[Tensor, "out in"]
    bits: float
    facts: dict[str, Any] = field(default_factory=dict)


class Compressor:
    """Subclass it, once per compressor: set ``Options`` and ``facts`` and write :meth:`one`, or :meth:`compress` where maps that read the
    same input are compressed together.

    structural: it takes layers away instead (:meth:`kept`), and changes no weight.
    """

    Options: ClassVar[type[CompressorOptions]] = CompressorOptions
    facts: ClassVar[CompressorFacts]
    structural: ClassVar[bool] = False

    def __init__(self, options: CompressorOptions):
        self.options: Any = options

    @property
    def needs_calibration(self) -> bool:
        """Whether it cannot do without having seen inputs; may depend on the options."""
        return False

    def check(self, shapes: dict[str, tuple[int, int]]) -> None:
        """Before anything is touched: shapes [out in] by name. Raises: InputError for one that it cannot compress, with what is allowed."""

    def compress(
        self, names: Sequence[str], weights: Sequence[Float[Tensor, "out in"]], inputs: "Inputs | None"
    ) -> list[Made]:
        """Weights that read one input, in float32 or wider -> what takes their place. inputs: None without calibration."""
        return [self.one(name, weight, inputs) for name, weight in zip(names, weights, strict=True)]

    def one(self, name: str, weight: Float[Tensor, "out in"], inputs: "Inputs | None") -> Made:
        """One weight -> what takes its place."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it does to a weight")


def dense_bits(weight: Tensor) -> float:
    """Bits of a weight that is kept as it is."""
    return float(STORED * weight.numel())


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raises: InputError for what is no whole number in the range."""
    good = isinstance(value, int) and not isinstance(value, bool) and value >= least and (most is None or value <= most)
    if not good:
        upper = f"to {most}" if most is not None else "on"
        raise InputError(f"{name} must be a whole number from {least} {upper}, got {value!r}")
