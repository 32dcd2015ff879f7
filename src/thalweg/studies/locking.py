"""Locks: the hash of a plan and of everything it resolves to, written before the first run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from thalweg._version import __version__
from thalweg.errors import CheckpointError, InputError
from thalweg.records import jsonl
from thalweg.records.files import atomic_write_text
from thalweg.records.provenance import now
from thalweg.studies.plan import load

if TYPE_CHECKING:
    from thalweg.studies.plan import AnyPlan

LOCK_SCHEMA = 1
OPTIONAL = ("recorded_before",)  # fields that locks of earlier versions lack


@dataclass(frozen=True)
class Lock:
    """What was fixed: the plan, the scale, and the resolved configuration of every arm (without learning rate and seed).

    recorded_before: how many runs of the scale had a record already; None in a lock that an earlier version wrote.
    """

    plan_hash: str
    scale: str
    arms: dict[str, dict[str, Any]]
    locked: str
    version: str
    power: dict[str, float]
    recorded_before: int | None = None

    def note(self, wanted: int, counts: str) -> str:
        """What a reader must know of runs that were recorded before the lock, empty for none. wanted: runs of the scale; counts: their noun."""
        if not self.recorded_before:
            return ""
        return f"locked when {self.recorded_before} of {wanted} {counts} were recorded (some may belong to other plans)"


def path_of(plan_path: str | Path, scale: str) -> Path:
    """The lock file of a plan at a scale: beside the plan."""
    plan_path = Path(plan_path)
    return plan_path.with_name(f"{plan_path.stem}.{scale}.lock.json")


def write(
    plan_path: str | Path,
    scale: str,
    arms: dict[str, dict[str, Any]],
    power: dict[str, float],
    recorded_before: int | None = None,
) -> Lock:
    """Lock a plan. A lock that exists is never replaced by a different one.

    arms: resolved configuration of each arm. recorded_before: how many runs of the scale have a record now.
    Raises: InputError when another lock stands there.
    """
    path, plan = path_of(plan_path, scale), load(plan_path)
    lock = Lock(
        plan.hash(),
        scale,
        arms,
        now(),
        __version__,
        power,
        recorded_before,
    )
    if path.exists():
        old = read(plan_path, scale)
        if not differences(plan, scale, arms, old):
            return old
        if old.scale != scale:
            raise InputError(_of_another_scale(old, path))
        raise InputError(
            f"{path} locks another version of this plan; runs may rest on it: give the changed plan a new name"
        )
    table = {name: value for name, value in lock.__dict__.items() if value is not None}
    atomic_write_text(path, jsonl.encode({"schema": LOCK_SCHEMA, "kind": "plan-lock", **table}, indent=1) + "\n")
    return lock


def read(plan_path: str | Path, scale: str) -> Lock:
    """Read the lock of a plan. Raises: InputError if there is none, CheckpointError if it is broken."""
    path = path_of(plan_path, scale)
    if not path.exists():
        raise InputError(
            f"{Path(plan_path).name} is not locked at scale {scale}; run: thalweg study lock {plan_path} --scale {scale}"
        )
    table = jsonl.read_object(path, "plan lock")
    jsonl.check_schema(table.get("schema"), LOCK_SCHEMA, str(path), "plan lock")
    kinds = {"arms": (dict, "table"), "power": (dict, "table"), "recorded_before": (int, "whole number")}
    for name in Lock.__dataclass_fields__:
        if name not in table and name in OPTIONAL:
            continue
        if name not in table:
            raise CheckpointError(f"{path} is broken: it lacks {name!r}; restore it from version control")
        kind, called = kinds.get(name, (str, "text"))
        if not isinstance(table[name], kind) or isinstance(table[name], bool):
            raise CheckpointError(
                f"{path} is broken: {name} must be a {called}, got {table[name]!r:.40}; restore it from version control"
            )
    for arm, resolved in table["arms"].items():
        if not isinstance(resolved, dict):
            raise CheckpointError(
                f"{path} is broken: arms.{arm} must be a table, got {resolved!r:.40}; restore it from version control"
            )
    return Lock(**{name: table[name] for name in Lock.__dataclass_fields__ if name in table})


class Lockable(Protocol):
    """What :func:`require` reads of a study, of whatever kind."""

    @property
    def path(self) -> Path: ...
    @property
    def plan(self) -> Any: ...
    @property
    def scale_name(self) -> str: ...

    def lock_tables(self) -> dict[str, dict]: ...


def require(study: Lockable) -> None:
    """That a study is locked and was not changed since. Raises: InputError, CheckpointError for a broken lock."""
    lock = read(study.path, study.scale_name)
    changed = differences(study.plan, study.scale_name, study.lock_tables(), lock)
    if changed and lock.scale != study.scale_name:
        raise InputError(_of_another_scale(lock, path_of(study.path, study.scale_name)))
    if changed:
        raise InputError(f"{study.path.name}: {'; '.join(changed)}; a changed plan needs a new name and a new lock")


def differences(plan: "AnyPlan", scale: str, arms: dict[str, dict[str, Any]], lock: Lock) -> list[str]:
    """What has changed since the lock, in words; empty when nothing has."""
    if lock.scale != scale:
        return [f"the lock of scale {scale} is one of scale {lock.scale}"]
    found = []
    if plan.hash() != lock.plan_hash:
        found.append("the plan was edited after it was locked")
    changed = sorted(name for name in arms.keys() | lock.arms.keys() if not _agree(arms.get(name), lock.arms.get(name)))
    if changed and not found:
        found.append(
            f"this version of the package resolves {', '.join(changed)} differently than thalweg {lock.version} did at the lock"
        )
    return found


def _of_another_scale(lock: Lock, path: Path) -> str:
    return f"{path} is the lock of scale {lock.scale}; restore the one of this scale from version control, or remove it and lock the plan"


def _agree(now: dict[str, Any] | None, locked: dict[str, Any] | None) -> bool:
    """Whether an arm resolves as it did; a field that a later version added is not a difference."""
    return now is not None and locked is not None and all(now.get(key) == value for key, value in locked.items())
