"""The probe of the context horizon: how long a relevant key keeps its weight, by the model's own logits, beside what it retrieves."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thalweg.capture.attention_call import AttentionCall
from thalweg.capture.limits import longest_of, vocabulary_of
from thalweg.capture.windows import Batch, Text
from thalweg.continuum.base import Collector, Figure, Finding, Probe, ProbeOptions, Subject, UnitMeans, register
from thalweg.continuum.needles import Needle, needles_of
from thalweg.continuum.scores import no_attention, scores_of, watch_attention
from thalweg.errors import InputError
from thalweg.evaluation import ruler
from thalweg.geometry.retention import frozen, horizon, offset_of, retention, shape_of
from thalweg.records import Measurements
from thalweg.statistics import bootstrap

TOKENS_NEEDED = 128  # a window shorter than this holds no needle task
NEIGHBOURS = "other keys of the prompt, drawn at random"
DRAWN = 16
CAVEATS = (
    "N_c is an estimate for one key among others with normal logits, for each head alone; a model retrieves by many heads and layers.",
    "Heads shown as retrieving were chosen by their weight on every second sample and are measured on the others.",
    "Margins are taken at the last token of the prompt, towards the needle's value; a head that looks from elsewhere is not seen.",
    "Margins depend on the distance of the keys too; offset_slope, 0 if they do not, says how they change with the length.",
    "Where skewness and kurtosis are far from 0, or the spread is frozen, N_c by margin and spread is no estimate; the fitted one is.",
)


@dataclass(frozen=True)
class HorizonOptions(ProbeOptions):
    """Options of the probe of horizons.

    lengths: tokens of the needle prompts; those that the model cannot take are left out. samples: prompts of each length.
    share: the weight p* at which the horizon stands. heads: how many retrieving heads are shown by length.
    """

    lengths: tuple[int, ...] = (192, 384, 768)
    samples: int = 6
    share: float = 0.5
    heads: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 2 or self.heads < 1 or not self.lengths or min(self.lengths) < 8:
            raise InputError("horizon needs at least 2 samples, 1 head and lengths of at least 8 tokens")
        if not 0 < self.share < 1:
            raise InputError(f"share of horizon lies between 0 and 1, got {self.share}")


@register(
    "horizon",
    summary="how many keys one relevant key survives by its margin, beside measured needle retrieval; attention sinks",
    source="a context horizon: Liang 2026 (arXiv 2607.17146), formula not available; p = 1/(1 + (N-1) exp(s^2/2 - D)) and N_c: derived by us; "
    "tasks in the style of RULER, Hsieh et al. 2024 (arXiv 2404.06654)",
)
class Horizon(Probe):
    """Margin and spread of logits towards a needle, the horizon that they give and the one that is fitted, retrieval, and the sink's share."""

    title = "The context horizon"
    Options = HorizonOptions

    def applies(self, subject: Subject) -> str | None:
        if not subject.place.causal:
            return "it is no causal decoder, so a token has no past that it could lose"
        return no_attention(subject.place)

    def collect(self, subject: Subject, text: Text, options: HorizonOptions) -> Collector:
        return _Sinks(text)

    def finish(self, collector: "_Sinks", subject: Subject, text: Text, options: HorizonOptions) -> Finding:
        rows = Measurements()
        caveats: list[str] = [*CAVEATS]
        said = [collector.rows(rows, caveats)]
        why, lengths = _needles_fit(subject, options)
        if why:
            caveats.append(f"Margins and retrieval were not measured: {why}.")
        else:
            said.insert(0, _needles(subject, lengths, options, rows, caveats))
        return Finding("horizon", summary="; ".join(said), rows=rows, caveats=tuple(caveats), figures=FIGURES)


FIGURES = (
    Figure(
        "Weight on the needle against the length",
        ("horizon.retained", "horizon.predicted.fitted", "horizon.predicted.normal"),
        "step",
        "tokens of the prompt",
        "share of attention",
        log_x=True,
        lines="site",
        names=("seen", "predicted, fitted tail", "predicted, normal tail"),
        note="Of the best key of the needle, without the first token. Predicted: from the shortest length alone. Dashed: other keys.",
    ),
    Figure(
        "Needle retrieval",
        ("horizon.recall",),
        "step",
        "tokens of the prompt",
        "recall",
        log_x=True,
        note="Dashed: the same answers against other needles.",
    ),
    Figure(
        "Share of attention on the first token",
        ("horizon.sink_layer",),
        y_label="share",
        note="Mean over heads and queries. Dashed: uniform causal attention.",
    ),
    Figure(
        "The longest horizon of a layer's heads",
        ("horizon.layer_fitted",),
        y_label="keys at which the share is left",
        log_y=True,
        note="Fitted to weights at all lengths. Dashed: a key like the others.",
    ),
)


