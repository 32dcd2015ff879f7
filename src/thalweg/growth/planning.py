"""Before a growing run: its first spectrum, the heads that each threshold would give, and what they would cost."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thalweg import config as configs
from thalweg._words import counted, duration
from thalweg.data import Task
from thalweg.growth.forecasting import Forecast, forecast
from thalweg.growth.options import GrowthOptions
from thalweg.growth.run import Grower, options_of
from thalweg.models.size import parameters
from thalweg.training import TrainConfig
from thalweg.training.cost import train_flops
from thalweg.training.determinism import derive_seed, pick_device, reproducible
from thalweg.training.engine import Engine
from thalweg.training.parallel import Ranks
from thalweg.training.plan import TrainPlan, plan_of
from thalweg.training.tasks import load_task

SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)  # thresholds of the table, beside the user's own


@dataclass(frozen=True)
class Predicted:
    """What a threshold would come to, were nothing to move: heads by layer, capped as the run caps them (limited: by what, empty for nothing);
    parameters; training FLOPs per token; seconds of the whole run were it of that shape from the start (None: not timed)."""

    threshold: float
    heads: tuple[int, ...]
    limited: Literal["", "capped", "dwell"]
    parameters: int
    flops_per_token: float
    seconds: float | None


@dataclass(frozen=True)
class GrowthPlan:
    """training: the plan of the shape that the run starts with. forecast: its first spectrum. predicted: by threshold, ascending; chosen: which
    of them is the run's. looks: at most so many, each of about so many seconds on average. again: the run begins at a model that was there."""

    training: TrainPlan
    forecast: Forecast
    predicted: tuple[Predicted, ...]
    chosen: float
    looks: int
    look_seconds: float
    again: bool = False

    @property
    def lines(self) -> list[str]:
        """For a person."""
        found = [*str(self.training).splitlines(), "growth      begins at this shape; its first look:"]
        found += [f"  {line}" for line in self.forecast.lines()]
        found.append(
            "heads by threshold, read off this spectrum (weights and inputs will move; the threshold sets the count):"
        )
        found.append(f"  {'threshold':<11}{'heads by layer':<26}{'parameters':>12}{'FLOPs/token':>14}{'time':>10}")
        for p in self.predicted:
            mark = " *" if p.threshold == self.chosen else ""
            heads = " ".join(map(str, p.heads)) + (f" ({p.limited})" if p.limited else "")
            time = "" if p.seconds is None else duration(p.seconds)
            found.append(
                f"  {f'{p.threshold:g}{mark}':<11}{heads:<26}{p.parameters:>12,}{p.flops_per_token:>14,.0f}{time:>10}"
            )
        if any(p.limited == "dwell" for p in self.predicted):
            found.append("  (dwell): the run ends before more births than that, one in a layer at a time")
        if self.again:
            found.append(
                "  thresholds are shares of what this model has left now; what its heads captured in an earlier run is not in its folder"
            )
        found.append(
            f"looking     at most {counted(self.looks, 'look')}, about {duration(self.looks * self.look_seconds)} together (*: this run)"
        )
        return found

    def to_plain(self) -> dict[str, Any]:
        return {
            "training": configs.to_plain(self.training),
            "forecast": configs.to_plain(self.forecast),
            "predicted": configs.to_plain(self.predicted),
            "threshold": self.chosen,
            "looks": self.looks,
            "look_seconds": self.look_seconds,
            "again": self.again,
        }


def plan_growth(
    config: TrainConfig, *, task: Task | None = None, cache_dir: str | Path | None = None, probe: bool = True
) -> GrowthPlan:
    """The plan of a growing run; nothing is written. probe: time a few updates. Raises: InputError as the run would at its start."""
    task = load_task(config, cache_dir) if task is None else task
    options_of(config, config.network(task))  # before anything is timed
    training = plan_of(config, task=task, probe=probe)
    device = pick_device(config.device)
    with reproducible(derive_seed(config.seed, 2), device, config.threads):
        grower = Grower(config)
        grower.attach(Engine(config, task, device, Ranks()))
        grower.ready()
        found = forecast(grower.network, grower.options, shown=None)
        options = grower.options
        shares = sorted({*SHARES, options.threshold})
        predicted = tuple(_predict(grower, found, options, share, config, training) for share in shares)
        chosen = next(p for p in predicted if p.threshold == options.threshold)
        births = max(after - layer.heads for after, layer in zip(chosen.heads, found.layers, strict=True))
        first, later = _timed_looks(grower)
    looks = config.total_steps // options.check_every + 1
    seconds = later + (first - later) * min(births, looks) / looks
    return GrowthPlan(training, found, predicted, options.threshold, looks, seconds, config.init_from is not None)


def _timed_looks(grower: Grower) -> tuple[float, float]:
    """Seconds of a look that is followed by births and their proofs, and of one that is not, on a network that nobody needs afterwards."""
    seconds = []
    for step in (0, grower.options.check_every):
        begun = time.perf_counter()
        grower.network.forget()
        grower.look(step, last=False)
        seconds.append(time.perf_counter() - begun)
    return seconds[0], min(seconds)


def _births(steps: int, options: GrowthOptions) -> int:
    """The most births that a layer has in so many steps, one at a time, by its dwell."""
    if options.dwell == "gap":
        return options.most_heads
    checks = max(math.ceil(options.dwell / options.check_every), 1)  # from one birth to the next
    return steps // (checks * options.check_every) + 1


def _predict(
    grower: Grower, found: Forecast, options: GrowthOptions, share: float, config: TrainConfig, training: TrainPlan
) -> Predicted:
    wanted = found.heads(share)
    capped = tuple(
        max(min(count, options.most_heads), layer.heads) for count, layer in zip(wanted, found.layers, strict=True)
    )
    births = _births(config.total_steps, options)
    heads = tuple(min(count, layer.heads + births) for count, layer in zip(capped, found.layers, strict=True))
    limited = "dwell" if heads != capped else "capped" if capped != wanted else ""
    model = grower.network.model.config
    model = model.replace(layer_heads=tuple(count * grower.network.group for count in heads))
    flops = train_flops(model, config.sequence_length)
    seconds = None if training.seconds is None else training.seconds * flops / training.flops_per_token
    return Predicted(share, heads, limited, sum(parameters(model).values()), flops, seconds)
