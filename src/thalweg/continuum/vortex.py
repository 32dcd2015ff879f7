"""Does training circulate? Weights as a stationary diffusion, by block: the sense of rotation in a plane that was chosen on other records."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.capture.windows import Text
from thalweg.continuum.base import Figure, Finding, Probe, ProbeOptions, Subject, register
from thalweg.continuum.trajectory import Trajectory
from thalweg.errors import InputError
from thalweg.geometry import circulation as flow
from thalweg.records import Measurements
from thalweg.statistics import sign_flip

DICKEY_FULLER = 14.1  # n (1 - rho) that a random walk stays below in 95 of 100 paths
LEAST_IN_HALF = 3 * DICKEY_FULLER  # of a direction of the first half, before it may enter the plane
BLOCKS = 12  # of the second half, whose areas are compared
LEAST = 240  # records: 120 in a half, 10 in a block
PLANE = (
    "area rates and their intervals are those of the plane that the first half chose, in expectation a lower bound for the fastest "
    "plane of the block: where that turns at 0.1 a record, 2,100 records gave 0.104 with 2 directions (interval right in 11 of 11 "
    "paths), and 0.068 among 16 (in 6 of 12)"
)


@dataclass(frozen=True)
class VortexOptions(ProbeOptions):
    """skip: share of the records at the start that are left out. level: of the tests, over all blocks of weights together (Holm).
    surrogates: of each kind; walks: random walks that are put through the whole procedure."""

    skip: float = 0.3
    level: float = 0.05
    surrogates: int = 199
    walks: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(surrogates=19, walks=0)
        if not 0 <= self.skip < 1:
            raise InputError(f"skip of vortex must be in [0, 1), got {self.skip}")
        if not 0 < self.level < 1:
            raise InputError(f"level of vortex must be in (0, 1), got {self.level}")


class Swirl(NamedTuple):
    """What the second half says of the plane of the first. areas: of its blocks, per record; p_flip, p_shuffled: of the two nulls."""

    rate: float
    areas: list[float]
    relaxations: float
    p_flip: float
    p_shuffled: float
    shuffled: Tensor
    path: Tensor
    kept: int

    @property
    def stationary(self) -> bool:
        return self.relaxations > DICKEY_FULLER

    @property
    def p(self) -> float:
        """The larger of the two, 1 where nothing can be said, or the sense of rotation is not that of the first half."""
        return max(self.p_flip, self.p_shuffled) if self.stationary and self.rate > 0 else 1.0


@register(
    "vortex",
    summary="whether training circulates: area rate, entropy production and radius of a trajectory of weights, against surrogates",
    source="Liang 2026, arXiv 2607.17146 (a vortex for AdamW and SGD, in words; how it was measured is not readable); "
    "estimators, nulls and tests derived by us",
)
class Vortex(Probe):
    """By block: a plane from the first half of the records, its area rate on the second.

    A vortex is called where the second half has come back in both directions of the plane (Dickey and Fuller), turns in the sense of the
    first, and beats both nulls at the level of all blocks together (Holm): its blocks turned backwards in time at random (sign flips), and
    the second coordinate with its blocks in another order, so that each keeps its own past and the two know nothing of each other.
    """

    kind = "trajectory"
    text = False
    Options = VortexOptions
    title = "Vortices of training"

    def run(self, subject: Subject, text: Text | None, options: VortexOptions) -> Finding:
        given = subject.trajectory
        if not isinstance(given, Trajectory):
            raise InputError(f"the vortex is looked for in a Trajectory, got {type(given).__name__}; give one")
        first = int(options.skip * len(given.steps))
        if len(given.steps) - first < LEAST:
            raise InputError(_too_few(given, options.skip))
        path = given.after(int(given.steps[first]))
        rows, generator = Measurements(), torch.Generator().manual_seed(options.seed)
        swirls = {b: swirl(x, options.surrogates, generator) for b, x in path.blocks.items()}
        called = holm({b: 1.0 if s is None else s.p for b, s in swirls.items()}, options.level)
        for block, s in swirls.items():
            _block_rows(rows, block, path, s, called[block], generator)
        walks = _walks(path, options, generator)
        if walks is not None:
            null = {"null": options.level, "null_kind": "level of the test", "n": options.walks}
            rows.add("vortex.found", walks, branch="random walks in place of the weights", **null)
        found, held = sum(called.values()), sum(s is not None and s.stationary for s in swirls.values())
        null = {"null": options.level, "null_kind": "level of the test, over all blocks together", "n": len(swirls)}
        rows.add("vortex.found", float(found > 0), **null)
        words = f"circulates in {found} of {len(swirls)} blocks; {held} stationary in the plane that was chosen"
        if any(s is not None for s in swirls.values()):
            words += ", whose rate is in expectation a lower bound for the fastest"
        caveats = [
            "one trajectory is one seed: a claim needs at least eight",
            "what has not come back within the records is left out: there drift and swirl cannot be told apart",
            PLANE,
            "weights are seen through random projections, so a swirl of a few of them may be missed",
            "momentum circulates in the space of weights and velocities always; whether it shows in the weights depends on noise and curvature",
            "loops in a plot of principal components prove nothing (vortex.swept_area: a random walk sweeps 10/3)",
        ]
        if path.facts.get("schedule") not in (None, "constant"):
            caveats.append(
                f"the learning rate follows a {path.facts['schedule']} schedule, so no part of the run is stationary for sure"
            )
        lost = _lost(path)
        if lost is not None and not 0 < lost < 1:
            caveats.append(
                f"vortex.radius_ratio is left out: at lr {path.facts['lr']:g} and weight_decay {path.facts['weight_decay']:g} "
                f"decay takes {lost:.0%} of the weights between two records, {path.stride} steps apart, and no radius follows"
            )
        return Finding("vortex", summary=words, rows=rows, caveats=tuple(caveats), figures=FIGURES)


def _too_few(given: Trajectory, skip: float) -> str:
    """What is missing, in records and in steps."""
    n, stride = len(given.steps), given.stride
    needed = int((LEAST - 1) / (1 - skip)) + 1
    while needed - int(skip * needed) < LEAST:  # rounding
        needed += 1
    words = (
        f"a vortex needs at least {LEAST} records behind the first {skip:.0%}, {needed:,} in all, got {n:,}: "
        f"train at least {int(given.steps[-1]) + (needed - n) * stride:,} steps"
    )
    every = n * stride // needed
    rarer = f", or record every {every:,}" if every else ""
    return f"{words} at one record every {stride:,}{rarer}"


def _lost(path: Trajectory) -> float | None:
    """Share of the weights that decay takes between two records; None where the facts of the run do not say."""
    lr, decay = path.facts.get("lr"), path.facts.get("weight_decay")
    if not lr or not decay or path.facts.get("schedule", "constant") != "constant":
        return None
    return 1 - (1 - min(lr * decay, 1)) ** path.stride


def swirl(path: Float[Tensor, "n k"], surrogates: int, generator: torch.Generator) -> Swirl | None:
    """The plane of the first half on the second; None where the first half has no plane that comes back."""
    x = path.double()
    half = len(x) // 2
    if len(x) < 2 * BLOCKS * 3:
        raise InputError(f"two halves of {BLOCKS} blocks need at least {2 * BLOCKS * 3} records, got {len(x)}")
    plane = flow.fastest_plane(x[:half], LEAST_IN_HALF)
    if plane is None:
        return None
    y = x[half:] @ plane.basis
    y = (y - y.mean(0)) / y.std(0, correction=0).clamp(min=1e-300)
    areas = [flow.area_rate(part)[0, 1].item() for part in y.tensor_split(BLOCKS)]
    rate = flow.area_rate(y)[0, 1].item()
    shuffled = _shuffled(y, surrogates, generator)
    p_shuffled = (1 + int((shuffled >= abs(rate)).sum())) / (1 + surrogates)
    return Swirl(rate, areas, flow.relaxations(y), sign_flip(areas), p_shuffled, shuffled, y, plane.kept)


def _shuffled(y: Float[Tensor, "n 2"], surrogates: int, generator: torch.Generator) -> Tensor:
    """|Area rate| with the blocks of the second coordinate in another order [surrogates], no block in its own place."""
    found = []
    parts = y[:, 1].tensor_split(BLOCKS)
    for _ in range(surrogates):
        order = torch.randperm(BLOCKS, generator=generator)
        while bool((order == torch.arange(BLOCKS)).any()):
            order = torch.randperm(BLOCKS, generator=generator)
        other = torch.cat([parts[i] for i in order.tolist()])
        found.append(flow.area_rate(torch.stack([y[:, 0], other], 1))[0, 1].abs())
    return torch.stack(found)


def holm(p: dict[str, float], level: float) -> dict[str, bool]:
    """Which are called at the level of all together. Source: Holm 1979 (Scandinavian Journal of Statistics 6, 65)."""
    found, going = dict.fromkeys(p, False), True
    for rank, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        going = going and value <= level / (len(p) - rank)
        found[name] = going
    return found


def _block_rows(
    rows: Measurements, block: str, path: Trajectory, s: Swirl | None, called: bool, generator: torch.Generator
) -> None:
    x, stride = path.blocks[block].double(), path.stride
    where: dict[str, Any] = {"site": block, "step": int(path.steps[-1])}
    parts = block.rsplit(".", 1)
    if len(parts) == 2 and parts[1].isdigit():
        where["layer"] = int(parts[1])
    n = len(x)
    null = {"null": flow.SWEPT_BY_WALK, "null_kind": "10/3: a long random walk"}
    rows.add("vortex.swept_area", flow.swept_area(x).item(), n=n, **null, **where)
    lost = _lost(path)
    if lost is not None and 0 < lost < 1:
        null = {
            "null": 1.0,
            "null_kind": "sqrt(E|x' - rho x|^2 / (1 - rho^2)): stationary, isotropic, updates without memory",
        }
        rows.add("vortex.radius_ratio", flow.radius_ratio(x, lost), n=n, **null, **where)
    if block in path.norms:
        rows.add("vortex.radius", path.norms[block].mean().item(), n=n, unit="weights", **where)
    if s is None:
        rows.add(
            "vortex.relaxations",
            math.nan,
            n=n // 2,
            null=DICKEY_FULLER,
            null_kind="no two directions came back",
            **where,
        )
        rows.add("vortex.found", 0.0, null=0.0, null_kind="no vortex", **where)
        return
    walk = {"null": DICKEY_FULLER, "null_kind": "random walk, upper 5 %"}
    rows.add("vortex.relaxations", s.relaxations, n=len(s.path), **walk, **where)
    areas = np.array(s.areas) / stride
    half = 2.2 * areas.std(ddof=1) / math.sqrt(len(areas))  # t of 11 degrees of freedom, 95 %
    rows.add(
        "vortex.area_rate",
        s.rate / stride,
        n=len(areas),
        unit="1/step",
        low=s.rate / stride - half,
        high=s.rate / stride + half,
        interval=f"95% t over {len(areas)} blocks of the second half, of the plane that the first half chose",
        null=float(s.shuffled.quantile(0.95)) / stride,
        null_kind="95th percentile of the second coordinate with its blocks in another order",
        **where,
    )
    back = flow.area_rate(s.path.flip(0))[0, 1].item() / stride
    rows.add(
        "vortex.area_rate",
        back,
        n=len(areas),
        unit="1/step",
        branch="time backwards",
        null=-s.rate / stride,
        null_kind="minus the rate",
        **where,
    )
    for name, p in (("sign_flip", s.p_flip), ("block_shuffle", s.p_shuffled)):
        rows.add("vortex.p", p, branch=name, null=0.5, null_kind="no circulation", n=len(areas), **where)
    rows.add("vortex.found", float(called), null=0.0, null_kind="no vortex", **where)
    try:
        fitted = flow.fit(s.path)
        made = flow.entropy_production(fitted.circulation, fitted.diffusion, fitted.covariance).item() / stride
        rows.add(
            "vortex.drift",
            torch.linalg.eigvals(fitted.drift).real.min().item() / stride,
            unit="1/step",
            n=len(s.path),
            null=0.0,
            null_kind="does not come back",
            **where,
        )
        rows.add(
            "vortex.diffusion", torch.trace(fitted.diffusion).item() / 2 / stride, unit="1/step", n=len(s.path), **where
        )
        twin = _balanced(fitted, len(s.path), generator)
        kind = "mean of fits to simulated paths with the same covariance and diffusion, without circulation"
        rows.add(
            "vortex.entropy_production",
            made,
            unit="nats/step",
            n=len(s.path),
            null=twin / stride,
            null_kind=kind,
            **where,
        )
    except InputError:  # a plane that does not pull back has no stationary state to compare with
        return


def _balanced(fitted: flow.Fit, times: int, generator: torch.Generator, paths: int = 19) -> float:
    """Mean entropy production of fits to paths of the balanced twin, A = D C^-1."""
    drift = fitted.diffusion @ torch.linalg.inv(fitted.covariance)
    found = []
    for path in flow.simulated(drift, fitted.diffusion, times, paths=paths, generator=generator):
        one = flow.fit(path)
        found.append(flow.entropy_production(one.circulation, one.diffusion, one.covariance).item())
    return sum(found) / len(found)


def _walks(path: Trajectory, options: VortexOptions, generator: torch.Generator) -> float | None:
    """Share of random walks, with the increments of a block in another order and with random signs, that would be called a vortex."""
    if not options.walks:
        return None
    found, blocks = 0, list(path.blocks.values())
    for i in range(options.walks):
        steps = blocks[i % len(blocks)].double().diff(dim=0)
        order = torch.randperm(len(steps), generator=generator)
        signs = 2.0 * torch.randint(0, 2, (len(steps), 1), generator=generator) - 1
        walk = torch.cat([torch.zeros(1, steps.shape[1], dtype=torch.float64), (steps[order] * signs).cumsum(0)])
        s = swirl(walk, options.surrogates, generator)
        found += s is not None and s.p <= options.level
    return found / options.walks


FIGURES = (
    Figure(
        "Area rate by block of weights",
        ("vortex.area_rate",),
        y_label="1/step",
        lines="branch",
        note="What stands above the dashed line beats the shuffled coordinate.",
    ),
    Figure(
        "Has the plane come back?",
        ("vortex.relaxations",),
        y_label="n (1 - rho)",
        log_y=True,
        note="Below the dashed line a random walk is not excluded, and nothing is called.",
    ),
)
