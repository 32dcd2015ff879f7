"""An edited model against the same model unedited, item by item: what the edit costs, and how sure that is."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from thalweg.errors import InputError, ProofError
from thalweg.evaluation.scores import Scores, interval_words
from thalweg.records import Measurements
from thalweg.statistics import RESAMPLES, Interval, bootstrap, sign_flip

DRIFT = 1e-3  # relative, of a log likelihood: what hooks that change nothing may change
LIKELIHOOD = "log_likelihood"
Role = Literal["unedited", "no-op", "edited"]


@dataclass(frozen=True)
class Difference:
    """One metric of one task: edited minus baseline, with a bootstrap interval over the items, which stay paired.

    sign_flip: two-sided p of "the items' differences in ``column`` are symmetric about zero". better: which direction of the metric is.
    """

    task: str
    metric: str
    unit: str
    edited: float
    baseline: float
    interval: Interval
    column: str
    sign_flip: float
    better: str

    @property
    def value(self) -> float:
        return self.interval.estimate

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "task": self.task,
            "metric": self.metric,
            "unit": self.unit,
            "edited": self.edited,
            "baseline": self.baseline,
            "difference": self.value,
            "low": self.interval.low,
            "high": self.interval.high,
            "interval": interval_words(self.interval),
            "sign_flip_p": self.sign_flip,
            "n": self.interval.n,
            "better": self.better,
        }


def differences(
    edited: Scores,
    baseline: Scores,
    *,
    level: float = 0.95,
    method: str = "BCa",
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Difference]:
    """Edited minus baseline for every metric of a task.

    Raises: InputError where the two were not scored on the same items by the same rule.
    """
    check_matched(edited, baseline)
    found = []
    for metric in baseline.metrics:
        theirs = [edited.columns[name] for name in metric.needs]
        ours = [baseline.columns[name] for name in metric.needs]

        def moved(*sums: Any, of: Callable[..., Any] = metric.of, half: int = len(ours)) -> Any:
            return of(*sums[:half]) - of(*sums[half:])

        found.append(
            Difference(
                baseline.task,
                metric.name,
                metric.unit,
                edited.value(metric.name),
                baseline.value(metric.name),
                bootstrap([*theirs, *ours], moved, level=level, method=method, resamples=resamples, seed=seed),
                metric.needs[0],
                sign_flip(theirs[0] - ours[0], seed=seed),
                metric.better,
            )
        )
    return found


def check_matched(edited: Scores, baseline: Scores) -> None:
    """Raises: InputError for results that cannot be paired."""
    for what, a, b in (
        ("task", edited.task, baseline.task),
        ("rule", edited.rule, baseline.rule),
        ("items", edited.items, baseline.items),
        ("metrics", [m.name for m in edited.metrics], [m.name for m in baseline.metrics]),
    ):
        if a != b:
            raise InputError(
                f"two results are paired item by item and need the same {what}, got {a!r:.80} and {b!r:.80}"
            )


def drift(noop: Scores, unedited: Scores) -> float | None:
    """The relative change of the summed log likelihood by an edit that changes nothing; None for tasks without likelihoods."""
    if LIKELIHOOD not in noop.columns:
        return None
    before = float(unedited.columns[LIKELIHOOD].sum())
    return abs(float(noop.columns[LIKELIHOOD].sum()) - before) / max(abs(before), 1e-300)


@dataclass(frozen=True)
class Edit:
    """One edit to be evaluated. edited, noop: enter the edit, and the same edit at scales 1 (same site, backend and hooks), on the model;
    noop_name: equal for edits that share one no-op, which is then run once.
    """

    name: str
    edited: Callable[[], AbstractContextManager]
    noop: Callable[[], AbstractContextManager]
    noop_name: str = "no-op"


@dataclass(frozen=True)
class Outcome:
    """An edit on one task, beside its matched baseline. drift: of the baseline from the unedited model, relative."""

    edit: str
    scores: Scores
    baseline: Scores
    differences: list[Difference]
    drift: float | None

    def measurements(self, **fields: Any) -> Measurements:
        """Rows ``difference.METRIC``, edited minus baseline, arm = the edit; null 0 by the matched no-op."""
        rows = Measurements()
        for one in self.differences:
            row: dict[str, Any] = {"unit": one.unit, "n": one.interval.n, "arm": self.edit, "split": one.task}
            if np.isfinite(one.interval.low):
                row |= {"low": one.interval.low, "high": one.interval.high, "interval": interval_words(one.interval)}
            row |= {"null": 0.0, "null_kind": "the edit at scales 1"}
            rows.add(f"difference.{one.metric}", one.value, **(row | fields))
        return rows


def evaluate_edits(
    edits: Sequence[Edit],
    evaluate: Callable[[str, Role], Mapping[str, Scores]],
    *,
    on_outcome: Callable[[Outcome], None] | None = None,
    on_unedited: Callable[[Mapping[str, Scores]], None] | None = None,
    **options: Any,
) -> tuple[Mapping[str, Scores], list[Outcome]]:
    """The unedited model, then every edit beside its matched no-op: same site, backend and hooks, scales 1.

    evaluate(name, role): the scores by task of the model as it stands. options: of :func:`differences`.
    Raises: ProofError where a no-op moves a log likelihood by more than 1e-3 of itself: then the hooks do something else than the edit.
    """
    unedited = evaluate("unedited", "unedited")
    if on_unedited is not None:
        on_unedited(unedited)
    baselines: dict[str, Mapping[str, Scores]] = {}
    outcomes: list[Outcome] = []
    for edit in edits:
        if edit.noop_name not in baselines:
            with edit.noop():
                baselines[edit.noop_name] = evaluate(edit.noop_name, "no-op")
            for task, scores in baselines[edit.noop_name].items():
                check_drift(edit.noop_name, scores, unedited[task])
        with edit.edited():
            edited = evaluate(edit.name, "edited")
        for task, scores in edited.items():
            baseline = baselines[edit.noop_name][task]
            moved = differences(scores, baseline, **options)
            outcome = Outcome(edit.name, scores, baseline, moved, drift(baseline, unedited[task]))
            outcomes.append(outcome)
            if on_outcome is not None:
                on_outcome(outcome)
    return unedited, outcomes


def check_drift(name: str, noop: Scores, unedited: Scores) -> None:
    """Raises: ProofError."""
    moved = drift(noop, unedited)
    if moved is not None and not moved <= DRIFT:
        raise ProofError(
            f"{name} at scales 1 moves the log likelihood of {noop.task} by {moved:.2g} of itself, at most {DRIFT:g} is rounding; "
            "nothing measured beside it would mean anything"
        )
