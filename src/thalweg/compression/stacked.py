"""Experts of transformers, which hold one tensor [e ...] for each map of all of them: what is a map there, and what each expert's map reads."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thalweg.compression.calibration import Inputs

Maps = Mapping[tuple[int, int], Inputs]  # (id of the parameter, expert) -> what is kept of its inputs

_PRODUCTS = (nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)


def stacked_maps(module: nn.Module) -> list[str]:
    """The parameters of a module that hold one map for each expert; none for a class that does not say how they lie in memory."""
    if not isinstance(getattr(module, "is_transposed", None), bool) or not hasattr(module, "config"):
        return []
    return [name for name, p in module.named_parameters(recurse=False) if p.ndim == 3]


class _Products(TorchFunctionMode):
    """Adds to the inputs of an expert's map whatever it is multiplied by."""

    def __init__(self, modules: list[nn.Module], maps: Maps):
        super().__init__()
        self.maps = maps
        self.places = {p.untyped_storage().data_ptr(): p for m in modules for p in m.parameters(recurse=False)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and len(args) > 1 and isinstance(args[1], Tensor):
            x, weight = args[:2]
            parameter = self.places.get(weight.untyped_storage().data_ptr())
            if parameter is not None:
                expert = (weight.storage_offset() - parameter.storage_offset()) // parameter.stride(0)
                if (inputs := self.maps.get((id(parameter), expert))) is not None:
                    inputs.add(x)
        return func(*args, **(kwargs or {}))


@contextmanager
def listening(modules: list[nn.Module], maps: Maps) -> Iterator[None]:
    """Fill ``maps`` while the model runs. Experts run one by one meanwhile (``eager`` of transformers): faster ways multiply all at once."""
    with ExitStack() as stack:
        configs: dict[int, Any] = {id(module.config): module.config for module in modules}
        for config in configs.values():
            was = config._experts_implementation
            config._experts_implementation = "eager"
            stack.callback(setattr, config, "_experts_implementation", was)
        stack.enter_context(_Products(modules, maps))
        yield
