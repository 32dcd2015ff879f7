"""The learning rate over a run."""

import math
from typing import Literal

ScheduleKind = Literal["cosine", "linear", "constant"]


def factor(step: int, *, steps: int, warmup: int, kind: ScheduleKind = "cosine", floor: float = 0.1) -> float:
    """Factor on the peak learning rate for the update that completes ``step`` (1 .. ``steps``).

    Linear from 1/``warmup`` to 1 over the first ``warmup`` updates, then down to ``floor`` at the last one.
    Source: cosine decay, Loshchilov and Hutter 2017 (arXiv 1608.03983) Eq. 5, one cycle, as in GPT-3 (arXiv 2005.14165, App. B).
    """
    if step <= warmup:
        return step / warmup
    if kind == "constant":
        return 1.0
    done = (step - warmup) / max(steps - warmup, 1)
    share = 1 - done if kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return floor + (1 - floor) * share
