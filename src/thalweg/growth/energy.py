"""The free energy of a whole run, fit and structure, and what it must do at each kind of event.

F = fit + weight (R + theta heads). fit: loss on the fixed probe set. R: sum over layers of the positive eigenvalues of the residual, what all
directions together still hold. theta: the price of a head, the threshold of growth. weight: nats per unit of residual, the user's to choose,
since fit and structure have no common unit.

Where it must fall, and why (derived; the paper's functional was not available, so "reconstructed"):

* **birth** of heads on optimal planes: fit stays (zero output map). Capturing u takes its eigenvalue lambda from R; the new block itself adds
  -sigma |P S u| v v^T to the residual, which is not positive; so R falls by lambda at least and F by weight (lambda - theta) > 0 per head.
  The further columns of a head (``noise``) add to the residual at most what :func:`thalweg.growth.birth.noise_rise` says, in the
  order of their square; where that is more than lambda - theta, F may rise.
  It holds at the moment of birth, with one normaliser before and after, and for the eigenvectors of one operator. Gamma = |A|_F in the
  place of R would not do: the negative part that the new block adds raises it (measured: at most births).
* **pruning**: the price theta comes back, and the direction of the head returns to the residual. The controller looks beforehand and prunes
  only if weight x (rise of R - theta) + (rise of fit with the head masked) is not positive: so F does not rise.

Where it need not fall:

* **training** between events: full-batch descent with small steps lowers fit, but R moves with the weights either way; minibatch descent
  lowers neither surely. Over training it is a measurement.
* **a new layer**: it brings heads and its own residual. F rises by weight (R of the layer + theta per head).
* **births of heads that have dictionaries of prototypes**: the output stays, but the loss of the new dictionary is part of the fit.
* **births from random factors** (the control): R can rise.
* **a change of the normaliser** |S|_2 |M|_F, which follows the weights: only values with one normaliser compare.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from thalweg.errors import InputError
from thalweg.growth.reading import Reading
from thalweg.records import Measurements

TOLERANCE = 1e-9  # of the size of the terms: what rounding may add to a fall


@dataclass(frozen=True)
class FreeEnergy:
    """fit [nats, or the unit of the loss], residual (sum of positive eigenvalues over layers), heads, threshold, weight."""

    fit: float
    residual: float
    heads: int
    threshold: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.weight < 0 or self.threshold < 0:
            raise InputError(f"weight and threshold must not be negative, got {self.weight:g} and {self.threshold:g}")

    @property
    def structure(self) -> float:
        """weight (R + theta heads)."""
        return self.weight * (self.residual + self.threshold * self.heads)

    @property
    def total(self) -> float:
        return self.fit + self.structure

    def fell_to(self, after: "FreeEnergy") -> bool:
        """Whether ``after`` is no higher, up to rounding and a drift of 1e-6 of the fit."""
        slack = TOLERANCE * (abs(self.total) + abs(self.structure)) + 1e-6 * max(abs(self.fit), 1e-3)
        return after.total <= self.total + slack

    def rows(self, **fields) -> Measurements:
        rows = Measurements()
        rows.add("growth.free_energy", self.total, **fields)
        rows.add("growth.fit", self.fit, **fields)
        rows.add("growth.structure", self.structure, **fields)
        return rows


def free_energy(fit: float, readings: Iterable[Reading], threshold: float, weight: float) -> FreeEnergy:
    """F of a network whose layers read like this."""
    readings = list(readings)
    return FreeEnergy(fit, sum(r.positive for r in readings), sum(len(r.heads) for r in readings), threshold, weight)
