"""From the arguments of a call to what connections (``Tokens``) and attention (``TokenView``) need; checks them on the way."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from thalweg.connections import Tokens
from thalweg.errors import InputError, ShapeError
from thalweg.models.cache import DecoderCache
from thalweg.models.config import DecoderConfig
from thalweg.models.rotary import angles
from thalweg.models.sublayers import TokenView


def look(
    config: DecoderConfig,
    dtype: torch.dtype,
    input_ids: Int[Tensor, "b t"],
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    segments: Tensor | None,
    cache: DecoderCache | None,
) -> tuple[Tokens, TokenView]:
    """Who is real, where everybody stands and who may see whom. Raises: InputError, ShapeError."""
    batch, length = input_ids.shape
    past = 0 if cache is None else cache.length
    if past + length > config.max_length:
        raise InputError(
            f"the sequence has {past + length} tokens, this model takes {config.max_length} (max_length); shorten it or raise max_length"
        )
    if segments is not None and cache is not None:
        raise InputError("packed documents (segments) cannot be decoded with a cache; pass one document per row")
    if position_ids is not None and position_ids.shape == (1, length):
        position_ids = position_ids.expand(batch, length)
    for name, value in (("position_ids", position_ids), ("segments", segments)):
        if value is not None and value.shape != input_ids.shape:
            raise ShapeError(
                f"{name} must have the shape of input_ids {tuple(input_ids.shape)}, got {tuple(value.shape)}"
            )
    mask = None if attention_mask is None else present(attention_mask, batch, length, past)
    seen = cache.see(mask, batch, length) if cache is not None else mask
    positions = position_ids if position_ids is not None else count(input_ids, seen, segments, past)
    view = TokenView(
        *angles(positions, config.head_width, config.rope_base, dtype),
        allowed(seen, segments, past, length, input_ids.device),
    )
    return Tokens(mask, positions, segments, None if cache is None else cache.memory), view


def check_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Raises: InputError, ShapeError for what no embedding can look up."""
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"input_ids must be integers (int64 or int32), got {input_ids.dtype}")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ShapeError(
            f"input_ids must be [batch, tokens] with at least one of each, got shape {tuple(input_ids.shape)}"
        )
    if torch.compiler.is_compiling() or input_ids.device.type != "cpu":
        return  # looking at the values would break the graph or wait for the device
    low, high = (int(value) for value in input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise InputError(f"token ids must lie in 0..{vocab_size - 1} (vocab_size {vocab_size}), got {low}..{high}")


def present(attention_mask: Tensor, batch: int, length: int, past: int) -> Bool[Tensor, "b t"]:
    """The part of the mask that belongs to this call; the cache remembers the rest."""
    shape = attention_mask.shape
    if len(shape) != 2 or shape[0] != batch or (shape[1] != length and shape[1] != past + length):
        wanted = f"[{batch}, {length}]" + (f" or [{batch}, {past + length}]" if past else "")
        raise ShapeError(f"attention_mask must be {wanted} (one entry per token), got shape {tuple(shape)}")
    mask = attention_mask[:, -length:].bool()
    if torch.compiler.is_compiling() or mask.device.type != "cpu":
        return mask  # as in check_ids
    starts = mask[:, :1].sum(1) + (mask[:, 1:] & ~mask[:, :-1]).sum(1)
    if bool((starts > 1).any()):
        row = int((starts > 1).nonzero()[0])
        raise InputError(
            f"attention_mask has a hole between real tokens in row {row}; pad on the left or on the right only"
        )
    return mask


def count(input_ids: Tensor, seen: Tensor | None, segments: Tensor | None, past: int) -> Int[Tensor, "b t"]:
    """Positions: 0, 1, ... over the real tokens of each row, or of each segment."""
    batch, length = input_ids.shape
    steps = torch.arange(past, past + length, device=input_ids.device).expand(batch, length)
    if segments is not None:
        starts = torch.ones_like(segments, dtype=torch.bool)
        starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
        return steps - torch.where(starts, steps, 0).cummax(dim=1).values
    return steps if seen is None else (seen.cumsum(dim=1) - 1).clamp(min=0)[:, -length:]


def allowed(
    seen: Tensor | None, segments: Tensor | None, past: int, length: int, device: torch.device
) -> Bool[Tensor, "b 1 t k"] | None:
    """Who may see whom; None where plain causal attention says it all. A padded token sees itself, so that no softmax is empty."""
    if seen is None and segments is None and past == 0:
        return None
    query = torch.arange(past, past + length, device=device)[:, None]
    key = torch.arange(past + length, device=device)
    may = (key <= query)[None, None]
    if seen is not None:
        may = may & seen[:, None, None, :]
    if segments is not None:
        may = may & (segments[:, None, :, None] == segments[:, None, None, :])
    return may | (key == query)
