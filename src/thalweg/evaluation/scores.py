"""What every evaluation returns: numbers by item, and metrics that are functions of their sums over items."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from thalweg.errors import InputError, UnknownNameError
from thalweg.records import Measurements
from thalweg.statistics import SMALLEST, Interval, bootstrap

ENOUGH = 6  # items; of 3 to 5 normal ones a 95 % bootstrap interval (BCa or percentile) holds the mean in 74 to 86 % of draws


@dataclass(frozen=True)
class Metric:
    """A number for a whole evaluation: ``of`` the sums of the columns ``needs`` over its items.

    needs[0] is what the model decides (log likelihoods, hits); the others count. null: what stands there when nothing was learned, with how
    it was obtained.
    """

    name: str
    unit: str
    needs: tuple[str, ...]
    of: Callable[..., Any]
    better: Literal["lower", "higher"]
    null: float | None = None
    null_kind: str = ""


@dataclass(frozen=True)
class Scores:
    """The result of one evaluation.

    task: its name; rule: what the numbers depend on, in words (windows, shots, length); items: the independent units (documents,
    questions, samples); columns: one number for each item, by name; facts: what else a record must say.
    """

    task: str
    rule: str
    items: tuple[str, ...]
    columns: dict[str, np.ndarray]
    metrics: tuple[Metric, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = {len(column) for column in self.columns.values()} | {len(self.items)}
        if len(sizes) != 1:
            raise InputError(f"{self.task}: every column needs one number for each item, got lengths {sorted(sizes)}")

    def metric(self, name: str) -> Metric:
        """Raises: UnknownNameError."""
        for metric in self.metrics:
            if metric.name == name:
                return metric
        raise UnknownNameError("metric", name, [metric.name for metric in self.metrics])

    def value(self, name: str) -> float:
        """One metric. Raises: UnknownNameError."""
        metric = self.metric(name)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            return float(metric.of(*(self.columns[column].sum() for column in metric.needs)))

    def values(self) -> dict[str, float]:
        """Every metric."""
        return {metric.name: self.value(metric.name) for metric in self.metrics}

    def interval(self, name: str, **options: Any) -> Interval:
        """The bootstrap interval of a metric over items; options of :func:`thalweg.statistics.bootstrap`."""
        metric = self.metric(name)
        return bootstrap([self.columns[column] for column in metric.needs], metric.of, **options)

    def measurements(self, *, options: dict[str, Any] | None = None, **fields: Any) -> Measurements:
        """One row for each metric, with its interval over items and its null. options: of the bootstrap; fields: stamped on every row."""
        rows = Measurements()
        for metric in self.metrics:
            found = self.interval(metric.name, **(options or {}))
            row: dict[str, Any] = {"unit": metric.unit, "n": len(self.items), "split": self.task}
            if np.isfinite(found.low):
                row |= {"low": found.low, "high": found.high, "interval": interval_words(found)}
            if metric.null is not None:
                row |= {"null": metric.null, "null_kind": metric.null_kind}
            rows.add(metric.name, found.estimate, **(row | fields))
        return rows

    def rows(self) -> list[dict[str, Any]]:
        """One table for each item."""
        return [
            {"item": item, **{name: float(column[i]) for name, column in self.columns.items()}}
            for i, item in enumerate(self.items)
        ]


def few_words(n: int) -> str:
    """What a bootstrap interval over so few items lacks, for people; empty for enough of them, and where there is no interval."""
    return "an interval over so few has not the coverage it names" if SMALLEST <= n < ENOUGH else ""


def interval_words(found: Interval) -> str:
    """:attr:`Interval.words`, and :func:`few_words` where the items are few."""
    return "; ".join(filter(None, (found.words, few_words(found.n))))


def share(needs: tuple[str, str], name: str, unit: str = "", **null: Any) -> Metric:
    """The metric "sum of the first column over sum of the second", where more is better."""
    return Metric(name, unit, needs, lambda hits, count: hits / count, "higher", **null)
