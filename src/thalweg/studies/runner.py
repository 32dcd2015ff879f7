"""Running a study: what is missing, in complete seed blocks, resumable at any moment."""

import dataclasses
import signal
from collections.abc import Callable, Generator, Mapping, Set
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from thalweg.errors import ExitCode, InputError, InUseError, ThalwegError
from thalweg.interrupts import terminated_as_interrupt
from thalweg.records.run import RunFolder
from thalweg.studies import locking as locks
from thalweg.studies.data_used import changed_data
from thalweg.studies.judging import StudyVerdict, judge
from thalweg.studies.plan import Plan, load
from thalweg.studies.resolve import conflicts, fingerprint, require_models, resolve, tables
from thalweg.studies.store import RunRecord, Store
from thalweg.studies.tuning import Tuning, search, tuning_runs
from thalweg.training.config import TrainConfig

Say = Callable[[str], None]


class Interrupted(ThalwegError):
    """A study was stopped by the user; finished runs are kept, the one in progress resumes."""

    exit_code = ExitCode.INTERRUPTED


@dataclass(frozen=True)
class Job:
    """One run that is missing."""

    arm: str
    purpose: str  # "tuning" or "seed"
    config: TrainConfig

    @property
    def label(self) -> str:
        return self.config.connection

    @property
    def name(self) -> str:
        return (
            f"{self.arm} lr {self.config.lr:g}" if self.purpose == "tuning" else f"{self.arm} seed {self.config.seed}"
        )


class Study:
    """A plan at a scale with its records and its resolved arms.

    records: folder of committed records (default: ``records/`` beside the plan). workspace: folder of run folders, not committed.
    """

    counts = "seed runs"

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
        if not isinstance(plan, Plan):
            raise InputError(f"{self.path.name} is a plan of edits; open it with studies.study")
        self.plan: Plan = plan
        self.scale_name, self.scale = scale, self.plan.at(scale)
        self.store = Store(records if records is not None else self.path.parent / "records")
        self.workspace = Path(workspace)
        self.arms = resolve(self.plan, scale, task_vocabulary)

    def lock_tables(self) -> dict[str, dict]:
        """What the lock hashes: the resolved configuration of every arm."""
        return tables(self.arms)

    def require_runnable(self) -> None:
        """That the model of every arm can be made. Raises: InputError naming the arm."""
        require_models(self.arms)

    def judge(self, void: list[str]) -> StudyVerdict:
        """The verdict by rule, from the records alone. void: what differs from the lock."""
        records = self.records()
        void = [*void, *changed_data(self._with_tuning(records))]
        return judge(self.plan, self.scale_name, records, void=void, edges=self.edges())

    def look_up(self, run: TrainConfig, *, whole: bool = False) -> RunRecord | None:
        """The record of a run, if any plan of this folder ever finished it. whole: with what was measured, not its outcome alone."""
        find = self.store.find if whole else self.store.outcome
        record = find(fingerprint(run), run.connection, run.seed)
        if record is not None and (fields := conflicts(record.config, run)):
            # Stating the old values does not help: what differs from the defaults of now makes another fingerprint, and no record of it.
            raise InputError(
                f"the record of {run.connection} seed {run.seed} ({record.fingerprint[:12]}) was made by {_maker(record)}, with other "
                f"defaults for {', '.join(fields)}; go on with that version, or remove the record and run the study anew"
            )
        return record

    def tuning(self, arm: str) -> Tuning:
        """Where the learning rate of an arm stands."""
        if not self.scale.learning_rates:
            return Tuning({}, (), self.arms[arm].lr, False)
        return search(self.arms[arm], self.scale, self.look_up)

    def rates(self) -> dict[str, float | None]:
        """The learning rate of every arm; None where it is not chosen yet."""
        return {arm: self.tuning(arm).best for arm in self.arms}

    def seed_run(self, arm: str, rate: float, seed: int) -> TrainConfig:
        """The run of an arm on one seed."""
        return dataclasses.replace(self.arms[arm], lr=rate, seed=seed)

    def missing(self) -> list[Job]:
        """The next runs: first all learning rates; when those are settled, the seeds, block by block."""
        tunings = {arm: self.tuning(arm) for arm in self.arms}
        jobs = [Job(arm, "tuning", run) for arm, tuning in tunings.items() for run in tuning.pending]
        if not jobs:
            rates = {arm: tuning.best for arm, tuning in tunings.items()}
            for seed in self.scale.seeds:
                runs = {arm: self.seed_run(arm, rate, seed) for arm, rate in rates.items() if rate is not None}
                jobs.extend(Job(arm, "seed", run) for arm, run in runs.items() if self.look_up(run) is None)
        seen: set[str] = set()  # arms that are the same run in other words run once
        return [job for job in jobs if not (fingerprint(job.config) in seen or seen.add(fingerprint(job.config)))]

    def records(self) -> dict[str, dict[int, RunRecord]]:
        """Arm -> seed -> record, of those that exist."""
        found: dict[str, dict[int, RunRecord]] = {}
        for arm in self.arms:
            rate = self.tuning(arm).best
            if rate is None:
                continue
            by_seed = {seed: self.look_up(self.seed_run(arm, rate, seed), whole=True) for seed in self.scale.seeds}
            found[arm] = {seed: record for seed, record in by_seed.items() if record is not None}
        return found

    def _with_tuning(self, records: Mapping[str, Mapping[int, RunRecord]]) -> dict[str, RunRecord]:
        """Name of the run -> record: the seed runs, and those that the learning rates were chosen by."""
        found = {f"{arm} seed {seed}": record for arm, by_seed in records.items() for seed, record in by_seed.items()}
        for arm, base in self.arms.items():
            runs = [run for rate in self.tuning(arm).losses for run in tuning_runs(base, self.scale, rate)]
            named = {f"{arm} lr {run.lr:g} seed {run.seed}": self.look_up(run) for run in runs}
            found |= {name: record for name, record in named.items() if record is not None}
        return found

    def edges(self) -> list[str]:
        """Arms whose best learning rate stayed at the edge of the extended grid."""
        return [arm for arm in self.arms if self.tuning(arm).edge]

    def progress(self) -> tuple[int, int]:
        """Seed runs done, and in all."""
        rates = {arm: rate for arm, rate in self.rates().items() if rate is not None}
        runs = [self.seed_run(arm, rate, seed) for arm, rate in rates.items() for seed in self.scale.seeds]
        return sum(self.look_up(run) is not None for run in runs), len(self.arms) * len(self.scale.seeds)


