"""What a run tells the world while it goes on; progress bars and trackers listen, the record does not depend on them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal["start", "step", "evaluation", "checkpoint", "note", "change", "end"]


@dataclass(frozen=True)
class Event:
    """One thing that happened. ``step`` counts completed updates out of ``steps``; ``values`` are named numbers in the units of the record."""

    kind: EventKind
    step: int
    steps: int
    values: Mapping[str, float] = field(default_factory=dict)
    text: str = ""


Listener = Callable[[Event], None]
