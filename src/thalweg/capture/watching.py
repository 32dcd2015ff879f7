"""Watch the stream go by: one event per site, in order, while the model runs. Nothing is copied and nothing is kept.

A model in eager mode is hooked at the points of its description; compiled models run uncompiled inside :func:`watch`. Passes that gradient
checkpointing repeats in the backward pass are not counted: only what happens inside the model's own forward is.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from thalweg.capture.layout import Located, Point, SitePlace
from thalweg.capture.padding import real_tokens
from thalweg.errors import CaptureError


@dataclass(frozen=True, slots=True)
class ValueEvent:
    """Attention before its output projection. o [b t h dv]; v [b t kv dv]: values of the tokens of the call; own [b h t]: A_tt, or None."""

    o: Float[Tensor, "b t h dv"]
    v: Float[Tensor, "b t kv dv"]
    own: Float[Tensor, "b h t"] | None = None


@dataclass(frozen=True, slots=True)
class InnerEvent:
    """Inside a feed-forward sublayer. x [b t d]: what it is given; h [b t m]: input of its last linear map."""

    x: Float[Tensor, "b t d"]
    h: Float[Tensor, "b t m"]


@dataclass(frozen=True, slots=True)
class Event:
    """What happened at one site; tensors are the model's own, detached: look at them during the call, do not keep or change them.

    state [b t d]: the raw stream before the addition; of several streams, what the site reads, before its norm. branch [b t d]: what is
    added, multiplier and sandwich norm included; where a connection writes in another way, the update that it is given. following [b t d]:
    the next state, observed, never computed; of several streams, what is read next. states, next_states [b t n d]: of several streams,
    else None. real [b t]: not padding. seen: what a replay needs beside (see :mod:`thalweg.capture.proof`).
    """

    place: SitePlace
    state: Float[Tensor, "b t d"]
    branch: Float[Tensor, "b t d"]
    following: Float[Tensor, "b t d"]
    real: Bool[Tensor, "b t"]
    states: Float[Tensor, "b t n d"] | None = None
    next_states: Float[Tensor, "b t n d"] | None = None
    values: ValueEvent | None = None
    seen: "dict[str, Any] | None" = None
    inner: InnerEvent | None = None


OnEvent = Callable[[Event], Any]


class Handle(Protocol):
    """What undoes one attachment."""

    def remove(self) -> None: ...


class Tap(Protocol):
    """How a model is watched, and how a write of its is replayed."""

    def parts(self, place: SitePlace) -> set[str]:
        """What must have been seen of a site before its event can be made."""
        ...

    def attach(self, recorder: "Recorder") -> Iterator[Handle]:
        """Let the recorder see the parts of every site; yield what undoes it."""
        ...

    def event(self, place: SitePlace, seen: dict[str, Any], real: Tensor, values: ValueEvent | None) -> Event:
        """The event of a site whose parts have all been seen."""
        ...

    def write(self, events: list[Event]) -> Any:
        """The next state, computed from the events of one site (of all parallel sites of a layer)."""
        ...

    def observed(self, event: Event) -> Any:
        """The next state as the model had it, in the form of :meth:`write`."""
        ...

    def begun(self, event: Event) -> Any:
        """The state before the site, in the form of :meth:`write`."""
        ...

    def end(self, event: Event) -> Tensor:
        """What the unembedding sees [b t d], computed from the event of the last site."""
        ...


@contextmanager
def watch(
    located: Located, on_event: OnEvent, values: bool = False, own_weights: bool = False, inner: bool = False
) -> Iterator[None]:
    """Call ``on_event`` once per site as every forward pass of ``located.model`` goes by.

    values: with o and v of attention sites that have heads. own_weights: with A_tt too. inner: with x and h of feed-forward sites whose last
    map is known. Hooks are gone afterwards, also after an exception; the training mode stays as it is.
    Raises: CaptureError where a pass ends and a site was not seen; what ``on_event`` raises.
    """
    recorder = Recorder(located, on_event, values=values or own_weights, own_weights=own_weights, inner=inner)
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if own_weights:
            from thalweg.capture.attention import attention_tap

            stack.enter_context(attention_tap(located.model, recorder.see_attention))
        for handle in recorder.attach():
            stack.callback(handle.remove)
        yield


class Recorder:
    """Collects the parts of every site and calls ``on_event`` when a site is complete and all before it are."""

    def __init__(
        self,
        located: Located,
        on_event: OnEvent,
        *,
        values: bool = False,
        own_weights: bool = False,
        inner: bool = False,
    ):
        self.located, self.on_event, self.own_weights = located, on_event, own_weights
        self.tap: Tap = located.tap(located) if located.tap is not None else HookTap(located)
        self.running, self.call, self.real = False, ((), {}), None
        self.slots: list[dict[str, Any]] = [{} for _ in located.sites]
        self.due = 0
        self.valued = {p.index for p in located.attention if values and p.heads is not None}
        self.opened = {p.index for p in located.sites if inner and p.inner is not None}
        self.needed = [self.needs(place) for place in located.sites]
        self.owners: dict[int, int] = {}
        if own_weights:
            for i in self.valued:
                self.owners |= dict.fromkeys(map(id, located.module(located.sites[i].sublayer).modules()), i)

    def attach(self) -> Iterator[Handle]:
        model = self.located.model
        yield model.register_forward_pre_hook(self.begin, with_kwargs=True, prepend=True)
        yield model.register_forward_hook(self.finish, always_call=True)
        yield from self.tap.attach(self)
        for i in self.valued:
            heads = self.located.sites[i].heads
            assert heads is not None
            yield self.at(Point(heads.value, "output"), self.see, i, "v")
            yield self.at(Point(heads.output, "input"), self.see, i, "o")
        for i in self.opened:
            inner = self.located.sites[i].inner
            assert inner is not None
            yield self.at(inner.given, self.see, i, "x")
            yield self.at(Point(inner.last, "input"), self.see, i, "h")

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.running, self.call, self.real, self.due = True, (args, kwargs), None, 0
        self.slots = [{} for _ in self.located.sites]

    def finish(self, model: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self.running, due = False, self.due
        slots, self.slots, self.call, self.real = self.slots, [], ((), {}), None
        if result is None or due == len(slots):  # None: the pass raised
            return
        place, lacking = self.located.sites[due], ", ".join(sorted(self.needed[due] - slots[due].keys()))
        raise CaptureError(
            f"the pass ended and {place.name} ({place.block}) was not seen whole, its {lacking} is missing; "
            f"the map does not fit the model, or the layer was skipped or is called in another way"
        )

    def at(self, point: Point, see: Callable[..., None], *labels: Any) -> Handle:
        """Call ``see(*labels, tensor)`` when the model comes to a point."""
        module = self.located.module(point.module)
        if point.side == "input":
            return module.register_forward_pre_hook(
                lambda _, args, kwargs: (self.running and see(*labels, given(args, kwargs))) or None, with_kwargs=True
            )
        return module.register_forward_hook(
            lambda _, args, output: (self.running and see(*labels, item_of(output, point.item))) or None
        )

    def needs(self, place: SitePlace) -> set[str]:
        """Parts that the event of a site is made of."""
        wanted = self.tap.parts(place)
        if place.index in self.valued:
            wanted |= {"o", "v"} | ({"own"} if self.own_weights else set())
        if place.index in self.opened:
            wanted |= {"x", "h"}
        return wanted

    def see(self, index: int, part: str, value: Any) -> None:
        """One part of a site."""
        if not self.running or index < self.due:
            return
        value = value.detach() if isinstance(value, Tensor) else tree_map_only(Tensor, Tensor.detach, value)
        if part == "update" and self.located.sites[index].parallel:
            value = value.clone()  # Falcon adds the one sublayer to what the other gave, in place
        self.slots[index][part] = value
        while self.due < len(self.slots) and self.needed[self.due] <= self.slots[self.due].keys():
            seen, self.slots[self.due] = self.slots[self.due], {}
            self.due += 1
            with torch.no_grad():
                self.on_event(self._event(self.due - 1, seen))

    def see_attention(self, call: Any) -> None:
        """One call of the attention function."""
        index = self.owners.get(id(call.module))
        if index is not None and self.running:
            self.see(index, "own", call.own())

    def _event(self, index: int, seen: dict[str, Any]) -> Event:
        place = self.located.sites[index]
        if self.real is None:
            update = seen["update"]
            self.real = real_tokens(self.located.model, *self.call, update.shape[:2], update.device)
        values = None
        if index in self.valued and place.heads is not None:
            values = ValueEvent(place.heads.outputs(seen["o"]), place.heads.values(seen["v"]), seen.get("own"))
        device = seen["update"].device  # a model over several devices hands the stream on inside the next block
        if any(isinstance(x, Tensor) and x.device != device for x in seen.values()):
            seen = tree_map_only(Tensor, lambda x: x.to(device), seen)
        event = self.tap.event(place, seen, self.real.to(device), values)
        return event if index not in self.opened else replace(event, inner=_inner(place, seen))


def _inner(place: SitePlace, seen: dict[str, Any]) -> InnerEvent:
    """Raises: CaptureError where the sublayer runs its tokens in parts."""
    x, h = seen["x"], seen["h"]
    if x.shape[:-1] != h.shape[:-1]:
        raise CaptureError(
            f"{place.sublayer} is given {list(x.shape)} and its last map {list(h.shape)}: it does not take its tokens as they come, "
            f"so its inside cannot be watched (of transformers: set chunk_size_feed_forward to 0)"
        )
    return InnerEvent(x, h)


class HookTap:
    """Models whose sites are described by points: one stream with additions, or streams side by side."""

    def __init__(self, located: Located):
        self.located = located

    def parts(self, place: SitePlace) -> set[str]:
        return {"state", "update", "following"} | ({"read", "write", "mix", "next_read"} if place.read else set())

    def attach(self, recorder: Recorder) -> Iterator[Handle]:
        wanted: dict[Point, list[tuple[int, str]]] = defaultdict(list)
        sites = self.located.sites
        for place in sites:
            wanted[place.state].append((place.index, "state"))
            wanted[Point(place.update, "output")].append((place.index, "update"))
            if place.read is not None and place.mixing is not None:
                wanted[place.read].append((place.index, "read"))
                wanted[place.mixing[0]].append((place.index, "write"))
                wanted[place.mixing[1]].append((place.index, "mix"))
                if place.index:
                    wanted[place.read].append((place.index - 1, "next_read"))
        for place in sites:  # what closes a site is seen after what opens it
            wanted[place.following].append((place.index, "following"))
        if self.located.contract is not None:
            wanted[Point(self.located.contract, "output")].append((len(sites) - 1, "next_read"))

        def see(labels: list[tuple[int, str]], value: Any) -> None:
            for index, part in labels:
                recorder.see(index, part, value)

        for point, labels in wanted.items():
            yield recorder.at(point, see, labels)

    def event(self, place, seen, real, values):
        branch = seen["update"] if place.multiplier == 1 else seen["update"] * place.multiplier
        if place.read is None:
            return Event(place, seen["state"], branch, seen["following"], real, values=values, seen=seen)
        read, following = seen["read"], seen["next_read"]
        return Event(place, read, branch, following, real, seen["state"], seen["following"], values, seen)

    def write(self, events):
        place, seen = events[0].place, events[0].seen
        assert seen is not None
        if place.read is not None:  # mix is [from, to] over there
            update, weights = seen["update"], seen["write"].to(seen["update"].dtype)
            mixed = seen["mix"].to(update.dtype).transpose(-1, -2) @ seen["state"]
            return weights.unsqueeze(-1) * update.unsqueeze(-2) + mixed
        total = events[0].state
        for event in events:
            total = total + event.branch
        return total if place.norm_after is None else self.located.module(place.norm_after)(total)

    def observed(self, event):
        return event.following if event.next_states is None else event.next_states

    def begun(self, event):
        return event.state if event.states is None else event.states

    def end(self, event):
        x = self.observed(event)
        for name in (self.located.contract, self.located.final_norm):
            x = x if name is None else self.located.module(name)(x)
        return x


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor that a module was called with, by place or by name. Raises: CaptureError."""
    for value in (*args, kwargs.get("hidden_states"), *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise CaptureError("a module on the stream was called without a tensor; the map does not fit the model")


def item_of(output: Any, item: int) -> Tensor:
    """The tensor that a module gave, ``item`` of several. Raises: CaptureError."""
    if isinstance(output, Tensor) and item == 0:
        return output
    try:
        found = output[item]
    except (KeyError, IndexError, TypeError):
        found = None
    if not isinstance(found, Tensor):
        raise CaptureError(
            f"a module on the stream gave {type(output).__name__} without a tensor at {item}; the map does not fit the model"
        )
    return found
