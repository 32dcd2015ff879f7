"""Verdicts by rule: they read the locked plan and the records, nothing else."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from thalweg.errors import ExitCode, InputError
from thalweg.studies.observe import Observation, observe
from thalweg.studies.plan import Hypothesis, Plan
from thalweg.studies.statistics import Paired, levels, paired
from thalweg.studies.store import RunRecord

Status = Literal["supported", "refuted", "inconclusive", "void"]

EXIT_CODES = {
    "supported": ExitCode.OK,
    "refuted": ExitCode.REFUTED,
    "inconclusive": ExitCode.INCONCLUSIVE,
    "void": ExitCode.VOID,
}


@dataclass(frozen=True)
class Verdict:
    """The verdict on one hypothesis, with what it rests on.

    statistics is in the direction of the statement: positive favours it. values: the contrast of each unit, as measured; sample: what a
    unit is (``seed``, ``document``, ``layer``).
    """

    hypothesis: str
    statement: str
    status: Status
    reason: str
    primary: bool
    measure: str
    unit: str
    direction: str
    margin: float
    values: dict[int, float] = field(default_factory=dict)
    statistics: Paired | None = None
    substituted: tuple[str, ...] = ()  # "arm seed: rule" where a diverged run took the value of its rule
    arms: dict[str, dict[int, float]] = field(default_factory=dict)
    sample: str = "seed"

    @property
    def estimate(self) -> float | None:
        """Mean contrast in the measure's own sign."""
        return None if self.statistics is None else self._sign() * self.statistics.estimate

    @property
    def interval(self) -> tuple[float, float] | None:
        """Interval of the contrast in the measure's own sign."""
        if self.statistics is None:
            return None
        ends = sorted((self._sign() * self.statistics.low, self._sign() * self.statistics.high))
        return ends[0], ends[1]

    def _sign(self) -> float:
        return 1.0 if self.direction == "greater" else -1.0


@dataclass(frozen=True)
class StudyVerdict:
    """All verdicts of a plan at one scale, and the one that the exit code tells."""

    plan: str
    scale: str
    kind: str
    plan_hash: str
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    sample: str = "seed"

    @property
    def status(self) -> Status:
        """void if any is void; else refuted if any primary one is; supported if all primary ones are; else inconclusive."""
        every = [v.status for v in self.verdicts]
        primary = [v.status for v in self.verdicts if v.primary] or every
        if "void" in every or not every:
            return "void"
        if "refuted" in primary:
            return "refuted"
        return "supported" if all(s == "supported" for s in primary) else "inconclusive"

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODES[self.status]


def judge(
    plan: Plan,
    scale: str,
    runs: Mapping[str, Mapping[int, RunRecord]],
    *,
    void: Sequence[str] = (),
    edges: Sequence[str] = (),
) -> StudyVerdict:
    """Judge every hypothesis of ``plan`` at ``scale``.

    runs: arm -> seed -> record. void: reasons that void the whole study (no lock, plan edited, foreign records). edges: arms whose best
    learning rate stayed at the edge of the extended grid; a hypothesis that leans on one is inconclusive.

    The rule: with the contrast of each seed signed so that positive favours the statement, a hypothesis is supported when the interval
    lies above the margin, refuted when it lies below, else inconclusive; the level of the interval follows the plan's correction over
    its primary hypotheses. A missing seed voids it; an arm that has not learned makes it inconclusive; so does a plan that is exploratory
    or a demo, which can never support.
    """
    chosen = plan.at(scale)
    trials = [
        trial_of(h, chosen.seeds, lambda column, h=h: _observations(h, column, chosen.seeds, runs))
        for h in plan.hypotheses_at(scale)
    ]
    return rule(plan, scale, chosen.kind, trials, len(chosen.seeds), void=void, edges=edges)


class Ruled(Protocol):
    """What the rule reads of a plan, of whatever kind."""

    @property
    def name(self) -> str: ...
    @property
    def alpha(self) -> float: ...
    @property
    def multiplicity(self) -> str: ...

    def hash(self) -> str: ...


@dataclass(frozen=True)
class Trial:
    """A hypothesis with what the records say of it.

    seen: column of the contrast -> unit -> observation, None where there is no record. sample: what a unit is, of whose contrasts the
    interval is. of: what is missing where nothing was observed. refused: why the hypothesis can be read from no record.
    """

    h: Hypothesis
    seen: Mapping[str, Mapping[int, Observation | None]]
    sample: str = "seed"
    of: str = "runs"
    refused: str = field(default="", kw_only=True)

    def complete(self) -> bool:
        """Whether every unit has a finite value in every column."""
        return all(
            o is not None and o.value is not None and math.isfinite(o.value)
            for by_unit in self.seen.values()
            for o in by_unit.values()
        )

    def values(self) -> dict[int, float]:
        """The contrast of each unit; of complete trials."""
        units = next(iter(self.seen.values())).keys()
        return {u: sum(w * self.seen[arm][u].value for arm, w in self.h.contrast.items()) for u in units}  # type: ignore[union-attr, operator]  # complete

    def test(self, level: float) -> Paired:
        """The interval, signed so that positive favours the statement. Raises: InputError for fewer than two units."""
        signed = [self.h.sign() * v for v in self.values().values()]
        return paired(signed, margin=self.h.sign() * self.h.margin, level=level)

    @property
    def units(self) -> int:
        return len(next(iter(self.seen.values())))


def trial_of(h: Hypothesis, units: Sequence[int], column: Callable[[str], Mapping[int, Observation | None]]) -> Trial:
    """The trial of a hypothesis from its columns; one that cannot be read is refused alone, so that the others are judged.

    column: a name of the contrast -> unit -> observation, which may raise InputError.
    """
    try:
        return Trial(h, {name: column(name) for name in h.contrast})
    except InputError as error:
        return Trial(h, {name: dict.fromkeys(units) for name in h.contrast}, refused=str(error))


