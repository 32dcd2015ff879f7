"""What a record says about a hypothesis: one number per run, or why there is none."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from thalweg.errors import InputError
from thalweg.statistics import spearman
from thalweg.studies.plan import Hypothesis
from thalweg.studies.store import KEPT, RunRecord

# What ``at`` may say of a logged series and of a measure by depth; the latter also ``layer:K``.
IN_SERIES = ("final", "best")
GOODS = ("share",)  # units of which more is better: accuracies and exact matches
IN_DEPTH = ("last", "final", "first", "min", "max", "mean", "trend")


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
        return Observation(None, reason=f"no finite {h.measure} ({h.at})", unlearned=unlearned(record))
    return Observation(value, unlearned=unlearned(record))


def check_rules(h: Hypothesis) -> None:
    """That ``at`` and ``diverged`` can be read from some record. Raises: InputError."""
    if h.at.startswith("layer:"):
        _layer(h.at, h.id)
    elif h.at not in (*IN_SERIES, *IN_DEPTH):
        raise _unknown_at(h.at, h.id)
    if h.measure.startswith(KEPT) and h.at not in IN_SERIES:
        raise _no_place_of_series(h)
    if not h.measure.startswith(KEPT) and h.at in IN_SERIES and h.at not in IN_DEPTH:
        raise InputError(
            f"hypothesis {h.id}: {h.measure} is a measure by depth, taken at {', '.join(IN_DEPTH)} or layer:K, got {h.at!r}, "
            f"which is for logged series (they begin with {', '.join(KEPT)})"
        )
    if not (h.diverged in ("unigram", "inconclusive") or (_is_number(h.diverged) and math.isfinite(h.diverged))):
        raise _unknown_divergence(h)


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
    raise _unknown_divergence(h)


def _unknown_divergence(h: Hypothesis) -> InputError:
    return InputError(
        f"hypothesis {h.id}: diverged must be unigram, inconclusive or a finite number, got {h.diverged!r}"
    )


def _measured(record: RunRecord, h: Hypothesis) -> float | None:
    series = record.series(h.measure)
    if series:
        if h.at not in IN_SERIES:
            raise _no_place_of_series(h)
        best = max if record.units.get(h.measure) in GOODS else min
        return series[-1][1] if h.at == "final" else best(value for _, value in series)
    return by_depth(record.depth_profile(h.measure), h.at, h.id)


def _no_place_of_series(h: Hypothesis) -> InputError:
    return InputError(
        f"hypothesis {h.id}: {h.measure} is a logged series, taken at {' or '.join(IN_SERIES)}, got {h.at!r}"
    )


def by_depth(profile: dict[int, float], at: str, who: str) -> float | None:
    """One number from a measure by layer. Raises: InputError for an ``at`` that does not exist."""
    if not profile:
        return None
    layers = sorted(profile)
    values = [profile[layer] for layer in layers]
    if at.startswith("layer:"):
        return profile.get(_layer(at, who))
    if at == "trend":
        return spearman(layers, values, constant=0.0)
    simple = {"last": values[-1], "final": values[-1], "first": values[0], "min": min(values), "max": max(values)}
    simple["mean"] = sum(values) / len(values)
    if at not in simple:
        raise _unknown_at(at, who)
    return simple[at]


def _layer(at: str, who: str) -> int:
    number = at.removeprefix("layer:")
    if not (number.isascii() and number.isdecimal()):
        raise InputError(f"hypothesis {who}: write layer:K with a number, got {at!r}")
    return int(number)


def _unknown_at(at: str, who: str) -> InputError:
    return InputError(
        f"hypothesis {who}: at must be one of {', '.join(IN_SERIES)} (logged series), {', '.join(IN_DEPTH)} or layer:K "
        f"(measures by depth), got {at!r}"
    )


def unlearned(record: RunRecord) -> str:
    """Why a run counts as not having learned, empty if it has: not below the unigram entropy, or what xz reaches on the text."""
    return why_unlearned(record.last("val/loss"), record.last("val/bits_per_byte"), record.nulls)


def why_unlearned(loss: object, bits: object, nulls: Mapping[str, float]) -> str:
    """The same of a final loss [nats/token] and bits/byte, each None where it was not logged, and the nulls of the data."""
    for value, called in ((loss, "loss"), (bits, "number of bits/byte")):
        if _is_number(value) and not math.isfinite(value):
            return f"the final {called} is {value}, no finite number"
    unigram, xz = nulls.get("unigram_entropy"), nulls.get("xz_bits_per_byte")
    if _is_number(loss) and _is_number(unigram) and loss >= unigram:
        return f"loss {loss:.3f} is not below the unigram entropy {unigram:.3f}"
    if _is_number(bits) and _is_number(xz) and bits >= xz:
        return f"{bits:.3f} bits/byte is not below the {xz:.3f} of xz"
    return ""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def observed(h: Hypothesis, value: float) -> Observation:
    """A value; one that is not finite takes what the hypothesis states for it."""
    if math.isfinite(value):
        return Observation(value)
    if isinstance(h.diverged, float):
        return Observation(h.diverged, True, True, f"not finite, takes {h.diverged:g}")
    return Observation(None, diverged=True, reason="not finite, rule: inconclusive")
