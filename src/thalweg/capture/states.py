"""What streams over the states at one depth: size, direction, anisotropy, outlier channels, first token, second moments."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from thalweg.capture.histogram import COSINE, POSITIVE, SHARE
from thalweg.capture.tables import Entry, Table, Units, add_rows
from thalweg.errors import InputError
from thalweg.geometry.catalog import Null
from thalweg.geometry.outliers import TOP, energy_kurtosis, energy_share, first_token_of
from thalweg.geometry.similarity import mean_pairwise_cosine
from thalweg.geometry.spectrum import effective_rank_of_moments, large_gaussian_null
from thalweg.ops.precision import wide
from thalweg.records import Measurements

RANKS = ("pooled_effective_rank", "pooled_effective_rank.centred", "pooled_effective_rank.without_first")
STATE_MEASURES = (
    "rms",
    "entered_cosine",
    "anisotropy",
    "outlier_channels.share",
    "outlier_channels.kurtosis",
    "first_token.ratio",
    "first_token.share",
)


class Tokens(NamedTuple):
    """The real tokens of a call: ``real`` [b t], or None where all are; the unit of every one [n]; ``first``: place among the n of the first
    token of every row [b]; ``row``: row of every one [n]; ``unit_of_row`` [b]."""

    real: Bool[Tensor, "b t"] | None
    unit: Int[Tensor, " n"]
    first: Int[Tensor, " b"]
    row: Int[Tensor, " n"]
    unit_of_row: Int[Tensor, " b"]

    @classmethod
    def of(cls, real: Bool[Tensor, "b t"], unit_of_row: Int[Tensor, " b"]) -> "Tokens":
        """Rows without a real token are left out."""
        whole, (b, t) = bool(real.all()), real.shape
        row = torch.arange(b, device=real.device).repeat_interleave(t)
        row = row if whole else row[real.flatten()]
        counts = real.sum(1)
        start = counts.cumsum(0) - counts
        keep = counts > 0
        return cls(None if whole else real, unit_of_row[row], start[keep], row, unit_of_row[keep])

    def to(self, device: torch.device) -> "Tokens":
        """The same on another device."""
        real, *others = self
        moved = (x.to(device) for x in others)
        return Tokens(None if real is None else real.to(device), *moved)

    def flat(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "n d"]:
        """The real tokens of x, in float32 or wider."""
        return wide(x.flatten(0, 1) if self.real is None else x[self.real])


class StateStatistics:
    """States at one depth. Memory: 2 width numbers, or 2 width^2 + 2 width with moments, of 8 bytes, and two tables.

    Products are taken in float32 over the tokens of a batch and summed over batches in float64.
    """

    def __init__(self, width: int, units: Units, *, moments: bool, entered: bool):
        self.width, self.nonzero, self.moments = width, 0, moments
        self.table = Table({"square": None, "size": POSITIVE, **({"entered": COSINE} if entered else {})}, units)
        self.rows_table = Table({"ratio": POSITIVE, "share": SHARE}, units)
        self.sums: dict[str, Tensor] = {"unit": _zeros(width), "energy": _zeros(width)}
        if moments:
            self.sums |= {"mean": _zeros(width), "rest": _zeros(width, width), "first": _zeros(width, width)}

    @property
    def bytes(self) -> int:
        return self.table.bytes + self.rows_table.bytes + sum(x.nbytes for x in self.sums.values())

    def add(self, x: Float[Tensor, "n d"], size: Float[Tensor, " n"], entered: Tensor | None, tokens: Tokens) -> None:
        """size: norm of every token; entered: its cosine with the state that entered the stream."""
        columns = [size.square(), size / math.sqrt(self.width), *(() if entered is None else (entered,))]
        self.table.add(torch.stack(columns), tokens.unit)
        weight = torch.where(size > 0, 1 / torch.where(size > 0, size, 1.0), 0.0)
        self._sum("unit", weight @ x)
        self._sum("energy", x.square().sum(0))
        self.nonzero = self.nonzero + (size > 0).sum()
        self._first(size, tokens)
        if self.moments:
            chosen = x[tokens.first]
            first = chosen.T @ chosen
            self._sum("first", first)
            self._sum("rest", (x.T @ x).double() - first)
            self._sum("mean", x.sum(0))

    def _first(self, size: Tensor, tokens: Tokens) -> None:
        """Ratio and share of :func:`thalweg.geometry.outliers.first_token`, for rows of any length at once."""
        norms, count = size.double(), torch.bincount(tokens.row)
        total, squares = (torch.zeros_like(count, dtype=norms.dtype) for _ in range(2))
        total.index_add_(0, tokens.row, norms)
        squares.index_add_(0, tokens.row, norms.square())
        some = count > 0
        count = count[some]
        ratio, share = first_token_of(norms[tokens.first], total[some], squares[some], count)
        enough = count > 1
        self.rows_table.add(torch.stack([ratio, share])[:, enough], tokens.unit_of_row[enough])

    def _sum(self, name: str, value: Tensor) -> None:
        total = self.sums[name]
        self.sums[name] = (total if total.device == value.device else total.to(value.device)) + value

    def measurements(self, fields: Mapping[str, Any]) -> Measurements:
        """Rows of everything. Raises: InputError where a state was not finite."""
        rows, n, site = Measurements(), self.table.tokens, fields["site"]
        if not n:
            return rows
        if not torch.isfinite(self.sums["energy"]).all():
            raise InputError(
                f"the states at {site} are not all finite in {fields.get('dtype')}; try another dtype, or a model that has not diverged"
            )
        stream = "stream units"
        entries = [Entry("rms", "square", None, True, self.width, unit=stream, spread="size")]
        if "entered" in self.table.columns:
            entries.append(Entry("entered_cosine", "entered", null=Null(0.0, 0.0, "independent directions")))
        add_rows(rows, self.table, entries, fields)
        mean_share = self.rows_table.tokens / n  # one over the mean length
        entries = [
            Entry("first_token.ratio", "ratio", null=Null(1.0, 0.0, "a token like the others")),
            Entry("first_token.share", "share", null=Null(mean_share, 0.0, "1/tokens: a token like the others")),
        ]
        add_rows(rows, self.rows_table, entries, fields)
        if n > 1:
            unit = self.sums["unit"].double()
            value = mean_pairwise_cosine(unit, float(self.nonzero), n).item()
            rows.add("anisotropy", value, n=n, null=0.0, null_kind="independent directions", **fields)
        energy = self.sums["energy"].double()
        null = {"null": min(TOP / self.width, 1.0), "null_kind": f"{TOP}/width: all channels alike"}
        rows.add("outlier_channels.share", energy_share(energy).item(), n=n, **null, **fields)
        null = {"null": 1.0, "null_kind": "all channels alike"}
        rows.add("outlier_channels.kurtosis", energy_kurtosis(energy).item(), n=n, **null, **fields)
        if self.moments:
            self._ranks(rows, n, fields)
        return rows

    def _ranks(self, rows: Measurements, n: int, fields: Mapping[str, Any]) -> None:
        rest, mean = self.sums["rest"].double(), self.sums["mean"].double()
        whole = rest + self.sums["first"].double()
        firsts = min(self.rows_table.tokens, n - 1)
        for name, moments, tokens, free in (
            (RANKS[0], whole, n, n),
            (RANKS[1], whole - torch.outer(mean, mean) / n, n, n - 1),
            (RANKS[2], rest, n - firsts, n - firsts),
        ):
            if free < 1:
                continue
            null = large_gaussian_null(free, self.width)
            value = effective_rank_of_moments(moments.cpu(), tokens).item()
            rows.add(name, value, n=tokens, null=null.value, null_kind=null.kind, **fields)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)
