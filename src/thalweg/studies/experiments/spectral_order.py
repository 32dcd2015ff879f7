"""Do heads come in the order of the spectrum? For a fixed operator by algebra; where weights train between births it is a question."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thalweg.geometry.directional import DirectionalOperator
from thalweg.geometry.eigenpairs import top_eigenpairs
from thalweg.growth import GrowthOptions
from thalweg.records import Measurements
from thalweg.statistics import spearman
from thalweg.studies.experiments.base import Progress, register
from thalweg.studies.experiments.growing import GrowingLayer, grown, planes, rotation, seeded, teacher, tokens

LEAST = 4  # births that an order is spoken of


@dataclass(frozen=True)
class OrderOptions:
    """width: of the stream; batch, time: tokens; planes: of the first head; heads: cap; threshold: of growth; dwell: steps of training between
    births; steps: at most; lr: of the descent."""

    width: int = 16
    batch: int = 4
    time: int = 16
    planes: int = 6
    heads: int = 12
    threshold: float = 0.02
    dwell: int = 40
    steps: int = 600
    lr: float = 2.0


@register(
    "spectral_order",
    options=OrderOptions,
    columns={"order.at_birth": ("fixed", "moving"), "order.initial": ("fixed", "moving"), "order.moved": ("moving",)},
    summary="whether heads are born in the order of eigenvalues, with a fixed operator (an identity) and with weights that train",
    source="reconstructed from the reviews of Cirrincione 2026, arXiv 2604.01880 (spectral alignment); the identity is derived",
)
def spectral_order(options: OrderOptions, seed: int, progress: Progress) -> Measurements:
    """Minus Spearman's correlation of the number of a birth with an eigenvalue: 1 where the largest comes first.

    order.at_birth: with the eigenvalue that was found at the birth; order.initial: with the Rayleigh quotient of the direction on the operator
    before any birth; both NaN for fewer than four births. order.moved: change of the interaction of the first head, over its size.
    """
    o, rows = options, Measurements()
    x = tokens(o.batch, o.time, o.width, seeded(seed, 0))
    basis = rotation(o.width, seeded(seed, 1))
    query, key = planes(basis, [0.8**i for i in range(o.planes)])
    other = planes(rotation(o.width, seeded(seed, 2)), [1.0] * o.planes)
    network = GrowingLayer(x, teacher(x, *other, seeded(seed, 3)), query, key, generator=seeded(seed, 4))
    start = DirectionalOperator(network.inputs(0), query, key)
    found = {"fixed": _deflated(start, o), "moving": _grown(network, o, seed, progress)}
    first = network.heads(0)[0]
    moved = torch.linalg.matrix_norm(first.query @ first.key.T - query @ key.T) / torch.linalg.matrix_norm(
        query @ key.T
    )
    rows.add("order.moved", moved.item(), arm="moving", null=0.0, null_kind="as before the births")
    for arm, (values, directions) in found.items():
        quotients = [(u @ start.apply(u)).item() for u in directions]
        for measure, against in (("order.at_birth", values), ("order.initial", quotients)):
            rows.add(measure, _order(against), arm=arm, n=len(values), null=0.0, null_kind="births in any order")
        for i, value in enumerate(values):
            rows.add("order.eigenvalue", value, arm=arm, step=i)
    return rows


def _deflated(operator: DirectionalOperator, o: OrderOptions) -> tuple[list[float], list[Tensor]]:
    """Top eigenpairs one by one, each captured before the next is looked for, down to the threshold."""
    theta = o.threshold * operator.frobenius()
    values: list[float] = []
    directions: list[Tensor] = []
    while len(values) < o.heads:
        left = operator.without(torch.stack(directions, 1) if directions else None)
        value, vector = top_eigenpairs(left, 1)
        if value[0].item() <= theta:
            break
        values.append(value[0].item())
        directions.append(vector[:, 0])
    return values, directions


def _grown(network: GrowingLayer, o: OrderOptions, seed: int, progress: Progress) -> tuple[list[float], list[Tensor]]:
    """By the controller, weights training between the births."""
    growth = GrowthOptions(
        head_width=network.width,
        threshold=o.threshold,
        dwell=o.dwell,
        check_every=o.dwell,
        most_heads=o.heads,
        seed=seed,
        degeneracy=0.0,
    )
    controller = grown(network, growth, o.steps, o.dwell, o.lr)
    births = [event for event in controller.record if event.kind == "birth"]
    progress(f"{len(births)} births, {controller.status}: {controller.reason}")
    values = [value for event in births for value in event.eigenvalues]
    return values, [torch.tensor(u, dtype=torch.float64) for event in births for u in event.directions]


def _order(values: list[float]) -> float:
    return float("nan") if len(values) < LEAST else -spearman(range(len(values)), values)
