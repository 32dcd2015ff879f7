"""Before training: the spectrum of what the first heads leave, how many heads it predicts, what it warns of and what a look costs."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from thalweg._words import counted, duration
from thalweg.geometry.directional import CHANCE
from thalweg.geometry.eigenpairs import choose, spectrum
from thalweg.growth.options import GrowthOptions
from thalweg.growth.protocol import Growable
from thalweg.growth.reading import look
from thalweg.records import Measurements

KAPPA_T = 2.0  # reported of first-party code


@dataclass(frozen=True)
class LayerForecast:
    """One layer as it is. eigenvalues: leading ones, descending, over |S| |M|. above: how many exceed the threshold: the number of heads that
    are added if neither input nor weights move (for a fixed operator, deflation returns its eigenvalues in order, by construction). sees:
    whether its input has directions at all. flops: of one product with the operator. seconds: that the look took."""

    layer: int
    heads: int
    tokens: int
    width: int
    eigenvalues: tuple[float, ...]
    residual: float
    condition: float
    asymmetry: float
    above: int
    sees: bool
    method: str
    flops: float
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """All layers, the threshold that they would have, a guess at the births of each layer (:func:`births_guess`), warnings in words."""

    layers: tuple[LayerForecast, ...]
    threshold: float
    births: float
    warnings: tuple[str, ...]

    def heads(self, share: float) -> tuple[int, ...]:
        """Heads of every layer, were the threshold ``share`` of the first residual, read off the spectrum: if nothing moved."""
        largest = self.largest
        return tuple(f.heads + sum(value > share * largest for value in f.eigenvalues if f.sees) for f in self.layers)

    @property
    def largest(self) -> float:
        """The residual that thresholds are shares of."""
        return max((f.residual for f in self.layers if f.sees), default=math.inf)

    def lines(self) -> list[str]:
        """For a person."""
        taken = 1 - math.exp(-1 / KAPPA_T**2)
        lines = []
        for f in self.layers:
            values = " ".join(f"{value:.3g}" for value in f.eigenvalues[:6])
            lines.append(
                f"layer {f.layer}: {counted(f.heads, 'head')}, residual {f.residual:.3g}, eigenvalues {values} ...; {f.above} above "
                f"the threshold, so {counted(f.heads + f.above, 'head')} if nothing moved"
            )
            lines.append(
                f"  {f.tokens} tokens of width {f.width}, condition {f.condition:.3g}, asymmetry {f.asymmetry:.3f} (chance {CHANCE:.3f}); "
                f"a look: {f.method}, {f.flops:,.0f} FLOPs a product, {duration(f.seconds)}"
            )
        lines.append(
            f"threshold {self.threshold:.3g}; about {self.births:.1f} births in each layer if every head takes {taken:.0%} of the residual "
            "(its share is not known beforehand, so this is no bound)"
        )
        return lines + [f"warning: {warning}" for warning in self.warnings]

    def rows(self) -> Measurements:
        """Rows ``growth.forecast.*``."""
        rows = Measurements()
        for f in self.layers:
            here = {"layer": f.layer, "n": f.tokens}
            rows.add("growth.forecast.start", f.heads, **here)
            rows.add("growth.forecast.heads", f.heads + f.above, **here)
            rows.add("growth.forecast.residual", f.residual, null=0.0, null_kind="white input", **here)
            rows.add("growth.forecast.condition", f.condition, null=1.0, null_kind="white input", **here)
            rows.add(
                "growth.forecast.asymmetry", f.asymmetry, null=CHANCE, null_kind="independent random factors", **here
            )
            for i, value in enumerate(f.eigenvalues):
                rows.add("growth.forecast.eigenvalue", value, stream=i, **here)
        rows.add("growth.forecast.threshold", self.threshold)
        rows.add("growth.forecast.births", self.births)
        return rows


def forecast(network: Growable, options: GrowthOptions, *, shown: int | None = 16) -> Forecast:
    """Look at every layer once and change nothing. shown: leading eigenvalues that are kept (None: all that are positive).

    Raises: InputError for a probe set that cannot be read.
    """
    readings, seconds = [], []
    for layer in range(network.layers()):
        begun = time.perf_counter()
        readings.append(look(network, layer, {}, options))
        seconds.append(time.perf_counter() - begun)
    seeing = [r.residual for r in readings if r.condition >= options.least_condition]
    threshold = options.threshold * max(seeing, default=0.0)
    layers = []
    for reading, taken in zip(readings, seconds, strict=True):
        operator = reading.operator
        values = spectrum(operator, method=options.method)
        n, d, r = len(operator.x), operator.width, operator.query.shape[1]
        sees = reading.condition >= options.least_condition
        layers.append(
            LayerForecast(
                reading.layer,
                len(reading.heads),
                n,
                d,
                tuple((values[values > 0] if shown is None else values[:shown]).tolist()),
                reading.residual,
                reading.condition,
                reading.asymmetry,
                int((values > threshold).sum()) if sees and threshold > 0 else 0,
                sees,
                choose(operator, options.method),
                2.0 * (2 * (2 * n * d) + 2 * (4 * d * r)),
                taken,
            )
        )
    return Forecast(tuple(layers), threshold, births_guess(1.0, options.threshold), tuple(_warnings(layers, options)))


def births_guess(residual: float, threshold: float, kappa: float = KAPPA_T) -> float:
    """kappa^2 ln(residual / threshold): births until the threshold if every head takes the share 1 - exp(-1 / kappa^2) of what is left.

    A guess and no bound: the form is reported of INCRT (arXiv 2604.10703, text not available); heads take no set share, and training raises
    what is left.
    """
    return kappa**2 * math.log(max(residual / threshold, 1.0))


def _warnings(layers: Sequence[LayerForecast], options: GrowthOptions) -> list[str]:
    found = []
    for f in layers:
        if f.condition < options.least_condition:
            found.append(
                f"layer {f.layer}: its input looks alike in every direction (condition {f.condition:.3f}), so the residual is 0 whatever "
                "is left; test before any whitening"
            )
        if f.tokens < f.width:
            found.append(f"layer {f.layer}: {f.tokens} tokens for a width of {f.width}; give a larger probe set")
        if f.above + f.heads > options.most_heads:
            found.append(
                f"layer {f.layer}: {counted(f.above + f.heads, 'head')} predicted, the cap is {options.most_heads}; "
                "raise the threshold or the cap"
            )
    return found
