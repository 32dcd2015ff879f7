"""Torsion: does the order swap of attention and feed-forward follow their bracket, more than the bracket of another token?"""

import math
import statistics
from dataclasses import dataclass

from thalweg.records import Measurements
from thalweg.studies.experiments.base import Progress, register
from thalweg.studies.experiments.subjects import SubjectOptions, note_learning, probed

NULLS = {"bracket": "", "other_tokens": ".other_tokens", "other_layer": ".other_layer"}


@dataclass(frozen=True)
class TorsionOptions(SubjectOptions):
    """As of every experiment on a model."""


@register(
    "torsion",
    options=TorsionOptions,
    columns={"torsion.cosine": tuple(NULLS), "torsion.excess": ("bracket",), "torsion.positive": ("bracket",)},
    summary="cosine of the order-swap residual with the commutator, beside that of other tokens and of the layer before (probe splitting)",
    source="Liang 2026, arXiv 2607.17146 (cosines .717 and .623 in words); sign and nulls derived by us",
)
def torsion(options: TorsionOptions, seed: int, progress: Progress) -> Measurements:
    """torsion.cosine: mean over layers (of ``other_layer``, those but the first). torsion.positive: share of layers above zero.

    torsion.excess: the least, over layers, of the cosine less that of the tokens shuffled.
    """
    found, subject = probed(options, seed, "splitting", {"refine_tokens": 0, "seed": seed})
    cosines = {arm: [row.value for row in found.where(measure=f"splitting.cosine{end}")] for arm, end in NULLS.items()}
    rows, model = Measurements(), {"model": subject.name}
    random = next(row.null for row in found.where(measure="splitting.cosine.other_tokens"))
    for arm, values in cosines.items():
        null = {"null": random, "null_kind": "1/sqrt(width): a random direction"}
        mean = statistics.fmean(values) if values else math.nan  # one layer has none before it
        rows.add("torsion.cosine", mean, arm=arm, n=len(values), **null, **model)
    pairs = list(zip(cosines["bracket"], cosines["other_tokens"], strict=True))
    rows.add(
        "torsion.excess",
        min(a - b for a, b in pairs),
        arm="bracket",
        n=len(pairs),
        null=0.0,
        null_kind="tokens shuffled",
        **model,
    )
    rows.add(
        "torsion.positive",
        sum(a > 0 for a, _ in pairs) / len(pairs),
        arm="bracket",
        n=len(pairs),
        null=0.5,
        null_kind="chance",
        **model,
    )
    note_learning(rows, subject, tuple(NULLS))
    progress(
        f"{subject.name}: cosine {statistics.fmean(cosines['bracket']):.3f}, shuffled {statistics.fmean(cosines['other_tokens']):.3f}"
    )
    return rows
