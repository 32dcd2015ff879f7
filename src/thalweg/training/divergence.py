"""When a run counts as diverged: a rule fixed beforehand, whose outcome is a result."""

import math
from typing import Any

from thalweg.training.config import TrainConfig


class DivergenceRule:
    """The rule of :class:`TrainConfig`. Each check gives None, or the reason in words.

    Its state (first loss, updates in a row above the bound) is saved with the run, so that a resumed run decides alike.
    """

    def __init__(self, config: TrainConfig):
        self.factor, self.patience, self.rms = config.diverge_factor, config.diverge_patience, config.diverge_rms
        self.first_loss: float | None = None
        self.above = 0

    def check_update(self, loss: float, gradient_norm: float) -> str | None:
        """Before the update is applied: loss in nats per token, norm of the gradient before clipping."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(gradient_norm):
            return f"the gradient norm is {gradient_norm}"
        if self.first_loss is None:
            self.first_loss = loss
        bound = self.factor * self.first_loss
        self.above = self.above + 1 if loss > bound else 0
        if self.above >= self.patience:
            return f"the loss has been above {bound:.4g} ({self.factor:g} times the first) for {self.above} steps"
        return None

    def check_stream(self, rms: float) -> str | None:
        """At an evaluation: largest root mean square of a state of the stream."""
        return None if rms <= self.rms else f"the root mean square of the stream is {rms:.4g}, above {self.rms:g}"

    def state_dict(self) -> dict[str, Any]:
        return {"first_loss": self.first_loss, "above": self.above}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first_loss, self.above = state["first_loss"], state["above"]
