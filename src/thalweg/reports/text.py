"""Numbers and spans as a reader wants them."""

import math


def number(value: float | int | None, digits: int = 4) -> str:
    """A number with ``digits`` significant digits, whole numbers with separators, a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not math.isfinite(value):
        return "not finite"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}" if 1e-4 <= abs(value) < 1e6 else f"{value:.{digits - 1}e}"


def big(value: float | None, unit: str = "") -> str:
    """A count with a prefix: 2.36 M, 14.2 GB."""
    if value is None or not math.isfinite(value):
        return "–"
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.4g} {unit}".strip()


def mean_sd(values: list[float]) -> str:
    """Mean, standard deviation and count: ``4.321 ± 0.012 (n=5)``."""
    if not values:
        return "–"
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{number(mean)} (n=1)"
    sd = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return f"{number(mean)} ± {number(sd, 2)} (n={len(values)})"
