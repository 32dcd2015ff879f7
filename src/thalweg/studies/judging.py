"""Verdicts by rule: they read the locked plan and the records, nothing else."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from thalweg.errors import ExitCode
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

    statistics is in the direction of the statement: positive favours it. values: the contrast of each seed, as measured.
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
    chosen, kind = plan.at(scale), plan.at(scale).kind
    found = [(h, _observations(h, chosen.seeds, runs)) for h in plan.hypotheses_at(scale)]
    first = {h.id: _blocked(h, seen, kind, void, edges) for h, seen in found}
    tested = {
        h.id: paired(_signed(h, seen), margin=h.sign() * h.margin)
        for h, seen in found
        if first[h.id] is None and len(chosen.seeds) > 1
    }
    # The family is what the plan locked: a hypothesis that could not be tested still counts, with p = 1.
    family = [h.id for h, _ in found if h.primary]
    decisive = [tested[i].decisive_p if i in tested else 1.0 for i in family]
    rates = (
        dict(zip(family, levels(decisive, alpha=plan.alpha, method=plan.multiplicity), strict=True)) if family else {}
    )
    verdicts = []
    for h, seen in found:
        status, reason = first[h.id] or ("inconclusive", "one seed decides nothing")
        statistics = None
        if h.id in tested:
            rate, is_open = rates.get(h.id, (plan.alpha, True))
            statistics = paired(_signed(h, seen), margin=h.sign() * h.margin, level=1 - rate)
            status, reason = _decide(statistics, is_open, kind)
        elif (first[h.id] or ("", ""))[0] == "inconclusive" and _complete(h, seen):
            statistics = (
                paired(_signed(h, seen), margin=h.sign() * h.margin, level=1 - plan.alpha)
                if len(chosen.seeds) > 1
                else None
            )
        verdicts.append(_verdict(h, seen, status, reason, statistics))
    notes = [f"{len(chosen.seeds)} seeds: smallest two-sided sign-flip p is {2.0 ** (1 - len(chosen.seeds)):g}"]
    if kind == "demo":
        notes.append("demo: too small to judge")
    return StudyVerdict(plan.name, scale, kind, plan.hash(), tuple(verdicts), tuple(notes))


def _observations(
    h: Hypothesis, seeds: Sequence[int], runs: Mapping[str, Mapping[int, RunRecord]]
) -> dict[str, dict[int, Observation | None]]:
    return {
        arm: {seed: observe(runs[arm][seed], h) if seed in runs.get(arm, {}) else None for seed in seeds}
        for arm in h.contrast
    }


def _blocked(
    h: Hypothesis,
    seen: Mapping[str, Mapping[int, Observation | None]],
    kind: str,
    void: Sequence[str],
    edges: Sequence[str],
) -> tuple[Status, str] | None:
    """Why a hypothesis cannot be tested, or None."""
    if void:
        return "void", "; ".join(void)
    missing = [
        f"{arm} seed {seed}" for arm, by_seed in seen.items() for seed, value in by_seed.items() if value is None
    ]
    if missing:
        named = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        return "void", f"{len(missing)} of {sum(map(len, seen.values()))} runs are missing ({named})"
    every = [(arm, seed, o) for arm, by_seed in seen.items() for seed, o in by_seed.items() if o is not None]
    unlearned = [f"{arm} seed {seed} ({o.unlearned})" for arm, seed, o in every if o.unlearned and not o.diverged]
    has_not = f"has not learned: {', '.join(unlearned[:3])}{' ...' if len(unlearned) > 3 else ''}" if unlearned else ""
    if kind == "demo":
        return "inconclusive", "demo: too small to judge" + (f"; {has_not}" if has_not else "")
    absent = [f"{arm} seed {seed}: {o.reason}" for arm, seed, o in every if o.value is None and not o.diverged]
    if absent:
        return "void", f"the measure is not in the records ({absent[0]})"
    lost = [f"{arm} seed {seed} ({o.reason})" for arm, seed, o in every if o.value is None]
    if lost:
        return "inconclusive", f"diverged: {', '.join(lost[:3])}"
    if h.must_learn and has_not:
        return "inconclusive", has_not
    at_edge = sorted(set(edges) & set(h.contrast))
    if at_edge:
        return "inconclusive", f"best learning rate at the edge of the grid: {', '.join(at_edge)}"
    return None


def _complete(h: Hypothesis, seen: Mapping[str, Mapping[int, Observation | None]]) -> bool:
    return all(
        o is not None and o.value is not None and math.isfinite(o.value)
        for by_seed in seen.values()
        for o in by_seed.values()
    )


def _contrast(h: Hypothesis, seen: Mapping[str, Mapping[int, Observation | None]]) -> dict[int, float]:
    seeds = next(iter(seen.values())).keys()
    return {s: sum(w * seen[arm][s].value for arm, w in h.contrast.items()) for s in seeds}  # type: ignore[union-attr, operator]  # complete


def _signed(h: Hypothesis, seen) -> list[float]:
    return [h.sign() * v for v in _contrast(h, seen).values()]


def _decide(statistics: Paired, is_open: bool, kind: str) -> tuple[Status, str]:
    where = f"{statistics.level:.1%} interval against the margin, {statistics.n} pairs"
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


def _verdict(h: Hypothesis, seen, status: Status, reason: str, statistics: Paired | None) -> Verdict:
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
        values=_contrast(h, seen) if _complete(h, seen) else {},
        statistics=statistics,
        substituted=tuple(
            f"{arm} seed {seed}: {o.reason}"
            for arm, by_seed in seen.items()
            for seed, o in by_seed.items()
            if o is not None and o.substituted
        ),
        arms={
            arm: {s: o.value for s, o in by_seed.items() if o is not None and o.value is not None}
            for arm, by_seed in seen.items()
        },
    )
