"""JSON that any tool can read: strict (no bare NaN), one record a line, a torn last line tolerated."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thalweg.errors import CheckpointError, InputError
from thalweg.records.files import is_complete, read_bytes

REMEDY = "restore the file, or remove that line"
_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(value: Any, indent: int | None = None) -> str:
    """``value`` as strict JSON; numbers that are not finite become the strings NaN, Infinity, -Infinity.

    Raises: InputError for a value that JSON cannot hold.
    """
    try:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"a record holds a value that JSON cannot store: {error}; give plain numbers, text, lists and tables"
        ) from error


def plain(value: Any) -> Any:
    """A copy of ``value`` as JSON gives it back. Raises: InputError for a value that JSON cannot hold."""
    return json.loads(encode(value))


def number(value: Any) -> Any:
    """The float that :func:`encode` wrote as a string; any other value unchanged."""
    return _NAMES.get(value, value) if isinstance(value, str) else value


def numbers(value: Any) -> Any:
    """:func:`number` everywhere in a tree of tables and lists."""
    if isinstance(value, dict):
        return {key: numbers(inner) for key, inner in value.items()}
    return [numbers(inner) for inner in value] if isinstance(value, list) else number(value)


def read_object(path: str | Path, what: str) -> dict[str, Any]:
    """The JSON table in a file. Raises: InputError if there is none, CheckpointError if it is broken."""
    data = read_bytes(path, what)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is broken ({_first_line(error)}); it is not JSON: restore it or start the run anew"
        ) from None
    if not isinstance(value, dict):
        raise InputError(f"{path} is no {what}: it holds a JSON {type(value).__name__}, not a table")
    return value


def read_lines(path: str | Path, what: str) -> list[tuple[int, dict[str, Any]]]:
    """Line numbers (from 1) and tables of a JSON-lines file; an unfinished last line (a killed process) is passed over.

    Raises: InputError if the file is missing; CheckpointError that names the line if one before the end is broken.
    """
    lines = read_bytes(path, what).split(b"\n")
    tail = lines.pop()  # empty when the file ends in a newline
    if tail.strip() and is_complete(tail):
        lines.append(tail)
    rows = []
    for index, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path}:{index} is broken ({_first_line(error)}); this is not a {what}, or it was changed by hand: {REMEDY}"
            ) from None
        if not isinstance(row, dict):
            raise CheckpointError(
                f"{path}:{index} holds a JSON {type(row).__name__}, not a table; this is not a {what}: {REMEDY}"
            )
        rows.append((index, row))
    return rows


def check_schema(found: Any, known: int, where: str, what: str) -> None:
    """Refuse what another program or a newer version wrote. Raises: InputError."""
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise InputError(f"{where} is no thalweg {what}: it has no schema number (got {found!r})")
    if found > known:
        raise InputError(
            f"{where} has schema {found}; this version of thalweg reads up to {known}: upgrade thalweg to read it"
        )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
