"""Does the count of births measure how complex the data are? Against operators and inputs of known rank."""

import math
from dataclasses import dataclass

import torch

from thalweg.growth import GrowthOptions
from thalweg.records import Measurements
from thalweg.statistics import spearman
from thalweg.studies.experiments.base import Progress, register
from thalweg.studies.experiments.growing import GrowingLayer, grown, planes, rotation, seeded, teacher, tokens

ARMS = ("operator", "inputs")


@dataclass(frozen=True)
class ComplexityOptions:
    """ranks: planes of the first head (operator), or directions of the input (inputs, with as many planes as the width holds).

    width, batch, time: of the tokens. threshold: of growth. dwell, steps, lr: training between births. heads: cap.
    """

    ranks: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    width: int = 20
    batch: int = 4
    time: int = 16
    threshold: float = 0.05
    dwell: int = 5
    steps: int = 150
    lr: float = 0.02
    heads: int = 24


@register(
    "complexity",
    options=ComplexityOptions,
    columns={"complexity.rank": ARMS, "complexity.dimension": ARMS, "complexity.distance": ARMS},
    summary="births of growth against the rank of the operator or of the input, and against the dimension that principal components see",
    source="claim reconstructed from the reviews of Cirrincione 2026, arXiv 2604.01880 (the growth record as a measure); construction ours",
)
def complexity(options: ComplexityOptions, seed: int, progress: Progress) -> Measurements:
    """complexity.rank: Spearman's correlation over networks of births with the known rank. complexity.dimension: with the participation ratio
    (tr C)^2 / tr C^2 of what the rank is of (input, or interaction). complexity.distance: mean of |log(births / rank)|; no births count as 1/2.
    """
    o, rows = options, Measurements()
    for arm in ARMS:
        births, dimensions = [], []
        for rank in o.ranks:
            count, dimension = _grow(o, arm, rank, seed)
            births.append(count)
            dimensions.append(dimension)
            rows.add("complexity.births", count, arm=arm, step=rank, null=float(rank), null_kind="the known rank")
        for name, against in (("rank", o.ranks), ("dimension", dimensions)):
            rows.add(
                f"complexity.{name}",
                spearman(births, against, constant=0.0),  # a count that never changes orders nothing
                arm=arm,
                n=len(births),
                null=0.0,
                null_kind="unrelated",
            )
        logs = [abs(math.log(max(b, 0.5) / r)) for b, r in zip(births, o.ranks, strict=True)]
        rows.add(
            "complexity.distance",
            sum(logs) / len(logs),
            arm=arm,
            n=len(logs),
            unit="nats",
            null=0.0,
            null_kind="births equal the rank",
        )
        progress(f"{arm}: births {births} at ranks {list(o.ranks)}")
    return rows


def _grow(o: ComplexityOptions, arm: str, rank: int, seed: int) -> tuple[int, float]:
    """Births until growth ends, and the participation ratio."""
    whole = o.width // 2
    x = tokens(o.batch, o.time, o.width, seeded(seed, 0), lowest=0.2, rank=rank + 1 if arm == "inputs" else None)
    query, key = planes(rotation(o.width, seeded(seed, 1)), [1.0] * (rank if arm == "operator" else whole))
    network = GrowingLayer(x, teacher(x, query, key, seeded(seed, 2)), query, key, generator=seeded(seed, 3))
    growth = GrowthOptions(
        head_width=4,
        threshold=o.threshold,
        dwell=o.dwell,
        check_every=o.dwell,
        most_heads=o.heads,
        seed=seed,
        patience=2,
    )
    controller = grown(network, growth, o.steps, o.dwell, o.lr)
    births = sum(len(event.heads) for event in controller.record if event.kind == "birth")
    matrix = network.inputs(0) if arm == "inputs" else query @ key.T
    squares = torch.linalg.svdvals(matrix - matrix.mean(0) if arm == "inputs" else matrix).square()
    return births, (squares.sum() ** 2 / squares.square().sum()).item()