def _maker(record: RunRecord) -> str:
    """The version that made a record, with the commit where that is known."""
    commit = (record.provenance.get("git") or {}).get("commit")
    return (
        f"thalweg {record.versions.get('thalweg', 'of another version')}{f' at commit {commit:.12}' if commit else ''}"
    )


def task_vocabulary(run: TrainConfig) -> int:
    """Vocabulary size of the task of a run; opens (and on first use builds) the data."""
    from thalweg import data

    return data.load(run.data, tokenizer=run.tokenizer, vocab_size=run.vocab_size).vocab_size


def run(study: Study, *, jobs: int = 1, say: Say = lambda line: None, limit: int | None = None, on_event=None) -> int:
    """Run what is missing; returns the number of runs finished now.

    A locked plan is checked against its lock first. An interrupted run goes on where it was. limit: stop after so many runs.
    jobs: processes side by side, each with the threads that the plan fixes. A run that another process is doing is left to it.
    Raises: InputError if the plan is not locked or was changed; Interrupted after Ctrl-C.
    """
    locks.require(study)
    study.require_runnable()
    done, busy = 0, set[str]()
    while True:
        free = [job for job in study.missing() if fingerprint(job.config) not in busy]
        batch = free if limit is None else free[: limit - done]
        if not batch:
            break
        with closing(_execute(study, batch, jobs, on_event)) as finished:
            for job, status in finished:
                if status is None:
                    busy.add(fingerprint(job.config))
                    say(f"{job.name}: another process is doing it; going on with the next run")
                    continue
                done += 1
                say(f"{job.name}: {status} ({done} now, {len(study.missing())} in sight)")
    if elsewhere := [job.name for job in study.missing() if fingerprint(job.config) in busy]:
        say(
            f"another process is doing {', '.join(elsewhere)}; when it has ended, the same command runs what is missing"
        )
    return done


def _execute(study: Study, batch: list[Job], jobs: int, on_event) -> Generator[tuple[Job, str | None], None, None]:
    """Each job with how its run ended, None where another process has the folder of the run."""
    if jobs == 1:
        for job in batch:
            yield job, _one(study, job, on_event)
        return
    waiting, running, others = iter(batch), dict[Future, Job](), set(active_children())
    with terminated_as_interrupt():
        pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_leave_ctrl_c_to_the_study)
        try:
            while True:  # no more than can run at once are handed over, so that an interrupt starts nothing new
                for job in islice(waiting, jobs - len(running)):
                    running[pool.submit(_train, job.config, folder_of(study, job))] = job
                if not running:
                    break
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    job = running.pop(future)
                    try:
                        future.result()
                    except InUseError:
                        yield job, None
                        continue
                    yield job, _keep(study, job)
        except BrokenProcessPool:
            raise InputError(
                "a worker was killed (out of memory?); finished runs are kept, the same command goes on"
            ) from None
        except BaseException:
            for worker in _workers(others):  # each saves its run and ends; none trains on without its study
                worker.terminate()
            raise
        finally:
            _close(pool, others)


def _close(pool: ProcessPoolExecutor, others: Set[BaseProcess]) -> None:
    try:
        pool.shutdown(cancel_futures=True)
    except KeyboardInterrupt:  # asked again: at once, the last checkpoints stand
        for worker in _workers(others):
            worker.kill()
        raise


def _workers(others: Set[BaseProcess]) -> Set[BaseProcess]:
    """The children of this process but for ``others``, which it had before."""
    return set(active_children()) - others


def _leave_ctrl_c_to_the_study() -> None:
    """In a worker: a terminal sends Ctrl-C to all processes; were it heard here, the word of the study would be a second one and kill."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def folder_of(study: Study, job: Job) -> Path:
    """The run folder of a job; named like its record."""
    return study.workspace / study.store.path(fingerprint(job.config), job.label, job.config.seed).stem


def _one(study: Study, job: Job, on_event) -> str | None:
    from thalweg.training.signals import Interrupted as RunInterrupted

    try:
        _train(job.config, folder_of(study, job), on_event)
    except RunInterrupted:  # its own word says how the run alone would go on
        raise _interrupted(job) from None
    except InUseError:
        return None
    return _keep(study, job)


def _interrupted(job: Job) -> Interrupted:
    return Interrupted(f"interrupted in {job.name}; finished runs are kept, the same command goes on")


def _train(config: TrainConfig, folder: Path, on_event=None) -> None:
    from thalweg.training import train

    if RunFolder.is_run(folder) and RunFolder.open(folder).status in ("done", "diverged"):
        return
    train(config, folder, resume=RunFolder.is_run(folder), on_event=on_event)


def _keep(study: Study, job: Job) -> str:
    folder = RunFolder.open(folder_of(study, job))
    if folder.status == "interrupted":
        raise _interrupted(job)
    study.store.keep(folder, fingerprint(job.config), job.label, job.config.seed)
    return folder.status
