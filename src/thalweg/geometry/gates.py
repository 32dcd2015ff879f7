"""What gates do: how strongly a site writes, what it erases or amplifies, where along depth that turns."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError, UnknownNameError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real

THRESHOLD = 0.1  # half width of a class round its exact value, and the distance of "closed" and "open" from 0 and 1

_MGT = "MGT, arXiv 2601.01014, experiment on the distribution of beta"
_TRANSITION = "ours: a definition fixed beforehand for the phase transition that MGT (arXiv 2601.01014) expects"
Statistic = Callable[[Tensor, float], Tensor]  # values [items count], threshold -> [items]


def _share(of: Callable[[Tensor, float], Tensor]) -> Statistic:
    return lambda x, t: of(x, t).double().mean(-1)


def _mean(x: Tensor, _: float) -> Tensor:
    return x.mean(-1)


def _sd(x: Tensor, _: float) -> Tensor:
    return x.std(-1, correction=0)


def _log_abs(x: Tensor, _: float) -> Tensor:
    """Mean ln|x| over the entries that are not 0; -inf where all are."""
    used = x != 0
    logs = torch.where(used, torch.where(used, x, 1.0).abs().log(), 0.0).sum(-1)
    return torch.where(used.any(-1), logs / used.sum(-1).clamp(min=1), -math.inf)


# name of the gate -> statistic -> (function, what it is, range)
STATISTICS: dict[str, dict[str, tuple[Statistic, str, tuple[float | None, float | None]]]] = {
    "gate": {
        "mean": (_mean, "mean of the gate on the update", (0.0, 1.0)),
        "sd": (_sd, "spread of the gate over tokens and channels", (0.0, 0.5)),
        "closed": (_share(lambda x, t: x < t), "share of gate values near 0", (0.0, 1.0)),
        "open": (_share(lambda x, t: x > 1 - t), "share of gate values near 1", (0.0, 1.0)),
    },
    "beta": {
        "mean": (_mean, "mean write strength", (None, None)),
        "sd": (_sd, "spread of the write strength over tokens and channels", (0.0, None)),
        "below_zero": (_share(lambda x, _: x < 0), "share of write strengths below 0", (0.0, 1.0)),
    },
    "read": {
        "mean": (_mean, "mean weight that a stream is read with", (None, None)),
        "sd": (_sd, "spread of the read weights over tokens and streams", (0.0, None)),
    },
    "write": {
        "mean": (_mean, "mean weight that a stream is written to with", (None, None)),
        "sd": (_sd, "spread of the write weights over tokens and streams", (0.0, None)),
    },
    "erase": {
        "mean": (_mean, "mean erase factor (alpha * beta)", (None, None)),
        "sd": (_sd, "spread of the erase factor over tokens and channels", (0.0, None)),
        "log_abs": (_log_abs, "mean ln|alpha * beta| where it is not 0", (None, None)),
        "identity": (
            _share(lambda x, t: (x >= -t) & (x <= t)),
            "share of erase factors near 0: old state kept",
            (0.0, 1.0),
        ),
        "partial": (_share(lambda x, t: (x > t) & (x < 1 - t)), "share between 0 and 1: old state shrunk", (0.0, 1.0)),
        "erase": (_share(lambda x, t: (x >= 1 - t) & (x <= 1 + t)), "share near 1: old state erased", (0.0, 1.0)),
        "flip": (
            _share(lambda x, t: (x > 1 + t) & (x < 2 - t)),
            "share between 1 and 2: old state shrunk, sign turned",
            (0.0, 1.0),
        ),
        "reflect": (_share(lambda x, t: (x >= 2 - t) & (x <= 2 + t)), "share near 2: old state reflected", (0.0, 1.0)),
        "amplify": (
            _share(lambda x, t: (x < -t) | (x > 2 + t)),
            "share below 0 or above 2: old state enlarged",
            (0.0, 1.0),
        ),
    },
}
_OTHER: dict[str, tuple[Statistic, str, tuple[float | None, float | None]]] = {
    "mean": (_mean, "mean", (None, None)),
    "sd": (_sd, "spread over tokens and channels", (0.0, None)),
}


def gate_statistics(
    gates: Mapping[str, Float[Tensor, "..."]], *, threshold: float = THRESHOLD, keep: int = 0
) -> dict[str, Float[Tensor, "..."]]:
    """Statistics of named gate values: ``beta.mean``, ``beta.below_zero``, ``erase.reflect`` and so on, in float64.

    gates: name -> values, of any shape; the first ``keep`` axes are kept, the others reduced. ``gate`` lies in [0, 1]
    and multiplies the update; ``beta`` is the write strength; ``erase`` is the factor e by which the old state is
    removed (state * (1 - e)): with the threshold h, identity |e| <= h, erase |e - 1| <= h, reflect |e - 2| <= h,
    amplify e < -h or e > 2 + h, partial and flip between them; the six shares sum to 1. Other names get mean and sd.
    Raises: InputError for NaN, or a threshold outside (0, 0.5).
    """
    if not 0 < threshold < 0.5:
        raise InputError(f"the threshold of the gate classes must lie in (0, 0.5), got {threshold}")
    found = {}
    for name, values in gates.items():
        real(values, f"gate {name!r}")
        if values.ndim < keep or values.numel() == 0:
            raise ShapeError(f"gate {name!r} must have values beyond its first {keep} axes, got {list(values.shape)}")
        flat = values.double().reshape(*values.shape[:keep], -1)
        for statistic, (function, _, _) in STATISTICS.get(name, _OTHER).items():
            found[f"{name}.{statistic}"] = function(flat, threshold)
    return found


def gate_statistic(values: Float[Tensor, "..."], *, gate: str, statistic: str, threshold: float = THRESHOLD) -> Tensor:
    """One statistic of :func:`gate_statistics` for the values of one gate. Raises: UnknownNameError, InputError."""
    found = gate_statistics({gate: values}, threshold=threshold)
    if f"{gate}.{statistic}" not in found:
        raise UnknownNameError("statistic of a gate", f"{gate}.{statistic}", found)
    return found[f"{gate}.{statistic}"]


for _gate, _statistics in STATISTICS.items():
    for _statistic, (_, _words, _range) in _statistics.items():
        measure(
            f"{_gate}.{_statistic}",
            summary=_words,
            source=_MGT if _gate in ("beta", "erase") else "definition",
            takes=f"values of the gate {_gate!r}, any shape",
            range=_range,
            options={"gate": _gate, "statistic": _statistic},
        )(gate_statistic)


class SignTransition(NamedTuple):
    """Where along depth the sign of a gate turns. depth: in sites, from 0; None where the mean does not change sign."""

    depth: float | None
    midpoint: float
    sharpness: float


@measure(
    "beta.transition",
    summary="first place along depth where the mean write strength changes sign",
    source=_TRANSITION,
    takes="mean by site, share below zero by site, values behind each share",
    range=(0.0, None),
    unit="sites",
)
@measure(
    "beta.sharpness",
    summary="slope, over the whole depth, of a logistic curve through the shares of write strengths below 0",
    source=_TRANSITION,
    takes="mean by site, share below zero by site, values behind each share",
    range=(None, None),
    null="0: the same share at every depth",
)
def sign_transition(means: Sequence[float], below_zero: Sequence[float], count: int) -> SignTransition:
    """Where and how sharply a gate changes sign along depth.

    means, below_zero: by site, first to last; count: values behind each share. ``depth`` is the first place, in sites
    and linear between them, where the mean reaches 0. A logistic curve through the shares gives ``midpoint`` (in
    sites; infinite when flat) and ``sharpness`` (its slope over the whole depth, scaled to 1), by least squares on
    the empirical logits ln((k + 1/2) / (count - k + 1/2)), which stay finite at shares of 0 and 1.
    Raises: InputError for fewer than two sites, other lengths, or a share outside [0, 1].
    """
    if len(means) != len(below_zero) or len(means) < 2:
        raise InputError(f"a transition needs two sites or more of both series, got {len(means)} and {len(below_zero)}")
    if count < 1 or not all(0 <= share <= 1 for share in below_zero):
        raise InputError(f"shares must lie in [0, 1] and count be positive, got {list(below_zero)} and {count}")
    depth = None
    for site, (a, b) in enumerate(pairwise(means)):
        if a == 0 or b == 0 or a * b < 0:
            depth = site + (a / (a - b) if a else 0.0)
            break
    logits = [math.log((share * count + 0.5) / ((1 - share) * count + 0.5)) for share in below_zero]
    last = len(logits) - 1
    place = [site / last for site in range(last + 1)]
    centre, level = sum(place) / len(place), sum(logits) / len(logits)
    spread = sum((x - centre) ** 2 for x in place)
    slope = sum((x - centre) * (y - level) for x, y in zip(place, logits, strict=True)) / spread
    midpoint = (centre - level / slope) * last if slope else math.inf
    return SignTransition(depth, midpoint, slope)
