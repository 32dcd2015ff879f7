"""Attention heads in value space, over a stream of tokens."""

from collections.abc import Mapping, Sequence
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
FEW_SIGNED, FEW_SHARE = replace(SIGNED, low=-1e3, high=1e3, count=BINS), replace(SHARE, count=BINS)
OWN = ("own_weight", "value_coefficient.exclude_self")


class HeadStatistics:
    """Every head of one attention site, and their mean. Memory: 4 columns a head, or 7 with own weights."""

    def __init__(self, heads: Heads, units: Units, own: bool):
        self.heads, self.own = heads, own
        kinds = {"value_coefficient.full": FEW_SIGNED, "value_fraction": FEW_SHARE}
        if own:
            kinds |= {OWN[0]: FEW_SHARE, OWN[1]: FEW_SIGNED}
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
        add_rows(rows, self.table, entries_by_part(self.names, nulls, "head", self.heads.query), fields)
        return rows


def entries_by_part(
    names: Sequence[str], nulls: Mapping[str, Null], field: str, parts: int, whole: str | None = None
) -> list[Entry]:
    """Of every measure its mean over the parts (heads ...), with ``whole`` in ``field``, and each part, with its number there.

    The columns of the table are ``NAME`` and ``NAME PART``.
    """
    entries = []
    for name in names:
        null = nulls.get(name)
        entries.append(Entry(name, name, null=null, fields={field: whole}))
        entries += [Entry(name, f"{name} {part}", null=null, fields={field: part}) for part in range(parts)]
    return entries