def few(names: Sequence[str]) -> str:
    """The first three, and whether there are more."""
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def rule(
    plan: Ruled,
    scale: str,
    kind: str,
    trials: Sequence[Trial],
    units: int,
    *,
    sample: str = "seed",
    void: Sequence[str] = (),
    edges: Sequence[str] = (),
) -> StudyVerdict:
    """The rule of :func:`judge` for trials of any sample; units: how many of ``sample`` the plan names."""
    first = {t.h.id: _blocked(t, kind, void, edges) for t in trials}
    tested = {t.h.id: t.test(0.95) for t in trials if first[t.h.id] is None and t.units > 1}
    # The family is what the plan locked: a hypothesis that could not be tested still counts, with p = 1.
    family = [t.h.id for t in trials if t.h.primary]
    decisive = [tested[i].decisive_p if i in tested else 1.0 for i in family]
    rates = (
        dict(zip(family, levels(decisive, alpha=plan.alpha, method=plan.multiplicity), strict=True)) if family else {}
    )
    verdicts = []
    for t in trials:
        status, reason = first[t.h.id] or ("inconclusive", f"one {t.sample} decides nothing")
        statistics = None
        if t.h.id in tested:
            rate, is_open = rates.get(t.h.id, (plan.alpha, True))
            statistics = t.test(1 - rate)
            status, reason = _decide(t, statistics, is_open, kind)
        elif (first[t.h.id] or ("", ""))[0] == "inconclusive" and t.complete():
            statistics = t.test(1 - plan.alpha) if t.units > 1 else None
        verdicts.append(_verdict(t, status, reason, statistics))
    notes = [f"{units} {sample}s: smallest two-sided sign-flip p is {2.0 ** (1 - units):g}"]
    if kind == "demo":
        notes.append("demo: too small to judge")
    return StudyVerdict(plan.name, scale, kind, plan.hash(), tuple(verdicts), tuple(notes), sample)


def _observations(
    h: Hypothesis, arm: str, seeds: Sequence[int], runs: Mapping[str, Mapping[int, RunRecord]]
) -> dict[int, Observation | None]:
    return {seed: observe(runs[arm][seed], h) if seed in runs.get(arm, {}) else None for seed in seeds}


def _blocked(t: Trial, kind: str, void: Sequence[str], edges: Sequence[str]) -> tuple[Status, str] | None:
    """Why a hypothesis cannot be tested, or None."""
    h, seen = t.h, t.seen
    if void:
        return "void", "; ".join(void)
    if t.refused:
        return "void", t.refused
    missing = [
        f"{arm} {t.sample} {unit}" for arm, by_unit in seen.items() for unit, value in by_unit.items() if value is None
    ]
    if missing:
        return "void", f"{len(missing)} of {sum(map(len, seen.values()))} {t.of} are missing ({few(missing)})"
    every = [(arm, unit, o) for arm, by_unit in seen.items() for unit, o in by_unit.items() if o is not None]
    unlearned = [f"{arm} {t.sample} {unit} ({o.unlearned})" for arm, unit, o in every if o.unlearned and not o.diverged]
    has_not = f"has not learned: {few(unlearned)}" if unlearned else ""
    if kind == "demo":
        return "inconclusive", "demo: too small to judge" + (f"; {has_not}" if has_not else "")
    absent = [f"{arm} {t.sample} {unit}: {o.reason}" for arm, unit, o in every if o.value is None and not o.diverged]
    if absent:
        return "void", f"the measure is not in the records ({absent[0]})"
    lost = [f"{arm} {t.sample} {unit} ({o.reason})" for arm, unit, o in every if o.value is None]
    if lost:
        return "inconclusive", f"diverged: {', '.join(lost[:3])}"
    if h.must_learn and has_not:
        return "inconclusive", has_not
    at_edge = sorted(set(edges) & set(h.contrast))
    if at_edge:
        return "inconclusive", f"best learning rate at the edge of the grid: {', '.join(at_edge)}"
    return None


def _decide(t: Trial, statistics: Paired, is_open: bool, kind: str) -> tuple[Status, str]:
    pairs = "pairs" if t.sample == "seed" else f"{t.sample}s"
    where = f"{statistics.level:.1%} interval against the margin, {statistics.n} {pairs}"
    if is_open and statistics.low > statistics.margin:
        if kind == "exploratory":
            return (
                "inconclusive",
                f"the interval lies beyond the margin, but an exploratory plan supports nothing ({where})",
            )
        return "supported", f"the interval lies beyond the margin ({where})"
    if is_open and statistics.high < statistics.margin:
        return "refuted", f"the interval excludes the minimum effect ({where})"
    return (
        "inconclusive",
        f"the interval holds the margin ({where})" if is_open else f"closed by the step-down correction ({where})",
    )


def _verdict(t: Trial, status: Status, reason: str, statistics: Paired | None) -> Verdict:
    h = t.h
    return Verdict(
        hypothesis=h.id,
        statement=h.statement,
        status=status,
        reason=reason,
        primary=h.primary,
        measure=f"{h.measure} ({h.at})",
        unit=h.unit,
        direction=h.direction,
        margin=h.margin,
        values=t.values() if t.complete() else {},
        statistics=statistics,
        substituted=tuple(
            f"{arm} {t.sample} {unit}: {o.reason}"
            for arm, by_unit in t.seen.items()
            for unit, o in by_unit.items()
            if o is not None and o.substituted
        ),
        arms={
            arm: {u: o.value for u, o in by_unit.items() if o is not None and o.value is not None}
            for arm, by_unit in t.seen.items()
        },
        sample=t.sample,
    )
