"""What a run of growth is asked for: one frozen dataclass, checked when it is made."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from thalweg.config import build, convert
from thalweg.errors import InputError, UnknownNameError

Method = Literal["auto", "dense", "factored", "lanczos"]


@dataclass(frozen=True)
class GrowthOptions:
    """When heads and layers are added, when heads are removed, and when growth ends.

    threshold: theta over Gamma(0), the residual at the first check (the largest over the layers); heads are added while the top eigenvalue is
    above theta. prune_level: phi over theta, below 1 (hysteresis); heads whose directional energy stays below phi are pruned;
    prune_relative_to: ``threshold``, or phi = prune_level x the ``median`` energy over the heads of the layer. check_every: steps between
    looks. dwell: steps that a layer is left alone after an event, or ``gap``: from the spectral gap (:func:`spectral_dwell`). patience: calm
    checks in a row before growth ends. prune_patience: checks in a row below phi before a head is masked. mask_checks: in how many checks the
    mask falls from 1 to 0. allowed_rise: share by which the fit may rise with a head masked away; above it the head is restored.
    degeneracy: eigenvalues nearer than this share of the largest are one, and get their heads at once.
    head_width: of new heads. most_heads: cap per layer. most_layers: cap on depth; None: depth is the user's. asymmetry_level: of the top
    layer, above which a calm layer gets one on top of it; layer_dwell: steps a layer must have lived before. birth: on the optimal
    ``plane`` or at ``random`` (control). captured: directions stored at ``birth``, or the ``current`` top direction of every live head.
    center: residual about the mean token. prune: whether heads are removed at all. stall: births in a row that did not lower the top
    eigenvalue, after which the run is unstable. weight: nats per unit of residual, in the free energy. least_condition: kappa(S) below which
    the residual sees nothing. drift: what a birth or a pruning may change of the outputs, relative. method: of the eigenpairs. noise: size of
    the further columns of a new head beside those of its plane. seed: of the noise in new heads.

    Reported of the paper and its first-party code: threshold 0.1, prune_level 0.01, check_every 5, prune_patience 100, asymmetry_level 0.9,
    layer_dwell 500. Ours: all else. Raises: InputError, UnknownNameError.
    """

    head_width: int
    threshold: float = 0.10
    prune_level: float = 0.01
    prune_relative_to: Literal["threshold", "median"] = "threshold"
    check_every: int = 5
    dwell: int | Literal["gap"] = 100
    patience: int = 3
    prune_patience: int = 100
    mask_checks: int = 4
    allowed_rise: float = 0.01
    degeneracy: float = 1e-3
    most_heads: int = 32
    most_layers: int | None = None
    asymmetry_level: float = 0.9
    layer_dwell: int = 500
    birth: Literal["plane", "random"] = "plane"
    captured: Literal["birth", "current"] = "birth"
    center: bool = False
    prune: bool = True
    stall: int = 5
    weight: float = 1.0
    least_condition: float = 1.05
    drift: float = 1e-6
    method: Method = "auto"
    noise: float = 1e-3
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("prune_relative_to", "birth", "captured", "method"):
            allowed = _CHOICES[name]
            if getattr(self, name) not in allowed:
                raise UnknownNameError(f"value for {name}:", getattr(self, name), allowed)
        _check_dwell(self.dwell, "dwell")
        for name in _WHOLE:
            value = getattr(self, name)
            if value is None or (name == "dwell" and value == "gap"):
                continue
            least = {"head_width": 2, "dwell": 0, "layer_dwell": 0, "seed": 0}.get(name, 1)
            if convert(int, value, name) < least:
                raise InputError(f"{name} must be at least {least}, got {value}")
        reasons = {
            "threshold": "it is a share of the first residual",
            "prune_level": "from 1 on, a head that was pruned would be born again at once",
        }
        for name, reason in reasons.items():
            if not 0 < getattr(self, name) < 1:
                raise InputError(f"{name} must be above 0 and below 1, got {getattr(self, name):g}; {reason}")
        for name in ("allowed_rise", "degeneracy", "weight", "drift", "noise"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} must be finite and not negative, got {getattr(self, name):g}")
        if not self.least_condition >= 1:
            raise InputError(f"least_condition must be at least 1, got {self.least_condition:g}")
        if not 0 < self.asymmetry_level <= 1:
            raise InputError(f"asymmetry_level must be above 0 and at most 1, got {self.asymmetry_level:g}")


_CHOICES = {
    "prune_relative_to": ("threshold", "median"),
    "birth": ("plane", "random"),
    "captured": ("birth", "current"),
    "method": ("auto", "dense", "factored", "lanczos"),
}
_WHOLE = (
    *("head_width", "check_every", "dwell", "patience", "prune_patience", "mask_checks"),
    *("most_heads", "most_layers", "layer_dwell", "stall", "seed"),
)


def from_table(table: Mapping[str, Any]) -> GrowthOptions:
    """The options that a table ``growth`` gives. Raises: InputError, UnknownNameError."""
    _check_dwell(table.get("dwell", 0), "growth.dwell")
    return build(GrowthOptions, dict(table), where="growth")


def _check_dwell(value: Any, name: str) -> None:
    if value != "gap" and (not isinstance(value, int) or isinstance(value, bool)):
        raise InputError(f"{name} must be a whole number of steps, or gap, got {value!r}")


LONGEST_DWELL = 10_000  # reported of first-party code, where the gap is as good as zero


def spectral_dwell(
    first: float, second: float, norm: float, *, rate: float = 0.5, kappa: float = 2.0, error: float = 0.05
) -> int:
    """Steps after which an online tracker of the top direction would stand within ``error``: kappa ln(1 / error) / (rate gap^2).

    gap = (first - second) / norm, so that units do not matter; at most 10,000. Source: first-party code of INCRT (the form, kappa 2, error
    0.05); the division by the norm is ours.
    """
    gap = (first - second) / norm if norm > 0 else 0.0
    if gap < 1e-8:
        return LONGEST_DWELL
    return min(LONGEST_DWELL, math.ceil(kappa * math.log(1 / error) / (rate * gap**2)))