class _Sinks(Collector):
    """Weight on the first token, by head, over queries from the second on."""

    needs = frozenset({"attention"})

    def __init__(self, text: Text):
        self.text = text
        self.means: dict[int, UnitMeans] = {}
        self.layers: dict[int, UnitMeans] = {}
        self.uniform, self.learned = [0.0, 0.0], [0.0, 0]
        self.batch: Batch | None = None

    def begin(self, batch: Batch) -> None:
        self.batch = batch

    def attention(self, layer: int, call: AttentionCall) -> None:
        assert self.batch is not None
        batch, scores = self.batch, scores_of(call)
        total = torch.logsumexp(scores, -1)
        if call.sinks is not None:
            all_mass = torch.logaddexp(total, call.sinks.to(total.dtype)[:, None])
            self.learned[0] += float((1 - (total - all_mass).exp()).mean())
            self.learned[1] += 1
            total = all_mass
        first = (scores[..., 0] - total).exp()[..., 1:]
        seen = first > 0  # with a window the first token is out of sight
        mask = batch.attention_mask
        real = torch.ones_like(first[:, 0]) if mask is None else mask[:, 1:].to(first)
        values, weight = (first * real[:, None]).sum(-1), real.sum(-1)
        heads, units = first.shape[1], self.text.units
        self.means.setdefault(layer, UnitMeans(units, heads)).add(batch.unit_of_row, values, weight)
        self.layers.setdefault(layer, UnitMeans(units, 1)).add(batch.unit_of_row, values.mean(1, keepdim=True), weight)
        if bool(seen.any()):
            each = 1 / torch.arange(2, first.shape[-1] + 2, dtype=torch.float64)
            self.uniform[0] += float((each * real.double().cpu()).sum())
            self.uniform[1] += float(real.sum())

    def rows(self, rows: Measurements, caveats: list[str]) -> str:
        even = self.uniform[0] / max(self.uniform[1], 1)
        null = {"null": even, "null_kind": "uniform causal attention", "branch": "attention"}
        for layer in sorted(self.means):
            heads = range(self.means[layer].sums.shape[1])
            fields = [{**null, "layer": layer, "head": h} for h in heads]
            self.means[layer].rows(rows, ["horizon.sink_share" for _ in heads], fields)
            self.layers[layer].rows(rows, ["horizon.sink_layer"], [{**null, "layer": layer}])
        if self.learned[1]:
            share = self.learned[0] / self.learned[1]
            caveats.append(f"Learned sinks, which belong to no key, take {share:.0%} of the mass beside.")
        shares = [row.value for row in rows.where(measure="horizon.sink_share")]
        over = sum(value > 0.5 for value in shares)
        return (
            f"first token: {sum(shares) / max(len(shares), 1):.0%} of attention ({even:.1%} if uniform), "
            f"more than half in {over} of {len(shares)} heads"
        )


def _needles_fit(subject: Subject, options: HorizonOptions) -> tuple[str, list[int]]:
    """Why no needle can be hidden, or the lengths that fit."""
    if subject.tokenizer is None:
        return "the model has no tokenizer, and a needle is a text", []
    longest = longest_of(subject.model) or max(options.lengths)
    fitting = [n for n in sorted(set(options.lengths)) if n <= longest]
    if not fitting and longest >= TOKENS_NEEDED:
        fitting = [longest]
    return ("", fitting) if fitting else (f"the model takes {longest} tokens at most, too few for a needle task", [])


