"""Run the blocks of a model one at a time over all calibration tokens: the states of one depth are kept, nothing else."""

import inspect
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from thalweg.capture.layout import Located
from thalweg.compression.calibration import Inputs
from thalweg.compression.stacked import listening
from thalweg.compression.targets import Target
from thalweg.errors import InputError


@dataclass
class Call:
    """How a block was called. slot: where the state stands, a place among the arguments or a name; it is cut out of them."""

    slot: int | str
    args: list[Any]
    kwargs: dict[str, Any]

    def run(self, block: nn.Module, state: Any) -> Any:
        """The next state: what the block gives, or the first of it where the state is one tensor."""
        args, kwargs = list(self.args), dict(self.kwargs)
        if isinstance(self.slot, int):
            args[self.slot] = state
        else:
            kwargs[self.slot] = state
        return next_state(block(*args, **kwargs), state)


class Replay:
    """The states before one block, for every batch; :meth:`run` takes them through it.

    Building it runs the model once over every batch and keeps how each block was called (masks and angles; equal ones once). Raises:
    InputError for a model whose blocks do not simply follow each other.
    """

    def __init__(self, located: Located, batches: Sequence[Tensor], targets: Sequence[Target]):
        self.located = located
        self.blocks = [located.module(name) for name in located.blocks]
        self.calls: list[list[Call]] = []  # [batch][block]
        self.states: list[Any] = []
        self.leader: dict[int, int] = {}  # module -> the first module that gets the same tensor
        device = next(located.model.parameters()).device
        for number, batch in enumerate(batches):
            self._record(batch.to(device), targets if number == 0 else ())

    def _record(self, ids: Tensor, targets: Sequence[Target]) -> None:
        calls: list[Call | None] = [None] * len(self.blocks)
        entered: list[Any] = []
        last: list[Any] = []
        alive: list[Tensor] = []
        seen: dict[tuple, int] = {}
        first = not self.calls

        def before(index: int, args: tuple, kwargs: dict[str, Any]) -> None:
            if calls[index] is not None:
                raise InputError(
                    f"{self.located.blocks[index]} is called twice in one pass, which cannot be followed layer by layer"
                )
            call, state = split(args, kwargs, self.located.blocks[index])
            if index == 0:
                entered.append(state)
            elif first and not _same(state, last[-1]):
                raise InputError(
                    f"between {self.located.blocks[index - 1]} and {self.located.blocks[index]} the model does something of its own, so it "
                    "cannot be followed layer by layer; compress without calibration"
                )
            calls[index] = _shared(call, self.calls[0][index]) if self.calls else call
            alive.clear()
            seen.clear()

        def after(index: int, output: Any) -> None:
            state = entered[0] if index == 0 else last[-1]
            last[:] = [next_state(output, state)]

        def reads(module: nn.Module, args: tuple) -> None:
            x = args[0]
            alive.append(x)  # its memory is not used again while it is compared
            key = (x.data_ptr(), tuple(x.shape), x.stride())
            self.leader[id(module)] = seen.setdefault(key, id(module))

        with ExitStack() as stack:
            for i, block in enumerate(self.blocks):
                stack.callback(
                    block.register_forward_pre_hook(lambda m, a, k, i=i: before(i, a, k), with_kwargs=True).remove
                )
                stack.callback(block.register_forward_hook(lambda m, a, o, i=i: after(i, o)).remove)
            for module in {id(t.module): t.module for t in targets if not t.stacked}.values():
                stack.callback(module.register_forward_pre_hook(reads).remove)
            model = self.located.model
            more = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
            model(ids, **more)
        if any(call is None for call in calls):
            raise InputError("not every layer of the model is called in a pass; it cannot be followed layer by layer")
        self.calls.append(calls)  # type: ignore[arg-type]  # none is None
        self.states.append(entered[0])

    def groups(self, targets: Iterable[Target]) -> list[list[Target]]:
        """The targets of one layer, those that read the same tensor together, in order."""
        found: dict[tuple[int, int | None], list[Target]] = {}
        for target in targets:
            reader = id(target.tensor) if target.stacked else self.leader.get(id(target.module), id(target.module))
            found.setdefault((reader, target.expert), []).append(target)
        return list(found.values())

    def gather(self, layer: int, groups: Sequence[Sequence[Target]]) -> list[Inputs]:
        """What the inputs of every group are, over all batches; the states stay where they are."""
        found = [Inputs(group[0].shape[1], group[0].weight) for group in groups]
        heard: dict[int, list[tuple[int | None, Inputs]]] = {}
        stacked: dict[tuple[int, int], Inputs] = {}
        for group, inputs in zip(groups, found, strict=True):
            if group[0].stacked:
                stacked[id(group[0].tensor), group[0].expert or 0] = inputs
            else:
                heard.setdefault(id(group[0].module), []).append((group[0].expert, inputs))

        def listen(module: nn.Module, args: tuple) -> None:
            for expert, inputs in heard[id(module)]:
                inputs.add(args[0] if expert is None else _rows_of(expert, *args))

        modules = {id(group[0].module): group[0] for group in groups}
        with ExitStack() as stack:
            for first in modules.values():
                if not first.stacked:
                    stack.callback(first.module.register_forward_pre_hook(listen).remove)
            if experts := [first.module for first in modules.values() if first.stacked]:
                stack.enter_context(listening(experts, stacked))
            for calls, state in zip(self.calls, self.states, strict=True):
                calls[layer].run(self.blocks[layer], state)
        if stacked and not any(inputs.tokens for inputs in stacked.values()):
            raise InputError(
                f"the experts of {self.located.blocks[layer]} could not be heard; compress without calibration, or say sites='attention'"
            )
        return found

    def advance(self, layer: int) -> None:
        """Take the states through a block as it is now."""
        for i, calls in enumerate(self.calls):
            self.states[i] = calls[layer].run(self.blocks[layer], self.states[i])


