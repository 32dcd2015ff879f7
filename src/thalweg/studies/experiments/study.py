"""Running a study of experiments: seed by seed, what is missing, resumable at any moment."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from thalweg import config
from thalweg.errors import CheckpointError, InputError, ThalwegError
from thalweg.records import provenance
from thalweg.studies import locking as locks
from thalweg.studies.experiments.base import HAS_LEARNED, registry, value_of
from thalweg.studies.experiments.plan import ExperimentHypothesis, ExperimentPlan
from thalweg.studies.judging import StudyVerdict, Trial, rule, trial_of
from thalweg.studies.observe import Observation, observed
from thalweg.studies.plan import digest, load
from thalweg.studies.store import RunRecord, Store, write

Say = Callable[[str], None]
FOLDER = "experiments"  # of the records, inside that of the runs
TRAIN = "train."  # before a field of a training, in what an experiment resolves to
Records = Mapping[str, Mapping[int, RunRecord]]


@dataclass(frozen=True)
class Job:
    """One experiment on one seed. name: of its table in the plan, and the seed."""

    use: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.use} seed {self.seed}"


@dataclass(frozen=True)
class Resolved:
    """What decides the rows of an experiment beside the seed."""

    experiment: str
    options: Any
    fingerprint: str
    table: dict[str, Any]


class ExperimentStudy:
    """A plan of experiments at a scale with its records; as :class:`thalweg.studies.runner.Study`.

    records: folder of committed records (default: ``records/`` beside the plan; these lie in ``experiments/`` inside). workspace: not used;
    what an experiment trains is gone when it ends, its rows stay.
    """

    counts = "runs"

    def __init__(
        self,
        plan_path: str | Path,
        scale: str,
        *,
        records: str | Path | None = None,
        workspace: str | Path = "runs/studies",
    ):
        self.path = Path(plan_path)
        plan = load(self.path)
        if not isinstance(plan, ExperimentPlan):
            raise InputError(f"{self.path.name} is no plan of experiments; open it with studies.study")
        self.plan = plan
        self.scale_name, self.scale = scale, plan.at(scale)
        self.store = Store(Path(records if records is not None else self.path.parent / "records") / FOLDER)

    @cached_property
    def uses(self) -> dict[str, Resolved]:
        """Name in the plan -> what runs, in the order in which it runs."""
        return {name: self._resolved(name) for name in self.plan.experiments_at(self.scale_name)}

    def _resolved(self, name: str) -> Resolved:
        experiment = self.plan.experiments[name].experiment
        kind, options = registry[experiment], self.plan.options(name, self.scale_name)
        table, defaults = config.to_plain(options), config.to_plain(kind.Options())
        # Defaults stay out, so that an option that came later leaves old records findable; the lock and records hold all of them.
        stated = {key: value for key, value in table.items() if value != defaults.get(key)}
        identity: dict[str, Any] = {"experiment": experiment, "options": stated}
        resolved: dict[str, Any] = {"experiment": experiment, "options": table}
        if weights := _weights(table):
            identity["sha256"] = resolved["sha256"] = weights
        return Resolved(experiment, options, digest(identity), {**resolved, **_training(table)})

    def lock_tables(self) -> dict[str, dict]:
        """What the lock hashes: every experiment with all its options."""
        return {name: use.table for name, use in self.uses.items()}

    def record(self, job: Job) -> RunRecord | None:
        """What was finished of a run. Raises: CheckpointError for a broken record, or one of other options."""
        use = self.uses[job.use]
        found = self.store.find(use.fingerprint, use.experiment, job.seed)
        if found is None:
            return None
        now, then = (
            {**table.get("options", {}), **{key: value for key, value in table.items() if key.startswith(TRAIN)}}
            for table in (use.table, found.config)
        )
        differ = [key for key in sorted(now.keys() & then.keys()) if now[key] != then[key]]
        if differ:
            path = self.store.path(use.fingerprint, use.experiment, job.seed)
            raise CheckpointError(f"{path} was made with another {', '.join(differ)}; remove it and run the study anew")
        return found

    def records(self) -> dict[str, dict[int, RunRecord]]:
        """Name in the plan -> seed -> record, of those that exist."""
        found: dict[str, dict[int, RunRecord]] = {name: {} for name in self.uses}
        for job in self.jobs():
            record = self.record(job)
            if record is not None:
                found[job.use][job.seed] = record
        return found

    def jobs(self) -> list[Job]:
        """All runs, in complete seed blocks."""
        return [Job(name, seed) for seed in self.scale.seeds for name in self.uses]

    def missing(self) -> list[Job]:
        """Runs to come, in the order in which they run."""
        return [job for job in self.jobs() if self.record(job) is None]

    def rates(self) -> dict[str, float | None]:
        """None: nothing is tuned."""
        return {}

    def progress(self) -> tuple[int, int]:
        """Runs done, and in all."""
        wanted = len(self.jobs())
        return wanted - len(self.missing()), wanted

    def trials(self) -> list[Trial]:
        """Every hypothesis with what the records say of it."""
        records, seeds = self.records(), self.scale.seeds
        return [
            trial_of(h, seeds, lambda column, h=h: _seen(h, column, seeds, records))
            for h in self.plan.hypotheses_at(self.scale_name)
        ]

    def require_runnable(self) -> None:
        """Nothing: opening the plan has checked the options of every experiment."""

    def judge(self, void: list[str]) -> StudyVerdict:
        """The verdict by rule, from the records alone."""
        return rule(self.plan, self.scale_name, self.scale.kind, self.trials(), len(self.scale.seeds), void=void)


def _training(options: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of the training of options, as stated or by default, without those that change no number or that seeds set.

    One key each, beside the options: a lock or a record of before they stood there, or before a field was there, then still agrees.
    """
    from thalweg.studies.experiments.subjects import OWN
    from thalweg.studies.resolve import FREE
    from thalweg.training.config import TrainConfig

    stated = options.get("train")
    if not isinstance(stated, Mapping) or options.get("model", OWN) != OWN:
        return {}
    fields = {**config.to_plain(TrainConfig()), **stated}
    return {f"{TRAIN}{key}": value for key, value in fields.items() if key not in (*FREE, "seed")}


