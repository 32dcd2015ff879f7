"""Records: the only thing that reports and verdicts read. Imports no torch."""

from thalweg.records.files import append_line, append_lines, atomic_write_bytes, atomic_write_text
from thalweg.records.measurements import SCHEMA_VERSION, Measurement, Measurements
from thalweg.records.run import RunFolder

__all__ = [
    "SCHEMA_VERSION",
    "Measurement",
    "Measurements",
    "RunFolder",
    "append_line",
    "append_lines",
    "atomic_write_bytes",
    "atomic_write_text",
]
