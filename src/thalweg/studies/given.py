"""What plans on given models share, whatever is done to the models: names of tables, subjects, scales, claims."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from thalweg.errors import InputError, UnknownNameError
from thalweg.studies.plan import Hypothesis, check_head

_NAME = re.compile(r"[A-Za-z0-9_]+")


class GivenPlan(Protocol):
    """The tables that such a plan has."""

    @property
    def schema(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def subject(self) -> Mapping[str, Any]: ...
    @property
    def scale(self) -> Mapping[str, Any]: ...
    @property
    def arms(self) -> Mapping[str, Any]: ...
    @property
    def hypotheses(self) -> tuple[Any, ...]: ...


def check_tables(plan: GivenPlan) -> None:
    """Head, names of subjects, scales and arms, one source for each subject. Raises: InputError."""
    check_head(plan.schema, plan.alpha)
    for what, table in (("subject", plan.subject), ("scale", plan.scale), ("arms", plan.arms)):
        if not table:
            raise InputError(f"a plan needs at least one entry under {what!r}")
        check_names(what, table)
    if not plan.hypotheses:
        raise InputError("a plan needs at least one entry under 'hypotheses'")
    for name, subject in plan.subject.items():
        if bool(subject.model) == bool(subject.train):
            raise InputError(f"subject.{name} states exactly one of model and train")


def check_names(what: str, names: Iterable[str]) -> None:
    """That names of a table are made of letters, digits and _. Raises: InputError."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise InputError(f"{what}: a name holds only letters, digits and _ (A-Z, a-z, 0-9), got {name!r}")


def check_least(name: str, scale: Any, least: Iterable[tuple[str, int]]) -> None:
    """That numbers of a scale are large enough. Raises: InputError."""
    for key, low in least:
        if getattr(scale, key) < low:
            raise InputError(f"scale.{name}.{key} must be at least {low}, got {getattr(scale, key)}")


def check_known(plan: GivenPlan, name: str, scale: Any) -> None:
    """That a scale names families and subjects of the plan. Raises: UnknownNameError."""
    for family in scale.arms:
        if family not in plan.arms:
            raise UnknownNameError(f"family in scale.{name}.arms:", family, plan.arms)
    for subject in scale.models:
        if subject not in plan.subject:
            raise UnknownNameError(f"subject in scale.{name}.models:", subject, plan.subject)


def check_claim(h: Hypothesis, what: str) -> None:
    """That a hypothesis names at least one of ``what``, and has a rule for what is not finite. Raises: InputError."""
    if not h.contrast:
        raise InputError(f"hypothesis {h.id} has an empty contrast; name at least one {what}")
    if h.diverged != "inconclusive" and not isinstance(h.diverged, float):
        raise InputError(f"hypothesis {h.id}: diverged must be inconclusive or a number, got {h.diverged!r}")
