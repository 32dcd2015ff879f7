"""Does one more direction raise the separation of prototypes? At a fixed assignment by algebra; with a free one it is a question."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thalweg.ops.prototypes import assignment, squared_distances_of
from thalweg.records import Measurements
from thalweg.studies.experiments.base import Progress, register
from thalweg.studies.experiments.growing import seeded

ARMS = ("fixed", "free")
ROUNDING = 1e-12


@dataclass(frozen=True)
class SeparationOptions:
    """trials: random dictionaries; tokens, prototypes, width: of each; temperature: over the critical one of the narrower space."""

    trials: int = 500
    tokens: int = 64
    prototypes: int = 5
    width: int = 3
    temperature: float = 0.25


@register(
    "separation",
    options=SeparationOptions,
    columns={"separation.variance_fell": ARMS, "separation.force_fell": ARMS, "separation.force_change": ARMS},
    summary="share of random dictionaries whose variance and separation force fall when an orthogonal direction is added",
    source="claim reconstructed from the reviews of Cirrincione 2026, arXiv 2604.01880 (growth amplifies separation); fixed form derived",
)
def separation(options: SeparationOptions, seed: int, progress: Progress) -> Measurements:
    """Shares over trials, and the mean change of the log force; tokens and prototypes get one more independent coordinate."""
    o, g = options, seeded(seed, 0)
    x = torch.randn(o.trials, o.tokens, o.width + 1, generator=g, dtype=torch.float64)
    p = torch.randn(o.trials, o.prototypes, o.width + 1, generator=g, dtype=torch.float64)
    tau = torch.full(
        (o.trials,), 4 * o.temperature, dtype=torch.float64
    )  # the tokens have a variance of 1 along every direction
    narrow, wide = (x[..., :-1], p[..., :-1]), (x, p)
    q = assignment(*narrow, tau)
    before = separated(q, narrow[1])
    after = {"fixed": separated(q, wide[1]), "free": separated(assignment(*wide, tau), wide[1])}
    rows = Measurements()
    for arm, (variance, force) in after.items():
        fell = variance < before[0] * (1 - ROUNDING), force < before[1] * (1 - ROUNDING)
        for name, found in zip(("variance", "force"), fell, strict=True):
            rows.add(
                f"separation.{name}_fell",
                found.double().mean().item(),
                arm=arm,
                n=o.trials,
                null=0.0,
                null_kind="monotone",
            )
        change = (force / before[1]).log().mean().item()
        rows.add("separation.force_change", change, arm=arm, n=o.trials, unit="nats", null=0.0, null_kind="no change")
    return rows


def separated(q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Variance term and |2 P Sigma_q|_F, means over tokens, of every trial. Shapes: [b n k], [b k d] -> [b], [b]."""
    about = q @ p
    variance = (q * squared_distances_of(p, about)).sum(-1).mean(-1)
    gradient = 2 * (q.mean(-2)[..., None] * p - q.mT @ about / q.shape[-2])
    return variance, torch.linalg.matrix_norm(gradient)
