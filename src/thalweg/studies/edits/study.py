"""Running a study of edits: what is missing, edit by edit, resumable at any moment."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from thalweg.errors import InputError
from thalweg.records import provenance
from thalweg.studies import locking as locks
from thalweg.studies.edits import store as records
from thalweg.studies.edits.observe import Found, trials
from thalweg.studies.edits.plan import EditArm, EditPlan
from thalweg.studies.edits.store import EditRecord
from thalweg.studies.edits.subjects import DivergedSubjectError, label_of, resolved
from thalweg.studies.edits.texts import Reading, reading
from thalweg.studies.judging import StudyVerdict, Trial, rule
from thalweg.studies.plan import digest, load
from thalweg.studies.store import Store

Say = Callable[[str], None]
FOLDER = "edits"  # of the records, inside that of the runs


@dataclass(frozen=True)
class Group:
    """One subject on one text: what one record holds."""

    subject: str
    label: str
    tables: dict[str, Any]  # of subject, text and evaluation
    reading: Reading
    arms: tuple[EditArm, ...]

    @property
    def fingerprint(self) -> str:
        return digest(self.tables)


class EditStudy:
    """A plan of edits at a scale with its records; as :class:`thalweg.studies.runner.Study`.

    records: folder of committed records (default: ``records/`` beside the plan; edits lie in ``edits/`` inside). workspace: folder of the run
    folders of subjects that are trained here, not committed. Studies of other things that are done to a given model stand on this class:
    they name plan and folder, and say what is measured (:meth:`bench`), in which order (:meth:`rank`), and what it means (:meth:`trials`).
    """

    counts = "edits"
    folder = FOLDER

    def __init__(
        self,
        plan_path: str | Path,
        scale: str,
        *,
        records: str | Path | None = None,
        workspace: str | Path = "runs/studies",
    ):
        self.path = Path(plan_path)
        self.plan: EditPlan = self.checked(load(self.path))
        self.scale_name, self.scale = scale, self.plan.at(scale)
        self.store = Store(records if records is not None else self.path.parent / "records")
        self.workspace = Path(workspace)
        self.arms = {name: self.plan.edits[name] for name in self.plan.arms_at(scale)}

    def checked(self, plan: Any) -> EditPlan:
        """The plan, if it is one of this kind. Raises: InputError."""
        if not isinstance(plan, EditPlan):
            raise InputError(f"{self.path.name} is no plan of edits; open it with studies.study")
        return plan

    def evaluation(self) -> dict[str, Any]:
        """What is measured, for the lock and the fingerprint of a record."""
        return {"kind": self.plan.text.evaluation, "buckets": self.plan.text.buckets, "audit": self.scale.audit}

    def reading(self, family: str) -> Reading:
        """What a family reads. Raises: InputError for a text that is too short."""
        return reading(self.plan, self.scale_name, family)

    def bench(self, subject: Any, group: Group) -> Any:
        """What measures: ``tokens``, ``unedited()`` and ``edited(arm, noop, rows)``."""
        from thalweg.studies.edits.measuring import Bench

        return Bench.of(subject, group.reading, self.plan.text.evaluation, self.plan.text.buckets, self.scale.audit)

    def rank(self, arm: EditArm) -> int:
        """Which arms come before others of the same family of needs: no-ops first."""
        return 0 if arm.noop else 1

    def trials(self) -> list[Trial]:
        """Every hypothesis with what the records say of it."""
        return trials(self.plan, self.scale_name, self.records())

    @cached_property
    def groups(self) -> list[Group]:
        """Subjects and texts. Raises: InputError for a text that is not there or too short."""
        found: dict[str, tuple[str, dict[str, Any], Reading, list[EditArm]]] = {}
        for family, arms in self.plan.members.items():
            if not self.arms.keys() & {arm.name for arm in arms}:
                continue
            subject, text = self.plan.subject_of(family), self.reading(family)
            tables = {
                "subject": resolved(self.plan, self.scale_name, subject),
                "text": text.facts,
                "evaluation": self.evaluation(),
            }
            found.setdefault(digest(tables), (subject, tables, text, []))[3].extend(arms)
        return [
            Group(s, label_of(self.plan, self.scale_name, s), tables, text, tuple(arms))
            for s, tables, text, arms in found.values()
        ]

    def lock_tables(self) -> dict[str, dict]:
        """What the lock hashes: every edit, every subject as far as it is known before it is opened, and the text."""
        tables: dict[str, dict] = {}
        for i, group in enumerate(self.groups):
            tables[f"group {i}"] = {"fingerprint": group.fingerprint, **group.tables}
            tables |= {arm.name: {"edit": arm.plain(), "noop": arm.noop, "group": i} for arm in group.arms}
        return tables

    def record(self, group: Group) -> EditRecord | None:
        """What was finished of a group. Raises: CheckpointError for a broken record."""
        return records.find(self.store.folder / self.folder, group.label, group.fingerprint)

    def records(self) -> dict[str, Found]:
        """Arm -> what its record holds, of those that are complete with their no-op."""
        found: dict[str, Found] = {}
        for group in self.groups:
            record = self.record(group)
            if record is None or "unedited" not in record.rows:
                continue
            for arm in group.arms:
                row = record.rows.get(arm.identity)
                noop = record.rows.get(self.plan.edits[self.plan.noop_of(arm.name)].identity)
                if row is not None and noop is not None:
                    found[arm.name] = Found(row, noop, record.rows["unedited"], record)
        return found

    def missing(self) -> list[EditArm]:
        """Edits to come, in the order in which they run: those that primary hypotheses rest on first, no-ops before all."""
        found: list[EditArm] = []
        for group in self.groups:
            found += self.missing_of(group, self.record(group))
        return found

    def missing_of(self, group: Group, record: EditRecord | None) -> list[EditArm]:
        """Of one group."""
        hypotheses = sorted(self.plan.hypotheses_at(self.scale_name), key=lambda h: not h.primary)
        named = list(dict.fromkeys(name for h in hypotheses for name in self.plan.named_by(h)))
        first = {name: i for i, name in enumerate(named)}
        done = set(record.rows) if record is not None else set()
        waiting: dict[str, EditArm] = {}
        for arm in group.arms:
            if arm.identity not in done:
                waiting.setdefault(arm.identity, arm)
        names = {arm.identity: [a.name for a in group.arms if a.identity == arm.identity] for arm in waiting.values()}

        def rank(arm: EditArm) -> tuple[int, int]:
            return self.rank(arm), min(first.get(name, len(first)) for name in names[arm.identity])

        return sorted(waiting.values(), key=rank)

    def rates(self) -> dict[str, float | None]:
        """None: nothing is tuned."""
        return {}

    def progress(self) -> tuple[int, int]:
        """Edits done, and in all; the same edit in other words counts once."""
        wanted = sum(len({arm.identity for arm in group.arms}) for group in self.groups)
        return wanted - len(self.missing()), wanted

    def require_runnable(self) -> None:
        """Nothing: no model is made here, and those at hand are checked where they are opened."""

    def judge(self, void: list[str]) -> StudyVerdict:
        """The verdict by rule, from the records alone."""
        units = self.scale.documents
        return rule(self.plan, self.scale_name, self.scale.kind, self.trials(), units, sample="document", void=void)


def run_edits(
    study: EditStudy, *, jobs: int = 1, say: Say = lambda line: None, limit: int | None = None, on_event=None
) -> int:
    """Compute what is missing, one edit after the other; returns the number of edits finished now.

    A locked plan is checked against its lock first. Every edit is written when it is complete, so that the same command goes on after any
    stop. limit: stop after so many edits. A subject whose training diverged leaves the others running.
    Raises: InputError if the plan is not locked or was changed, for a record of other weights, or one that another process adds to; at the
    end, for subjects whose training diverged, the first reason.
    """
    locks.require(study)
    if jobs != 1:
        raise InputError(
            f"a study of {study.counts} runs one after the other on its one model, got jobs {jobs}; leave it out"
        )
    import torch

    threads, done, failed = torch.get_num_threads(), 0, list[str]()
    torch.set_num_threads(study.plan.threads)
    try:
        for group in study.groups:
            if not _waits(study, group) or (limit is not None and done >= limit):
                continue
            with records.held(study.store.folder / study.folder, group.label, group.fingerprint):
                record = study.record(group)  # anew: until now another process may have added to it
                pending = study.missing_of(group, record)[: None if limit is None else limit - done]
                if not pending and record is not None:
                    continue
                try:
                    done += _run_group(study, group, record, pending, say, on_event)
                except DivergedSubjectError as error:
                    failed.append(f"subject {group.subject}: {error}")
                    say(failed[-1])
    finally:
        torch.set_num_threads(threads)
    if failed:
        raise InputError(f"{done} {study.counts} finished; {failed[0]}")
    return done


def _waits(study: EditStudy, group: Group) -> bool:
    record = study.record(group)
    return record is None or bool(study.missing_of(group, record))


def _run_group(
    study: EditStudy, group: Group, record: EditRecord | None, pending: list[EditArm], say: Say, on_event
) -> int:
    from thalweg.studies.edits.subjects import open_subject

    plan, scale = study.plan, study.scale_name
    subject = open_subject(plan, scale, group.subject, study.store, study.workspace, on_event)
    bench = study.bench(subject, group)
    facts = {"tokens": bench.tokens, "documents": [d.name for d in group.reading.documents], **subject.facts}
    path = records.path_of(study.store.folder / study.folder, group.label, group.fingerprint)
    if record is None:
        machine = provenance.collect()
        versions = machine.pop("versions")
        facts["notes"] = list(subject.notes)
        record = EditRecord(group.fingerprint, facts=facts, versions=versions, provenance=machine, **group.tables)
        say(f"{group.subject}: unedited, {len(facts['documents'])} documents of {group.reading.tokens} tokens")
        record.rows["unedited"] = bench.unedited()
        records.write(path, record)
    elif differ := records.conflicts(record, facts):
        raise InputError(
            f"{path} was made with another subject: its {', '.join(differ)} differ from what was opened now; restore that subject, or "
            "remove the record and run the study anew"
        )
    elsewhere = changed_machine(record)
    for i, arm in enumerate(pending, 1):
        noop = plan.edits[plan.noop_of(arm.name)]
        row = bench.edited(arm, noop, record.rows)
        row = dataclasses.replace(row, notes=(*row.notes, *elsewhere))
        record.rows[arm.identity] = row
        records.write(path, record)
        say(f"{group.subject}: {arm.name} ({i} of {len(pending)}, {row.seconds:.0f} s)")
    return len(pending)


def changed_machine(record: EditRecord) -> list[str]:
    """One line where versions or machine are not those that a record was begun with."""
    machine = provenance.collect()
    then = {**record.provenance, "versions": record.versions}
    names = [name for name in provenance.BITWISE if name in then and machine.get(name) != then[name]]
    return [f"gone on with another {', '.join(names)} than the record was begun with"] if names else []