@dataclass
class _Margins:
    """By layer: sums that are kept of every prompt, tensors [heads]."""

    found: dict[int, list[dict[str, Tensor]]] = field(default_factory=dict)
    needles: list[Needle] = field(default_factory=list)
    seed: int = 0

    def __post_init__(self) -> None:
        self.drawing = [torch.Generator().manual_seed(self.seed + i) for i in range(len(self.needles))]

    def see(self, layer: int, call: AttentionCall) -> None:
        if call.query.shape[2] != max(needle.ids.shape[1] for needle in self.needles):
            return  # a token of the answer, or a pass that asks whether the model is causal
        last = scores_of(call, last=1)[:, :, 0].double()
        for needle, generator, scores in zip(self.needles, self.drawing, last, strict=True):
            self._add(layer, needle, scores[:, -needle.ids.shape[1] :], generator)  # prompts are padded on the left

    def _add(self, layer: int, needle: Needle, scores: Tensor, generator: torch.Generator) -> None:
        """scores [h k]: of the last token of a prompt."""
        keys = scores.shape[-1]
        inside = torch.zeros(keys, dtype=torch.bool)
        inside[needle.start : needle.end] = True
        other = ~inside & torch.isfinite(scores[0]).cpu()
        other[0] = False  # the sink is no distractor like the others
        if not bool(torch.isfinite(scores[:, inside]).any()) or int(other.sum()) < 8:
            return  # a window that does not reach the needle
        others = scores[:, other]
        total = torch.logsumexp(scores, -1)
        best = scores[:, inside].max(-1).values
        places = other.nonzero()[:, 0]
        drawn = places[torch.randint(len(places), (DRAWN,), generator=generator)]
        skew, kurtosis = shape_of(others)
        self.found.setdefault(layer, []).append(
            {
                "margin": best - others.mean(-1),
                "spread": others.std(-1),
                "kept": (scores[:, inside] - total[:, None]).exp().sum(-1),
                "best": torch.sigmoid(best - torch.logsumexp(others, -1)),
                "null": (scores[:, drawn] - torch.logsumexp(others, -1, keepdim=True)).exp().mean(-1),
                "skew": skew,
                "kurtosis": kurtosis,
                "keys": torch.full_like(best, float(other.sum()) + 1),
            }
        )


def _needles(
    subject: Subject, lengths: list[int], options: HorizonOptions, rows: Measurements, caveats: list[str]
) -> str:
    by_length: dict[int, dict[int, dict[str, Tensor]]] = {}
    recalled: dict[int, tuple[float, float | None]] = {}
    for length in list(lengths):
        try:
            made = ruler.samples("single", subject.tokenizer, length, options.samples, seed=options.seed)
        except InputError as error:
            caveats.append(f"{length} tokens are too few for a needle task with this tokenizer ({error}).")
            lengths.remove(length)
            continue
        needles = [*needles_of(made, subject.tokenizer, vocabulary_of(subject.model))]
        margins = _Margins(needles=needles, seed=options.seed)
        with watch_attention(subject.place, margins.see):  # one reading of the prompts: that in which they are answered
            scores = ruler.run(subject.model, subject.tokenizer, {"single": made}, length=length, batch_size=len(made))
        by_length[length] = {
            layer: {name: torch.stack([one[name] for one in found]) for name in found[0]}
            for layer, found in margins.found.items()
        }
        recalled[length] = _recall(scores["single"], length, rows)
    if not by_length:  # each has said why
        return "no needle could be hidden"
    if not any(by_length.values()):
        caveats.append("No head saw a needle: windows of attention are shorter than the prompts.")
        return "no head saw a needle"
    return _horizons(by_length, recalled, options, rows)


def _recall(scores: Any, length: int, rows: Measurements) -> tuple[float, float | None]:
    hits, metric = scores.columns["recall"], scores.metrics[0]
    interval = bootstrap((hits, scores.columns["samples"]), lambda a, b: a / b)
    ends = (
        {"low": interval.low, "high": interval.high, "interval": interval.words} if math.isfinite(interval.low) else {}
    )
    null = {} if metric.null is None else {"null": metric.null, "null_kind": metric.null_kind}
    rows.add("horizon.recall", interval.estimate, step=length, n=len(hits), split=scores.rule, **ends, **null)
    return interval.estimate, metric.null


