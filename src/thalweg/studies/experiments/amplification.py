"""Does growth amplify the separation of prototypes? At and after each birth, against one that follows no direction, and none at all."""

import copy
from dataclasses import dataclass

import torch

from thalweg.errors import InputError
from thalweg.geometry.prototypes import farthest_pair, separation_force
from thalweg.growth import GrowthOptions, at_random, on_the_plane
from thalweg.growth.reading import Reading, look
from thalweg.records import Measurements
from thalweg.studies.experiments.base import Progress, register
from thalweg.studies.experiments.growing import GrowingLayer, Head, planes, rotation, seeded, teacher, tokens

AGAINST = ("random", "none")
TIMES = ("at", "soon", "late")
ARMS = tuple(f"{time}_{other}" for time in TIMES for other in AGAINST)


@dataclass(frozen=True)
class AmplificationOptions:
    """width, batch, time: of the tokens; prototypes: of each head; births: looked at; warm: steps before the first; soon, late: steps after a
    birth at which is looked; lr: of the descent."""

    width: int = 12
    batch: int = 4
    time: int = 12
    prototypes: int = 4
    births: int = 1
    warm: int = 100
    soon: int = 100
    late: int = 1000
    lr: float = 0.02

    def __post_init__(self) -> None:
        if not 0 < self.soon < self.late or self.births < 1:
            raise InputError(f"0 < soon < late and births at least 1, got {self.soon}, {self.late} and {self.births}")


@register(
    "amplification",
    options=AmplificationOptions,
    columns={"amplify.force": ARMS, "amplify.total_force": ARMS, "amplify.pairs": ARMS, "amplify.residual": ARMS},
    summary="separation force, pair distances and residual at and after each birth, over those after a birth at random and after none",
    source="claim reconstructed from the reviews of Cirrincione 2026, arXiv 2604.01880 (growth amplifies separation)",
)
def amplification(options: AmplificationOptions, seed: int, progress: Progress) -> Measurements:
    """Log ratios, mean over births: amplify.force and amplify.pairs (farthest pair) are means over the heads that were there before,
    amplify.total_force is of all heads together, amplify.residual of Gamma. Twins go on from one moment with the same steps.
    """
    o, rows = options, Measurements()
    x = tokens(o.batch, o.time, o.width, seeded(seed, 0))
    query, key = planes(rotation(o.width, seeded(seed, 1)), [0.8**i for i in range(4)])
    other = planes(rotation(o.width, seeded(seed, 2)), [1.0] * 4)
    target = teacher(x, *other, seeded(seed, 3))
    network = GrowingLayer(x, target, query, key, prototypes=o.prototypes, generator=seeded(seed, 4))
    network.train_steps(o.warm, o.lr)
    directions: dict[int, torch.Tensor] = {}
    found: dict[str, dict[str, list[float]]] = {arm: {} for arm in ARMS}
    for birth in range(o.births):
        old = list(network.live)
        reading = look(network, 0, directions, GrowthOptions(head_width=4))
        twins = {name: copy.deepcopy(network) for name in ("plane", *AGAINST)}
        held = {name: _born(twin, name, reading, directions, seeded(seed, 20 + birth)) for name, twin in twins.items()}
        before = 0
        for time, steps in (("at", 0), ("soon", o.soon), ("late", o.late)):
            for twin in twins.values():
                twin.train_steps(steps - before, o.lr)
            before = steps
            seen = {name: _look(twin, old, held[name]) for name, twin in twins.items()}
            for name in AGAINST:
                for measure, value in seen["plane"].items():
                    ratio = torch.tensor(value / seen[name][measure]).log().item()
                    found[f"{time}_{name}"].setdefault(measure, []).append(ratio)
            for name, table in seen.items():
                for measure, value in table.items():
                    rows.add(f"amplify.{measure}.value", value, arm=name, step=steps, split=f"birth {birth}")
        network, directions = twins["plane"], held["plane"]
        progress(f"birth {birth}: {len(network.live)} heads, loss {network.fit():.4g}")
    for arm, table in found.items():
        for measure, values in table.items():
            mean = sum(values) / len(values)
            rows.add(f"amplify.{measure}", mean, arm=arm, n=len(values), unit="nats", null=0.0, null_kind="as its twin")
    return rows


def _born(
    network: GrowingLayer, name: str, reading: Reading, directions: dict, generator: torch.Generator
) -> dict[int, torch.Tensor]:
    """Add a head to a twin, or none; what is captured then. A birth at random captures nothing."""
    if name == "none":
        return dict(directions)
    u, value = reading.vectors[:, 0], reading.top
    if name == "random":
        network.add_heads(0, [at_random(reading.operator, u, value, network.width, generator=generator)])
        return dict(directions)
    birth = on_the_plane(reading.operator, u, value, network.width, generator=generator)
    (head,) = network.add_heads(0, [birth])
    return {**directions, head: birth.direction}


@torch.no_grad()
def _look(network: GrowingLayer, old: list[str], directions: dict[int, torch.Tensor]) -> dict[str, float]:
    forces = {name: _force(network, head) for name, head in network.parts.items()}
    pairs = []
    for name in old:
        head = network.parts[name]
        assert head.dictionary is not None
        pairs.append(farthest_pair(head.mixed(network.x).flatten(0, 1), head.dictionary.prototypes[0]).item())
    return {
        "force": sum(forces[name] for name in old) / len(old),
        "total_force": sum(force**2 for force in forces.values()) ** 0.5,
        "pairs": sum(pairs) / len(pairs),
        "residual": look(network, 0, directions, GrowthOptions(head_width=4)).residual,
    }


def _force(network: GrowingLayer, head: Head) -> float:
    assert head.dictionary is not None
    temperature = head.dictionary.width * head.dictionary.temperature[0].item()
    return separation_force(head.mixed(network.x).flatten(0, 1), head.dictionary.prototypes[0], temperature).item()
