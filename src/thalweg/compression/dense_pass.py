"""What one pass of the dense model leaves for the compressed one: its updates, and what its blocks and sublayers were given."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from thalweg.capture.layout import Located, Point, SitePlace
from thalweg.capture.proof import called
from thalweg.capture.watching import Event, given, item_of, watch
from thalweg.models.block import Block
from thalweg.ops.precision import wide

HIDDEN = "hidden"


@dataclass(frozen=True)
class Wanted:
    """blocks: what every block was given (local mode). reads: what every sublayer was given, before its norm (isolated mode). values: the
    outputs of attention heads before the output projection. hidden: what the unembedding was given."""

    blocks: bool = False
    reads: bool = False
    values: bool = False
    hidden: bool = False


class Record(Protocol):
    """Tensors of one batch, by name (:func:`branch_key` ...)."""

    def tensor(self, name: str) -> Tensor:
        """A tensor that was kept."""
        ...

    def tree(self, name: str) -> Any:
        """A state of any structure that was kept."""
        ...


class Kept:
    """A record in memory: ``tensors``; trees by their leaves, with their structure in ``specs``."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.specs: dict[str, TreeSpec] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def put(self, name: str, value: Any) -> None:
        """Keep a copy: a model may reuse what it hands out."""
        leaves, spec = tree_flatten(value)
        self.specs[name] = spec
        for i, leaf in enumerate(leaves):
            self.shapes[f"{name}/{i}"] = tuple(leaf.shape)
            self.tensors[f"{name}/{i}"] = narrow(leaf.detach()).clone(memory_format=torch.contiguous_format)

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())

    def tensor(self, name: str) -> Tensor:
        return self.leaf(f"{name}/0")

    def tree(self, name: str) -> Any:
        spec = self.specs[name]
        return tree_unflatten([self.leaf(f"{name}/{i}") for i in range(spec.num_leaves)], spec)

    def leaf(self, name: str) -> Tensor:
        """One tensor, repeated where it was."""
        return self.tensors[name].expand(self.shapes[name])


def narrow(x: Tensor) -> Tensor:
    """Without the repetition along axes that only repeat (streams that begin with one embedding): kept once, and summed as the model does."""
    for axis, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[axis] > 1:
            x = x.narrow(axis, 0, 1)
    return x


def branch_key(site: int) -> str:
    """What a sublayer adds [b t d]."""
    return f"branch.{site}"


def step_key(layer: int) -> str:
    """Change of the stream over a layer [b t d] or [b t n d], where it is not the sum of the branches."""
    return f"step.{layer}"


def heads_key(site: int) -> str:
    """Outputs of the heads of an attention sublayer [b t h dv]."""
    return f"heads.{site}"


def block_key(layer: int) -> str:
    """The state that a block was given."""
    return f"block.{layer}"


def read_key(site: int) -> str:
    """What a sublayer reads [b t d], before its norm."""
    return f"read.{site}"


def adds_up(located: Located) -> bool:
    """Whether the change over a layer is the sum of what its sublayers return."""
    return located.tap is None and all(place.norm_after is None and place.read is None for place in located.sites)


@contextmanager
def recording(located: Located, wanted: Wanted) -> Iterator[Kept]:
    """Keep what the passes inside leave behind; a record of the last one."""
    record, begun = Kept(), {}
    last = {place.layer: place.index for place in located.sites}
    plain = adds_up(located)

    def look(event: Event) -> None:
        place = event.place
        record.put(branch_key(place.index), event.branch)
        if wanted.values and event.values is not None:
            record.put(heads_key(place.index), event.values.o)
        if not plain:
            step = step_of(event, begun, last)
            if step is not None:
                record.put(step_key(place.layer), step)

    handles = []
    try:
        with watch(located, look, values=wanted.values):
            if wanted.blocks:
                handles += [
                    module.register_forward_pre_hook(_keep_block(record, layer), with_kwargs=True)
                    for layer, module in enumerate(blocks_of(located))
                ]
            if wanted.reads:
                handles += [see(located, p.state, record.put, read_key(p.index)) for p in located.sites]
            if wanted.hidden and located.head is not None:
                handles.append(see(located, unembedded(located), record.put, HIDDEN))
            yield record
    finally:
        for handle in handles:
            handle.remove()


