"""Do different starts end with the same heads, and is none of them too many? With distinct and with degenerate eigenvalues."""

import itertools
import math
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from thalweg.errors import InputError
from thalweg.geometry.directional import DirectionalOperator
from thalweg.geometry.eigenpairs import top_eigenpairs
from thalweg.geometry.prototypes import spread
from thalweg.growth import OjaTracker
from thalweg.ops.prototypes import assign, critical_temperature, kmeans_plus_plus
from thalweg.records import Measurements
from thalweg.studies.experiments.base import Progress, register
from thalweg.studies.experiments.growing import planes, rotation, seeded

SPECTRA = ("distinct", "degenerate")
VALUES = {"distinct": (1.0, 0.7, 0.5, 0.35), "degenerate": (1.0, 1.0, 0.5, 0.5)}
BELOW = 0.05  # strength of the planes that no head is due to, over the first


@dataclass(frozen=True)
class UniquenessOptions:
    """starts: of trackers and dictionaries. width: of the stream; tokens: of the input. steps: of Oja's rule for each head.

    prototypes, fit_steps, lr: of dictionaries on what the heads captured. threshold: between heads that are due and the rest, over the first
    eigenvalue.
    """

    starts: int = 8
    width: int = 16
    steps: int = 200
    prototypes: int = 5
    fit_steps: int = 150
    lr: float = 0.2
    tokens: int = 192
    threshold: float = 0.1

    def __post_init__(self) -> None:
        if self.starts < 2 or self.width < 12:
            raise InputError(f"starts must be at least 2 and width at least 12, got {self.starts} and {self.width}")


@register(
    "uniqueness",
    options=UniquenessOptions,
    columns={
        "unique.angle": SPECTRA,
        "unique.vectors": SPECTRA,
        "unique.count": SPECTRA,
        "unique.prototypes": SPECTRA,
        "minimal.lifted": SPECTRA,
    },
    summary="angles between what different starts capture, matched directions and prototypes, and whether any head can be left out",
    source="claim reconstructed from the reviews of Cirrincione 2026, arXiv 2604.01880 (unique minimal hierarchy); Ky Fan's theorem",
)
def uniqueness(options: UniquenessOptions, seed: int, progress: Progress) -> Measurements:
    """The worst over all pairs of starts. unique.angle: largest principal angle between the captured spaces [rad]. unique.vectors: smallest
    |cosine| of directions after Hungarian matching. unique.prototypes: largest distance of matched prototypes over sqrt(tr C).

    unique.count: share of starts with another number of heads than the first. minimal.lifted: share of heads without which the residual rises
    over the threshold.
    """
    o, rows = options, Measurements()
    for number, arm in enumerate(SPECTRA):
        operator = known(o, VALUES[arm], seeded(seed, number))
        theta = o.threshold * top_eigenpairs(operator, 1)[0].item()
        found = [_captured(operator, theta, o, 97 * seed + start) for start in range(o.starts)]
        points = [_dictionary(operator.x, basis, o, seeded(seed, 10 + start)) for start, basis in enumerate(found)]
        size = spread(operator.x).item()
        pairs = list(itertools.combinations(range(o.starts), 2))
        fields = {"arm": arm, "n": len(pairs)}
        same = [(i, j) for i, j in pairs if found[i].shape == found[j].shape]
        angles = [_angle(found[i], found[j]) for i, j in same]
        cosines = [_matched(-(found[i].T @ found[j]).abs()) for i, j in same]
        distances = [_matched(torch.cdist(points[i], points[j])) / size for i, j in pairs]
        rows.add(
            "unique.angle",
            max(angles, default=math.nan),
            unit="rad",
            null=math.pi / 2,
            null_kind="spaces across each other",
            **fields,
        )
        rows.add(
            "unique.vectors",
            min((-c for c in cosines), default=math.nan),
            null=o.width**-0.5,
            null_kind="random directions",
            **fields,
        )
        others = sum(basis.shape != found[0].shape for basis in found) / o.starts
        rows.add("unique.count", others, arm=arm, n=o.starts, null=0.0, null_kind="all starts agree")
        rows.add("unique.prototypes", max(distances), null=0.0, null_kind="the same prototypes", **fields)
        lifted = [_lifts(operator, basis, i, theta) for basis in found for i in range(basis.shape[1])]
        rows.add(
            "minimal.lifted",
            sum(lifted) / len(lifted),
            arm=arm,
            n=len(lifted),
            null=1.0,
            null_kind="none can be left out",
        )
        progress(f"{arm}: {sorted({b.shape[1] for b in found})} heads, angle {max(angles, default=math.nan):.2g}")
    return rows


def known(o: UniquenessOptions, values: tuple[float, ...], generator: torch.Generator) -> DirectionalOperator:
    """An operator whose positive eigenvalues are ``values`` and two more far below, up to a factor.

    On the plane of u and v, eigenvectors of S with s_u > s_v, the block s (v u^T - u v^T) has the eigenvalues +- s (s_u - s_v) / 2.
    """
    basis = rotation(o.width, generator)
    moments = torch.ones(o.width, dtype=torch.float64)
    moments[1::2] = 0.25
    left = torch.linalg.qr(torch.randn(o.tokens, o.width, generator=generator, dtype=torch.float64))[0]
    x = math.sqrt(o.tokens) * left * moments.sqrt() @ basis.T
    query, key = planes(basis, [*values, BELOW, 0.8 * BELOW])
    return DirectionalOperator(x, query, key)


def _captured(operator: DirectionalOperator, theta: float, o: UniquenessOptions, seed: int) -> Tensor:
    """Directions [d h] that a tracker finds one by one from a random start, until none is left above the threshold."""
    directions: list[Tensor] = []
    while len(directions) < o.width:
        matrix = operator.without(torch.stack(directions, 1) if directions else None).dense()
        tracker = OjaTracker(o.width, seed=1000 * seed + len(directions))
        u = tracker.track(lambda v, matrix=matrix: matrix @ v, o.steps)
        if tracker.value <= theta:
            break
        for other in directions:
            u = u - (other @ u) * other
        directions.append(u / u.norm())
    return torch.stack(directions, 1) if directions else torch.zeros(o.width, 0, dtype=torch.float64)


def _dictionary(x: Tensor, basis: Tensor, o: UniquenessOptions, generator: torch.Generator) -> Tensor:
    """Prototypes [k d] on what the heads captured, back in the space of the input."""
    y = x @ basis
    p = kmeans_plus_plus(y, o.prototypes, generator).requires_grad_()
    temperature = critical_temperature(y).item() / 16
    optimizer = torch.optim.SGD([p], lr=o.lr)
    for _ in range(o.fit_steps):
        optimizer.zero_grad()
        assign(y, p, temperature).loss.mean().backward()
        optimizer.step()
    return p.detach() @ basis.T


def _angle(a: Tensor, b: Tensor) -> float:
    """Largest principal angle, by its sine, which keeps the digits of small ones."""
    return math.asin(min(1.0, torch.linalg.matrix_norm(b - a @ (a.T @ b), 2).item()))


def _matched(cost: Tensor) -> float:
    """The largest cost of a pair in the assignment of the least total cost."""
    i, j = linear_sum_assignment(cost.numpy())
    return float(cost[i, j].max())


def _lifts(operator: DirectionalOperator, basis: Tensor, i: int, theta: float) -> bool:
    rest = torch.cat([basis[:, :i], basis[:, i + 1 :]], 1)
    return top_eigenpairs(operator.without(rest), 1)[0].item() > theta
