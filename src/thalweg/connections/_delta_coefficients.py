"""The coefficients of the delta connection: how far along a direction to go (beta) and what to write there (v).

Logits and values are computed in float32 or wider, under autocast too.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thalweg.ops.precision import full_precision, wide


class Gate(nn.Module):
    """beta = 2 sigmoid(W c + b); with ``hidden`` units beta = 2 sigmoid(W2 tanh(W1 c) + b). [b t d] -> [b t] in (0, 2).

    Starts at ``start`` for every input: the last map is 0 and b = logit(start / 2).
    """

    def __init__(self, width: int, start: float, hidden: int | None = None):
        super().__init__()
        self.start = start
        self.hidden = nn.Parameter(torch.zeros(hidden, width)) if hidden else None
        self.weight = nn.Parameter(torch.zeros(1, hidden or width))
        self.bias = nn.Parameter(torch.zeros(1))

    def reset_parameters(self) -> None:
        if self.hidden is not None:
            nn.init.normal_(self.hidden, std=0.5 / math.sqrt(self.hidden.shape[1]))
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, math.log(self.start / (2 - self.start)))

    def forward(self, c: Tensor) -> Tensor:
        with full_precision(c):
            z = wide(c)
            if self.hidden is not None:
                z = torch.tanh(F.linear(z, wide(self.hidden)))
            return 2 * torch.sigmoid(F.linear(z, wide(self.weight), wide(self.bias))).squeeze(-1)

    def extra_repr(self) -> str:
        return f"start={self.start}, hidden={0 if self.hidden is None else self.hidden.shape[0]}"


class FixedGate(nn.Module):
    """The same beta everywhere: [b t d] -> [b t]."""

    def __init__(self, beta: float):
        super().__init__()
        self.beta = beta

    def reset_parameters(self) -> None:
        """Nothing to set."""

    def forward(self, c: Tensor) -> Tensor:
        return wide(c).new_full(c.shape[:2], self.beta)

    def extra_repr(self) -> str:
        return f"beta={self.beta}"


class Value(nn.Module):
    """v = W u; with ``bounded`` v = 4 sigmoid(W u + b). [b t d] -> [b t n]."""

    def __init__(self, width: int, channels: int, bounded: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, width))
        self.bias = nn.Parameter(torch.zeros(channels)) if bounded else None

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.5 / math.sqrt(self.weight.shape[1]))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, u: Tensor) -> Tensor:
        with full_precision(u):
            if self.bias is None:
                return F.linear(wide(u), wide(self.weight))
            return 4 * torch.sigmoid(F.linear(wide(u), wide(self.weight), wide(self.bias)))

    def extra_repr(self) -> str:
        return f"channels={self.weight.shape[0]}, bounded={self.bias is not None}"
