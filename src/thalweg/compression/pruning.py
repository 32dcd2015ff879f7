"""Which weights go: the lowest scores of every output, anywhere in its row or so many of every run of neighbours."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from thalweg.compression.compressors.base import STORED, check_whole
from thalweg.errors import InputError


@dataclass(frozen=True)
class Structure:
    """share: of the weights of a row that go, where they stand free. n, m: n of every m neighbouring inputs go; 0 where they
    stand free."""

    share: float
    n: int = 0
    m: int = 0

    @classmethod
    def of(cls, given: float | str) -> "Structure":
        """``0.5``, or ``2:4``: two of every four neighbours go. Raises: InputError."""
        if isinstance(given, str):
            parts = given.split(":")
            if len(parts) == 2 and all(part.strip().isdigit() for part in parts):
                n, m = map(int, parts)
                check_whole("the second number of a sparsity N:M", m, 2)
                if not 1 <= n < m:
                    raise InputError(f"a sparsity N:M takes N of every M away, 1 <= N < M, got {given!r}")
                return cls(n / m, n, m)
            try:
                given = float(given)
            except ValueError:
                raise InputError(f"sparsity is a share such as 0.5, or N:M such as 2:4, got {given!r}") from None
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 1:
            raise InputError(f"sparsity is a share above 0 and below 1, or N:M such as 2:4, got {given!r}")
        return cls(float(given))

    def check(self, shapes: dict[str, tuple[int, int]]) -> None:
        """Raises: InputError for rows that M does not divide."""
        for name, (_, inputs) in shapes.items():
            if self.m and inputs % self.m:
                raise InputError(
                    f"sparsity {self.n}:{self.m} needs a multiple of {self.m} inputs, {name} has {inputs}; give a share such as {self.share:g}"
                )

    def bits(self, weight: Float[Tensor, "out in"]) -> float:
        """Bits of the pruned matrix: 16 for every weight that is left, and where they stand: one bit a weight where they stand free,
        log2 M bits for each that is left of a run of M."""
        left = float((weight != 0).sum())
        if not self.m:
            return STORED * left + weight.numel()
        return weight.numel() / self.m * (self.m - self.n) * (STORED + math.ceil(math.log2(self.m)))


def lowest(score: Float[Tensor, "out in"], structure: Structure) -> Bool[Tensor, "out in"]:
    """True for the weights that go: in every row the floor(share in) lowest scores, or the n lowest of every m neighbours.

    Of equal scores those further left go (stable sort). Shapes: [out in] -> [out in].
    """
    parts = score.reshape(-1, structure.m) if structure.m else score
    count = structure.n if structure.m else int(score.shape[1] * structure.share)
    order = parts.argsort(dim=-1, stable=True)[:, :count]
    gone = torch.zeros_like(parts, dtype=torch.bool).scatter(-1, order, True)
    return gone.reshape(score.shape)
