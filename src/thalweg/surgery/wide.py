"""A model of transformers in another dtype, and in float64 all the way: its code asks for float32 in norms, angles and softmax."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thalweg.capture.evaluating import evaluating
from thalweg.ops.precision import default_dtype


class Float64(TorchFunctionMode):
    """Inside it, whoever asks for float32 gets float64. The code that runs is otherwise the model's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.float:
            func = Tensor.double
        return func(*(_wider(a) for a in args), **{name: _wider(a) for name, a in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def running(dtype: torch.dtype, *models: nn.Module) -> Iterator[None]:
    """The region in which ``models`` compute in ``dtype``: without gradients and dropout, and wide where that is float64."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(evaluating(model))
        stack.enter_context(Float64() if dtype == torch.float64 else nullcontext())
        yield


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model`` itself if it is of this dtype with angles to match, else a copy that is."""
    if all(p.dtype == dtype for p in model.parameters()) and not stale_angles(model, dtype):
        return model
    made = copy.deepcopy(model).to(dtype)
    renew_angles(made, dtype)
    return made


def renew_angles(model: nn.Module, dtype: torch.dtype) -> None:
    """Make the rotary angles of a model of transformers anew: it computes them in float32 when it is made, and a cast rounds them."""
    for parent, name, made in stale_angles(model, dtype):
        setattr(parent, name, made)


def stale_angles(model: nn.Module, dtype: torch.dtype) -> list[tuple[nn.Module, str, nn.Module]]:
    """Where modules with rotary angles stand that would be other ones if they were made in ``dtype``, and the new ones."""
    found = []
    with default_dtype(dtype), Float64() if dtype == torch.float64 else nullcontext():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child).__name__.endswith("RotaryEmbedding"):
                    made = type(child)(child.config).to(next(model.parameters()).device)
                    pairs = zip(child.buffers(), made.buffers(), strict=True)
                    if any(a.dtype != b.dtype or not torch.equal(a, b) for a, b in pairs):
                        found.append((parent, name, made))
    return found
