"""What cached decoding keeps: keys and values, which tokens are real, and the memory of connections that look along tokens."""

import weakref
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from thalweg.connections import TokenMemory
from thalweg.errors import InputError, ShapeError


class DecoderCache:
    """Grows with every call. Keys and values [b h p w] per attention site; ``mask`` [b p] (None: every token so far is real)."""

    def __init__(self) -> None:
        self.length = 0
        self.mask: Bool[Tensor, "b p"] | None = None
        self.slots: dict[int, tuple[Tensor, Tensor]] = {}
        self.memory = TokenMemory()
        self._owner: weakref.ref[nn.Module] | None = None  # weak: a cache keeps no model alive

    def claim(self, model: nn.Module) -> None:
        """Belong to ``model`` from now on. Raises: InputError if the tokens held come from another one, whose keys say nothing here."""
        if self.length and self._owner is not None and self._owner() is not model:
            raise InputError(
                f"the cache holds {self.length} tokens of another model; give each model a cache of its own, or reset() this one"
            )
        self._owner = weakref.ref(model)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": None}  # a copy in another process knows no model

    @property
    def batch_size(self) -> int:
        """Rows held; -1 before the first call."""
        return next((keys.shape[0] for keys, _ in self.slots.values()), -1)

    def see(self, mask: Bool[Tensor, "b t"] | None, batch: int, tokens: int) -> Bool[Tensor, "b k"] | None:
        """Note the tokens of this call, before the layers run; returns the mask of all tokens so far, this call included.

        Raises: ShapeError for another number of rows than the cache holds.
        """
        if self.batch_size not in (-1, batch):
            raise ShapeError(
                f"the cache holds {self.batch_size} rows, got {batch}; start a new cache or select its rows"
            )
        if mask is not None or self.mask is not None:
            device = mask.device if mask is not None else self.mask.device  # type: ignore[union-attr]  # one of the two is a tensor
            past = (
                self.mask if self.mask is not None else torch.ones(batch, self.length, dtype=torch.bool, device=device)
            )
            now = mask if mask is not None else torch.ones(batch, tokens, dtype=torch.bool, device=device)
            self.mask = torch.cat([past, now], dim=1)
        self.length += tokens
        return self.mask

    def extend(
        self, index: int, keys: Float[Tensor, "b h t w"], values: Float[Tensor, "b h t w"]
    ) -> tuple[Float[Tensor, "b h k w"], Float[Tensor, "b h k w"]]:
        """Append the keys and values of this call at attention site ``index``; returns all of them."""
        if index in self.slots:
            past_keys, past_values = self.slots[index]
            keys, values = torch.cat([past_keys, keys], dim=2), torch.cat([past_values, values], dim=2)
        self.slots[index] = keys, values
        return keys, values

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Reorder, repeat or drop rows of the batch (beam search, parallel sampling)."""
        self.slots = {index: (keys[rows], values[rows]) for index, (keys, values) in self.slots.items()}
        self.mask = None if self.mask is None else self.mask[rows]
        self.memory.select(rows)

    def drop_last(self, tokens: int) -> None:
        """Forget the last ``tokens`` tokens. Raises: InputError where a connection remembers tokens, which cannot be undone."""
        if not tokens:
            return
        if self.memory.slots:
            raise InputError(
                "this connection looks along tokens, so its cache cannot be cropped; decode without an assistant"
            )
        self.length -= tokens
        self.slots = {
            index: (keys[:, :, :-tokens], values[:, :, :-tokens]) for index, (keys, values) in self.slots.items()
        }
        self.mask = None if self.mask is None else self.mask[:, :-tokens]

    def reset(self) -> None:
        """Forget everything."""
        DecoderCache.__init__(self)
