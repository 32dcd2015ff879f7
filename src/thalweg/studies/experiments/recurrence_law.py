"""The law of recurrence: rms of the rotary overlap is 1/sqrt(2k) at long times; what of it is left inside a context window?"""

import math
from dataclasses import dataclass

import torch

from thalweg.geometry.normalisation import power_law
from thalweg.geometry.positions import long_time_rms, plain_frequencies, unturned_share, window_rms
from thalweg.records import Measurements
from thalweg.studies.experiments.base import Progress, register
from thalweg.studies.experiments.growing import seeded

ARMS = ("long", "window")


@dataclass(frozen=True)
class RecurrenceOptions:
    """A seed is a clock: its base is drawn from bases and its window from windows, both evenly in the logarithm. planes: over which slopes are
    fitted; head: planes at which the rms is read; samples: distances at long times."""

    bases: tuple[float, float] = (1e4, 1e6)
    windows: tuple[int, int] = (2048, 32768)
    planes: tuple[int, ...] = (16, 32, 64, 128)
    head: int = 64
    samples: int = 40_000


@register(
    "recurrence_law",
    options=RecurrenceOptions,
    columns={"recurrence.rms": ARMS, "recurrence.slope": ARMS, "recurrence.unturned": ("window",)},
    summary="rms of the rotary overlap times sqrt(2k), and its slope in k, at long times and inside the window, for random bases and windows",
    source="Liang 2026, arXiv 2607.17146 (O(1/sqrt k)); constant and windows derived by us",
)
def recurrence_law(options: RecurrenceOptions, seed: int, progress: Progress) -> Measurements:
    """recurrence.rms: 1 by the law. recurrence.slope: of log rms on log k, -1/2 by the law. recurrence.unturned: share of planes that never
    complete a turn.
    """
    o, rows = options, Measurements()
    a, b = torch.rand(2, generator=seeded(seed, 0), dtype=torch.float64).tolist()
    base = _between(o.bases, a)
    length = int(_between(o.windows, b))

    def rms(planes: int, arm: str) -> float:
        theta = plain_frequencies(2 * planes, base)
        return long_time_rms(theta, o.samples, seed)[0] if arm == "long" else window_rms(theta, length)

    ks = torch.tensor(o.planes, dtype=torch.float64)
    where = f"base {base:.3g}, window {length}"
    for arm in ARMS:
        scaled = torch.tensor([rms(k, arm) for k in o.planes], dtype=torch.float64)
        slope = power_law(ks, scaled / (2 * ks).sqrt())[0]
        rows.add("recurrence.rms", rms(o.head, arm), arm=arm, n=o.head, null=1.0, null_kind="the law", split=where)
        rows.add("recurrence.slope", slope, arm=arm, n=len(o.planes), null=-0.5, null_kind="the law", split=where)
    share = unturned_share(plain_frequencies(2 * o.head, base), length)
    rows.add("recurrence.unturned", share, arm="window", n=o.head, null=0.0, null_kind="all planes turn", split=where)
    progress(where)
    return rows


def _between(ends: tuple[float, float], share: float) -> float:
    return math.exp(math.log(ends[0]) + share * (math.log(ends[1]) - math.log(ends[0])))
