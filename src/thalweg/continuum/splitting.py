"""The depth as an integrator: a layer is one step of attention and one of feed-forward, so what does their order do, and what a finer step?"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.capture.evaluating import evaluating
from thalweg.capture.layout import Located
from thalweg.capture.proof import called
from thalweg.capture.states import Tokens
from thalweg.capture.windows import NOT_SCORED, Batch, Text
from thalweg.continuum.base import Collector, Figure, Finding, Probe, ProbeOptions, Subject, UnitMeans, register
from thalweg.continuum.fields import Layer, differentiable, logits_of, pairs, watch_layers, why_no_fields
from thalweg.continuum.passes import states_only
from thalweg.errors import InputError
from thalweg.geometry.bracket import order_swap, swap_cosine, swap_of
from thalweg.ops.depth import through_layer
from thalweg.records import Measurements
from thalweg.statistics import SMALLEST

CUTS = (1, 2, 4, 8, 16, 32)  # 1 / h at which the bracket is held against the swap
REFINED = (
    ("lie", 1),
    ("lie", 2),
    ("lie", 4),
    ("lie", 8),
    ("swapped", 1),
    ("together", 1),
    ("strang", 1),
    ("strang", 2),
)
LIMIT = ("strang", 4)  # the finest: stands for the exact flow
COLUMNS = ("splitting.cosine", "splitting.cosine.other_tokens", "splitting.cosine.other_layer", "splitting.size")


@dataclass(frozen=True)
class SplittingOptions(ProbeOptions):
    """refine_tokens: of the first window, on which steps are refined and the error of the bracket is taken by step; 0: neither is."""

    refine_tokens: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refine_tokens < 2 and self.refine_tokens != 0:
            raise InputError(
                "refine_tokens of splitting must be at least 2, as the first token of a window is left out, or 0 for no finer steps, "
                f"got {self.refine_tokens}"
            )


@register(
    "splitting",
    summary="depth as an integrator: order swap against the bracket of attention and feed-forward, and finer steps",
    source="Liang 2026, arXiv 2607.17146 (cosines .717 and .623, in words; text not readable); "
    "sign, expansion, nulls and refinement derived by us",
)
class Splitting(Probe):
    """R after T minus T after R against -[T, R] at every token but the first of a window; then whole layers in finer steps.

    T, R: what attention and feed-forward add to a state, norms included, in float32 or wider. The swap is at a step of 1, as the model has it.
    """

    Options = SplittingOptions
    title = "Depth as an integrator: torsion and step size"

    def applies(self, subject: Subject) -> str | None:
        return why_no_fields(subject.place) or _why_no_derivatives(subject.place)

    def collect(self, subject: Subject, text: Text, options: SplittingOptions) -> Collector:
        refined = Measurements()
        if options.refine_tokens:
            with evaluating(subject.model):
                _refine(subject.place, text, options, refined)
        return _Torsion(subject, text, options, refined)

    def finish(self, collector: "_Torsion", subject: Subject, text: Text, options: SplittingOptions) -> Finding:
        located, rows = subject.place, collector.refined
        found = collector.rows(rows)
        refined, layers = min(options.refine_tokens, len(text.windows[0].ids)), len(collector.means)
        caveats = [
            "The first token of a window (a sink in most models) is left out.",
            "A step of 1 lies outside the radius of the expansion, so a cosine below 1 refutes nothing (see splitting.error by step).",
            "Fields are called one by one on captured states: the swap of one layer is not carried on to the next.",
        ]
        left = located.depth - layers
        if left:
            caveats.append(
                f"{left} of {located.depth} layers have other sublayers than one attention and one feed-forward."
            )
        if collector.still:
            caveats.append(
                f"In {len(collector.still)} of {layers} layers attention or feed-forward adds nothing, so there is no swap to compare "
                "with a bracket: their cosines of 0 say nothing, and splitting.found leaves them out."
            )
        if refined and not rows.where(measure="splitting.error"):
            caveats.append("No layer has a bracket on the window of the finer steps, so there is no error by step.")
        if refined:
            caveats.append(
                f"Finer steps and the error by step are from {refined} tokens of one window, without an interval."
            )
        return Finding(
            "splitting",
            summary=_summary(rows, collector.still, found),
            rows=rows,
            caveats=tuple(caveats),
            figures=FIGURES,
            sketch=bool(left),
        )


class _Torsion(Collector):
    """Cosines and sizes by layer, over the tokens of all batches. refined: the rows of finer steps, which were taken before."""

    needs = frozenset({"layers"})

    def __init__(self, subject: Subject, text: Text, options: SplittingOptions, refined: Measurements):
        self.located, self.refined, self.prove = subject.place, refined, not options.refine_tokens
        self.means = {pair[1].layer: UnitMeans(text.units, len(COLUMNS)) for pair in pairs(self.located)}
        self.generator = torch.Generator().manual_seed(options.seed)
        self.earlier: Tensor | None = None
        self.batch: Batch | None = None
        self.moving: set[int] = set()  # layers where the order or the bracket changes anything
        self.units = text.units

    @property
    def still(self) -> list[int]:
        """The other layers."""
        return [layer for layer in self.means if layer not in self.moving]

    def begin(self, batch: Batch) -> None:
        self.batch, self.earlier = batch, None

    def layer(self, layer: Layer) -> None:
        assert self.batch is not None
        t, r = layer.updates or (None, None)
        with differentiable():
            swap = swap_of(layer.attention, layer.feed_forward, layer.before, t, r)
        real, device = layer.real.clone(), swap.residual.device
        real[:, 0] = False
        tokens = Tokens.of(real.to(device), self.batch.unit_of_row.to(device))
        residual, bracket, both = (tokens.flat(x) for x in (swap.residual, swap.bracket, swap.first + swap.after))
        if bool(residual.any()) or bool(bracket.any()):
            self.moving.add(layer.index)
        order = torch.randperm(len(residual), generator=self.generator).to(device)
        order = torch.where(order == torch.arange(len(order), device=device), order.roll(1), order)
        size = torch.linalg.vector_norm(residual, dim=-1) / torch.linalg.vector_norm(both, dim=-1).clamp(min=1e-30)
        columns = [swap_cosine(residual, bracket), swap_cosine(residual, bracket[order])]
        columns += [torch.zeros_like(size) if self.earlier is None else swap_cosine(residual, self.earlier), size]
        weight = torch.ones(len(size), len(COLUMNS))
        if layer.index == min(self.means):
            weight[:, 2] = 0
        self.earlier = bracket
        self.means[layer.index].add(tokens.unit, torch.stack([c.to(size) for c in columns], 1), weight)

    def end(self, batch: Batch) -> None:
        self.earlier = None

    def rows(self, rows: Measurements) -> str:
        """In words: in how many layers the cosine stands above all nulls."""
        random = {
            "null": self.located.width**-0.5,
            "null_kind": "1/sqrt(width): root mean square of a random direction",
        }
        found = 0
        for layer, mean in self.means.items():
            where, own = {"site": f"layers.{layer}", "layer": layer}, Measurements()
            other = float(mean.sums[:, 1].sum() / mean.weights[:, 1].sum())
            nulls = {"null": other, "null_kind": "prediction of another token of the layer"}
            mean.rows(own, COLUMNS, [{**where, **nulls}, {**where, **random}, {**where, **random}, where])
            rows.extend(own)
            found += stands_out({row.measure: row for row in own}, random["null"])
        if not self.moving:
            return "nothing to compare"
        if all(row.low is None for row in rows.where(measure=COLUMNS[0])):
            return f"no interval to hold against a null: needs {SMALLEST} {self.units.name}, got {self.units.count}"
        null = {"null": 0.025, "null_kind": "chance, where there is nothing to find"}
        rows.add("splitting.found", found / len(self.moving), n=len(self.moving), **null)
        return f"order swap follows the bracket in {found} of {len(self.moving)} layers"


def stands_out(rows: dict[str, Any], random: float) -> bool:
    """Whether the interval of the cosine lies above those of all nulls; no where it has none."""
    cosine = rows[COLUMNS[0]]
    nulls = [rows[name] for name in COLUMNS[1:3] if name in rows]
    ends = [row.high for row in nulls]
    return (
        cosine.low is not None and None not in ends and cosine.low > max([random, *(e for e in ends if e is not None)])
    )


def _refine(located: Located, text: Text, options: SplittingOptions, rows: Measurements) -> int:
    """Error of the bracket by step, and the model in finer steps, on the first window; the tokens that were looked at."""
    window = text.windows[0]
    ids = torch.tensor([window.ids[: options.refine_tokens]])
    batch = Batch(ids, None, torch.tensor([window.targets[: ids.shape[1]]]), torch.tensor([0]))
    layers: list[Layer] = []
    errors: list[list[float]] = []

    def see(layer: Layer) -> None:
        with differentiable():
            found = swap_of(layer.attention, layer.feed_forward, layer.before, *(layer.updates or ()))
            size = torch.linalg.vector_norm(found.bracket[:, 1:])
            errors.append([])
            fields = layer.attention, layer.feed_forward
            known = fields[0](layer.before), fields[1](layer.before)
            for cut in CUTS if size else ():
                swap = found.residual if cut == 1 else order_swap(*fields, layer.before, 1 / cut, known=known)
                off = torch.linalg.vector_norm((swap * cut**2 + found.bracket)[:, 1:])
                errors[-1].append(float(off / size.clamp(min=1e-30)))
        layers.append(layer)

    with watch_layers(located, see, prove=True):
        located.model(**called(located.model, batch.call), **states_only(located.model))
    table = torch.tensor([row for row in errors if row], dtype=torch.float64)
    if len(table):
        _errors(table, rows)
    if len(layers) == located.depth:
        _compare(located, layers, batch, rows)
    return ids.shape[1]


def _errors(table: Tensor, rows: Measurements) -> None:
    """What the bracket misses, by step. table [layers cuts]."""
    kind = {"interval": "p10 to p90 over layers", "n": len(table), "null": 0.0, "null_kind": "the step is small"}
    for i, cut in enumerate(CUTS):
        low, middle, high = table[:, i].quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        rows.add("splitting.error", middle, step=cut, low=low, high=high, **kind)
    order = (table[:, -2] / table[:, -1]).log2().median().item()
    rows.add("splitting.error_order", order, n=len(table), null=1.0, null_kind="O(h): a smooth field at small steps")


def _compare(located: Located, layers: list[Layer], batch: Batch, rows: Measurements) -> None:
    def end(scheme: Any, steps: int) -> Tensor:
        x = layers[0].before
        for layer in layers:
            x = through_layer(x, (layer.attention, layer.feed_forward), steps, scheme)
        return x

    model = end("lie", 1)
    limit = end(*LIMIT)
    scored = located.causal and located.head is not None
    logits = logits_of(located, model) if scored else None
    own, apart = None, 0.0
    if logits is not None:
        own = logits.double().log_softmax(-1)
        apart = _kl(own, logits.roll(1, dims=1))
        rows.add("refinement.kl", apart, branch="another token", unit="nats/token", n=batch.input_ids.numel())
    for scheme, steps in (*REFINED, LIMIT):
        state = model if (scheme, steps) == REFINED[0] else limit if (scheme, steps) == LIMIT else end(scheme, steps)
        where = {"branch": scheme, "step": steps, "n": state.shape[1]}
        rows.add("refinement.state", _off(state, model), null=0.0, null_kind="the model itself", **where)
        rows.add(
            "refinement.limit",
            _off(state, limit),
            null=0.0,
            null_kind=f"the flow, as {LIMIT[0]} in {LIMIT[1]} steps",
            **where,
        )
        if logits is None or own is None:
            continue
        got = logits_of(located, state)
        null = {"null": apart, "null_kind": "predictions of the token before"}
        rows.add("refinement.kl", _kl(own, got), unit="nats/token", **null, **where)
        agree = (got.argmax(-1) == logits.argmax(-1)).double().mean().item()
        rows.add("refinement.agreement", agree, null=1.0, null_kind="the model itself", **where)
        targets = batch.targets.to(got.device).flatten()[: got.shape[1]]
        if bool((targets != NOT_SCORED).any()):
            losses = [F.cross_entropy(x.flatten(0, 1)[: len(targets)], targets).item() for x in (logits, got)]
            rows.add(
                "refinement.loss", losses[1], unit="nats/token", null=losses[0], null_kind="the model itself", **where
            )


def _kl(own: Tensor, other: Tensor) -> float:
    """Mean of KL(model || other) over tokens. own: log probabilities of the model, float64; other: logits."""
    q = other.double().log_softmax(-1)
    return torch.sub(own, q, out=q).mul_(own.exp()).sum(-1).mean().item()


def _off(state: Tensor, wanted: Tensor) -> float:
    """Mean over tokens of the norm of the difference over that of what is wanted, the first token left out."""
    off = torch.linalg.vector_norm((state - wanted)[:, 1:], dim=-1)
    return (off / torch.linalg.vector_norm(wanted[:, 1:], dim=-1).clamp(min=1e-30)).double().mean().item()


def _why_no_derivatives(located: Located) -> str | None:
    """Why the layers cannot be differentiated forward; None where they can."""
    for module in (m for pair in pairs(located) for place in pair for m in located.module(place.sublayer).modules()):
        kernel = getattr(getattr(module, "config", None), "_experts_implementation", None)
        if kernel == "grouped_mm" and any(p.ndim == 3 for p in module.parameters(recurse=False)):
            return (
                "its experts run in the kernel grouped_mm, which has no forward derivative; call "
                'model.set_experts_implementation("eager"), or write "experts_implementation": "eager" into its config.json'
            )
    return None


def _summary(rows: Measurements, still: list[int], found: str) -> str:
    cosines = [row.value for row in rows.where(measure=COLUMNS[0]) if row.layer not in still]
    words = [f"mean cosine {sum(cosines) / len(cosines):+.3f}, {found}"] if cosines else [found]
    if still:
        words.append(f"attention or feed-forward adds nothing in {len(still)} layers")
    finer = rows.where(measure="refinement.kl", branch=LIMIT[0], step=LIMIT[1]).to_rows()
    if finer:
        words.append(f"{finer[0]['value']:.2g} nats from the model to the flow that it would integrate")
    return "; ".join(words)


FIGURES = (
    Figure(
        "Order swap against the bracket",
        COLUMNS[:3],
        y_label="cosine",
        note="Torsion is what stands above the predictions of other tokens and of the layer before.",
    ),
    Figure("How much the order matters", (COLUMNS[3],), y_label="swap / update of the layer"),
    Figure(
        "What the bracket misses, by step",
        ("splitting.error",),
        x="step",
        x_label="steps in a layer (1/h)",
        y_label="relative error",
        log_x=True,
        log_y=True,
        note="A model at a step of 1 is where the line begins; it falls by half at every doubling where the expansion holds.",
    ),
    Figure(
        "The model in finer steps",
        ("refinement.kl",),
        x="step",
        x_label="steps in a layer (1/h)",
        y_label="nats from the model",
        log_x=True,
        lines="branch",
        note="If depth were the exact integral of a flow, finer steps would change nothing.",
    ),
)
