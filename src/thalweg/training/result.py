"""What a run came to."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from thalweg.errors import CheckpointError


@dataclass(frozen=True)
class RunResult:
    """How a run ended; stored as ``result`` of the run record.

    status: done, diverged or interrupted. step: completed updates of ``steps``. train_loss, final_loss, best_loss: nats per token, of the
    last update and of the last and best held-out evaluation; final_loss is None for a run that did not reach its end, because a diverged
    arm takes the value that its rule states. evaluation: the last held-out metrics. nulls: of the data. cost: parameters,
    connection_parameters, flops_per_token (of training), tokens, seconds, tokens_per_second, peak_memory (bytes). data: name and
    fingerprint. reason: why a run diverged or stopped.
    """

    status: str
    step: int
    steps: int
    train_loss: float | None = None
    final_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    nulls: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    @classmethod
    def from_plain(cls, table: Mapping[str, Any], source: Path) -> "RunResult":
        """The result that a record holds; keys of other versions are passed over. Raises: CheckpointError naming the key."""
        for name, (types, needed) in _TYPES.items():
            if needed and name not in table:
                raise CheckpointError(f"the result in {source} lacks {name!r}; train again in a new folder")
            if name in table and (not isinstance(table[name], types) or isinstance(table[name], bool)):
                found = type(table[name]).__name__
                raise CheckpointError(
                    f"the result in {source} is damaged: {name!r} is a {found}; train again in a new folder"
                )
        return cls(**{f.name: table[f.name] for f in fields(cls) if f.name in table})

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


_NUMBER = (int, float, type(None))
_TYPES: dict[str, tuple[tuple[type, ...], bool]] = {
    "status": ((str,), True),
    "step": ((int,), True),
    "steps": ((int,), True),
    "train_loss": (_NUMBER, False),
    "final_loss": (_NUMBER, False),
    "best_loss": (_NUMBER, False),
    "best_step": ((int, type(None)), False),
    "evaluation": ((dict,), False),
    "nulls": ((dict,), False),
    "cost": ((dict,), False),
    "data": ((dict,), False),
    "reason": ((str,), False),
}
