"""The probe of RMSNorm: how steep it is at the origin, where the law of its source holds, and at the tokens that a model really reads."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thalweg.capture.histogram import POSITIVE, SIGNED
from thalweg.capture.layout import Located
from thalweg.capture.tables import Entry, Table, add_rows
from thalweg.capture.windows import Batch, Text
from thalweg.continuum.base import Collector, Figure, Finding, Probe, ProbeOptions, Subject, register
from thalweg.continuum.norms import BROKEN, SAME, ZERO, RootMeanSquareNorm, norms_of, refused_of
from thalweg.geometry.catalog import Null
from thalweg.geometry.normalisation import (
    epsilon_slope,
    local_slope,
    power_law,
    rms_inverse,
    rms_lipschitz,
    rms_map,
)
from thalweg.ops.forward_mode import jvp
from thalweg.records import Measurements

EPSILONS = torch.logspace(-12, -1, 23, dtype=torch.float64)  # locked studies read the slope that is fitted over these
RANGE = f"{float(EPSILONS[0]):g} to {float(EPSILONS[-1]):g}"
FELT = 100.0  # mean square / epsilon below which epsilon shortens the output by more than half a percent
CHECKED, ITERATIONS = 4, 8  # tokens and power iterations of the check by jvp
LOW = 0.01  # quantile of tokens whose mean square epsilon should leave alone
FLAT: dict[str, Any] = {"null": 0.0, "null_kind": "epsilon is not felt"}
GLOBAL = "global constant: reached at the origin alone"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CAVEATS = (
    "The slope of -1/2 with R^2 = 1 is an identity at the origin; it says nothing about activations.",
    "slope.local is exact: -eps / (2 (ms + eps)) at the epsilon that acts, mean over tokens; a few tokens near zero can carry it.",
    f"slope.activations is a line fitted over epsilons of {RANGE}, at the geometric mean of ms; a range with a higher end gives a steeper one.",
    "The global constant is reached at x = 0 alone; the local one, a bound max |gain| (ms + eps)^(-1/2), is what a token meets.",
    "lipschitz_check says how much of that bound a power iteration of the module's own Jacobian reaches.",
    "epsilon.stored and epsilon.lost_above say what a dtype leaves of epsilon if a norm sums in it; most norms of models sum in float32.",
    "A norm is one factor of a layer's Jacobian; neither number is the Lipschitz constant of the layer.",
)


@register(
    "rmsnorm",
    summary="how steep RMSNorm is at the origin and at real tokens, and whether epsilon is felt",
    source="law at the origin: Liang 2026 (arXiv 2607.17146); exact norms, values at activations and the inverse: derived by us",
)
class RmsNorm(Probe):
    """The epsilon^(-1/2) law, global and local Lipschitz constants, mean square over epsilon, and the epsilon that fits, for every RMSNorm."""

    title = "RMSNorm where the activations are"

    def applies(self, subject: Subject) -> str | None:
        if norms_of(subject.place):
            return None
        refused, kind = refused_of(subject.place), subject.model.get_submodule
        said = [
            f"its norms ({', '.join(sorted({type(kind(n)).__name__ for n in ns}))}) {why}"
            for why, ns in refused.items()
        ]
        which = "RMSNorm that acts" if ZERO in refused else "RMSNorm"
        return f"it has no {which}: {'; '.join(said) or 'it has no norm'}; the law and its inverse are those of RMSNorm"

    def collect(self, subject: Subject, text: Text, options: ProbeOptions) -> Collector:
        return _Inputs(norms_of(subject.place), text)

    def finish(self, collector: "_Inputs", subject: Subject, text: Text, options: ProbeOptions) -> Finding:
        found, tables, kept, rows = list(collector.norms.values()), collector.tables, collector.kept, Measurements()
        used = [norm for norm in found if tables[norm.name].tokens]
        for norm in used:
            _rows_of(norm, tables[norm.name], kept[norm.name], rows)
        _law(used, tables, rows)
        caveats = [*CAVEATS, *_odd(found, used, subject.place)]
        return Finding("rmsnorm", summary=_summary(used, rows), rows=rows, caveats=tuple(caveats), figures=FIGURES)


FIGURES = (
    Figure(
        "Slope in epsilon at the model's own epsilon",
        ("rmsnorm.slope.local",),
        y_label="d log stretch / d log epsilon",
        lines="branch",
        note="-1/2 would be the law of the origin; at 0 (dashed) epsilon is not felt.",
    ),
    Figure(
        "Stretch of each norm at real tokens",
        ("rmsnorm.lipschitz_local",),
        y_label="bound on the norm of the Jacobian",
        log_y=True,
        lines="branch",
        note="Dashed: the global constant, which only x = 0 reaches.",
    ),
    Figure(
        "Mean square over epsilon",
        ("rmsnorm.log10_ms_over_eps",),
        y_label="log10",
        lines="branch",
        note="Above 2 epsilon shortens the output by less than half a percent; at 0 (dashed) it equals the mean square.",
    ),
    Figure(
        "The law of epsilon, at the origin and at the activations",
        ("rmsnorm.stretch.origin", "rmsnorm.stretch.activations"),
        x="step",
        x_label="log10 of epsilon",
        y_label="stretch",
        log_y=True,
        names=("at the origin", "at the activations"),
        note="At the origin a straight line of slope -1/2 by algebra; at the mean square that the activations have, flat until epsilon "
        "comes near it, so that a line fitted to it depends on how far to the right it goes.",
    ),
)


class _Inputs(Collector):
    """What every norm is given, as sums and histograms over tokens, and a few vectors of each."""

    needs = frozenset({"inputs"})

    def __init__(self, norms: list[RootMeanSquareNorm], text: Text):
        self.norms = {norm.name: norm for norm in norms}
        self.modules = tuple(self.norms)
        columns = {"stretch": POSITIVE, "log_ratio": SIGNED, "felt": None, "slope": None}
        self.tables = {name: Table(columns, text.units) for name in self.norms}
        self.kept: dict[str, Tensor] = {}
        self.batch: Batch | None = None

    def begin(self, batch: Batch) -> None:
        self.batch = batch

    def given(self, module: str, x: Tensor) -> None:
        assert self.batch is not None
        norm, (vectors, units) = self.norms[module], _real(x, self.batch)
        ms = vectors.double().square().mean(-1)
        total = ms + norm.epsilon
        ratio = (ms / norm.epsilon).clamp(min=1e-30).log10() if norm.epsilon else torch.full_like(ms, math.inf)
        felt, slope = (ms < FELT * norm.epsilon).double(), local_slope(ms, norm.epsilon)
        columns = torch.stack([norm.largest_gain * total.rsqrt(), ratio, felt, slope])
        self.tables[module].add(columns, units.to(vectors.device))
        self.kept.setdefault(module, vectors[:: max(1, len(vectors) // CHECKED)][:CHECKED].clone())


def _real(x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The vectors of real tokens [n width] of [b t ... width] or [b h t width], and their units [n]."""
    b, t = batch.input_ids.shape
    x = x.detach()
    if x.ndim > 3 and x.shape[1] != t and x.shape[2] == t:
        x = x.transpose(1, 2)
    elif x.ndim == 2:
        x = x.unflatten(0, (b, -1))
    x = x.reshape(b, x.shape[1], -1, x.shape[-1])
    whole = batch.attention_mask is None or x.shape[1] != t
    real = torch.ones(b, x.shape[1], dtype=torch.bool) if whole else batch.attention_mask.bool()  # type: ignore[union-attr]
    units = batch.unit_of_row[:, None].expand(b, x.shape[1])[real]
    return x[real.to(x.device)].flatten(0, 1), units.repeat_interleave(x.shape[2])


