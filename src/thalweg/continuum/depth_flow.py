"""Tokens as a flow through depth: how fast and how straight they move, how many directions they use, and whether they come together."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.capture.proof import dtype_of
from thalweg.capture.watching import Event
from thalweg.capture.windows import Batch, Text
from thalweg.continuum.base import Collector, Figure, Finding, Probe, ProbeOptions, Subject, UnitMeans, register
from thalweg.errors import InputError
from thalweg.geometry.depth import clusters, energy, energy_null, straightness, turning
from thalweg.geometry.lengths import token_relative_update
from thalweg.geometry.similarity import token_cosine, unit
from thalweg.geometry.spectrum import gaussian_null, stable_rank
from thalweg.ops.precision import wide
from thalweg.records import Measurements

STEEPEST = 700  # beta: above it exp(beta), and with it the null, is no float
CLOUD = ("depth.within_cosine", "depth.across_cosine", "depth.energy", "depth.clusters")


@dataclass(frozen=True)
class DepthFlowOptions(ProbeOptions):
    """beta: of the interaction energy. cosine: above which two tokens are linked into one cluster. tokens: of a window that are looked at,
    evenly spread behind its first; the others have their states read and dropped."""

    beta: float = 1.0
    cosine: float = 0.9
    tokens: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(tokens=2)
        if not 0 < self.beta <= STEEPEST:
            raise InputError(f"beta of depth_flow must be above 0 and at most {STEEPEST}, got {self.beta}")
        if not -1 < self.cosine < 1:
            raise InputError(f"cosine of depth_flow must lie between -1 and 1, got {self.cosine}")


@register(
    "depth_flow",
    summary="speed, turning and stable rank of token trajectories through depth, and whether tokens merge",
    source="Geshkovski et al. 2023, arXiv 2312.10794 (energy, clusters); Hosseini and Fedorenko 2023, arXiv 2311.04930 "
    "(turning, there along the text); nulls by us",
)
class DepthFlow(Probe):
    """States before every layer and after the last; of many streams, what the layer reads. The first token of a window is left out."""

    Options = DepthFlowOptions
    title = "Token trajectories through depth"

    def applies(self, subject: Subject) -> str | None:
        return None if subject.place.depth >= 2 else "a trajectory needs at least two layers"

    def collect(self, subject: Subject, text: Text, options: DepthFlowOptions) -> Collector:
        return _Paths(subject, text, options)

    def finish(self, collector: "_Paths", subject: Subject, text: Text, options: DepthFlowOptions) -> Finding:
        located, depth, rows = subject.place, subject.place.depth, Measurements()
        if not collector.looked:
            raise InputError(
                "no window has two tokens behind its first, so there is no trajectory to look at; give longer texts"
            )
        _rows(rows, located, options, collector)
        caveats = [
            "The first token of a window (a sink in most models) is left out.",
            "A common direction of all tokens raises every cosine; merging is what tokens of one window share beyond those of others.",
            f"Of every window at most {options.tokens} tokens are looked at.",
        ]
        dtype = dtype_of(located.model)
        if dtype not in (torch.float32, torch.float64):
            slowest = min((row.value for row in rows.where(measure="depth.speed")), default=0.0)
            caveats.append(
                f"States are {str(dtype).removeprefix('torch.')}: rounding moves a token by up to {torch.finfo(dtype).eps / 2:.1e} of its "
                f"length at every sublayer, and the shortest mean step of a layer is {slowest:.1e} of it."
            )
        if bool(collector.still.any()):
            layers = int((collector.still > 0).sum())
            caveats.append(
                f"The state of up to {int(collector.still.max()):,} of {collector.looked:,} tokens is zero before {layers} of {depth} "
                "layers, as where the embedding of padding is: a step from there has no relative length, so depth.speed leaves it out."
            )
        if located.streams > 1:
            caveats.append("Of several streams the trajectory is that of what the layers read.")
        return Finding("depth_flow", summary=_summary(rows, depth), rows=rows, caveats=tuple(caveats), figures=FIGURES)


class _Paths(Collector):
    """The trajectories of the chosen tokens of a batch, and means over those of all batches."""

    needs = frozenset({"sites"})

    def __init__(self, subject: Subject, text: Text, options: DepthFlowOptions):
        located, depth = subject.place, subject.place.depth
        self.options, self.looked, self.last = options, 0, len(located.sites) - 1
        self.starts = {place.layer: place.index for place in reversed(located.sites)}
        self.speeds, self.turns = UnitMeans(text.units, depth), UnitMeans(text.units, depth - 1)
        self.paths, self.clouds = UnitMeans(text.units, 2), UnitMeans(text.units, (depth + 1) * len(CLOUD))
        self.merging = UnitMeans(text.units, 1)
        self.still = torch.zeros(depth, dtype=torch.long)  # tokens whose state before a layer is zero
        self.states: list[Tensor] = []
        self.chosen: Tensor | None = None

    def begin(self, batch: Batch) -> None:
        self.states, self.chosen = [], None

    def site(self, event: Event) -> None:
        if self.chosen is None:
            self.chosen = _chosen(event.real, self.options.tokens)
        if self.starts[event.place.layer] == event.place.index:
            self.states.append(_taken(wide(event.state), self.chosen))
        if event.place.index == self.last:
            self.states.append(_taken(wide(event.following), self.chosen))

    def end(self, batch: Batch) -> None:
        assert self.chosen is not None
        if not self.chosen.numel() or self.chosen.shape[1] < 2:
            return
        path = torch.stack(self.states, dim=2)  # [b t places d]
        self.states = []
        unit_of = batch.unit_of_row.repeat_interleave(path.shape[1])
        flat = path.flatten(0, 1)
        self.looked += len(flat)
        speeds, moving = token_relative_update(flat[:, :-1], flat.diff(dim=1)), (flat[:, :-1] != 0).any(-1)
        self.speeds.add(unit_of, torch.where(moving, speeds, 0.0), moving)
        self.still += (~moving).sum(0).cpu()
        self.turns.add(unit_of, turning(flat))
        self.paths.add(unit_of, torch.stack([straightness(flat), stable_rank(flat.diff(dim=1))], 1))
        cloud, weight = _clouds(path, self.options)
        self.clouds.add(batch.unit_of_row, cloud.flatten(1), weight.flatten(1))
        gap = cloud[..., 0] - cloud[..., 1]
        self.merging.add(batch.unit_of_row, (gap[:, -1] - gap[:, 0])[:, None], weight[:, 0, 1:2])


def _chosen(real: Tensor, most: int) -> Tensor:
    """Places [b t] of tokens behind the first that are no padding in any row of the batch, evenly spread."""
    shortest = int(real.sum(1).min())
    if shortest < 3:
        return real.new_zeros(len(real), 0, dtype=torch.long)
    at = torch.linspace(1, shortest - 1, min(most, shortest - 1)).round().long().unique().to(real.device)
    return real.long().argmax(1)[:, None] + at


def _taken(state: Float[Tensor, "b t d"], at: Tensor) -> Float[Tensor, "b k d"]:
    return state.gather(1, at[..., None].expand(-1, -1, state.shape[-1])).clone()


def _clouds(path: Float[Tensor, "b t p d"], options: DepthFlowOptions) -> tuple[Tensor, Tensor]:
    """Measures of the tokens of every window at every place [b p measures], and their weights: 0 where there is no other window."""
    x = path.transpose(1, 2).double()
    mean = unit(x).mean(2)  # [b p d]
    rows = len(x)
    others = (mean.sum(0, keepdim=True) - mean) / max(rows - 1, 1)
    across = (mean * others).sum(-1)
    linked = torch.tensor(
        [[clusters(one, options.cosine) for one in row] for row in x], dtype=torch.float64, device=x.device
    )
    found = torch.stack([token_cosine(x), across, energy(x, options.beta), linked], -1)
    weight = torch.ones_like(found)
    weight[..., 1] = float(rows > 1)
    return found, weight


def _rows(rows: Measurements, located: Any, options: DepthFlowOptions, seen: _Paths) -> None:
    depth, width = located.depth, located.width

    def at(layer: int, **more: Any) -> dict[str, Any]:
        return {"site": f"layers.{layer}" if layer < depth else "stream.end", "layer": layer, **more}

    seen.speeds.rows(rows, ["depth.speed"] * depth, [at(i) for i in range(depth)])
    right = {"unit": "rad", "null": math.pi / 2, "null_kind": "independent steps"}
    seen.turns.rows(rows, ["depth.turning"] * (depth - 1), [at(i + 1, **right) for i in range(depth - 1)])
    null = gaussian_null(depth, width, "stable_rank")
    path_nulls = [
        {"null": depth**-0.5, "null_kind": "1/sqrt(steps): independent steps of one length"},
        {"null": null.value, "null_kind": f"steps of a walk: {null.kind}"},
    ]
    seen.paths.rows(rows, ["depth.straightness", "depth.stable_rank"], path_nulls)
    null = energy_null(options.tokens, width, options.beta)
    nulls = [
        {"null": 0.0, "null_kind": "independent directions"},
        {"null": 0.0, "null_kind": "independent directions"},
        {"null": null, "null_kind": "uniform directions on the sphere"},
        {"null": 1.0, "null_kind": "every token by itself"},
    ]
    own = Measurements()
    seen.clouds.rows(own, list(CLOUD) * (depth + 1), [at(i, **one) for i in range(depth + 1) for one in nulls])
    rows.extend(own)
    seen.merging.rows(
        rows, ["depth.merging"], [{"null": 0.0, "null_kind": "no change from the first state to the last"}]
    )


def _summary(rows: Measurements, depth: int) -> str:
    def mean(measure: str, **where: Any) -> float:
        values = [row.value for row in rows.where(measure=measure, **where)]
        return sum(values) / len(values) if values else math.nan

    start, end = (mean("depth.within_cosine", layer=layer) for layer in (0, depth))
    words = (
        f"turns by {mean('depth.turning'):.2f} rad a layer (walk: 1.57), straightness {mean('depth.straightness'):.2f}"
    )
    merging = mean("depth.merging")
    beyond = "needs two windows in a batch" if math.isnan(merging) else f"{merging:+.2f}"
    return f"{words}; cosine of tokens in a window {start:.2f} to {end:.2f}, beyond those of others {beyond}"


FIGURES = (
    Figure("How far a layer moves a token", ("depth.speed",), y_label="step / state", log_y=True),
    Figure(
        "How much a token turns",
        ("depth.turning",),
        y_label="rad",
        note="pi/2 is a walk whose steps know nothing of each other.",
    ),
    Figure(
        "Do tokens come together?",
        CLOUD[:2],
        y_label="cosine",
        note="Merging is where tokens of one window part from those of others.",
    ),
    Figure("Energy and clusters", CLOUD[2:], y_label="share"),
)
