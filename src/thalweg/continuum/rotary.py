"""The probe of rotary positions: how far the clock of a model carries before it repeats, and which of its planes never turn at all."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.capture.windows import Text
from thalweg.continuum.base import Figure, Finding, Probe, ProbeOptions, Subject, register
from thalweg.continuum.clocks import Clock, clocks_of, signs_of
from thalweg.geometry import positions as geometry
from thalweg.records import Measurements

LONG = 200_000  # lags over which recurrence is looked for beyond the window
PEAKS = 5
POINTS = 160  # distances of the overlap that are kept, evenly spaced in their logarithm
PLANES = (16, 32, 64, 128, 256)
RANDOM = "highest peak of as many planes with random frequencies"
CAVEATS = (
    "The law 1/sqrt(2k) holds at long times; inside a context window it fails, since planes that never turn add a constant.",
    "window_rms and slope.window say by how much; no line of slope -1/2 is fitted to a window.",
    "The overlap is that of the clock alone, with equal weight for every plane; what a head makes of it depends on its queries and keys.",
    "A clock is read from its module; layers (every fourth of SmolLM3) and models (Falcon with ALiBi) that leave it out are not told apart.",
    "still_share counts the channels of a head that hold no positions (qk_nope_head_dim, partial rotation) among all of them.",
    "holonomy walks inside the window in one regime of frequencies; its size is that of rounding, no property of training.",
    "The two advised bases are rules of thumb; neither says what a model does at the target length without training there.",
)


@dataclass(frozen=True)
class RotaryOptions(ProbeOptions):
    """Options of the probe of rotary positions.

    length: tokens of the window, 0: the longest that the model takes. target: tokens of the window that a base is advised for, 0: four times as
    many. lags: distances over which recurrence is looked for at long times.
    """

    length: int = 0
    target: int = 0
    lags: int = LONG

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(length=0, target=0, lags=16)


@register(
    "rotary",
    summary="how far the rotary clock carries: overlap, recurrence, planes that never turn, advice on the base",
    source="rotary positions: Su et al. 2021 (arXiv 2104.09864); recurrence O(1/sqrt(k)): Liang 2026 (arXiv 2607.17146); "
    "the constant 1/sqrt(2k), the law in windows, holonomy in floating point and the advice: derived by us",
)
class Rotary(Probe):
    """The effective frequencies of a model, and the clock that they make."""

    text = False
    title = "The rotary clock"
    Options = RotaryOptions

    def applies(self, subject: Subject) -> str | None:
        clocks = clocks_of(subject.place)
        if not clocks:
            signs, none = signs_of(subject.place), "no module holds inverse frequencies"
            if signs:
                return (
                    f"rotary positions that it may have could not be read: {', '.join(signs)} speak of them, but {none}"
                )
            return f"it has no rotary positions ({none})"
        return (
            None if any(bool((c.frequencies != 0).any()) for c in clocks) else "no plane of its rotary positions turns"
        )

    def run(self, subject: Subject, text: Text | None, options: RotaryOptions) -> Finding:
        rows, lines = Measurements(), []
        caveats: list[str] = [*CAVEATS]
        for clock in clocks_of(subject.place, options.length):
            if not bool((clock.frequencies != 0).any()):
                continue
            lines.append(_clock(clock, options, rows))
            if clock.rule not in ("", "default"):
                caveats.append(
                    f"{clock.name}: frequencies are scaled by the rule {clock.rule!r}; the rows hold what acts."
                )
            if clock.scale != 1:
                caveats.append(
                    f"{clock.name}: cosine and sine are multiplied by {clock.scale:.4g}, which scales the logits, not the angles."
                )
            if clock.step is None:
                caveats.append(
                    f"{clock.name}: its module could not be asked for angles in float32, so frequencies are those of its buffer and "
                    "no closed walk was made."
                )
            if clock.beyond:
                caveats.append(
                    f"{clock.name}: its module changes the frequencies with the length of the text; these act on texts of up to "
                    f"{clock.length:,} tokens, those of {clock.beyond!r} on longer ones."
                )
            elif clock.rule in ("dynamic", "longrope"):
                caveats.append(
                    f"{clock.name}: the rule {clock.rule!r} changes the frequencies with the length of the text; these act on one of "
                    f"{clock.length:,} tokens. Another length: rotary.length."
                )
        return Finding("rotary", summary="; ".join(lines), rows=rows, caveats=tuple(caveats), figures=FIGURES)


FIGURES = (
    Figure(
        "Overlap of two positions at a distance",
        ("rotary.overlap",),
        "step",
        "distance, tokens",
        "mean cosine",
        log_x=True,
        lines="site",
        note="Beyond the window the model was never trained; the standard deviation of random angles is 1/sqrt(2k).",
    ),
    Figure(
        "Tokens for a full turn, plane by plane",
        ("rotary.period", "rotary.window"),
        "step",
        "plane",
        "tokens",
        log_y=True,
        lines="site",
        note="Planes above the line of the window never complete a turn in it. Dashed: plain rotary positions of the same base.",
    ),
    Figure(
        "Highest local peaks of the overlap",
        ("rotary.peak.window", "rotary.peak.long"),
        "step",
        "distance, tokens",
        "overlap (mean cosine)",
        log_x=True,
        lines="site",
        note="Where the overlap rises again with distance. Dashed: the highest peak of random frequencies over as many distances.",
        names=("within the window", "within all distances looked at"),
    ),
)


def _clock(clock: Clock, options: RotaryOptions, rows: Measurements) -> str:
    """All rows of one clock; what is said of it."""
    theta, length = geometry.turning(clock.frequencies), clock.length
    k, where = len(theta), {"site": clock.name, "dtype": "float64"}
    plain = None if clock.base is None else geometry.plain_frequencies(2 * len(clock.frequencies), clock.base)
    for i, value in enumerate(clock.frequencies.tolist()):
        known = {} if plain is None else {"null": float(plain[i]), "null_kind": "plain rotary positions of this base"}
        rows.add("rotary.frequency", value, unit="rad/token", step=i, n=1, **known, **where)
        if value:
            known = {} if plain is None else {**known, "null": 2 * math.pi / float(plain[i])}
            rows.add("rotary.period", 2 * math.pi / abs(value), unit="tokens", step=i, n=1, **known, **where)
            rows.add("rotary.window", length, unit="tokens", step=i, n=1, **where)
    _overlap(theta, max(options.lags, length), rows, where)
    long, error = geometry.long_time_rms(theta, seed=options.seed)
    ends = {"low": long - 1.96 * error, "high": long + 1.96 * error, "interval": "95% normal, over random distances"}
    law = {"null": 1.0, "null_kind": "independent planes at long times"}
    rows.add("rotary.long_time_rms", long, n=200_000, **ends, **law, **where)
    seen = geometry.window_rms(theta, length)
    rows.add("rotary.window_rms", seen, n=length, **law, **where)
    share = geometry.unturned_share(clock.frequencies, length)
    fields: dict[str, Any] = {"n": len(clock.frequencies), **where}
    if clock.base is not None:
        fields |= {"null": geometry.unturned_law(clock.base, length), "null_kind": "1 - ln(L/2 pi)/ln(base), plain"}
    rows.add("rotary.unturned_share", share, **fields)
    rows.add("rotary.still_share", clock.still, n=clock.heads // 2, null=0.0, null_kind="all channels turn", **where)
    peak = _peaks(theta, length, options, rows, where)
    _holonomy(clock, rows, where)
    advice = _advice(clock, options, rows, where)
    turned = f"{share:.0%} of {len(clock.frequencies)} planes never turn in {length:,} tokens"
    return f"{clock.name}: {turned}; rms sqrt(2k) {long:.3f} at long times, {seen:.2f} in the window; {peak}{advice} (k = {k})"


def _overlap(theta: Tensor, longest: int, rows: Measurements, where: dict[str, Any]) -> None:
    lags = torch.logspace(0, math.log10(longest), POINTS, dtype=torch.float64).round().unique()
    sd = 1 / math.sqrt(2 * len(theta))
    for m, rho in zip(lags.long().tolist(), geometry.rotary_overlap(theta, lags).tolist(), strict=True):
        rows.add(
            "rotary.overlap", rho, step=m, n=len(theta), null=0.0, null_kind=f"random angles, sd {sd:.3g}", **where
        )


def _peaks(theta: Tensor, length: int, options: RotaryOptions, rows: Measurements, where: dict[str, Any]) -> str:
    said = ""
    for name, lags in (("window", length), ("long", options.lags)):
        found = geometry.recurrence(theta, lags, PEAKS)
        null = geometry.recurrence_null(len(theta), lags, draws=4, seed=options.seed)
        for m, rho in sorted(found):
            rows.add(f"rotary.peak.{name}", rho, step=m, n=lags, null=null, null_kind=RANDOM, **where)
        if found and name == "window":
            said = f"highest peak in the window {found[0][1]:.2f} at {found[0][0]:,}"
    return said or "no peak in the window"


def _holonomy(clock: Clock, rows: Measurements, where: dict[str, Any]) -> None:
    """How far a closed walk is from doing nothing: turn by a, by b and back by a + b, as the module computes it.

    The connection is flat and abelian, so it is the identity; what is left is the rounding of angles, which grows with the position. All
    three are turns within one text of the clock's length: a module that changes frequencies with the length would else be walked out by one
    clock and back by another.
    """
    if clock.step is None:
        return
    generator = torch.Generator().manual_seed(0)
    top = max(2, clock.length // 2)
    a, b = torch.randint(1, top, (2, 64), generator=generator)
    turns = [torch.complex(*(x.double() / clock.scale for x in clock.step(m))) for m in (a, b, a + b)]
    left = (turns[0] * turns[1] * turns[2].conj() - 1).abs()
    kind = "rounding of a float32 angle of that size"
    null = 2.0**-24 * float((a + b).max()) * float(clock.frequencies.abs().max())
    fields = {**where, "dtype": "float32"}
    rows.add("rotary.holonomy", float(left.max()), n=left.numel(), null=null, null_kind=kind, **fields)


def _advice(clock: Clock, options: RotaryOptions, rows: Measurements, where: dict[str, Any]) -> str:
    """Slopes in k at the base of the model, long and in the window, and bases for the target length."""
    if clock.base is None or clock.base <= 1:
        return ""
    flat = {
        "null": -0.5,
        "null_kind": "the law of long times",
        "n": len(PLANES),
        "dtype": "float64",
        "site": where["site"],
    }
    rows.add("rotary.slope.long", geometry.plane_slope(clock.base, None, PLANES), **flat)
    rows.add("rotary.slope.window", geometry.plane_slope(clock.base, min(clock.length, LONG), PLANES), **flat)
    target = options.target or 4 * clock.length
    if min(clock.length, target) < 7 or len(clock.frequencies) < 2:
        return ""
    same, ntk = geometry.advised_base(clock.base, clock.length, target, 2 * len(clock.frequencies))
    stays = {"null": clock.base, "null_kind": "the base of the model", "n": 1, "step": target, **where}
    rows.add("rotary.base.same_share", same, **stays)
    rows.add("rotary.base.ntk", ntk, **stays)
    return f"; for {target:,} tokens a base of {same:.3g} (same share of turning planes) or {ntk:.3g} (NTK-aware)"