def _horizons(
    by_length: dict[int, dict[int, dict[str, Tensor]]],
    recalled: dict[int, tuple[float, float | None]],
    options: HorizonOptions,
    rows: Measurements,
) -> str:
    """Horizons by head at the shortest length, the fit over lengths, and the retrieving heads by length."""
    first = min(length for length, found in by_length.items() if found)
    chosen: list[tuple[float, int, int]] = []
    for layer, found in sorted(by_length[first].items()):
        margin, spread, keys = (found[name].mean(0) for name in ("margin", "spread", "keys"))
        length = horizon(margin, spread, options.share)
        fitted, slope = _fitted(by_length, layer, options.share)
        cold = frozen(spread, keys)
        for h in range(len(margin)):
            where = {"layer": layer, "head": h, "branch": "attention", "n": len(found["margin"]), "step": first}
            rows.add(
                "horizon.margin", float(margin[h]), unit="nats", null=0.0, null_kind="a key like the others", **where
            )
            rows.add("horizon.spread", float(spread[h]), unit="nats", null=0.0, null_kind="all keys alike", **where)
            normal = {"null": 0.0, "null_kind": "normal logits"}
            rows.add("horizon.skewness", float(found["skew"].mean(0)[h]), **normal, **where)
            rows.add("horizon.kurtosis", float(found["kurtosis"].mean(0)[h]), **normal, **where)
            rows.add("horizon.frozen", float(cold[h]), null=0.0, null_kind="spread below sqrt(2 ln N)", **where)
            alone = {"null": 1 + (1 - options.share) / options.share, "null_kind": "a key without margin or spread"}
            rows.add("horizon.length", float(length[h]), unit="keys", **alone, **where)
            rows.add("horizon.fitted", float(fitted[h]), unit="keys", **alone, **{**where, "step": None})
            if slope is not None:
                still = {"null": 0.0, "null_kind": "margins do not change with the length"}
                rows.add("horizon.offset_slope", float(slope[h]), **{**where, "step": None}, **still)
            chosen.append((float(found["kept"][::2].mean(0)[h]), layer, h))
    for _, layer, h in sorted(chosen, reverse=True)[: options.heads]:
        _by_length(by_length, first, layer, h, rows)
    for layer in sorted({layer for _, layer, _ in chosen}):
        found = rows.where(measure="horizon.fitted", layer=layer)
        top = max(found, key=lambda r: r.value)
        same = {"unit": "keys", "n": top.n, "null": top.null, "null_kind": top.null_kind, "branch": "attention"}
        rows.add("horizon.layer_fitted", top.value, layer=layer, **same)
    _, layer, h = max(chosen)
    (best,) = (r for r in rows.where(measure="horizon.length", layer=layer, head=h))
    (fitted_best,) = (r for r in rows.where(measure="horizon.fitted", layer=layer, head=h))
    told = ", ".join(f"{value:.0%} at {length:,}" for length, (value, _) in sorted(recalled.items()))
    return (
        f"needle weight is most in layer {layer}, head {h}: {options.share:.0%} is left among {fitted_best.value:.3g} keys (fitted to weights; "
        f"{best.value:.3g} by margin and spread); retrieved {told}"
    )


def _fitted(
    by_length: dict[int, dict[int, dict[str, Tensor]]], layer: int, share: float
) -> tuple[Tensor, Tensor | None]:
    """N_c [heads] from measured weights of the best key at all lengths, and the slope of its offset against log length."""
    x, y = [], []
    for length in sorted(by_length):
        found = by_length[length].get(layer)
        if found is not None:
            x.append(math.log(length))
            y.append(offset_of(found["best"], found["keys"]).mean(0))
    offsets = torch.stack(y)
    length = 1 + offsets.mean(0).exp() * (1 - share) / share
    if len(x) < 2:
        return length, None
    logs = torch.tensor(x, dtype=torch.float64)
    centred = (logs - logs.mean())[:, None]
    return length, (centred * offsets).sum(0) / centred.square().sum()


def _by_length(
    by_length: dict[int, dict[int, dict[str, Tensor]]], first: int, layer: int, h: int, rows: Measurements
) -> None:
    """What a retrieving head keeps at each length, and what margin and spread at the shortest one predict; on the held-out samples."""
    start = {name: x[1::2, h].mean() for name, x in by_length[first][layer].items()}
    where = {"site": f"layer {layer} head {h}", "layer": layer, "head": h, "branch": "attention"}
    for length, found in sorted(by_length.items()):
        if layer not in found:
            continue
        part = {name: x[1::2, h] for name, x in found[layer].items()}
        null = {"null": float(part["null"].mean()), "null_kind": NEIGHBOURS}
        values, n = part["best"].numpy(), len(part["best"])
        interval = bootstrap((values, torch.ones(n).numpy()), lambda a, b: a / b)
        ends = {"low": interval.low, "high": interval.high, "interval": interval.words} if n >= 3 else {}
        rows.add("horizon.retained", float(values.mean()), step=length, n=n, **ends, **null, **where)
        whole = float(part["kept"].mean())
        rows.add("horizon.needle_share", whole, step=length, n=n, **where)
        keys = float(part["keys"].mean())
        even = {"null": 1 / keys, "null_kind": "1 / N", "step": length, "n": n}
        told = retention(start["margin"], start["spread"], keys)
        rows.add("horizon.predicted.normal", float(told), **even, **where)
        offset = offset_of(start["best"], start["keys"])
        rows.add("horizon.predicted.fitted", float(torch.sigmoid(offset - math.log(keys - 1))), **even, **where)
