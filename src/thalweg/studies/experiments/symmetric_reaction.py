"""Symmetric feed-forward weights: no rotation by algebra; is the amplification over depth theirs, or that of the norms that tying changes?"""

from dataclasses import dataclass

from thalweg.errors import InputError
from thalweg.records import Measurements
from thalweg.studies.experiments.base import Progress, register
from thalweg.studies.experiments.subjects import SubjectOptions, note_learning, probed

SPECTRA = ("model", "symmetric")
CONTROLS = ("model", "norm_matched", "rotated", "random_symmetric")


@dataclass(frozen=True)
class ReactionClaimOptions(SubjectOptions):
    """points, layers: tokens whose Jacobian is looked at, and layers in which it is with other weights. gated: whether the model must be."""

    points: int = 1
    layers: int = 2
    gated: bool = False


@register(
    "symmetric_reaction",
    options=ReactionClaimOptions,
    columns={"symmetric.imaginary": SPECTRA, "symmetric.untied_gate": SPECTRA[1:], "symmetric.excess": CONTROLS},
    summary="imaginary share of feed-forward Jacobians, and amplification with W = U^T over that of each control (probe reaction)",
    source="Liang 2026, arXiv 2607.17146 (imaginary spectrum 0; 93x to 142,955x in words); gated case and controls by us",
)
def symmetric_reaction(options: ReactionClaimOptions, seed: int, progress: Progress) -> Measurements:
    """symmetric.imaginary: mean over layers. symmetric.untied_gate: of W = U^T alone, the gate of a gated sublayer left free; 0 without a gate.

    symmetric.excess: log amplification over depth of symmetric weights less that of the model or a control.
    """
    probe = {"points": options.points, "layers": options.layers, "ablate_tokens": options.tokens, "seed": seed}
    found, subject = probed(options, seed, "reaction", probe)
    shares = {
        name: [r.value for r in found.where(measure="reaction.imaginary_share", branch=name)]
        for name in (*SPECTRA, "tied_down")
    }
    if bool(shares["tied_down"]) != options.gated:
        raise InputError(
            f"{subject.name} is {'gated' if shares['tied_down'] else 'not gated'}, the plan says gated = {str(options.gated).lower()}"
        )
    rows, model = Measurements(), {"model": subject.name}
    null = found.where(measure="reaction.imaginary_share", branch="model").to_rows()[0]
    random = {"null": null["null"], "null_kind": null["null_kind"]}
    for name in SPECTRA:
        rows.add(
            "symmetric.imaginary",
            sum(shares[name]) / len(shares[name]),
            arm=name,
            n=len(shares[name]),
            **random,
            **model,
        )
    tied = shares["tied_down"] or [0.0]
    rows.add(
        "symmetric.untied_gate", sum(tied) / len(tied), arm="symmetric", n=len(shares["tied_down"]), **random, **model
    )
    for name in CONTROLS:
        (row,) = found.where(measure="reaction.excess", branch=f"symmetric - {name}")
        rows.add(
            "symmetric.excess", row.value, arm=name, n=row.n, unit="nats", null=0.0, null_kind="no difference", **model
        )
    note_learning(rows, subject, (*SPECTRA, *CONTROLS[1:]))
    progress(f"{subject.name}: imaginary {sum(shares['model']) / len(shares['model']):.3f}, {found_words(rows)}")
    return rows


def found_words(rows: Measurements) -> str:
    """The excesses in one line."""
    return ", ".join(f"over {row.arm} {row.value:+.2f} nats" for row in rows.where(measure="symmetric.excess"))
