"""A model of transformers in another dtype, and in float64 all the way: its code asks for float32 in norms, angles and softmax."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Inside it, whoever asks for float32 gets float64. The code that runs is otherwise the model's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.float:
            func = Tensor.double
        return func(*(_wider(a) for a in args), **{name: _wider(a) for name, a in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Floating-point tensors are made in ``dtype`` where nobody says otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def running(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The region in which ``model`` computes in ``dtype``: without gradients and dropout, and wide where that is float64."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), Float64() if dtype == torch.float64 else nullcontext():
            yield
    finally:
        model.train(training)


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model`` itself if it is of this dtype, else a copy; the rotary angles of a copy are made anew, since a cast has rounded them."""
    if all(p.dtype == dtype for p in model.parameters()):
        return model
    made = copy.deepcopy(model).to(dtype)
    with default_dtype(dtype), Float64() if dtype == torch.float64 else nullcontext():
        for parent in list(made.modules()):
            for name, child in list(parent.named_children()):
                if type(child).__name__.endswith("RotaryEmbedding"):
                    device = next(made.parameters()).device
                    setattr(parent, name, type(child)(child.config).to(device))
    return made