def _rows_of(norm: RootMeanSquareNorm, table: Table, sample: Tensor, rows: Measurements) -> None:
    where: dict[str, Any] = {"site": norm.name, "layer": norm.layer, "branch": norm.part}
    where["dtype"] = str(norm.dtype).removeprefix("torch.")
    n = table.tokens
    finite = norm.epsilon > 0
    top = float(rms_lipschitz(norm.gain, norm.epsilon)) if finite else math.inf
    entries = [
        Entry("rmsnorm.lipschitz_local", "stretch", null=Null(top, 0.0, GLOBAL) if finite else None),
        Entry("rmsnorm.felt", "felt", null=Null(1.0, 0.0, "at the origin every token feels epsilon")),
    ]
    if finite:
        entries.append(
            Entry("rmsnorm.log10_ms_over_eps", "log_ratio", null=Null(0.0, 0.0, "mean square equal to epsilon"))
        )
        entries.append(Entry("rmsnorm.slope.local", "slope", null=Null(FLAT["null"], 0.0, FLAT["null_kind"])))
    add_rows(rows, table, entries, where)
    rows.add(
        "rmsnorm.lipschitz_global", top, n=1, **where, **_null(norm.epsilon**-0.5 if finite else None, "a gain of one")
    )
    rows.add("rmsnorm.epsilon", norm.epsilon, n=1, **where, **_null(norm.said, "the epsilon that the module states"))
    if finite:
        (low,) = (bins.quantile(table.histogram[s : s + bins.count].cpu(), LOW) for (i, bins), s in _binned(table, 1))
        kind = f"epsilon of the model; larger ones are felt by more than {LOW:.0%} of tokens"
        rows.add(
            "rmsnorm.epsilon.largest", 10**low * norm.epsilon / FELT, n=n, **where, null=norm.epsilon, null_kind=kind
        )
        exact = sample.double()
        back = rms_inverse_error(exact, norm.epsilon)
        if back is not None:
            kind = "rounding of float64, 2^-53"
            rows.add("rmsnorm.round_trip", back, n=len(exact), **where, null=2.0**-53, null_kind=kind)
    share = _reached(norm, sample)
    rows.add("rmsnorm.lipschitz_check", share, n=len(sample), **where, null=1.0, null_kind="the bound is reached")


