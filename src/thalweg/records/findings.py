"""Findings: what one probe of the continuous picture found, as rows, with the words and the drawings that belong to them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from thalweg.errors import InputError, UnknownNameError
from thalweg.records.measurements import FIELDS, Measurement, Measurements

Axis = Literal["layer", "step", "head", "stream", "seed"]
AXES = ("layer", "step", "head", "stream", "seed")


@dataclass(frozen=True)
class Figure:
    """One drawing, made of rows of a finding: a line for each measure (and for each value of ``lines``) over the field ``x``.

    title: what is shown. measures: names of measures, one line each. x: the field of a row that runs along the axis (``layer``: by depth;
    ``step``: any whole number, as a distance or a time). x_label, y_label: with units. log_x, log_y: scales; a logarithmic one draws positive
    values alone. lines: a field (``branch``, ``site``, ``head``, ``stream``, ``arm`` ...) each value of which is a line of its own, or "".
    names: what the line of each measure is called, one for each (none: the measure).
    note: what a reader should look at, in a sentence. The null of the rows is drawn as a dashed line, their low and high as a band.
    """

    title: str
    measures: tuple[str, ...]
    x: Axis = "layer"
    x_label: str = "layer"
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False
    lines: str = ""
    note: str = ""
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.x not in AXES:
            raise UnknownNameError("axis of a figure", self.x, AXES)
        if self.lines and self.lines not in FIELDS:
            raise UnknownNameError("field of a measurement", self.lines, FIELDS)
        if isinstance(self.measures, str) or not self.measures:
            raise InputError(f"a figure needs a tuple of measures, got {self.measures!r}")
        if self.names and len(self.names) != len(self.measures):
            raise InputError(f"names are one for each of {len(self.measures)} measures, got {len(self.names)}")


@dataclass(frozen=True)
class Finding:
    """What a probe found, or why it does not apply.

    probe: its name. title: for people. summary: one line with the main numbers and without a verdict. source: paper and what of it is derived
    by us. rows: every number, with its null where it has one. caveats: sentences that limit what the numbers say. figures: drawings of the
    rows. not_applicable: why there is no number (then rows are empty). failed: the error that ended the probe. seconds: that it took.
    sketch: too few tokens or not all layers, so the rows are no evidence.
    """

    probe: str
    title: str = ""
    summary: str = ""
    source: str = ""
    rows: Measurements = field(default_factory=Measurements)
    caveats: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    not_applicable: str = ""
    failed: str = ""
    seconds: float | None = None
    sketch: bool = False

    @property
    def words(self) -> str:
        """One line for a terminal."""
        if self.not_applicable:
            return f"{self.probe}: not applicable: {self.not_applicable}"
        if self.failed:
            return f"{self.probe}: failed: {self.failed}"
        return f"{self.probe}{' (sketch)' if self.sketch else ''}: {self.summary}"

    def to_plain(self) -> dict[str, Any]:
        """As JSON holds it; :meth:`from_plain` reads it back equal."""
        rows = [{k: v for k, v in row.to_row().items() if v not in (None, "")} for row in self.rows]
        figures = [asdict(figure) for figure in self.figures]
        return {**{name: getattr(self, name) for name in _PLAIN}, "rows": rows, "figures": figures}

    @classmethod
    def from_plain(cls, table: Mapping[str, Any]) -> "Finding":
        """Raises: InputError, UnknownNameError for a table that is none."""
        lists = ("measures", "names")
        figures = tuple(
            Figure(**{**one, **{name: tuple(one.get(name, ())) for name in lists}}) for one in table.get("figures", ())
        )
        rows = Measurements(Measurement(**row) for row in table.get("rows", ()))
        plain = {name: table[name] for name in _PLAIN if name in table}
        found = cls(**plain, rows=rows, figures=figures)
        return replace(found, caveats=tuple(found.caveats))


_PLAIN = ("probe", "title", "summary", "source", "caveats", "not_applicable", "failed", "seconds", "sketch")
