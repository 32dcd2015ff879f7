"""Whether a plan of compressions can decide anything: documents, margins, arms behind a rank, simulated power."""

from thalweg.studies.check import Check
from thalweg.studies.compressed.observe import LEAST
from thalweg.studies.compressed.plan import CompressionPlan
from thalweg.studies.edits.check import over_documents


def check(plan: CompressionPlan, scale: str, simulations: int = 20_000) -> Check:
    """Examine ``plan`` at ``scale``; what plans of edits need, and enough arms or layers behind every rank correlation."""
    chosen, hypotheses = plan.at(scale), plan.hypotheses_at(scale)
    problems = []
    for h in hypotheses:
        behind = len(plan.named_by(h, scale)) - 1 if h.measure == "rank" else LEAST
        if h.measure == "layer_rank":
            behind = len(plan.named_by(h, scale)) - 3  # no-op, first and last layer
        if behind < LEAST:
            problems.append(f"{h.id} ranks {behind} arms, at least {LEAST} are needed")
        if not chosen.kl_documents and "kl" in h.contrast and h.measure in ("rank", "layer_rank"):
            problems.append(f"{h.id} ranks by the layer-wise KL; set kl_documents")
        if not chosen.choices and "accuracy_drop" in (h.measure, h.fidelity):
            problems.append(f"{h.id} reads the cloze accuracy; set choices")
    edits = [plan.edits[name] for name in plan.arms_at(scale)]
    by_kl = dict.fromkeys(arm.family for arm in edits if arm.protect and arm.protect.by == "kl")
    if not chosen.kl_documents:
        problems += [f"{family} protects layers by the layer-wise KL; set kl_documents" for family in by_kl]
    identities = {(plan.subject_of(plan.edits[a].family), plan.edits[a].identity) for a in plan.arms_at(scale)}
    return over_documents(plan, scale, hypotheses, len(identities), problems, simulations)
