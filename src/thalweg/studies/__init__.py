"""Studies: plans locked before they run, verdicts by rule, negative results kept."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from thalweg.studies.plan import Arm, Hypothesis, Match, Plan, Scale, load

if TYPE_CHECKING:
    from thalweg.studies.edits.study import EditStudy
    from thalweg.studies.experiments.study import ExperimentStudy
    from thalweg.studies.judging import StudyVerdict
    from thalweg.studies.locking import Lock
    from thalweg.studies.runner import Study

    AnyStudy: TypeAlias = "Study | EditStudy | ExperimentStudy"


def study(plan_path: str | Path, scale: str, **where) -> "AnyStudy":
    """A plan of any kind at a scale with its records; ``where`` as in :class:`thalweg.studies.runner.Study`."""
    plan = load(plan_path)
    if isinstance(plan, Plan):
        from thalweg.studies.runner import Study

        return Study(plan_path, scale, **where)
    from thalweg.studies.compressed.plan import CompressionPlan
    from thalweg.studies.compressed.study import CompressionStudy
    from thalweg.studies.edits.study import EditStudy
    from thalweg.studies.experiments.plan import ExperimentPlan
    from thalweg.studies.experiments.study import ExperimentStudy

    if isinstance(plan, ExperimentPlan):
        return ExperimentStudy(plan_path, scale, **where)
    return (CompressionStudy if isinstance(plan, CompressionPlan) else EditStudy)(plan_path, scale, **where)


def lock(study: "AnyStudy") -> "Lock":
    """Check a study and lock it. Raises: InputError if it cannot decide, or if another version is locked."""
    from thalweg.studies import locking as locks
    from thalweg.studies.check import check

    checked = check(study.plan, study.scale_name).require()
    study.require_runnable()
    power = {p.hypothesis: p.result.power for p in checked.powers}
    recorded, _ = study.progress()
    return locks.write(study.path, study.scale_name, study.lock_tables(), power, recorded)


def run(study: "AnyStudy", **options) -> int:
    """Run what is missing; see :func:`thalweg.studies.runner.run`, :func:`thalweg.studies.edits.study.run_edits` and
    :func:`thalweg.studies.experiments.study.run_experiments`.

    Raises: InputError for a number of ``jobs`` or a ``limit`` below 1, beside what these raise.
    """
    from thalweg.errors import InputError
    from thalweg.studies.runner import Study
    from thalweg.studies.runner import run as run_study

    for name, count in (("jobs", options.get("jobs")), ("limit", options.get("limit"))):
        if count is not None and count < 1:
            raise InputError(f"{name} must be at least 1, got {count}")
    if isinstance(study, Study):
        return run_study(study, **options)
    from thalweg.studies.edits.study import run_edits
    from thalweg.studies.experiments.study import ExperimentStudy, run_experiments

    return run_experiments(study, **options) if isinstance(study, ExperimentStudy) else run_edits(study, **options)


def verdict(study: "AnyStudy") -> "StudyVerdict":
    """Judge a study by the rule of its plan, from its lock and its records alone."""
    from thalweg.errors import InputError
    from thalweg.studies import locking as locks

    lock = None
    try:
        lock = locks.read(study.path, study.scale_name)
        void = locks.differences(study.plan, study.scale_name, study.lock_tables(), lock)
    except InputError as error:
        void = [str(error)]
    judged = study.judge(void)
    if lock is None or not lock.recorded_before:  # counting would read every record once more
        return judged
    return dataclasses.replace(judged, notes=(*judged.notes, lock.note(study.progress()[1], study.counts)))


__all__ = ["Arm", "Hypothesis", "Match", "Plan", "Scale", "load", "lock", "run", "study", "verdict"]