def split(args: tuple, kwargs: dict[str, Any], name: str) -> tuple[Call, Any]:
    """A call without its state, and the state: the first argument, or the first named one that is a tensor [b t ...]."""
    slot: int | str | None = (
        0 if args else next((k for k, v in kwargs.items() if isinstance(v, Tensor) and v.ndim >= 3), None)
    )
    if slot is None:
        raise InputError(f"{name} is called without a state, so the model cannot be followed layer by layer")
    rest, named = list(args), dict(kwargs)
    if isinstance(slot, int):
        state, rest[slot] = rest[slot], None
    else:
        state = named.pop(slot)
    return Call(slot, rest, named), state


def next_state(output: Any, state: Any) -> Any:
    """The part of what a block gives that takes the place of its state."""
    return output[0] if isinstance(state, Tensor) and isinstance(output, tuple | list) else output


def _rows_of(expert: int, x: Tensor, sizes: Tensor) -> Tensor:
    end = int(sizes[: expert + 1].sum())
    return x[end - int(sizes[expert]) : end]


def _same(a: Any, b: Any) -> bool:
    (left, spec), (right, other) = tree_flatten(a), tree_flatten(b)
    return spec == other and all(
        x is y or (isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and torch.equal(x, y))
        for x, y in zip(left, right, strict=True)
    )


def _shared(call: Call, first: Call) -> Call:
    """The call with the tensors of the first batch where they are equal, so that masks and angles are held once."""
    (leaves, spec), (known, other) = tree_flatten((call.args, call.kwargs)), tree_flatten((first.args, first.kwargs))
    if spec != other:
        return call
    kept = [
        y if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and torch.equal(x, y) else x
        for x, y in zip(leaves, known, strict=True)
    ]
    args, kwargs = tree_unflatten(kept, spec)
    return Call(call.slot, args, kwargs)
