"""What may change the structure of a model while it trains: growth is one such thing. The loop knows no more of it than this."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from thalweg.records import Measurements, RunFolder

if TYPE_CHECKING:
    from thalweg.training.engine import Engine


@dataclass(frozen=True)
class Change:
    """What one look at a model came to: rows and named numbers for the record, lines for a person."""

    rows: Measurements = field(default_factory=Measurements)
    values: dict[str, float] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


class Changer(Protocol):
    """Asked after every update, on all ranks together, before the model is evaluated and saved.

    It changes the model by :meth:`thalweg.training.engine.Engine.adopt`, which carries optimisers over. What it needs to go on stands in
    ``state_dict`` (tensors and plain values), which the checkpoint keeps beside the model's new shape.
    """

    def attach(self, engine: "Engine") -> None:
        """Before the first pass. Raise InputError for a run that it cannot change."""
        ...

    def begin(self) -> Change:
        """Of a run that starts: what is done before the first evaluation."""
        ...

    def look(self, step: int, *, last: bool) -> Change | None:
        """After ``step`` updates; None where nothing is due. last: no update follows."""
        ...

    def diverged(self, step: int, reason: str) -> Change:
        """Of a run that ends as diverged at ``step``: no look follows, so this is the last word on the structure."""
        ...

    def write(self, folder: RunFolder) -> None:
        """On the first rank, after every look and when the run is taken up: what has happened so far, into the run folder."""
        ...

    def end(self, folder: RunFolder) -> None:
        """On the first rank, of a run that is done."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
