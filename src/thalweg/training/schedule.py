"""The learning rate over a run."""

import math
from typing import Literal

ScheduleKind = Literal["cosine", "linear", "step", "constant"]


def factor(step: int, *, steps: int, warmup: int, kind: ScheduleKind = "cosine", floor: float = 0.1) -> float:
    """Factor on the peak learning rate for the update that completes ``step`` (1 .. ``steps``).

    Linear from 1/``warmup`` to 1 over the first ``warmup`` updates, then down to ``floor`` at the last one. ``step`` falls twice, by the
    same factor, after 0.8 and 0.9 of all updates: with a floor of 0.1 to 0.316 and to 0.1.
    Source: cosine decay, Loshchilov and Hutter 2017 (arXiv 1608.03983) Eq. 5, one cycle, as in GPT-3 (arXiv 2005.14165, App. B); steps,
    DeepSeek LLM 2024 (arXiv 2401.02954), Section 2.3.
    """
    if step <= warmup:
        return step / warmup
    if kind == "constant":
        return 1.0
    if kind == "step":
        return floor ** (0.5 * ((step > 0.8 * steps) + (step > 0.9 * steps)))
    done = (step - warmup) / max(steps - warmup, 1)
    share = 1 - done if kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return floor + (1 - floor) * share
