"""At which variance do heads with a learned temperature cool? Derived: tau_0 / 4 through the assignment, tau_0 / 2 with it detached."""

import math
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from thalweg.geometry.prototypes import relative_entropy
from thalweg.ops.prototypes import GRADIENTS, Gradient, assign
from thalweg.records import Measurements
from thalweg.studies.experiments.base import Progress, register
from thalweg.studies.experiments.growing import seeded

LAW = {"through": 0.25, "detached": 0.5}
COOLED = 0.5  # of the starting temperature: a head below it has cooled


@dataclass(frozen=True)
class SplitOptions:
    """tokens, prototypes: of every one-dimensional head; start: temperature; noise: of the first prototypes, over the standard deviation;
    around: variances tried, over the law; lr, lr_temperature, steps: full-batch descent."""

    tokens: int = 256
    prototypes: int = 4
    start: float = 8.0
    noise: float = 0.01
    around: tuple[float, ...] = (0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 2.0, 3.0, 5.0)
    lr: float = 0.15
    lr_temperature: float = 0.03
    steps: int = 2000


@register(
    "temperature_split",
    options=SplitOptions,
    columns={
        "split.variance": GRADIENTS,
        "split.order": GRADIENTS,
        "split.temperature_order": GRADIENTS,
        "split.warm_spread": GRADIENTS,
    },
    summary="the variance above which heads cool, over the starting temperature: 1/4 through the assignment, 1/2 detached",
    source="claim reconstructed from the reviews of Cirrincione 2026, arXiv 2604.01880 (scale specialisation); the law is derived",
)
def temperature_split(options: SplitOptions, seed: int, progress: Progress) -> Measurements:
    """split.variance: middle between the largest variance that stays warm and the smallest that cools, over tau_0; NaN where the heads do not
    split in two. split.order: Spearman's correlation of variance and hardness among the cool; split.temperature_order: of variance and
    temperature. split.warm_spread: largest distance of prototypes of a warm head, over the standard deviation.
    """
    o, rows = options, Measurements()
    for gradient in GRADIENTS:
        variances = o.start * LAW[gradient] * torch.tensor(sorted(o.around), dtype=torch.float64)
        x, prototypes, temperatures = _descend(o, variances, gradient, seed)
        cool = temperatures < COOLED * o.start
        warm = variances[~cool]
        split = math.nan
        if cool.any() and len(warm) and warm.max() < variances[cool].min():
            split = (warm.max() + variances[cool].min()).item() / 2 / o.start
        law = {"null": LAW[gradient], "null_kind": "the law"}
        rows.add("split.variance", split, arm=gradient, n=len(variances), unit="tau_0", **law)
        hardness = [
            relative_entropy(assign(a, p, t.item()).weights).item()
            for a, p, t in zip(x, prototypes, temperatures, strict=True)
        ]
        for name, values in (("order", [1 - h for h in hardness]), ("temperature_order", temperatures.tolist())):
            chosen = [v for v, c in zip(values, cool.tolist(), strict=True) if c]
            rows.add(f"split.{name}", _rank(variances[cool].tolist(), chosen), arm=gradient, n=len(chosen), null=0.0)
        spread = (prototypes.amax(1) - prototypes.amin(1))[:, 0] / variances.sqrt()
        rows.add("split.warm_spread", spread[~cool].max().item() if len(warm) else math.nan, arm=gradient, n=len(warm))
        for variance, temperature, h in zip(variances.tolist(), temperatures.tolist(), hardness, strict=True):
            where = {"arm": gradient, "split": f"variance {variance:g}"}
            rows.add("split.temperature", temperature, **where)
            rows.add("split.hardness", h, null=1.0, null_kind="all prototypes at one point", **where)
        progress(f"{gradient}: splits at {split:.3g} tau_0 (law {LAW[gradient]:g})")
    return rows


def _descend(o: SplitOptions, variances: Tensor, gradient: Gradient, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [h n 1], prototypes [h k 1] and temperatures [h] after the descent; heads do not know of one another."""
    generator = seeded(seed, LAW[gradient] == 0.25)
    base = torch.randn(o.tokens, generator=generator, dtype=torch.float64)
    base = (base - base.mean()) / base.std(correction=0)
    x = (variances.sqrt()[:, None] * base)[..., None]
    start = o.noise * torch.randn(len(variances), o.prototypes, 1, generator=generator, dtype=torch.float64)
    prototypes = (variances.sqrt()[:, None, None] * start).requires_grad_()
    log_temperature = torch.full_like(variances, math.log(o.start)).requires_grad_()
    optimizer = torch.optim.SGD(
        [{"params": [prototypes], "lr": o.lr}, {"params": [log_temperature], "lr": o.lr_temperature}]
    )
    for _ in range(o.steps):
        optimizer.zero_grad()
        assign(x, prototypes, log_temperature.exp(), gradient=gradient).loss.mean(-1).sum().backward()
        optimizer.step()
    return x, prototypes.detach(), log_temperature.detach().exp()


def _rank(x: list[float], y: list[float]) -> float:
    if len(x) < 4 or len(set(y)) < 2:
        return math.nan
    return float(stats.spearmanr(x, y).statistic)  # type: ignore[attr-defined]  # its stub has no fields
