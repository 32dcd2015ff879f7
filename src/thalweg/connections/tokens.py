"""What is known of the tokens of a call, and what cached decoding keeps of earlier ones; for the connections that look along the token axis."""

from dataclasses import dataclass

import torch
from torch import Tensor


class TokenMemory:
    """What connections that look along the token axis keep between the calls of cached decoding, by site.

    One object lives in the generation cache; a connection calls :meth:`extend` with the tokens of this call and gets past and present.
    """

    def __init__(self) -> None:
        self.slots: dict[str, tuple[Tensor, Tensor]] = {}

    def extend(self, key: str, x: Tensor, mask: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        """Put the tokens of this call after those kept under ``key``; keep the last ``keep`` of the result for the next call.

        Shapes: x [b t ...], mask [b t] (True where the token is real) -> ([b p+t ...], [b p+t]) with p <= keep past tokens.
        """
        if key in self.slots:
            past, past_mask = self.slots[key]
            x, mask = torch.cat([past.to(x.dtype), x], 1), torch.cat([past_mask, mask], 1)
        start = max(x.shape[1] - keep, 0)
        self.slots[key] = (
            x[:, start:].detach().clone(),
            mask[:, start:].clone(),
        )  # a view would keep the whole prefill
        return x, mask

    def select(self, rows: Tensor) -> None:
        """Reorder or repeat the batch (beam search, parallel sampling). rows: [b'] indices."""
        self.slots = {key: (x[rows], mask[rows]) for key, (x, mask) in self.slots.items()}


@dataclass
class Tokens:
    """What is known of the tokens of a call; for the few connections that look along the token axis.

    mask [b t] bool, True where a token is real (None: all are); positions [b t] int; segments [b t] int, equal within one packed
    document; memory: past tokens in cached decoding.
    """

    mask: Tensor | None = None
    positions: Tensor | None = None
    segments: Tensor | None = None
    memory: TokenMemory | None = None

    def real(self, x: Tensor) -> Tensor:
        """The mask, made for ``x`` [b t ...] when none was given."""
        return self.mask.bool() if self.mask is not None else torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
