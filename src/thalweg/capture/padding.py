"""Which tokens of a call are real."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from thalweg.errors import InputError


def real_tokens(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: tuple[int, int], device: torch.device
) -> Bool[Tensor, "b t"]:
    """True where a token of the call is no padding; left or right, with or without a cache.

    shape: batch and tokens of the call. Raises: InputError for a mask that does not say which tokens are padding.
    """
    mask = attention_mask(model, args, kwargs)
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != shape[0] or mask.shape[1] < shape[1]:
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"attention_mask must be [b t], nonzero where a token is real, got {got} for tokens {list(shape)}; "
            f"what is padding cannot be told from another"
        )
    return mask[:, -shape[1] :].to(device).bool()


def attention_mask(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The argument ``attention_mask`` of a call, given by name or by place."""
    if "attention_mask" in kwargs or not args:
        return kwargs.get("attention_mask")
    names = list(inspect.signature(model.forward).parameters)
    place = names.index("attention_mask") if "attention_mask" in names else len(args)
    return args[place] if place < len(args) else None