def _binned(table: Table, column: int) -> list[Any]:
    return [(pair, start) for pair, start in zip(table.bins, table.starts, strict=True) if pair[0] == column]


def _null(value: float | None, kind: str) -> dict[str, Any]:
    return {} if value is None else {"null": value, "null_kind": kind}


def rms_inverse_error(x: Tensor, eps: float) -> float | None:
    """The largest relative error of x -> RMSNorm -> inverse over rows of ``x`` [n width]; None where y rounds to the edge of the ball."""
    y = rms_map(x, eps)
    if not bool((y.square().mean(-1) < 1).all()):
        return None
    return float(((rms_inverse(y, eps) - x).norm(dim=-1) / x.norm(dim=-1).clamp(min=1e-300)).max())


def _reached(norm: RootMeanSquareNorm, x: Tensor) -> float:
    """The largest share of the bound max|g| (ms + eps)^(-1/2) that a power iteration of J^T J reaches at rows of ``x``, J by jvp and vjp."""
    bound = norm.largest_gain * (x.double().square().mean(-1) + norm.epsilon).rsqrt()
    v = torch.zeros_like(x)
    v[:, int(norm.gain.abs().argmax())] = 1.0

    def stretched(v: Tensor) -> Tensor:
        return jvp(norm.module, x, v)[1]

    pull: Any = torch.func.vjp(norm.module, x)[1]
    for _ in range(ITERATIONS):
        u = pull(stretched(v))[0]
        v = (u / u.norm(dim=-1, keepdim=True).clamp(min=1e-30)).detach()
    return float(
        (stretched(v).detach().double().norm(dim=-1) / v.double().norm(dim=-1).clamp(min=1e-300) / bound).max()
    )


def _law(norms: list[RootMeanSquareNorm], tables: dict[str, Table], rows: Measurements) -> None:
    """The law of epsilon: measured by jvp at the origin, and at the mean squares of the activations of every norm."""
    measured = torch.stack([_at_origin(float(eps)) for eps in EPSILONS])
    slope, intercept, r2 = power_law(EPSILONS, measured)
    rows.add("rmsnorm.slope.origin", slope, n=len(EPSILONS), **FLAT)
    rows.add("rmsnorm.intercept.origin", intercept, n=len(EPSILONS), null=0.0, null_kind="a gain of one")
    rows.add("rmsnorm.r2.origin", r2, n=len(EPSILONS), null=0.0, null_kind="no law")
    squares = []
    for norm in norms:
        if norm.epsilon <= 0:
            continue
        ms = 10 ** (float(tables[norm.name].total("log_ratio").sum()) / tables[norm.name].tokens) * norm.epsilon
        squares.append(ms)
        where = {"site": norm.name, "layer": norm.layer, "branch": norm.part, "n": tables[norm.name].tokens}
        rows.add("rmsnorm.slope.activations", epsilon_slope(ms, EPSILONS)[0], **where, **FLAT)
    middle = float(torch.tensor(squares, dtype=torch.float64).median()) if squares else math.nan
    for exponent in range(-12, 0):
        eps = 10.0**exponent
        rows.add("rmsnorm.stretch.origin", float(_at_origin(eps)), step=exponent, n=1)
        if squares:
            rows.add("rmsnorm.stretch.activations", (middle + eps) ** -0.5, step=exponent, n=len(squares))
    for eps in sorted({norm.epsilon for norm in norms if norm.said is None} | {n.said for n in norms if n.said}):
        _held(eps, middle, rows)
    for dtype in DTYPES:
        least = max(torch.finfo(torch.float32).tiny, torch.finfo(dtype).max ** -2)
        kind = "smallest normal number of the statistics, float32"
        name = str(dtype).removeprefix("torch.")
        rows.add(
            "rmsnorm.epsilon.smallest", least, n=1, dtype=name, null=torch.finfo(torch.float32).tiny, null_kind=kind
        )


