"""Two runs side by side: configuration, last values, and the first step at which they part."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg.records.run import RunFolder


@dataclass(frozen=True)
class RunComparison:
    """config: keys that differ with both values. final: last value of the metrics that both logged, in ``units``.

    first_difference: step, or None.
    """

    first: str
    second: str
    config: dict[str, tuple[Any, Any]]
    final: dict[str, tuple[float, float]]
    units: dict[str, str]
    common_steps: int
    first_difference: int | None


def compare(
    first: str | Path,
    second: str | Path,
    series: str = "train/loss",
    settle: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
) -> RunComparison:
    """Compare two run folders. settle: fills in what a configuration leaves to its defaults.

    Raises: InputError for a folder that holds no run.
    """
    a, b = RunFolder.open(first), RunFolder.open(second)
    left, right = settle(a.config), settle(b.config)
    keys = sorted(left.keys() | right.keys())
    differing = {k: (left.get(k, "unset"), right.get(k, "unset")) for k in keys if left.get(k) != right.get(k)}
    one, two = a.series(), b.series()
    final = {name: (one[name][-1][1], two[name][-1][1]) for name in sorted(one.keys() & two.keys())}
    units = {name: unit for name, unit in {**b.units(), **a.units()}.items() if name in final and unit}
    left, right = dict(one.get(series, [])), dict(two.get(series, []))
    common = sorted(left.keys() & right.keys())
    parting = next((step for step in common if left[step] != right[step]), None)
    return RunComparison(str(first), str(second), differing, final, units, len(common), parting)
