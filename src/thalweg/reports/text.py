"""Numbers and words as a reader wants them."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from thalweg._words import counted as counted  # known here by all reports

NONE = "–"
# What no page and no XML may hold, and the marks that turn the direction of text round.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def clean(text: str) -> str:
    """``text`` with every character that HTML or XML cannot hold replaced by U+FFFD."""
    return _UNPRINTABLE.sub("\ufffd", text)


def number(value: Any, digits: int = 4) -> str:
    """A number with ``digits`` significant digits, thousands separated, a dash for none; anything else as its text."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.{max(0, digits - 1 - int(math.log10(abs(value))))}f}"
    text = f"{value:.{digits}g}" if 1e-4 <= abs(value) < 1e7 else f"{value:.{digits - 1}e}"
    return re.sub(r"e([+-])0*(\d)", lambda m: f"e{'-' if m[1] == '-' else ''}{m[2]}", text)


def big(value: Any, unit: str = "") -> str:
    """A count with a prefix: 2.36 M, 14.2 GB."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return NONE if value is None else number(value)
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.4g} {unit}".strip()


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; not finite if any value is not."""
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation of a sample (n - 1); None for a single value."""
    if len(values) < 2:
        return None
    middle = mean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1))


def spread(middle: float, sd: float | None) -> str:
    """``4.321 ± 0.012``: the mean to the digits that its standard deviation leaves meaningful."""
    if sd is None:
        return number(middle)
    if not (math.isfinite(middle) and math.isfinite(sd) and sd > 0):
        return f"{number(middle)} ± {number(sd, 2)}"
    decimals = max(0, 1 - math.floor(math.log10(sd)))
    if decimals > 7 or max(abs(middle), sd) >= 1e7:
        return f"{number(middle)} ± {number(sd, 2)}"
    return f"{middle:,.{decimals}f} ± {sd:,.{decimals}f}"


def within(value: Any, low: Any, high: Any) -> str:
    """``0.68 (0.65 to 0.71)``: a value with its interval."""
    return f"{number(value)} ({number(low)} to {number(high)})"


def mean_sd(values: Sequence[float]) -> str:
    """Mean and standard deviation of some values, a dash for none."""
    return spread(mean(values), deviation(values)) if values else NONE


def listed(names: Iterable[str], most: int = 12) -> str:
    """``a, b, c``, cut after ``most`` with the number of those left out."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def moment(stamp: Any) -> str:
    """A time stamp in UTC without its ``T`` and offset; any other text as it is, empty for none."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)(:\d\d)?\+00:00", str(stamp or ""))
    return f"{found[1]} {found[2]} UTC" if found else str(stamp or "")


def words(value: Any) -> str:
    """A plain value of a record (a table, a list, a flag) in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {words(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(words, value))
    return NONE if value is None else "yes" if value is True else "no" if value is False else str(value)
