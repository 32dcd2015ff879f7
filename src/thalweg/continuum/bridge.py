"""The probe of attention as a Schroedinger bridge: softmax holds the rows alone; how far is it from the plan that holds both sides?"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thalweg.capture.attention_call import AttentionCall
from thalweg.capture.evaluating import evaluating
from thalweg.capture.proof import called
from thalweg.capture.windows import Text
from thalweg.continuum.base import Figure, Finding, Probe, ProbeOptions, Subject, UnitMeans, register
from thalweg.continuum.passes import states_only
from thalweg.continuum.scores import no_attention, scores_of, watch_attention
from thalweg.ops.entropic import FLOOR, causal_columns, entropy, free_energy, full_bridge, functional, half_bridge
from thalweg.ops.precision import wide
from thalweg.records import Measurements
from thalweg.statistics import SMALLEST

TEMPERATURES = (0.5, 1.0, 2.0)
EXACT = 1e-12
ROWS = 64  # of one layer, on which the identities are checked in float64
CONVERGED = 1e-3
CAVEATS = (
    "Softmax is the half bridge by algebra (identity_error is rounding); its distance to the full bridge rests on a choice of columns.",
    "Distances depend on the length of the window, which stands in split; they compare heads of one run, not models at other lengths.",
    "The null permutes the scores of each query over the keys it may see: it keeps how peaked rows are and destroys what keys have in common.",
    "Above the null is no sign of learning: so is every head of three untrained models, by 0.0002 to 0.003. Read by how much.",
)
CAUSAL = (
    "Under the causal mask uniform columns would force the identity, so the columns are those of uniform causal attention (derived by us); "
    "the full bridge sees all queries of a window, so it is a measurement and no causal attention."
)


@dataclass(frozen=True)
class BridgeOptions(ProbeOptions):
    """Options of the probe of bridges.

    window: tokens of the pieces that the text is cut into. iterations: most of Sinkhorn's. tolerance: on the columns, as a share of the mass.
    every: one batch in so many is permuted for the null.
    """

    window: int = 64
    iterations: int = 50
    tolerance: float = 1e-3
    every: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(window=4, iterations=1, tolerance=0, every=1)


@register(
    "bridge",
    summary="softmax as a half Schroedinger bridge, and how far each head is from the full one",
    source="attention as a projection: Liang 2026 (arXiv 2607.17146); entropic transport: Peyre and Cuturi 2019 (arXiv 1803.00567); "
    "causal column marginals, the distance and its null: derived by us",
)
class BridgeProbe(Probe):
    """Free energy, entropy and temperature of attention, and the total variation between half and full bridge, by head."""

    title = "Attention as a half bridge"
    Options = BridgeOptions

    def applies(self, subject: Subject) -> str | None:
        return no_attention(subject.place)

    def run(self, subject: Subject, text: Text | None, options: BridgeOptions) -> Finding:
        assert text is not None
        state = _State(text, options)
        with evaluating(subject.model), watch_attention(subject.place, state.see):
            for state.number, (ids, state.units) in enumerate(_pieces(text, options.window, options.batch_size or 16)):
                subject.model(**called(subject.model, {"input_ids": ids}), **states_only(subject.model))
        rows, rule = Measurements(), f"pieces of {options.window} tokens"
        state.rows(rows, rule)
        caveats = [*CAVEATS, *([CAUSAL] if state.causal else [])]
        if state.residual > CONVERGED:
            caveats.append(
                f"Sinkhorn stopped after {options.iterations} iterations with up to {state.residual:.1e} of the mass in wrong "
                "columns (row residual, by layer): distances of peaked heads are off by about as much, most of them too small, "
                "some too large. What bounds them from below is bridge.column_distance, which needs no iteration."
            )
        if state.sinks:
            caveats.append(
                "Learned sinks of this model take part of the mass away from all keys; they are left out here."
            )
        return Finding("bridge", summary=_summary(rows, text), rows=rows, caveats=tuple(caveats), figures=FIGURES)


FIGURES = (
    Figure(
        "Half bridge to full bridge, mean over heads",
        ("bridge.layer_distance",),
        y_label="total variation of rows",
        note="0: the columns are what uniform attention gives them. Dashed: scores permuted within rows.",
    ),
    Figure(
        "Half bridge to full bridge, by head",
        ("bridge.distance",),
        y_label="total variation of rows",
        lines="head",
        note="Above the null: keys that many queries share, such as a sink.",
    ),
    Figure(
        "Entropy of attention over that of uniform attention",
        ("bridge.entropy_share",),
        y_label="share",
        lines="head",
        note="1: every key that may be seen has one weight; 0: one key takes all.",
    ),
)


def _pieces(text: Text, window: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of pieces of one length, ids [b t] and units [b]; pieces of one token are left out."""
    by_length: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
    for one in text.windows:
        for start in range(0, len(one.ids), window):
            piece = one.ids[start : start + window]
            by_length[len(piece)].append((piece, one.unit))
    for length, pieces in by_length.items():
        for start in range(0, len(pieces) if length > 1 else 0, size):
            some = pieces[start : start + size]
            yield torch.tensor([ids for ids, _ in some]), torch.tensor([unit for _, unit in some])