def _held(eps: float, middle: float, rows: Measurements) -> None:
    """What becomes of an epsilon in each dtype. middle: the mean square of the middle norm."""
    for dtype in DTYPES:
        stored, lost = held(eps, dtype)
        where = {"site": f"epsilon {eps:g}", "dtype": str(dtype).removeprefix("torch."), "n": 1}
        rows.add("rmsnorm.epsilon.stored", stored, null=eps, null_kind="epsilon as it is written", **where)
        rows.add("rmsnorm.epsilon.lost_above", lost, null=middle, null_kind="mean square of the middle norm", **where)


def held(eps: float, dtype: torch.dtype) -> tuple[float, float]:
    """Epsilon as a dtype stores it, and the least power of two to which it adds nothing there (infinite for none in its range).

    A mean square above that meets no epsilon where the sum is taken in that dtype; norms that take it in float32 have the limit of float32.
    """
    stored = torch.tensor(eps, dtype=torch.float64).to(dtype)
    powers = torch.tensor(2.0, dtype=torch.float64).pow(torch.arange(-40, 128, dtype=torch.float64)).to(dtype)
    powers = powers[torch.isfinite(powers) & (powers > 0)]
    same = powers[powers + stored == powers].double()
    return float(stored), float(same.min()) if len(same) else math.inf


@cache
def _at_origin(eps: float, width: int = 8) -> Tensor:
    """The stretch of RMSNorm at x = 0 by jvp along every axis: the largest column, J being a multiple of the identity there."""
    x = torch.zeros(width, dtype=torch.float64)
    columns = [jvp(lambda x: rms_map(x, eps), x, axis)[1] for axis in torch.eye(width, dtype=torch.float64)]
    return torch.linalg.matrix_norm(torch.stack(columns, 1), 2)


def _odd(found: list[RootMeanSquareNorm], used: list[RootMeanSquareNorm], place: Located) -> list[str]:
    lines = []
    other = [n for n in found if n.said is not None and abs(n.epsilon - n.said) > SAME * n.said]
    if other:
        lines.append(
            f"{len(other)} norms act with another epsilon than they state, as {other[0].name}: {other[0].epsilon:.3g}, not {other[0].said:.3g}."
        )
    for why, names in refused_of(place).items():
        if why in (ZERO, BROKEN):
            lines.append(f"{len(names)} norms {why}, as {names[0]}; they are left out.")
    if len(used) < len(found):
        lines.append(f"{len(found) - len(used)} of {len(found)} norms were not called in the pass and are left out.")
    if not place.causal:
        lines.append("The model is an encoder; tokens of a window see each other.")
    return lines


def _summary(norms: list[RootMeanSquareNorm], rows: Measurements) -> str:
    eps = sorted({float(f"{n.epsilon:.2g}") for n in norms})
    steep = [r.value for r in rows.where(measure="rmsnorm.lipschitz_local")]
    ratio = [r.value for r in rows.where(measure="rmsnorm.log10_ms_over_eps")]
    local, fitted = ([r.value for r in rows.where(measure=f"rmsnorm.slope.{w}")] for w in ("local", "activations"))
    tops = [r.value for r in rows.where(measure="rmsnorm.lipschitz_global")]
    parts = [f"{len(norms)} RMSNorms, epsilon {', '.join(f'{e:g}' for e in eps)}"]
    if local:
        parts.append(
            f"slope in that epsilon {min(local):.3g} to {max(local):.3g} at tokens (slope -0.5 at the origin, epsilon not felt at 0)"
        )
    parts.append(f"stretch at tokens {min(steep):.3g} to {max(steep):.3g}, at the origin up to {max(tops):.3g}")
    if ratio:
        parts.append(f"mean square {10 ** min(ratio):.3g} to {10 ** max(ratio):.3g} epsilons")
        parts.append(f"slope fitted over epsilons of {RANGE}: {min(fitted):.3g} to {max(fitted):.3g}")
    return "; ".join(parts)
