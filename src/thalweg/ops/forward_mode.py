"""Forward-mode derivatives: without the warning that torch gives at the first one in a process, and whether they are at work."""

import warnings
from collections.abc import Callable
from functools import cache

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor


@cache
def load_rules() -> None:
    """Let torch load its forward-mode rules: it does so at their first use, with torch.jit, which it deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit", DeprecationWarning)
        torch.func.jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def transformed() -> bool:
    """Whether forward-mode derivatives, vmap or the like are at work, which a function of our own does not know."""
    return fwAD._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None  # type: ignore[attr-defined]  # private, but there is no other way


def jvp(function: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """The value of ``function`` at ``point`` and its derivative along ``direction``, of the shape of the value."""
    load_rules()
    value, pushed = torch.func.jvp(function, (point,), (direction,))[:2]
    return value, pushed
