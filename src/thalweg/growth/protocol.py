"""What the controller asks of a network that can grow: nothing else is called, so anything that answers this can be grown.

Conventions that an implementation must keep:

* Heads of a layer are **summed** after their output maps, never averaged: a mean changes the function when a head is added.
* A new head is born with the given query and key factors and a **zero output map**, so that what the network computes is unchanged. Optimiser
  state of the heads that were there, schedulers and learning rates are the implementation's to keep.
* ``inputs`` and ``outputs`` run on one **fixed probe set**, in evaluation mode, the same at every call, padding left out.
* Identifiers of heads are given by the network, whole numbers that are never used twice within a layer.
* ``mask_head`` is reversible: a factor on the head's output, 1 in the beginning. ``prune_heads`` after a mask of 0 changes no number.
* On several ranks every method gives the same on all of them (means over ranks are taken inside).
* Where several queries share keys (grouped heads), one "head" here is a whole group, its factors side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class HeadFactors:
    """One live head: scores are x W_q W_k^T x^T. query, key [d w]; mask: the factor on its output."""

    id: int
    query: Float[Tensor, "d w"]
    key: Float[Tensor, "d w"]
    mask: float = 1.0


@dataclass(frozen=True, eq=False)
class Birth:
    """What a new head begins with: query and key factors [d w], to be followed by any value map and an output map of zeros.

    direction u [d], partner v [d]: the plane that it stands on; strength sigma: M_a = sigma (v u^T - u v^T); eigenvalue: what was left
    along u; captured: what the block alone gives along u, sigma |P S u| (both not normalised).
    """

    query: Float[Tensor, "d w"]
    key: Float[Tensor, "d w"]
    direction: Float[Tensor, " d"]
    partner: Float[Tensor, " d"]
    strength: float
    eigenvalue: float
    captured: float


@runtime_checkable
class Growable(Protocol):
    """A network whose layers have heads that can be added, masked and removed."""

    def layers(self) -> int:
        """How many layers have heads."""
        ...

    def heads(self, layer: int) -> Sequence[HeadFactors]:
        """The live heads of a layer, in the order of their birth."""
        ...

    def inputs(self, layer: int) -> Float[Tensor, "n d"]:
        """What the attention of this layer reads on the probe set, tokens flattened."""
        ...

    def outputs(self) -> Tensor:
        """What the network computes on the probe set (logits), for drift."""
        ...

    def fit(self) -> float:
        """The loss on the probe set, prototype losses included as they are trained."""
        ...

    def parameters_count(self) -> int:
        """How many parameters the network has."""
        ...

    def add_heads(self, layer: int, births: Sequence[Birth]) -> list[int]:
        """Add heads that compute nothing yet; their new identifiers, in order."""
        ...

    def mask_head(self, layer: int, head: int, value: float) -> None:
        """Multiply the output of a head by ``value`` in [0, 1]."""
        ...

    def prune_heads(self, layer: int, heads: Sequence[int]) -> None:
        """Remove heads for good."""
        ...

    def add_layer(self) -> int:
        """Add a layer with one head on top, that computes the identity; its number. Raise InputError where that is not possible."""
        ...
