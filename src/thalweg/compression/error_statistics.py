"""The errors of all updates while a pass of the compressed model goes by: sums only, whatever the number of tokens."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.capture.histogram import COSINE, POSITIVE, SIGNED
from thalweg.capture.layout import Located, SitePlace
from thalweg.capture.states import Tokens
from thalweg.capture.tables import LEVEL, Entry, Table, Units, add_rows
from thalweg.capture.watching import Event
from thalweg.compression.dense_pass import Record, adds_up, branch_key, heads_key, step_key, step_of
from thalweg.geometry.catalog import Null
from thalweg.geometry.errors import across_share_null, direction_cosine, error_lengths, random_error
from thalweg.geometry.rows import dtype_of
from thalweg.ops.precision import wide
from thalweg.records import Measurements
from thalweg.statistics import ratio_intervals

MEASURES = (
    "error.total",
    "error.along",
    "error.signed",
    "error.across",
    "error.across_share",
    "error.cosine",
    "error.pooled",
    "error.sqnr",
)
HEAD_MEASURES = ("error.total", "error.along", "error.signed", "error.across", "error.cosine", "error.pooled")
RANDOM = "measured: a random error of the same norm at the same tokens"
VALUE = "value"  # branch of rows on attention before its output projection
LAYER = "layer"


@dataclass(frozen=True)
class Matching:
    """layer_of: layer of the compressed model -> of the base; dropped: layers of the base that it has not; site_of: the same of sites."""

    layer_of: Mapping[int, int]
    dropped: tuple[int, ...]
    site_of: Mapping[int, int]


class Directions:
    """Random directions for the tokens of a batch, one for every width; the same for all places, so that places are compared fairly."""

    def __init__(self, count: int, seed: int, device: torch.device):
        self.count, self.seed, self.device = count, seed, device
        self.found: dict[int, Tensor] = {}

    def of(self, width: int) -> Float[Tensor, "n width"]:
        """The directions of a width."""
        if width not in self.found:
            generator = torch.Generator().manual_seed(self.seed)
            self.found[width] = torch.randn(self.count, width, generator=generator).to(self.device)
        return self.found[width]


class ErrorTable:
    """Errors of one update. heads: of how many heads beside; then the update is that of all heads side by side."""

    def __init__(self, width: int, units: Units, mode: str, heads: int = 0):
        self.width, self.mode, self.heads = width, mode, heads
        columns: dict[str, Any] = {
            "total": POSITIVE,
            "along": POSITIVE,
            "signed": SIGNED,
            "across": POSITIVE,
            "share": None,
            "cosine": COSINE,
            "error": None,
            "dense": None,
            "moved": None,
            "random along": None,
            "random across": None,
            "random cosine": None,
            "random signed": None,
        }
        self.names = tuple(columns)
        columns |= {f"{name} {head}": None for head in range(heads) for name in self.names}
        self.table = Table(columns, units)

    @property
    def bytes(self) -> int:
        return self.table.bytes

    def add(self, dense: Tensor, compressed: Tensor, tokens: Tokens, directions: Directions) -> None:
        """Count n tokens: updates [n d], or [n h dv] with heads."""
        columns = _columns(dense.flatten(1), compressed.flatten(1), directions.of(self.width))
        if self.heads:
            by_head = _columns(dense, compressed, directions.of(dense.shape[-1]).unsqueeze(1))  # each [n h]
            columns += [column[:, head] for head in range(self.heads) for column in by_head]
        self.table.add(torch.stack(columns), tokens.unit)

    def measurements(self, fields: Mapping[str, Any]) -> Measurements:
        """Rows of the update, and of its heads."""
        rows = Measurements()
        if not self.table.tokens:
            return rows
        add_rows(rows, self.table, self._entries("", self.width, MEASURES), fields)
        self._sqnr(rows, fields)
        for head in range(self.heads):
            entries = self._entries(f" {head}", self.width // self.heads, HEAD_MEASURES)
            add_rows(rows, self.table, entries, {**fields, "head": head})
        return rows

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Sums above and below the line of ``error.NAME``, by unit; of ``sqnr`` those of ``pooled``."""
        counts = self.table.counts.cpu().numpy()
        of = {"across_share": ("share", "moved"), "pooled": ("error", "dense"), "sqnr": ("error", "dense")}
        top, bottom = of.get(name, (name, ""))
        return self.table.total(top), self.table.total(bottom) if bottom else counts

    def _entries(self, end: str, width: int, wanted: Iterable[str]) -> list[Entry]:
        tokens = self.table.tokens

        def chance(column: str) -> Null:
            return Null(float(self.table.total(f"random {column}{end}").sum()) / tokens, 0.0, RANDOM)

        isotropic = Null(across_share_null(width), 0.0, "sqrt(1 - 1/width): isotropic error")
        found = {
            "error.total": Entry("", f"total{end}"),
            "error.along": Entry("", f"along{end}", null=chance("along")),
            "error.signed": Entry("", f"signed{end}", null=chance("signed")),
            "error.across": Entry("", f"across{end}", null=chance("across")),
            "error.across_share": Entry("", f"share{end}", f"moved{end}", null=isotropic),
            "error.cosine": Entry("", f"cosine{end}", null=chance("cosine")),
            "error.pooled": Entry("", f"error{end}", f"dense{end}", root=True, spread="dense"),
        }
        moved = float(self.table.total(f"moved{end}").sum())
        return [
            found[name]._replace(name=f"{name}.{self.mode}")
            for name in wanted
            if name in found and (moved or name != "error.across_share")
        ]

    def _sqnr(self, rows: Measurements, fields: Mapping[str, Any]) -> None:
        error, dense = self.table.total("error"), self.table.total("dense")
        low, high = ratio_intervals(error[:, None], dense[:, None], level=LEVEL)
        seen = int((self.table.counts > 0).sum())
        words = f"{LEVEL:.0%} percentile bootstrap over {seen} {self.table.units.name} of {self.table.tokens} tokens"
        ends = {}
        if np.isfinite(low[0]) and low[0] > 0:
            ends = {"low": decibels(high[0]), "high": decibels(low[0]), "interval": words}
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(error.sum() / dense.sum())
        rows.add(f"error.sqnr.{self.mode}", decibels(value), unit="dB", n=seen, **ends, **fields)


