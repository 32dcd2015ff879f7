"""Measurements: tidy rows, one number each, that every report, verdict and plot is made from."""

import dataclasses
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg.errors import InputError, MissingExtraError, UnknownNameError
from thalweg.records import jsonl
from thalweg.records.files import atomic_write_text

SCHEMA_VERSION = 1
KIND = "measurements"


@dataclass(frozen=True)
class Measurement:
    """One measured number with where, when and from how much it was measured.

    measure: name in the catalogue of measures; value in ``unit`` (empty: a pure number). site: place in the network
    (``layers.3.attention``); layer, head: counted from 0; stream: its number or ``mean``, ``read``, of a hidden vector its block; branch:
    kind of sublayer; split: of the data; step: of the training. n: independent items behind the value (sequences, tokens,
    seeds). low and high: the interval that ``interval`` names (``mean +- sd``, ``95% bootstrap``). dtype: that of the
    tensors measured. null: what the measure gives where there is nothing to find; null_kind: how that was obtained.
    Raises: InputError for a value of the wrong type. NaN and infinities are allowed: a diverged run is a result.
    """

    measure: str
    value: float
    unit: str = ""
    site: str = ""
    layer: int | None = None
    head: int | None = None
    stream: int | str | None = None
    step: int | None = None
    n: int | None = None
    low: float | None = None
    high: float | None = None
    interval: str = ""
    dtype: str = ""
    run: str = ""
    arm: str = ""
    seed: int | None = None
    model: str = ""
    branch: str = ""
    split: str = ""
    null: float | None = None
    null_kind: str = ""

    def __post_init__(self) -> None:
        fields = (
            self.__dict__
        )  # frozen: only here may it be written, to store plain Python numbers; a million rows are read at a time
        for name in _TEXT:
            if not isinstance(fields[name], str):
                raise _wrong(name, "text", fields[name])
        if not self.measure:
            raise InputError("a measurement needs the name of its measure, got an empty one")
        for name in _FLOAT:
            value = fields[name]
            if type(value) is not float and (value is not None or name == "value"):
                fields[name] = _to_float(name, value)
        for name in _INT:
            if type(fields[name]) is not int:
                fields[name] = _to_int(name, fields[name])
        if not isinstance(self.stream, str):
            fields["stream"] = _to_int("stream", self.stream)

    def to_row(self) -> dict[str, Any]:
        """All fields, in order."""
        return {name: getattr(self, name) for name in FIELDS}

    def to_line(self) -> str:
        """One line of JSON with the fields that are set."""
        return jsonl.encode({name: value for name, value in self.to_row().items() if value not in (None, "")})


SHOWN = 5  # rows that a look at measurements shows
FIELDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Measurement))
_TEXT = ("measure", "unit", "site", "interval", "dtype", "run", "arm", "model", "branch", "split", "null_kind")
_FLOAT = ("value", "low", "high", "null")
_INT = ("layer", "head", "step", "n", "seed")


