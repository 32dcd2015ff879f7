"""From the arguments of a call to what connections (``Tokens``) and attention (``TokenView``) need; checks them on the way."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from thalweg.connections import Tokens
from thalweg.errors import InputError, ShapeError
from thalweg.models.cache import DecoderCache
from thalweg.models.config import DecoderConfig
from thalweg.models.rotary import RotaryScaling, angles
from thalweg.models.sublayers import TokenView

IGNORED = -100  # of a label: not scored


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
    for name, value in (("position_ids", position_ids), ("segments", segments)):
        if value is not None:
            check_integers(name, value)
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise InputError(
            f"attention_mask must be a tensor, nonzero where a token is real, got {type(attention_mask).__name__}"
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
    if position_ids is not None and config.positions == "learned":
        check_positions(position_ids, config.max_length)
    positions = position_ids if position_ids is not None else count(input_ids, seen, segments, past)
    view = view_of(config, positions, dtype, seen, segments, past, mask)
    return Tokens(mask, positions, segments, None if cache is None else cache.memory), view


def view_of(
    config: DecoderConfig,
    positions: Int[Tensor, "b t"],
    dtype: torch.dtype,
    seen: Bool[Tensor, "b k"] | None = None,
    segments: Int[Tensor, "b t"] | None = None,
    past: int = 0,
    real: Bool[Tensor, "b t"] | None = None,
) -> TokenView:
    """What the sublayers see of tokens at ``positions``, ``past`` tokens being cached and ``seen`` real of all so far."""
    width, base, scaling = config.head_width, config.rope_base, config.rotary_scaling

    def view(window: int, base: float, scaling: RotaryScaling | None) -> TokenView:
        turned = angles(positions, width, base, dtype, scaling) if config.positions == "rotary" else (None, None)
        length, device = positions.shape[1], positions.device
        return TokenView(*turned, allowed(seen, segments, past, length, device, window, config.causal), real)

    everywhere = view(0, base, scaling)
    if config.window_rope_base is not None:
        base, scaling = config.window_rope_base, None
    everywhere.windowed = {window: view(window, base, scaling) for window in sorted(set(config.windows) - {0})}
    return everywhere


def check_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Raises: InputError, ShapeError for what no embedding can look up."""
    check_integers("input_ids", input_ids)
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ShapeError(
            f"input_ids must be [batch, tokens] with at least one of each, got shape {tuple(input_ids.shape)}"
        )
    if not can_look_at(input_ids):
        return
    low, high = (int(value) for value in input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"token ids must lie in 0..{vocab_size - 1} (vocab_size {vocab_size}), got {low}..{high}; "
            "use the tokenizer that the model was trained with"
        )


def check_labels(labels: Tensor, input_ids: Tensor, vocab_size: int) -> None:
    """Raises: InputError, ShapeError for what no loss can be taken of."""
    check_integers("labels", labels)
    if labels.shape != input_ids.shape:
        raise ShapeError(
            f"labels must be aligned with input_ids {tuple(input_ids.shape)}, got shape {tuple(labels.shape)}; "
            "do not shift them"
        )
    if not can_look_at(labels):
        return
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= vocab_size))
    if bool(wrong.any()):
        raise InputError(
            f"labels must lie in 0..{vocab_size - 1} or be {IGNORED} (not scored), got {int(labels[wrong][0])}"
        )


def check_positions(position_ids: Tensor, max_length: int) -> None:
    """Raises: InputError for positions that have no learned vector."""
    if not can_look_at(position_ids):
        return
    low, high = (int(value) for value in position_ids.aminmax())
    if low < 0 or high >= max_length:
        raise InputError(f"position_ids must lie in 0..{max_length - 1} (max_length {max_length}), got {low}..{high}")


def check_integers(name: str, value: object, shape: str = "[batch, tokens]") -> None:
    """Raises: InputError for what is no tensor of integers."""
    if not isinstance(value, Tensor):
        raise InputError(
            f"{name} must be a tensor of integers {shape}, got {type(value).__name__}; make it one by torch.tensor"
        )
    if value.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{name} must be integers (int64 or int32), got {value.dtype}; convert them by .long()")


def can_look_at(values: Tensor) -> bool:
    """Whether values may be looked at: it would break a graph that is being compiled, and wait for a device."""
    return not torch.compiler.is_compiling() and values.device.type == "cpu"


def present(attention_mask: Tensor, batch: int, length: int, past: int) -> Bool[Tensor, "b t"]:
    """The part of the mask that belongs to this call; the cache remembers the rest."""
    shape = attention_mask.shape
    if len(shape) != 2 or shape[0] != batch or (shape[1] != length and shape[1] != past + length):
        wanted = f"[{batch}, {length}]" + (f" or [{batch}, {past + length}]" if past else "")
        raise ShapeError(f"attention_mask must be {wanted} (one entry per token), got shape {tuple(shape)}")
    mask = attention_mask[:, -length:].bool()
    if not can_look_at(mask):
        return mask
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
    seen: Tensor | None,
    segments: Tensor | None,
    past: int,
    length: int,
    device: torch.device,
    window: int = 0,
    causal: bool = True,
) -> Bool[Tensor, "b 1 t k"] | None:
    """Who may see whom; None where attention without a mask says it all. A padded token sees itself, so that no softmax is empty.

    window: how many tokens one sees, itself included; 0: all. causal: no later ones; else a window reaches as far to both sides.
    """
    narrow = 0 < window < past + length
    if seen is None and segments is None and past == 0 and not narrow:
        return None
    query = torch.arange(past, past + length, device=device)[:, None]
    key = torch.arange(past + length, device=device)
    reach, ahead = window if narrow else past + length, key - query
    may = ((ahead > -reach) & (ahead < (1 if causal else reach)))[None, None]
    if seen is not None:
        may = may & seen[:, None, None, :]
    if segments is not None:
        may = may & (segments[:, None, :, None] == segments[:, None, None, :])
    return may | (key == query)
