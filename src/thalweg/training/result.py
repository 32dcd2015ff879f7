"""What a run came to."""

from dataclasses import asdict, dataclass, field
from typing import Any


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

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)
