"""Whether a plan can decide anything: seeds, grids, margins, simulated power."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thalweg.errors import InputError
from thalweg.studies import power
from thalweg.studies.observe import check_rules
from thalweg.studies.plan import Hypothesis, Plan

if TYPE_CHECKING:
    from thalweg.studies.plan import AnyPlan

LEAST_SEEDS = 5
LEAST_POWER = 0.8


@dataclass(frozen=True)
class HypothesisPower:
    """Power of one hypothesis, with what it was simulated from; effect, margin and detectable in the sign of the contrast."""

    hypothesis: str
    result: power.Power
    sd_source: str
    primary: bool
    direction: str


@dataclass(frozen=True)
class Check:
    """The outcome: ``problems`` stop a confirmatory plan from being locked, ``remarks`` do not."""

    scale: str
    kind: str
    runs: int
    tuning_runs: int
    powers: tuple[HypothesisPower, ...]
    problems: tuple[str, ...]
    remarks: tuple[str, ...]

    def require(self) -> "Check":
        """Raises: InputError listing the problems."""
        if self.problems:
            raise InputError(f"the plan cannot be locked at scale {self.scale}: {'; '.join(self.problems)}")
        return self


def check(plan: "AnyPlan", scale: str, simulations: int = 20_000) -> Check:
    """Examine ``plan`` at ``scale``; the other kinds by the ``check`` of their own folder.

    A confirmatory plan needs at least five seeds (three pairs cannot decide: the smallest two-sided sign-flip p is 0.25; five reach
    0.0625), a correction when it has several primary hypotheses, a grid of learning rates whose middle can win, and simulated power of
    0.8 for every primary hypothesis at its expected effect. The power is simulated at the strictest rate that the correction can ask for.
    """
    if not isinstance(plan, Plan):
        from thalweg.studies.compressed.check import check as check_compressions
        from thalweg.studies.edits.check import check as check_edits
        from thalweg.studies.edits.plan import EditPlan
        from thalweg.studies.experiments.check import check as check_experiments
        from thalweg.studies.experiments.plan import ExperimentPlan

        if isinstance(plan, ExperimentPlan):
            return check_experiments(plan, scale, simulations)
        return (
            check_edits(plan, scale, simulations)
            if isinstance(plan, EditPlan)
            else check_compressions(plan, scale, simulations)
        )
    chosen = plan.at(scale)
    hypotheses, arms = plan.hypotheses_at(scale), plan.arms_at(scale)
    problems, remarks = [], []
    if not hypotheses:
        problems.append("no hypothesis has all its arms at this scale")
    for h in hypotheses:
        try:
            check_rules(h)
        except InputError as error:
            problems.append(str(error))
    powers = powers_of(plan, hypotheses, len(chosen.seeds), simulations) if len(chosen.seeds) > 1 else ()
    weak = underpowered(powers, chosen.kind)
    problems, remarks = problems + weak[0], remarks + weak[1]
    if chosen.kind == "confirmatory":
        if len(chosen.seeds) < LEAST_SEEDS:
            problems.append(f"a confirmatory plan needs at least {LEAST_SEEDS} seeds, got {len(chosen.seeds)}")
        problems += undecided(plan, hypotheses)
    elif chosen.kind == "exploratory":
        remarks.append("exploratory: nothing can be supported")
    else:
        remarks.append("demo: too small to judge")
    rates = chosen.learning_rates
    if rates and (len(rates) < 3 or list(rates) != sorted(set(rates)) or rates[0] <= 0):
        problems.append(
            f"learning_rates needs at least 3 different positive values in ascending order, got {list(rates)}"
        )
    if not rates and chosen.kind == "confirmatory":
        problems.append("a confirmatory plan chooses the learning rate of each arm from one grid; set learning_rates")
    return Check(
        scale,
        chosen.kind,
        runs=len(arms) * len(chosen.seeds),
        tuning_runs=len(arms) * len(rates) * len(chosen.tuning_seeds),
        powers=powers,
        problems=tuple(problems),
        remarks=tuple(remarks),
    )


def powers_of(
    plan: "AnyPlan", hypotheses: Sequence[Hypothesis], pairs: int, simulations: int
) -> tuple[HypothesisPower, ...]:
    """The simulated power of every hypothesis, the primary ones at the strictest rate that the correction can ask for."""
    primary = sum(h.primary for h in hypotheses)
    rate = plan.alpha / max(primary, 1) if plan.multiplicity != "none" else plan.alpha
    found = []
    for h in hypotheses:
        result = power.simulate(
            effect=h.sign() * h.expected,
            sd=h.sd,
            margin=h.sign() * h.margin,
            pairs=pairs,
            alpha=rate if h.primary else plan.alpha,
            simulations=simulations,
        )
        shown = dataclasses.replace(result, effect=h.expected, margin=h.margin, detectable=h.sign() * result.detectable)
        found.append(HypothesisPower(h.id, shown, h.sd_source, h.primary, h.direction))
    return tuple(found)


def undecided(plan: "AnyPlan", hypotheses: Sequence[Hypothesis]) -> list[str]:
    """What a confirmatory plan of any kind lacks to decide its primary hypotheses."""
    primary = sum(h.primary for h in hypotheses)
    if not primary:
        return ["a confirmatory plan needs a primary hypothesis"]
    if plan.multiplicity == "none" and primary > 1:
        return [f"{primary} primary hypotheses need a correction; set multiplicity to holm or bonferroni"]
    return []


def underpowered(powers: Sequence[HypothesisPower], kind: str) -> tuple[list[str], list[str]]:
    """Problems and remarks on primary hypotheses of too little power, and of a power that rests on a guess."""
    guessed = [p.hypothesis for p in powers if p.primary and p.sd_source.strip().lower().startswith("guess")]
    remarks = []
    if guessed and kind != "demo":
        remarks.append(
            f"the spread of {', '.join(guessed)} is a guess, so its power is one too; a pilot on other units tells"
        )
    weak = [
        f"{p.hypothesis} has simulated power {p.result.power:.2f} at its expected effect {p.result.effect:g}"
        for p in powers
        if p.result.power < LEAST_POWER and p.primary and kind != "demo"
    ]
    if kind == "confirmatory":
        return [f"{text} (needs {LEAST_POWER})" for text in weak], remarks
    return [], [f"{text} (a confirmatory plan needs {LEAST_POWER})" for text in weak] + remarks