def _weights(options: Mapping[str, Any]) -> str:
    """SHA-256 of the model at hand that options name, so that other weights are another experiment; empty for none."""
    from thalweg.capture import at_hand

    named = options.get("model")
    known = at_hand.MODELS.get(named) if isinstance(named, str) else None
    return known.sha256 if known else ""


def _seen(
    h: ExperimentHypothesis, column: str, seeds: tuple[int, ...], records: Records
) -> dict[int, Observation | None]:
    """Seed -> the value of a column."""
    name, _, arm = column.partition(".")
    return {seed: _observation(h, arm, records[name].get(seed)) for seed in seeds}


def _observation(h: ExperimentHypothesis, arm: str, record: RunRecord | None) -> Observation | None:
    if record is None:
        return None
    if not len(record.measures.where(measure=h.measure, arm=arm)):
        return Observation(None, reason=f"no {h.measure} of {arm}")
    found = observed(h, value_of(record.measures, h.measure, arm, h.at, h.against))
    dull = [row.null_kind for row in record.measures.where(measure=HAS_LEARNED, arm=arm) if not row.value]
    return Observation(found.value, found.diverged, found.substituted, found.reason, "; ".join(dull)) if dull else found


def run_experiments(
    study: ExperimentStudy, *, jobs: int = 1, say: Say = lambda line: None, limit: int | None = None, on_event=None
) -> int:
    """Run what is missing, one experiment after the other, in complete seed blocks; returns the number of runs finished now.

    A locked plan is checked against its lock first. Every run is written when it is complete, so that the same command goes on after any stop.
    limit: stop after so many runs. A run that cannot be made here (of a model that is not there) leaves all others running.
    Raises: InputError if the plan is not locked or was changed; at the end, for runs that could not be made, the first reason.
    """
    locks.require(study)
    if jobs != 1:
        raise InputError(f"a study of experiments runs one after the other, got jobs {jobs}; leave it out")
    import torch

    threads, done, failed = torch.get_num_threads(), 0, dict[Job, str]()
    torch.set_num_threads(study.plan.threads)
    try:
        missing = study.missing()
        for i, job in enumerate(missing, 1):
            if limit is not None and done >= limit:
                break
            if study.record(job) is not None:  # the same experiment under another name has just run
                continue
            say(f"{job.name} ({i} of {len(missing)})")
            try:
                seconds = _run(study, job, say)
            except ThalwegError as error:
                failed[job] = str(error)
                say(f"{job.name} cannot run: {error}")
                continue
            done += 1
            say(f"{job.name}: {seconds:.0f} s")
    finally:
        torch.set_num_threads(threads)
    if failed:
        job, why = next(iter(failed.items()))
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise InputError(f"{done} runs finished; {job.name}{others} cannot run here: {why}")
    return done


def _run(study: ExperimentStudy, job: Job, say: Say) -> float:
    use, start = study.uses[job.use], time.monotonic()
    rows = registry[use.experiment].rows(use.experiment, use.options, job.seed, lambda line: say(f"  {line}"))
    seconds = time.monotonic() - start
    machine = provenance.collect()
    versions = machine.pop("versions")
    record = RunRecord(
        use.fingerprint,
        use.table,
        job.seed,
        "done",
        {"seconds": round(seconds, 1)},
        {},
        rows,
        provenance=machine,
        versions=versions,
    )
    write(study.store.path(use.fingerprint, use.experiment, job.seed), record)
    return seconds
