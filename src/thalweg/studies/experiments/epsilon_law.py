"""The law of epsilon: RMSNorm's steepness goes as epsilon^(-1/2) at the origin, by algebra; is it seen where the activations are?"""

import statistics
from dataclasses import dataclass

from thalweg.records import Measurements
from thalweg.studies.experiments.base import Progress, register
from thalweg.studies.experiments.subjects import SubjectOptions, note_learning, probed

ARMS = ("origin", "activations")


@dataclass(frozen=True)
class EpsilonOptions(SubjectOptions):
    """As of every experiment on a model."""


@register(
    "epsilon_law",
    options=EpsilonOptions,
    columns={"epsilon.slope": ARMS, "epsilon.steepest": ("activations",), "epsilon.felt": ("activations",)},
    summary="slope of log stretch on log epsilon, at the origin and at the mean squares of a model's activations (probe rmsnorm)",
    source="Liang 2026, arXiv 2607.17146 (slope -1/2, R^2 = 1); values at activations derived by us",
)
def epsilon_law(options: EpsilonOptions, seed: int, progress: Progress) -> Measurements:
    """epsilon.slope: at activations the median over norms. epsilon.steepest: the least over norms. epsilon.felt: largest share, over norms, of
    tokens whose output epsilon shortens by more than half a percent.
    """
    found, subject = probed(options, seed, "rmsnorm", {})
    (origin,) = found.where(measure="rmsnorm.slope.origin")
    slopes = [row.value for row in found.where(measure="rmsnorm.slope.activations")]
    felt = [row.value for row in found.where(measure="rmsnorm.felt")]
    rows, law = Measurements(), {"null": -0.5, "null_kind": "the law", "model": subject.name}
    rows.add("epsilon.slope", origin.value, arm="origin", n=origin.n, **law)
    rows.add("epsilon.slope", statistics.median(slopes), arm="activations", n=len(slopes), **law)
    rows.add("epsilon.steepest", min(slopes), arm="activations", n=len(slopes), **law)
    rows.add(
        "epsilon.felt",
        max(felt),
        arm="activations",
        n=len(felt),
        null=1.0,
        null_kind="at the origin",
        model=subject.name,
    )
    note_learning(rows, subject, ARMS)
    progress(f"{subject.name}: slope {origin.value:.4f} at the origin, {statistics.median(slopes):.2g} at activations")
    return rows
