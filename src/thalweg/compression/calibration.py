"""Calibration: the tokens that a compressor sees, and what is kept of the inputs of a linear map while they pass."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from thalweg.compression.compressors.base import check_whole
from thalweg.errors import InputError
from thalweg.ops.precision import wide

Samples = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Calibration:
    """samples: token numbers, each sample a row of its own. source: where they come from, in words."""

    samples: tuple[tuple[int, ...], ...]
    source: str = "given by the caller"

    @classmethod
    def of(
        cls, given: "Calibration | Samples", vocabulary: int | None = None, longest: int | None = None
    ) -> "Calibration":
        """Samples as they come, checked. vocabulary: size of the model's; longest: the most tokens that it takes. Raises: InputError."""
        if isinstance(given, Calibration):
            made = given
        else:
            if isinstance(given, str | bytes) or not isinstance(given, Sequence | Tensor):
                raise InputError(
                    f"calibration is a list of lists of token numbers, got {type(given).__name__}; of a text: calibration_of(...)"
                )
            rows = [row.tolist() if isinstance(row, Tensor) else row for row in given]
            made = cls(tuple(tuple(_ids(row, i)) for i, row in enumerate(rows)))
        if not made.samples:
            raise InputError("calibration holds no sample; give at least one list of token numbers")
        highest = max(max(row) for row in made.samples)
        if vocabulary is not None and highest >= vocabulary:
            raise InputError(
                f"calibration holds token {highest}, the model knows 0 to {vocabulary - 1}; use the model's own tokenizer"
            )
        if longest is not None and made.longest > longest:
            raise InputError(
                f"a sample of the calibration has {made.longest} tokens, this model takes {longest} at most; give shorter samples"
            )
        return made

    @property
    def tokens(self) -> int:
        return sum(map(len, self.samples))

    @property
    def longest(self) -> int:
        return max(map(len, self.samples))

    @property
    def sha256(self) -> str:
        """Of the tokens of all samples, in order."""
        digest = hashlib.sha256()
        for row in self.samples:
            digest.update(torch.tensor(row, dtype=torch.int64).numpy().tobytes() + b"|")
        return digest.hexdigest()

    def plain(self) -> dict[str, Any]:
        """For records."""
        return {
            "source": self.source,
            "samples": len(self.samples),
            "tokens": self.tokens,
            "longest": self.longest,
            "sha256": self.sha256,
        }

    def batches(self, size: int) -> list[Int[Tensor, "b t"]]:
        """Rows of one length side by side, at most ``size`` of them: nothing is ever padded."""
        check_whole("batch_size", size, 1)
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for row in self.samples:
            by_length.setdefault(len(row), []).append(row)
        return [torch.tensor(rows[i : i + size]) for rows in by_length.values() for i in range(0, len(rows), size)]


def calibration_of(
    texts: Iterable[str], encode: Callable[[str], Sequence[int]], *, samples: int, length: int, source: str = ""
) -> Calibration:
    """The first ``samples`` disjoint windows of ``length`` tokens of the texts, in order; what is left over at the end of a text is not used.

    Raises: InputError where no text is as long as a window.
    """
    check_whole("samples", samples, 1)
    check_whole("length", length, 2)
    found: list[tuple[int, ...]] = []
    longest = 0
    for text in texts:
        ids = [int(i) for i in encode(text)]
        longest = max(longest, len(ids))
        found += [tuple(ids[i : i + length]) for i in range(0, len(ids) - length + 1, length)]
        if len(found) >= samples:
            break
    if not found:
        raise InputError(
            f"no document has the {length} tokens of a sample, the longest has {longest}; give a shorter length or more text"
        )
    return Calibration(tuple(found[:samples]), source or "texts of the caller")


def _ids(row: Any, number: int) -> list[int]:
    good = isinstance(row, Sequence) and not isinstance(row, str | bytes) and len(row)
    if not good or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in row):
        raise InputError(
            f"sample {number} of the calibration must be a list of at least one token number, got {row!r:.60}"
        )
    return [int(i) for i in row]


class Inputs:
    """What is kept of the inputs x [in] of linear maps over all tokens: count, sums of |x| and x^2, and the products x x^T.

    Memory: in^2 + 2 in numbers. Products in float32 or wider; the sums of |x| and x^2 add up in float64.
    """

    def __init__(self, width: int, like: Tensor):
        self.tokens = 0
        self.absolute = torch.zeros(width, dtype=torch.float64, device=like.device)
        self.square = torch.zeros_like(self.absolute)
        self.products = torch.zeros(width, width, dtype=wide(like[:0]).dtype, device=like.device)

    def add(self, x: Float[Tensor, "*n in"]) -> None:
        rows = wide(x.detach().reshape(-1, x.shape[-1]))
        self.tokens += len(rows)
        self.absolute += rows.abs().sum(0, dtype=torch.float64)
        self.square += rows.square().sum(0, dtype=torch.float64)
        self.products.addmm_(rows.T, rows)

    @property
    def norms(self) -> Float[Tensor, " in"]:
        """||X_j||_2 of every feature over all tokens, float64."""
        return self.square.sqrt()

    @property
    def mean_absolute(self) -> Float[Tensor, " in"]:
        """Mean of |X_j| over the tokens, float64."""
        return self.absolute / max(self.tokens, 1)

    def energy(self, weight: Float[Tensor, "out in"]) -> Tensor:
        """sum over tokens and outputs of (W x)^2 = tr(W X X^T W^T), a scalar in float64."""
        weight = weight.to(self.products.dtype)
        return ((weight @ self.products) * weight).sum(dtype=torch.float64).clamp(min=0)