@dataclass
class _State:
    """What is kept while the model runs."""

    text: Text
    options: BridgeOptions
    number: int = 0
    units: Tensor = field(default_factory=lambda: torch.zeros(0))
    means: dict[tuple[str, int], UnitMeans] = field(default_factory=dict)
    residuals: dict[int, float] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    causal: bool = False
    sinks: bool = False

    @property
    def residual(self) -> float:
        return max(self.residuals.values(), default=0.0)

    def see(self, layer: int, call: AttentionCall) -> None:
        scores = scores_of(call)
        self.sinks = self.sinks or call.sinks is not None
        if self.number == 0:
            self._identities(scores)
        seen = call.visible()
        causal = bool((~seen).any())
        self.causal = self.causal or causal
        columns = _columns(seen, scores)
        half = torch.softmax(scores, -1)
        full = full_bridge(scores, columns, None, self.options.iterations, self.options.tolerance)
        self.residuals[layer] = max(self.residuals.get(layer, 0.0), full.residual)
        self._add("bridge.distance", layer, (half - full.log_plan.exp()).abs().sum(-1).mean(-1) / 2)
        self._add("bridge.column_distance", layer, (half.sum(-2) - columns).abs().sum(-1) / (2 * scores.shape[-2]))
        count = seen.sum(-1).clamp(min=2).to(scores.dtype).log()
        self._add("bridge.entropy_share", layer, (entropy(half) / count)[..., 1:].mean(-1))
        self._add("bridge.free_energy", layer, -torch.logsumexp(scores, -1).mean(-1))
        if self.number % self.options.every == 0:
            mixed = permuted(scores, self.options.seed + 1000 * self.number + layer)
            null = full_bridge(mixed, columns, None, self.options.iterations, self.options.tolerance)
            self._add("null", layer, (torch.softmax(mixed, -1) - null.log_plan.exp()).abs().sum(-1).mean(-1) / 2)

    def _add(self, name: str, layer: int, values: Tensor) -> None:
        key = (name, layer)
        if key not in self.means:
            self.means[key] = UnitMeans(self.text.units, values.shape[1])
        self.means[key].add(self.units, values)

    def _identities(self, scores: Tensor) -> None:
        """The half bridge as minimum of the free energy, and dF/dT = -H, on some rows in float64."""
        rows = scores.double().flatten(0, 2).clamp(min=FLOOR)  # -inf has no derivative in the temperature
        rows = rows[:: max(1, len(rows) // ROWS)]
        for temperature in TEMPERATURES:
            cost = -rows
            plan = half_bridge(cost, temperature)
            value, least = functional(plan, cost, temperature), free_energy(cost, temperature)
            self.errors["identity"].append(float(((value - least).abs() / least.abs().clamp(min=1)).max()))
            with torch.enable_grad():
                t = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
                total = -(t * torch.logsumexp(rows / t, -1)).sum()
            (slope,) = torch.autograd.grad(total, t)
            h = float(entropy(plan).sum())
            self.errors["temperature"].append(abs(float(slope) + h) / max(1.0, h))

    def rows(self, rows: Measurements, rule: str) -> None:
        for name, kind in (
            ("identity", "rounding: <c,p> - T H against -T log Z"),
            ("temperature", "rounding: dF/dT against -H"),
        ):
            worst = max(self.errors[name], default=0.0)
            rows.add(
                f"bridge.{name}_error", worst, n=ROWS * len(TEMPERATURES), null=EXACT, null_kind=kind, dtype="float64"
            )
        for layer in sorted(self.residuals):
            kind = {"null": self.options.tolerance, "null_kind": "tolerance of the iteration", "n": 1}
            rows.add("bridge.residual", self.residuals[layer], layer=layer, branch="attention", **kind)
        for (name, layer), means in self.means.items():
            if name == "null":
                continue
            nulls = _nulls(name, self.means.get(("null", layer)), means.sums.shape[1])
            unit = "nats" if name == "bridge.free_energy" else ""
            where = {"layer": layer, "branch": "attention", "split": rule, "unit": unit}
            heads = range(means.sums.shape[1])
            means.rows(rows, [name for _ in heads], [{**where, "head": h, **nulls[h]} for h in heads])
            if name == "bridge.distance":
                total = UnitMeans(means.units, 1)
                total.sums, total.weights = means.sums.sum(1, keepdim=True), means.weights.sum(1, keepdim=True)
                known = [n["null"] for n in nulls if n]
                null = {"null": sum(known) / len(known), "null_kind": nulls[0]["null_kind"]} if known else {}
                total.rows(rows, ["bridge.layer_distance"], [{**where, **null}])


def _columns(seen: Tensor, scores: Tensor) -> Tensor:
    """Column masses [.. k]: what every query gives to each key if it looks at all that it may see alike. Uniform without a mask."""
    q, k = scores.shape[-2:]
    order = torch.ones(q, k, dtype=torch.bool, device=seen.device).tril()
    if q == k and bool((seen == order).all()):
        return causal_columns(k, scores.dtype, scores.device)
    share = seen.to(scores.dtype)
    return (share / share.sum(-1, keepdim=True)).sum(-2)


def permuted(scores: Tensor, seed: int) -> Tensor:
    """The scores of every query in random order over the keys that it may see. Shapes: [... q k] -> [... q k]."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(scores.shape, generator=generator).to(scores.device)
    hidden = scores == -torch.inf
    order = noise.masked_fill(hidden, 2.0).argsort(-1)  # what may be seen, shuffled, then the rest
    place = hidden.to(torch.int8).argsort(dim=-1, stable=True)
    return torch.empty_like(scores).scatter_(-1, place, wide(scores).gather(-1, order).to(scores.dtype))


def _nulls(name: str, null: UnitMeans | None, heads: int) -> list[dict[str, Any]]:
    if name == "bridge.entropy_share":
        return [{"null": 1.0, "null_kind": "uniform attention"}] * heads
    if name == "bridge.column_distance":
        return [{"null": 0.0, "null_kind": "columns of uniform attention"}] * heads
    if name != "bridge.distance" or null is None:
        return [{}] * heads
    values = (null.sums.sum(0) / null.weights.sum(0)).tolist()
    return [{"null": value, "null_kind": "scores permuted within rows"} for value in values]


def _summary(rows: Measurements, text: Text) -> str:
    found = rows.where(measure="bridge.distance")
    values = sorted((r.value, r.layer, r.head) for r in found)
    above = f"{sum(r.low is not None and r.null is not None and r.low > r.null for r in found)} of {len(values)} heads above their null"
    if all(r.low is None for r in found):
        above = f"no interval to hold against a null: needs {SMALLEST} {text.units.name}, got {text.units.count}"
    identity = next(r.value for r in rows.where(measure="bridge.identity_error"))
    middle, (top, layer, head) = values[len(values) // 2][0], values[-1]
    return (
        f"softmax is the half bridge to {identity:.0e}; half to full: median head {middle:.3f}, most {top:.3f} (layer {layer}, head {head}) in "
        f"total variation; {above}"
    )
