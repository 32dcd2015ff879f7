"""What an experiment is, and the registry of experiments.

    run(options, seed, progress) -> Measurements

One file is one experiment: a function under ``@register(name, options=..., columns=..., summary=..., source=...)``. Everything random in it
comes from the seed. ``columns`` says which measures can be judged, and under which arms each stands; a run must leave a row of every one.
A value that is not finite says that nothing could be measured: a hypothesis then takes what it states for that. So does all that rests on a
training that diverged, which is a result (:func:`ended`, :class:`DivergedError`, :func:`nothing`). A row ``has_learned`` of 0
under an arm, with the reason in ``null_kind``, says that what was trained there has not learned.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from thalweg import config
from thalweg.errors import InputError
from thalweg.records import Measurement, Measurements
from thalweg.registry import Entry, Registry

Progress = Callable[[str], None]
Run = Callable[[Any, int, Progress], Measurements]
HAS_LEARNED = "has_learned"
REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
}
AT = ("only", *REDUCTIONS)


class DivergedError(InputError):
    """A training that a whole run rests on has diverged: the run leaves nothing finite, and hypotheses take what they state for that."""


@dataclass(frozen=True)
class Experiment:
    """One experiment. Options: its frozen dataclass. columns: measure that can be judged -> arms under which a run leaves it."""

    run: Run
    Options: type[Any]
    columns: Mapping[str, tuple[str, ...]]

    def options(self, values: Mapping[str, Any], where: str = "") -> Any:
        """Plain values as options. Raises: InputError, UnknownNameError naming the key."""
        return config.build(self.Options, values, where=where)

    def rows(self, name: str, options: Any, seed: int, progress: Progress) -> Measurements:
        """The rows of one seed, none of them finite where the training that they rest on diverged.

        Raises: InputError for a run that leaves a column without a row; what the experiment raises.
        """
        try:
            found = self.run(options, seed, progress)
        except DivergedError as error:
            progress(str(error))
            found = nothing(Measurements(), self.columns)
        for measure, arms in self.columns.items():
            for arm in arms:
                if not len(found.where(measure=measure, arm=arm)):
                    raise InputError(
                        f"experiment {name} left no row {measure} of arm {arm!r}; it must leave what it declares"
                    )
        return found


registry: Registry[Experiment] = Registry(
    "experiment", package="thalweg.studies.experiments", group="thalweg.experiments"
)


def register(
    name: str, *, options: type[Any], columns: Mapping[str, tuple[str, ...]], summary: str, source: str
) -> Callable[[Run], Run]:
    """Decorator that registers a function as an experiment."""

    def add(function: Run) -> Run:
        registry.register(name, summary=summary, source=source)(Experiment(function, options, columns))
        return function

    return add


def entries() -> Iterator[Entry[Experiment]]:
    """Every experiment with its summary and source."""
    return registry.entries()


def check_train(who: str, train: Mapping[str, Any], keys: Iterable[str], said_by: str) -> None:
    """Raises: InputError for a field of a training that experiment ``who`` sets itself. said_by: what says it instead, with its verb."""
    for key in keys:
        if key in train:
            raise InputError(f"{who}: {key} does not belong into train; {said_by} it")


def ended(status: str, what: str, seed: int) -> bool:
    """Whether a training came to its end; False where it diverged, which is a result. what: names it.

    Raises: InputError for one that was stopped.
    """
    if status not in ("done", "diverged"):
        raise InputError(
            f"{what} at seed {seed} is {status}, so nothing can be measured yet; the same command starts it anew"
        )
    return status == "done"


def nothing(rows: Measurements, columns: Mapping[str, Iterable[str]]) -> Measurements:
    """The rows with one that is not a number for every arm of ``columns``: what a training that diverged leaves of them."""
    for measure, arms in columns.items():
        for arm in arms:
            rows.add(measure, math.nan, arm=arm)
    return rows


def value_of(rows: Measurements, measure: str, arm: str, at: str, against: str) -> float:
    """What the rows say of one column: ``only`` its one row, or a reduction over several; ``against`` null: each less its own null.

    NaN where a row is NaN. Raises: InputError for several rows and ``only``, or rows without a null.
    """
    found = list(rows.where(measure=measure, arm=arm))
    if at == "only" and len(found) != 1:
        raise InputError(
            f"{measure} of {arm} has {len(found)} rows; a hypothesis says at = one of {', '.join(REDUCTIONS)}"
        )
    if any(math.isnan(row.value) for row in found):  # min and max would pass it over, and what diverged has no null
        return math.nan
    values = [row.value if against == "value" else row.value - _null(row) for row in found]
    return values[0] if at == "only" else REDUCTIONS[at](values)


def _null(row: Measurement) -> float:
    if row.null is None:
        raise InputError(f"{row.measure} of {row.arm} has no null; a hypothesis on it says against = value")
    return row.null
