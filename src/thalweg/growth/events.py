"""The growth record: every change of structure as one event, kept whole in a file and as rows for reports."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thalweg._words import counted
from thalweg.errors import InputError
from thalweg.growth.energy import FreeEnergy
from thalweg.records import Measurements, atomic_write_text, jsonl

Kind = Literal["birth", "mask", "restore", "prune", "layer"]
KIND, SCHEMA = "growth", 1


@dataclass(frozen=True)
class GrowthEvent:
    """One event.

    kind: birth of heads, mask (the first step towards pruning), restore (of a masked head), prune (for good), layer (a new one on top).
    step, layer, heads (identifiers). eigenvalues: of the directions taken, over |S|_2 |M|_F; next_eigenvalue: the first that was left;
    threshold: theta. residual_before, residual_after: Gamma; positive_before, positive_after: sum of positive eigenvalues; both sides with
    one normaliser. directions: unit vectors [heads][d], the largest component positive. captured: what each new head holds along its
    direction, normalised. condition: kappa(S). asymmetry: of the layer, chance 1 / sqrt 2. drift: of the outputs on the probe set,
    relative. parameters: of the network, before and after. energy_before, energy_after: free energy of the whole run; must_fall: it has to
    fall here (:mod:`thalweg.growth.energy`). degenerate: several heads at once, on directions of one eigenvalue. why: in words.
    """

    kind: Kind
    step: int
    layer: int
    heads: tuple[int, ...]
    why: str
    threshold: float
    eigenvalues: tuple[float, ...] = ()
    next_eigenvalue: float | None = None
    residual_before: float | None = None
    residual_after: float | None = None
    positive_before: float | None = None
    positive_after: float | None = None
    directions: tuple[tuple[float, ...], ...] = ()
    captured: tuple[float, ...] = ()
    condition: float | None = None
    asymmetry: float | None = None
    drift: float | None = None
    parameters_before: int | None = None
    parameters_after: int | None = None
    heads_after: int | None = None
    energy_before: float | None = None
    energy_after: float | None = None
    degenerate: bool = False
    must_fall: bool = False

    def line(self) -> str:
        """For a person."""
        what = f"step {self.step}, layer {self.layer}: {self.kind}"
        if self.kind == "layer":
            which = f", a new one with {counted(len(self.heads), 'head')}"
        else:
            which = f" of head{'s' * (len(self.heads) != 1)} {', '.join(map(str, self.heads))}" if self.heads else ""
        left = (
            f"; sum of positive eigenvalues {self.positive_before:.3g} -> {self.positive_after:.3g}"
            if self.positive_before is not None and self.positive_after is not None
            else ""
        )
        drift = f"; drift {self.drift:.1e}" if self.drift is not None else ""
        return f"{what}{which} ({self.why}){left}{drift}"

    def rows(self, **fields) -> Measurements:
        """One row per number, ``head`` naming whose it is. A direction is told by its largest component and the share of that; the whole vector
        stands in the record's file."""
        rows, here = Measurements(), {"layer": self.layer, "step": self.step, "branch": self.kind, **fields}
        for name in _NUMBERS:
            if (value := getattr(self, name)) is not None:
                rows.add(f"growth.event.{name}", float(value), **here)
        for i, head in enumerate(self.heads):
            at = {**here, "head": head}
            rows.add("growth.event", 1.0, unit=self.kind, **at)
            for name in ("eigenvalues", "captured"):
                if i < len(values := getattr(self, name)):
                    rows.add(f"growth.event.{name.removesuffix('s')}", values[i], **at)
            if i < len(self.directions):
                squares = [u * u for u in self.directions[i]]
                largest = max(range(len(squares)), key=squares.__getitem__)
                rows.add("growth.event.direction", float(largest), unit="component", **at)
                rows.add("growth.event.direction_share", squares[largest] / sum(squares), **at)
        return rows

    def to_table(self) -> dict[str, Any]:
        """All fields, as JSON keeps them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> "GrowthEvent":
        """Raises: InputError for fields that no event has."""
        names = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(table.keys() - names):
            raise InputError(f"a growth event has no {', '.join(unknown)}; this record was written by another version")
        values = jsonl.numbers(table)
        for name in ("heads", "eigenvalues", "captured"):
            values[name] = tuple(values.get(name, ()))
        values["directions"] = tuple(tuple(direction) for direction in values.get("directions", ()))
        return cls(**values)


_NUMBERS = (
    *(
        "threshold",
        "next_eigenvalue",
        "residual_before",
        "residual_after",
        "positive_before",
        "positive_after",
        "condition",
    ),
    *("asymmetry", "drift", "parameters_before", "parameters_after", "heads_after", "energy_before", "energy_after"),
)


class GrowthRecord:
    """All events of a run, in order: what the paper calls an interpretable growth record (reconstructed: its contents are ours)."""

    def __init__(self, events: Iterable[GrowthEvent] = ()):
        self.events = list(events)

    def add(self, event: GrowthEvent) -> GrowthEvent:
        self.events.append(event)
        return event

    def rows(self, **fields) -> Measurements:
        """Rows of all events."""
        return Measurements(row for event in self.events for row in event.rows(**fields))

    def save(self, path: str | Path, about: Mapping[str, Any] | None = None) -> None:
        """JSON lines, the first names the schema and holds ``about``, plain values on the whole; atomic. Raises: InputError (disk full ...)."""
        head = jsonl.encode({"schema": SCHEMA, "kind": KIND, **(about or {})})
        atomic_write_text(
            path, "".join(f"{line}\n" for line in (head, *(jsonl.encode(e.to_table()) for e in self.events)))
        )

    @classmethod
    def load(cls, path: str | Path) -> "GrowthRecord":
        """Raises: InputError for a missing or foreign file; CheckpointError for a broken line."""
        lines = jsonl.read_lines(path, "growth record")
        if not lines or lines[0][1].get("kind") != KIND:
            raise InputError(f'{path} is no growth record: its first line is not {{"schema": ..., "kind": "{KIND}"}}')
        jsonl.check_schema(lines[0][1].get("schema"), SCHEMA, str(path), "growth record")
        return cls(GrowthEvent.from_table(table) for _, table in lines[1:])

    def __iter__(self) -> Iterator[GrowthEvent]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)


def energy_pair(before: FreeEnergy, after: FreeEnergy) -> dict[str, Any]:
    """The fields of an event."""
    return {"energy_before": before.total, "energy_after": after.total}
