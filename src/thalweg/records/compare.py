"""Two runs side by side: configuration, last values, and the first step at which they part."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg.records.run import RunFolder


@dataclass(frozen=True)
class RunComparison:
    """config: keys that differ with both values. final: last value of the metrics that both logged. first_difference: step, or None."""

    first: str
    second: str
    config: dict[str, tuple[Any, Any]]
    final: dict[str, tuple[float, float]]
    common_steps: int
    first_difference: int | None


def compare(first: str | Path, second: str | Path, series: str = "train/loss") -> RunComparison:
    """Compare two run folders. Raises: InputError for a folder that holds no run."""
    a, b = RunFolder.open(first), RunFolder.open(second)
    keys = sorted(a.config.keys() | b.config.keys())
    differing = {
        k: (a.config.get(k, "unset"), b.config.get(k, "unset")) for k in keys if a.config.get(k) != b.config.get(k)
    }
    one, two = a.series(), b.series()
    final = {name: (one[name][-1][1], two[name][-1][1]) for name in sorted(one.keys() & two.keys())}
    left, right = dict(one.get(series, [])), dict(two.get(series, []))
    common = sorted(left.keys() & right.keys())
    parting = next((step for step in common if left[step] != right[step]), None)
    return RunComparison(str(first), str(second), differing, final, len(common), parting)