def decibels(noise_over_signal: float) -> float:
    """-10 log10 of a ratio of energies; infinite for 0."""
    return math.inf if noise_over_signal == 0 else -10 * math.log10(float(noise_over_signal))


def _columns(dense: Tensor, compressed: Tensor, direction: Tensor) -> list[Tensor]:
    """Every number of the table, in its order."""
    found = error_lengths(dense, compressed)
    chance = random_error(found, direction_cosine(dense, direction))
    signed = found.signed
    return [
        found.total,
        signed.abs(),
        signed,
        found.perpendicular,
        found.share,
        found.cosine,
        found.error.square(),
        found.dense.square(),
        (found.error > 0).to(found.dense.dtype),
        chance.signed.abs(),
        chance.perpendicular,
        chance.cosine,
        chance.signed,
    ]


class PairStatistics:
    """Call it with every event of a pass of the compressed model, each pass announced by :meth:`begin`.

    located: of the compressed model. base: of the dense one, whose sites and layers the rows name. mode: stands at the end of every
    measure's name. values: attention heads too, where both have them.
    """

    def __init__(self, located: Located, base: Located, matching: Matching, units: Units, mode: str, values: bool):
        self.located, self.base, self.matching, self.mode = located, base, matching, mode
        self.plain = adds_up(located) and adds_up(base)
        self.wholes = self.plain or (mode != "isolated" and adds_up(located) == adds_up(base))
        width, streams = base.width, base.streams
        self.sites = {place.index: ErrorTable(width, units, mode) for place in base.sites}
        whole = width if self.plain else width * streams
        self.layers = {layer: ErrorTable(whole, units, mode) for layer in range(base.depth)} if self.wholes else {}
        self.heads = {
            index: ErrorTable(heads.query * heads.width, units, mode, heads.query)
            for index, heads in (valued(located, base, matching) if values else {}).items()
        }
        self.last = {place.layer: place.index for place in located.sites}
        self.dtype = ""
        self._sums: tuple[Tensor, Tensor] | None = None
        self._begun: dict[int, Tensor] = {}

    @property
    def bytes(self) -> int:
        return sum(table.bytes for table in (*self.sites.values(), *self.layers.values(), *self.heads.values()))

    def begin(self, record: Record, tokens: Tokens, seed: int) -> None:
        """Announce a pass: what the dense model left, which tokens count, the seed of the random directions."""
        self.record, self.tokens = record, tokens
        self.directions = Directions(len(tokens.unit), seed, tokens.unit.device)
        self._sums, self._begun = None, {}

    def __call__(self, event: Event) -> None:
        """Count one site."""
        place = event.place
        self.dtype = dtype_of(event.branch)
        index = self.matching.site_of[place.index]
        dense, found = self._flat(self.record.tensor(branch_key(index))), self._flat(event.branch)
        self._add(self.sites[index], dense, found)
        if index in self.heads and event.values is not None:
            self._add(self.heads[index], self._flat(self.record.tensor(heads_key(index))), self._flat(event.values.o))
        if self.wholes:
            self._layer(event, dense, found)

    def _layer(self, event: Event, dense: Tensor, found: Tensor) -> None:
        """The whole layer: both branches together, or the change of the state."""
        place = event.place
        layer, ends = self.matching.layer_of[place.layer], self.last[place.layer] == place.index
        if self.plain:
            before = self._sums
            self._sums = (dense, found) if before is None else (before[0] + dense, before[1] + found)
            if ends:
                self._add(self.layers[layer], *self._sums)
                self._sums = None
            return
        step = step_of(event, self._begun, self.last)
        if step is not None:
            self._add(self.layers[layer], self._flat(self.record.tensor(step_key(layer))), self._flat(step))

    def end(self) -> None:
        """After a pass: layers that the compressed model has not, whose update is zero."""
        for layer in self.matching.dropped:
            sums: list[Tensor] = []
            for place in self.base.sites:
                if place.layer != layer:
                    continue
                dense = self._flat(self.record.tensor(branch_key(place.index)))
                sums.append(dense)
                self._add(self.sites[place.index], dense, torch.zeros_like(dense))
            if self.wholes:
                whole = sum(sums[1:], sums[0]) if self.plain else self._flat(self.record.tensor(step_key(layer)))
                self._add(self.layers[layer], whole, torch.zeros_like(whole))

    def _add(self, table: ErrorTable, dense: Tensor, found: Tensor) -> None:
        table.add(
            dense if table.heads else dense.flatten(1),
            found if table.heads else found.flatten(1),
            self.tokens,
            self.directions,
        )

    def _flat(self, x: Tensor) -> Tensor:
        return wide(self.tokens.flat(x.to(self.tokens.unit.device)))

    def tables(self) -> list[tuple[dict[str, Any], ErrorTable]]:
        """Every table with the place that it stands for, in the order of the pass."""
        found: list[tuple[dict[str, Any], ErrorTable]] = []
        for place in self.base.sites:
            where = {"layer": place.layer, "branch": place.kind}
            found.append(({"site": place.name, **where}, self.sites[place.index]))
            if place.index in self.heads:
                found.append(({**where, "site": f"{place.name}.{VALUE}", "branch": VALUE}, self.heads[place.index]))
        for layer, table in self.layers.items():
            found.append(({"site": f"layers.{layer}", "layer": layer, "branch": LAYER}, table))
        return found

    def by_branch(self) -> dict[str, list[tuple[int, ErrorTable]]]:
        """Kind of update -> its tables with their layers; of several sites of one kind in a layer the first."""
        found: dict[str, dict[int, ErrorTable]] = {}
        for where, table in self.tables():
            found.setdefault(where["branch"], {}).setdefault(where["layer"], table)
        return {branch: sorted(tables.items()) for branch, tables in found.items()}

    def measurements(self) -> Measurements:
        """Rows of everything that was counted."""
        rows = Measurements()
        for where, table in self.tables():
            rows.extend(table.measurements({**where, "dtype": self.dtype}))
        return rows


def valued(located: Located, base: Located, matching: Matching) -> dict[int, Any]:
    """Attention sites of the base whose heads both models show, with their layout."""
    theirs = {matching.site_of[place.index]: place for place in located.attention}

    def shown(place: SitePlace) -> bool:
        other = theirs.get(place.index)
        if place.heads is None or other is None or other.heads is None:
            return False
        return (place.heads.query, place.heads.key_value) == (other.heads.query, other.heads.key_value)  # none pruned

    return {place.index: place.heads for place in base.attention if shown(place)}


def unit_sums(tables: Sequence[ErrorTable], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Sums above and below the line of a measure by unit and layer, [units layers] twice."""
    pairs = [table.series(name) for table in tables]
    return np.stack([top for top, _ in pairs], 1), np.stack([bottom for _, bottom in pairs], 1)
