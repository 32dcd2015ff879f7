"""Measurements in the formats of other programs."""

import importlib.util
import io
from pathlib import Path

from thalweg.errors import InputError, MissingExtraError
from thalweg.records.files import atomic_write_bytes
from thalweg.records.measurements import Measurements

FORMATS = (".jsonl", ".parquet", ".csv")


def check_format(path: str | Path) -> Path:
    """The path. Raises: InputError for an ending that is not one of ``FORMATS``, MissingExtraError for one that nothing here can write."""
    found = Path(path)
    if found.suffix.lower() not in FORMATS:
        raise InputError(f"{path} must end in {', '.join(FORMATS)}; that says how it is written")
    for package, endings in (("pandas", (".csv", ".parquet")), ("pyarrow", (".parquet",))):
        if found.suffix.lower() in endings and importlib.util.find_spec(package) is None:
            raise MissingExtraError(f"{package} (for {found.suffix.lower()}; .jsonl needs nothing)", "data")
    return found


def export(rows: Measurements, path: str | Path) -> None:
    """Write the rows, all of them or nothing: JSON lines, or a table with one column for each field, ``stream`` as text.

    Raises: InputError for another ending or a place that cannot be written; MissingExtraError without pandas or pyarrow.
    """
    found = check_format(path)
    kind = found.suffix.lower()
    if kind == ".jsonl":
        rows.save(found)
        return
    table, buffer = rows.to_pandas(), io.BytesIO()
    table["stream"] = table["stream"].map(lambda stream: None if stream is None or stream != stream else str(stream))
    if kind == ".csv":
        table.to_csv(buffer, index=False)
    else:
        for name in ("layer", "head", "step", "n", "seed"):
            table[name] = table[name].astype("Int64")
        table.to_parquet(buffer, index=False)
    atomic_write_bytes(found, buffer.getvalue())