class Measurements:
    """An append-only list of :class:`Measurement`, with the few operations that reports need."""

    def __init__(self, rows: Iterable[Measurement] = ()):
        self._rows: list[Measurement] = []
        self.extend(rows)

    def add(self, measure: str, value: float, **fields: Any) -> None:
        """Append one row. Raises: UnknownNameError for a field that no row has."""
        _known(fields)
        self._rows.append(Measurement(measure, value, **fields))

    def extend(self, rows: Iterable[Measurement]) -> None:
        """Append rows, those of another :class:`Measurements` too."""
        for row in list(rows):
            if not isinstance(row, Measurement):
                raise InputError(f"measurements hold Measurement rows, got {type(row).__name__}")
            self._rows.append(row)

    def where(self, **equal: Any) -> "Measurements":
        """The rows whose fields equal all the given values. Raises: UnknownNameError."""
        _known(equal)
        return Measurements(
            row for row in self._rows if all(getattr(row, name) == value for name, value in equal.items())
        )

    def stamped(self, **fields: Any) -> "Measurements":
        """The same rows with ``fields`` filled in (run, arm, seed ...).

        Raises: InputError when a row already says something else; a stamp never overwrites.
        """
        _known(fields)
        return Measurements(_stamp(row, fields) for row in self._rows)

    def to_rows(self) -> list[dict[str, Any]]:
        """Every row as a table of all fields."""
        return [row.to_row() for row in self._rows]

    def to_pandas(self):
        """A pandas DataFrame, one column for each field. Raises: MissingExtraError without pandas."""
        try:
            import pandas
        except ImportError:
            raise MissingExtraError("pandas", "data") from None
        return pandas.DataFrame(self.to_rows(), columns=list(FIELDS))

    def to_parquet(self, path: str | Path) -> None:
        """Write a Parquet table, one column for each field, atomically.

        Raises: InputError for a path that does not end in ``.parquet``; MissingExtraError without pandas or pyarrow.
        """
        from thalweg.records.export import export

        if Path(path).suffix.lower() != ".parquet":
            raise InputError(f"a Parquet file is called NAME.parquet, got {path}; for JSON lines use save()")
        export(self, path)

    def lines(self) -> list[str]:
        """The JSON lines of a file of measurements, the header first."""
        return [HEADER, *(row.to_line() for row in self._rows)]

    def save(self, path: str | Path) -> None:
        """Write JSON lines, atomically; the first line names the schema. Raises: InputError (disk full ...)."""
        atomic_write_text(path, "".join(f"{line}\n" for line in self.lines()))

    @classmethod
    def load(cls, path: str | Path) -> "Measurements":
        """Read what :meth:`save` or a run folder wrote; a torn last line is passed over.

        Raises: InputError for a missing or foreign file or a newer schema; CheckpointError for a broken line.
        """
        lines = jsonl.read_lines(path, "file of measurements")
        if not lines or lines[0][1].get("kind") != KIND:
            raise InputError(
                f'{path} is no file of measurements: its first line is not {{"schema": ..., "kind": "{KIND}"}}'
            )
        jsonl.check_schema(lines[0][1].get("schema"), SCHEMA_VERSION, str(path), "file of measurements")
        return cls(_from_line(row, f"{path}:{index}") for index, row in lines[1:])

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Measurements) and self.lines() == other.lines()  # by text: NaN equals NaN

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        first = [f"  {row.measure} {row.site or '-'}: {row.value:.6g}" for row in self._rows[:SHOWN]]
        more = [f"  ... and {len(self) - SHOWN} more"] if len(self) > SHOWN else []
        head = f"Measurements({len(self)} rows of {len({row.measure for row in self._rows})} measures)"
        return "\n".join([head, *first, *more])


HEADER = jsonl.encode({"schema": SCHEMA_VERSION, "kind": KIND})


def _stamp(row: Measurement, fields: dict[str, Any]) -> Measurement:
    for name, value in fields.items():
        if (old := getattr(row, name)) not in (None, "", value):
            raise InputError(f"a row of {row.measure!r} has {name}={old!r} already, not {value!r}; stamp each row once")
    return dataclasses.replace(row, **fields)


def _from_line(row: dict[str, Any], where: str) -> Measurement:
    values = {name: jsonl.number(value) if name in _FLOAT else value for name, value in row.items()}
    try:
        _known(values)
        return Measurement(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except TypeError:
        raise InputError(
            f"{where}: a measurement needs at least 'measure' and 'value', got {', '.join(sorted(row)) or 'nothing'}"
        ) from None


def _known(fields: Iterable[str]) -> None:
    for name in fields:
        if name not in FIELDS:
            raise UnknownNameError("field of a measurement", name, FIELDS)


def _to_float(name: str, value: Any) -> float:
    if isinstance(value, str | bytes | bool) or not hasattr(type(value), "__float__"):
        raise _wrong(name, "a number", value)
    try:
        return float(value)  # numpy and torch scalars become plain numbers
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise _wrong(name, "one real number", value) from None


def _to_int(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool):
        raise _wrong(name, "a whole number", value)
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        raise _wrong(name, "a whole number", value) from None


def _wrong(name: str, wanted: str, value: Any) -> InputError:
    return InputError(f"{name} of a measurement must be {wanted}, got {str(value)[:80]!r} ({type(value).__name__})")
