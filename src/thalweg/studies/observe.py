"""What a record says about a hypothesis: one number per run, or why there is none."""

import math
from dataclasses import dataclass

from scipy import stats

from thalweg.errors import InputError
from thalweg.studies.plan import Hypothesis
from thalweg.studies.store import RunRecord


@dataclass(frozen=True)
class Observation:
    """The value of one run. substituted: the run diverged and takes the value its rule states; unlearned: why it has not learned."""

    value: float | None
    diverged: bool = False
    substituted: bool = False
    reason: str = ""
    unlearned: str = ""


def observe(record: RunRecord, h: Hypothesis) -> Observation:
    """The value of ``h.measure`` at ``h.at`` in ``record``, with the rule for divergence applied."""
    if record.status == "diverged":
        return _diverged(record, h)
    value = _measured(record, h)
    if value is None or not math.isfinite(value):
        return Observation(None, reason=f"no finite {h.measure} ({h.at})")
    return Observation(value, unlearned=_unlearned(record))


def _diverged(record: RunRecord, h: Hypothesis) -> Observation:
    if h.diverged == "inconclusive":
        return Observation(None, diverged=True, reason="rule: inconclusive")
    if h.diverged == "unigram":
        value = record.nulls.get("unigram_entropy")
        if value is None:
            return Observation(None, diverged=True, reason="rule: unigram entropy, which this data has not")
        return Observation(value, True, True, f"diverged, takes the unigram entropy {value:.4f}")
    if isinstance(h.diverged, float):
        return Observation(h.diverged, True, True, f"diverged, takes {h.diverged:g}")
    raise InputError(f"hypothesis {h.id}: diverged must be unigram, inconclusive or a number, got {h.diverged!r}")


def _measured(record: RunRecord, h: Hypothesis) -> float | None:
    series = record.series(h.measure)
    if series:
        if h.at not in ("final", "best"):
            raise InputError(f"hypothesis {h.id}: a logged series is taken at final or best, got {h.at!r}")
        return series[-1][1] if h.at == "final" else min(value for _, value in series)
    return by_depth(record.depth_profile(h.measure), h.at, h.id)


def by_depth(profile: dict[int, float], at: str, who: str) -> float | None:
    """One number from a measure by layer. Raises: InputError for an ``at`` that does not exist."""
    if not profile:
        return None
    layers = sorted(profile)
    values = [profile[layer] for layer in layers]
    if at.startswith("layer:"):
        try:
            return profile.get(int(at.removeprefix("layer:")))
        except ValueError:
            raise InputError(f"hypothesis {who}: write layer:K with a number, got {at!r}") from None
    if at == "trend":
        return float(stats.spearmanr(layers, values)[0]) if len(set(values)) > 1 else 0.0
    simple = {"last": values[-1], "final": values[-1], "first": values[0], "min": min(values), "max": max(values)}
    simple["mean"] = sum(values) / len(values)
    if at not in simple:
        raise InputError(f"hypothesis {who}: at must be one of {', '.join(simple)}, trend or layer:K, got {at!r}")
    return simple[at]


def _unlearned(record: RunRecord) -> str:
    """Why a finished run counts as not having learned: above the unigram entropy, or above what xz reaches on the same text."""
    loss, unigram = record.last("val/loss"), record.nulls.get("unigram_entropy")
    if loss is not None and unigram is not None and loss >= unigram:
        return f"loss {loss:.3f} is not below the unigram entropy {unigram:.3f}"
    bits, xz = record.last("val/bits_per_byte"), record.nulls.get("xz_bits_per_byte")
    if bits is not None and xz is not None and bits >= xz:
        return f"{bits:.3f} bits/byte is not below the {xz:.3f} of xz"
    return ""
