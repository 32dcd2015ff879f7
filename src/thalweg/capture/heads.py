"""Attention heads in value space, over a stream of tokens."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.capture.histogram import SHARE, SIGNED
from thalweg.capture.layout import Heads
from thalweg.capture.states import Tokens
from thalweg.capture.tables import Entry, Table, Units, add_rows
from thalweg.capture.watching import ValueEvent
from thalweg.geometry.catalog import Null
from thalweg.geometry.heads import fraction_of
from thalweg.geometry.updates import parallel_fraction_null
from thalweg.ops.value_edit import value_coefficient
from thalweg.records import Measurements

BINS = 512  # by head: a bin of an unbounded measure is 12 % of the value wide
OWN = ("own_weight", "value_coefficient.exclude_self")


class HeadStatistics:
    """Every head of one attention site, and their mean. Memory: 4 columns a head, or 7 with own weights."""

    def __init__(self, heads: Heads, units: Units, own: bool):
        self.heads, self.own = heads, own
        signed, share = replace(SIGNED, low=-1e3, high=1e3, count=BINS), replace(SHARE, count=BINS)
        kinds = {"value_coefficient.full": signed, "value_fraction": share}
        if own:
            kinds |= {OWN[0]: share, OWN[1]: signed}
        self.names = tuple(kinds)
        columns: dict[str, Any] = {f"{name} {head}": kinds[name] for name in kinds for head in range(heads.query)}
        self.table = Table(columns | dict.fromkeys(self.names), units)

    @property
    def bytes(self) -> int:
        return self.table.bytes

    def add(self, seen: ValueEvent, tokens: Tokens) -> None:
        """Count n tokens."""
        found = [value_coefficient(seen.o, seen.v), fraction_of(seen.o, seen.v)]
        if self.own and seen.own is not None:
            own = seen.own.transpose(1, 2).to(found[0].dtype)
            found += [own, value_coefficient(seen.o, seen.v, seen.own)]
        flat: list[Float[Tensor, "n h"]] = [tokens.flat(x) for x in found]
        self.table.add(torch.cat([*(x.T for x in flat), torch.stack([x.mean(1) for x in flat])]), tokens.unit)

    def measurements(self, fields: Mapping[str, Any]) -> Measurements:
        """Rows by head, and without a head the mean over them."""
        rows = Measurements()
        nulls = {
            "value_fraction": Null(parallel_fraction_null(self.heads.width), 0.0, "random direction"),
            OWN[1]: Null(0.0, 0.0, "values of others independent of the own one"),
        }
        if self.own and self.table.tokens:
            mean = float(self.table.total(OWN[0]).sum()) / self.table.tokens
            nulls["value_coefficient.full"] = Null(mean, 0.0, "mean A_tt: values of others independent of the own one")
        entries = []
        for name in self.names:
            entries.append(Entry(name, name, null=nulls.get(name)))
            heads = range(self.heads.query)
            entries += [Entry(name, f"{name} {head}", null=nulls.get(name), fields={"head": head}) for head in heads]
        add_rows(rows, self.table, entries, fields)
        return rows
