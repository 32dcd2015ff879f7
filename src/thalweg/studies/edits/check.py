"""Whether a plan of edits can decide anything: documents, margins, simulated power."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from thalweg.studies.check import Check, powers_of, undecided, underpowered
from thalweg.studies.edits.plan import EditHypothesis, EditPlan
from thalweg.studies.plan import Hypothesis

if TYPE_CHECKING:
    from thalweg.studies.compressed.plan import CompressionPlan

LEAST_DOCUMENTS = 20


def check(plan: EditPlan, scale: str, simulations: int = 20_000) -> Check:
    """Examine ``plan`` at ``scale``.

    A confirmatory plan needs at least 20 documents, a correction when it has several primary hypotheses, and simulated power of 0.8 for
    every primary hypothesis at its expected effect. Hypotheses over layers are secondary and have no power: layers of one model are no sample.
    """
    chosen, hypotheses = plan.at(scale), plan.hypotheses_at(scale)
    problems = []
    if any(h.against for h in hypotheses) and not chosen.audit:
        problems.append("hypotheses over layers need audited documents; set audit")
    problems += [line for h in hypotheses for line in _unmeasured(plan, chosen.documents, h)]
    if plan.text.evaluation == "likelihood" and any(t % plan.text.buckets for t in _lengths(plan, scale)):
        problems.append(f"tokens must be a multiple of buckets ({plan.text.buckets})")
    identities = {(plan.subject_of(plan.edits[a].family), plan.edits[a].identity) for a in plan.arms_at(scale)}
    powered = [h for h in hypotheses if not h.against]
    return over_documents(plan, scale, powered, len(identities), problems, simulations)


def _unmeasured(plan: EditPlan, documents: int, h: EditHypothesis) -> list[str]:
    """What the records will not hold although a hypothesis rests on it."""
    if h.against:
        (family,) = h.contrast
        if h.against == "applied" and plan.arms[family].edit.get("site") == "block":
            return [
                f"{h.id} is against applied, which has no value at site block; say against = drift, or edit another site"
            ]
        return []
    families = dict.fromkeys(plan.edits[arm].family for arm in h.contrast)
    return [
        f"{h.id} is judged on {documents} documents, arms.{name} reads {plan.arms[name].documents}; leave documents out of arms.{name}"
        for name in families
        if 0 < plan.arms[name].documents < documents
    ]


def over_documents(
    plan: "EditPlan | CompressionPlan",
    scale: str,
    powered: Sequence[Hypothesis],
    runs: int,
    problems: Sequence[str],
    simulations: int,
) -> Check:
    """What plans over documents share. powered: the hypotheses whose power is simulated; problems: those found already."""
    chosen = plan.at(scale)
    powers = powers_of(plan, powered, chosen.documents, simulations) if chosen.documents > 1 else ()
    found, remarks = underpowered(powers, chosen.kind)
    found += problems
    hypotheses = plan.hypotheses_at(scale)
    if not hypotheses:
        found.append("no hypothesis has all its arms at this scale")
    if chosen.kind == "confirmatory":
        if chosen.documents < LEAST_DOCUMENTS:
            found.append(
                f"a confirmatory plan over documents needs at least {LEAST_DOCUMENTS} documents, got {chosen.documents}"
            )
        found += undecided(plan, hypotheses)
    remarks.append(
        {
            "confirmatory": "documents of one text resemble each other: an interval over them says nothing about other texts",
            "exploratory": "exploratory: nothing can be supported",
            "demo": "demo: too small to judge",
        }[chosen.kind]
    )
    return Check(scale, chosen.kind, runs, 0, powers, tuple(found), tuple(remarks))


def _lengths(plan: EditPlan, scale: str) -> list[int]:
    chosen = plan.at(scale)
    return [plan.arms[name].tokens or chosen.tokens for name in plan.arms if not chosen.arms or name in chosen.arms]
