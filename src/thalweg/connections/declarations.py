"""What a connection declares of itself beside what it does: to sublayers, to the optimiser, to readers; the battery holds it to all of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Requirements:
    """What a connection asks of the inside of a sublayer, which the sublayer implements or refuses.

    gain: factor on the initial weights of value, attention output and both feed-forward maps (not query and key).
    output_gain: factor on the initial weights of the last map of the sublayer only (GPT-2's 1/sqrt(2L)).
    init: distribution of the generic pass, ``normal`` with the model's std or ``xavier`` (normal, with the gains above).
    inner_norm: a norm before the last map of the sublayer (Sub-LN).
    """

    gain: float = 1.0
    output_gain: float = 1.0
    init: Literal["normal", "xavier"] = "normal"
    inner_norm: bool = False


@dataclass(frozen=True)
class GroupHint:
    """How the optimiser should treat a group of parameters: a factor on the learning rate, and weight decay (None: the run's default)."""

    lr_mul: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True)
class Equivalence:
    """A claim about initialisation: the whole stream equals connection ``name`` with ``options`` within ``tolerance`` (float64, relative)."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9


@dataclass(frozen=True)
class Facts:
    """What ``thalweg show connection``, the documentation and the reports say of a connection.

    source: paper and equation. equation: in text, one line per step. words: the same in plain words, with the shape at each edge.
    chosen: values that the source does not state and that are ours. deviations: where the code leaves the source.
    verified: against what it was checked, in the words of its author: nothing unless said.
    """

    source: str
    equation: str
    words: str
    constraint: str = "none"
    precision: str = "coefficients and norms in float32 or wider; the stream in the dtype of the model"
    chosen: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()
    verified: tuple[str, ...] = ()
    bibtex: str = ""
