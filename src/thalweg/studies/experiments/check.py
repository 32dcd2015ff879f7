"""Whether a plan of experiments can decide anything: seeds, margins, simulated power."""

from thalweg.studies.check import LEAST_SEEDS, Check, powers_of, undecided, underpowered
from thalweg.studies.experiments.plan import ExperimentPlan


def check(plan: ExperimentPlan, scale: str, simulations: int = 20_000) -> Check:
    """Examine ``plan`` at ``scale``.

    A confirmatory plan needs at least five seeds, a correction when it has several primary hypotheses, and for every primary one a stated
    spread with simulated power of 0.8 at its expected effect. Identities are no findings: they are secondary and have no power.
    """
    chosen, hypotheses = plan.at(scale), plan.hypotheses_at(scale)
    powered = [h for h in hypotheses if h.sd > 0 and not h.identity]
    powers = powers_of(plan, powered, len(chosen.seeds), simulations) if len(chosen.seeds) > 1 else ()
    problems, remarks = underpowered(powers, chosen.kind)
    if not hypotheses:
        problems.append("no hypothesis has all its experiments at this scale")
    if chosen.kind == "confirmatory":
        if len(chosen.seeds) < LEAST_SEEDS:
            problems.append(f"a confirmatory plan needs at least {LEAST_SEEDS} seeds, got {len(chosen.seeds)}")
        problems += undecided(plan, hypotheses)
        problems += [
            f"{h.id} is primary and states no spread; set sd and sd_source, or make it secondary"
            for h in hypotheses
            if h.primary and not (h.sd > 0 and h.sd_source)
        ]
    remarks += [f"{h.id} is an identity: it checks the code and is no finding" for h in hypotheses if h.identity]
    remarks += [
        f"{h.id} states no spread, so no power" for h in hypotheses if not h.sd and not h.identity and not h.primary
    ]
    said = {"exploratory": "exploratory: nothing can be supported", "demo": "demo: too small to judge"}
    remarks += [said[chosen.kind]] if chosen.kind in said else []
    runs = len(plan.experiments_at(scale)) * len(chosen.seeds)
    return Check(scale, chosen.kind, runs, 0, powers, tuple(problems), tuple(remarks))