def unembedded(located: Located) -> Point:
    """Where all of what the unembedding is given is seen, also in a pass that makes the logits of the last token only."""
    if located.tap is None and located.final_norm is not None:
        return Point(located.final_norm, "output")
    return Point(str(located.head), "input")


def arguments(located: Located, call: Mapping[str, Any]) -> dict[str, Any]:
    """The call without a cache, and with no more logits made than have to be."""
    known = inspect.signature(located.model.forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in known.values())
    more: dict[str, Any] = {}
    if "use_cache" in known or (open_ended and located.tap is None):
        more["use_cache"] = False
    if "logits_to_keep" in known and unembedded(located).side == "output":
        more["logits_to_keep"] = 1
    return called(located.model, {**call, **more})


def step_of(event: Event, begun: dict[int, Tensor], last: Mapping[int, int]) -> Tensor | None:
    """At the last site of a layer, the change of the whole state over it; ``begun`` holds the states that layers began with."""
    place = event.place
    before, after = (event.state, event.following) if event.next_states is None else (event.states, event.next_states)
    assert before is not None
    if place.layer not in begun:
        begun.clear()
        begun[place.layer] = before.clone()
    return wide(after) - wide(begun.pop(place.layer)) if last[place.layer] == place.index else None


def blocks_of(located: Located) -> list[nn.Module]:
    """The layers."""
    return [located.module(name) for name in located.blocks]


def see(located: Located, point: Point, call: Any, *labels: Any) -> Any:
    """Call ``call(*labels, tensor)`` when the model comes to a point."""
    module = located.module(point.module)
    if point.side == "input":
        return module.register_forward_pre_hook(
            lambda _, args, kwargs: call(*labels, given(args, kwargs)), with_kwargs=True
        )
    return module.register_forward_hook(lambda _, args, output: call(*labels, item_of(output, point.item)))


def _keep_block(record: Kept, layer: int) -> Any:
    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record.put(block_key(layer), args[0][0] if isinstance(module, Block) else given(args, kwargs))

    return keep


@contextmanager
def feeding(
    located: Located, record: Record, layer_of: Mapping[int, int], site_of: Mapping[int, int]
) -> Iterator[None]:
    """Passes inside give every block what the dense block was given and, where ``site_of`` names sites, every sublayer what the dense one read.

    layer_of, site_of: from a layer or site of this model to that of the record. So one pass runs every layer on the dense input of that
    layer, without the errors of the layers before it.
    """
    handles = []
    try:
        for layer, module in enumerate(blocks_of(located)):
            if layer in layer_of:
                handles.append(
                    module.register_forward_pre_hook(_feed_block(record, block_key(layer_of[layer])), with_kwargs=True)
                )
        for site, wanted in site_of.items():
            handles.append(_feed_read(located, located.sites[site], record, read_key(wanted)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _feed_block(record: Record, name: str) -> Any:
    def feed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(module, Block):
            return _replaced(args, kwargs, record.tensor(name))
        (before, *_), sites, following, tokens, *rest = args
        state = like(record.tree(name), before)
        return ((state, *sites[0].read(state, tokens)), sites, following, tokens, *rest), kwargs

    return feed


def _feed_read(located: Located, place: SitePlace, record: Record, name: str) -> Any:
    module = located.module(place.state.module)
    if place.state.side == "input":
        return module.register_forward_pre_hook(
            lambda _, args, kwargs: _replaced(args, kwargs, record.tensor(name)), with_kwargs=True
        )
    return module.register_forward_hook(lambda _, args, output: like(record.tensor(name), item_of(output, 0)))


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with its first tensor, as :func:`thalweg.capture.watching.given` finds it, replaced."""
    for i, old in enumerate(args):
        if isinstance(old, Tensor):
            return (*args[:i], like(value, old), *args[i + 1 :]), kwargs
    names = ["hidden_states", *kwargs]
    name = next(name for name in names if isinstance(kwargs.get(name), Tensor))
    return args, {**kwargs, name: like(value, kwargs[name])}


def like(value: Any, old: Any) -> Any:
    """A state in the dtype and on the device of the one that it stands in for."""
    leaf = next(leaf for leaf in tree_flatten(old)[0] if isinstance(leaf, Tensor))
    return tree_map_only(Tensor, lambda x: x.to(leaf.device, leaf.dtype if x.is_floating_point() else x.dtype), value)
