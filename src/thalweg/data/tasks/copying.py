"""copy: say the first half again."""

import math
from dataclasses import dataclass

import numpy as np

from thalweg.data.synthetic import IGNORED, PAD, SyntheticTask, at_least
from thalweg.data.tasks import register
from thalweg.errors import InputError

SEPARATOR = 1
FIRST_SYMBOL = 2


@dataclass(frozen=True)
class CopyOptions:
    """vocab: symbols; half: length of what is copied; min_half: its least length in training and validation (None: always ``half``);
    longer: its length in the split ``longer`` (None: twice ``half``).
    """

    vocab: int = 16
    half: int = 12
    min_half: int | None = None
    longer: int | None = None

    def __post_init__(self) -> None:
        at_least(self, vocab=2, half=1)
        if self.min_half is not None and not 1 <= self.min_half <= self.half:
            raise InputError(f"min_half must be from 1 to half={self.half}, got {self.min_half}")
        if self.longer is not None and self.longer < 1:
            raise InputError(f"longer must be at least 1, got {self.longer}")


class Copy(SyntheticTask):
    """``u [SEP] u``, the second u scored; symbols of u are independent and uniform.

    Splits: train, valid, and ``longer`` for lengths that were not trained. Chance: ln(vocab) nats per token, 1/vocab of the tokens,
    vocab^-half of the sequences.
    """

    Options = CopyOptions
    splits = ("train", "valid", "longer")
    options: CopyOptions

    def __init__(self, name: str, options: CopyOptions):
        super().__init__(name, options)
        self.vocab_size = FIRST_SYMBOL + options.vocab

    @property
    def values(self) -> range:
        return range(FIRST_SYMBOL, self.vocab_size)

    def natural_length(self, split: str = "train") -> int:
        self._check_split(split)
        return 2 * self._halves(split)[1] + 1

    def _halves(self, split: str) -> tuple[int, int]:
        o = self.options
        if split == "longer":
            longest = o.longer or 2 * o.half
            return longest, longest
        return o.min_half or o.half, o.half

    def chance(self) -> dict[str, float]:
        shortest, longest = self._halves("valid")
        lengths = range(shortest, longest + 1)
        exact = sum(self.options.vocab**-half for half in lengths) / len(lengths)
        return {
            "chance": math.log(self.options.vocab),
            "chance_accuracy": 1 / self.options.vocab,
            "chance_exact_match": exact,
        }

    def examples(self, rng: np.random.Generator, count: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        shortest, longest = self._halves(split)
        half = rng.integers(shortest, longest + 1, size=(count, 1))
        symbols = rng.integers(self.values.start, self.values.stop, size=(count, longest))
        place = np.arange(2 * longest + 1)[None]
        again = place - half - 1  # place in the second u
        inside = (again >= 0) & (again < half)
        source = np.where(inside, again, np.minimum(place, longest - 1))
        ids = np.take_along_axis(symbols, source, axis=1)
        ids = np.where(place == half, SEPARATOR, np.where((place < half) | inside, ids, PAD))
        return ids, np.where(inside, ids, IGNORED)


register("copy", summary="u [SEP] u: repeat a random sequence", source="parameters vocab, half, min_half, longer")(
    Copy.open
)
