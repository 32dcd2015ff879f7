"""What is known of the tokens of the forward pass that is running: which are real, where they stand, prefill or decoding."""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from thalweg.capture import Located
from thalweg.errors import InputError

CACHES = ("cache", "past_key_values", "past_key_value")


@dataclass(frozen=True)
class Pass:
    """One forward pass. real [b t], None where all tokens are; positions [b t] among the real tokens of a row; decoding: one token after a
    cache that holds some, everything else is prefill."""

    real: Bool[Tensor, "b t"] | None
    positions: Int[Tensor, "b t"]
    decoding: bool

    def keep(self, changed: Tensor, original: Tensor) -> Tensor:
        """``changed`` [b t ...] where tokens are real, ``original`` where they are padding."""
        if self.real is None:
            return changed
        real = self.real.to(changed.device).view(*self.real.shape, *(1,) * (changed.ndim - 2))
        return torch.where(real, changed, original)


class Passes:
    """The pass that is running, told by hooks on the model and on the module that holds its layers."""

    def __init__(self) -> None:
        self._now: Pass | None = None

    @property
    def now(self) -> Pass:
        """Raises: InputError where layers run without the model that was edited."""
        if self._now is None:
            raise InputError(
                "a layer ran without its model, so its padding is not known; call the model that was given to edit"
            )
        return self._now

    def hold(self, phase: str) -> bool:
        """Whether an edit of this phase holds for the pass that is running."""
        return phase == "all" or (phase == "decode") == self.now.decoding

    @contextmanager
    def followed(self, located: Located) -> Iterator["Passes"]:
        """Know the pass of every call of the model inside the block."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = arguments(module, args, kwargs)
            if (
                module is located.model or tokens_of(given) is not None
            ):  # some bases get the embedded tokens, from the model
                self._now = read(given)

        modules = {id(m): m for m in (located.model, located.module(located.base))}
        with ExitStack() as stack:
            for module in modules.values():
                handle = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
            yield self
        self._now = None


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    if not args:
        return kwargs
    names = [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def read(given: dict[str, Any]) -> Pass:
    """The pass that these arguments of a model start. Raises: InputError without token ids or embeddings."""
    tokens = tokens_of(given)
    if tokens is None:
        raise InputError("the model was called without input_ids or inputs_embeds, so its tokens are not known")
    batch, length = tokens.shape[:2]
    past = past_of(next((given[n] for n in CACHES if given.get(n) is not None), None))
    steps = torch.arange(past, past + length, device=tokens.device).expand(batch, length)
    mask = given.get("attention_mask")
    if isinstance(mask, dict):  # by kind of layer, as generate makes them for caches of fixed size
        mask = mask.get("full_attention", next(iter(mask.values())))
    real = None
    positions = given.get("position_ids")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        seen = mask.bool() if mask.shape[1] == past + length else None
        real = mask[:, -length:].bool()
        if seen is not None:
            positions = (seen.cumsum(1) - 1).clamp(min=0)[:, past:]
    elif isinstance(mask, Tensor) and mask.ndim == 4:
        at = torch.arange(length, device=mask.device)
        own = mask[:, 0, at, past + at] if mask.shape[-1] > past + length - 1 else None
        if own is not None:
            real = (own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2).expand(batch, length)
    if real is not None and bool(real.all()):
        real = None
    usable = isinstance(positions, Tensor) and positions.ndim == 2 and positions.shape[1] == length
    return Pass(real, positions.expand(batch, length) if usable else steps, past > 0 and length == 1)  # type: ignore[union-attr]  # a tensor


def tokens_of(given: dict[str, Any]) -> Tensor | None:
    """Token ids or embeddings among the arguments of a model."""
    return next((given[n] for n in ("input_ids", "inputs_embeds") if isinstance(given.get(n), Tensor)), None)


def past_of(cache: Any) -> int:
    """Tokens that a cache holds."""
    if cache is None:
        return 0
    length = cache.get_seq_length() if hasattr(cache, "get_seq_length") else getattr(cache, "length", 0)
    return int(length)
