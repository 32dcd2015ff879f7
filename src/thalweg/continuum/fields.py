"""The two sublayers of a layer as functions of the stream: what each would add to any state, with its norms, as the model calls it.

They are made while a pass goes by, from the arguments that the model itself hands to its sublayers (masks, angles ...), and proved there:
at the state that the model had, each must give what the model added. Weights of 16 bits are widened to float32 for the length of a call.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from thalweg.capture.layout import Located, SitePlace
from thalweg.capture.proof import TOLERANCE, dtype_of, gap
from thalweg.capture.watching import Event, given, item_of, watch
from thalweg.errors import CaptureError, InputError
from thalweg.ops.precision import wide

Field = Callable[[Tensor], Tensor]
LOOSE = 10  # times the tolerance of a replay: a field widens 16 bits, and takes the plain kernel of attention


class Layer(NamedTuple):
    """One layer as it went by.

    attention, feed_forward: fields [b t d] -> [b t d]. before: its state, float32 or wider. updates: what the two added, in that order; None
    where the model computed in 16 bits. real [b t]: no padding.
    """

    index: int
    attention: Field
    feed_forward: Field
    before: Float[Tensor, "b t d"]
    updates: tuple[Tensor, Tensor] | None
    real: Tensor


def why_no_fields(located: Located) -> str | None:
    """Why a model's layers are not two updates of one stream in a row; None where they are."""
    if located.streams > 1:
        return f"it has {located.streams} streams, and the order of two updates is about one"
    if not pairs(located):
        if any(place.parallel for place in located.sites):
            return "attention and feed-forward read the same state side by side, so there is no order to swap"
        return "no layer has one attention and one feed-forward sublayer, in this order"
    sites = [place for pair in pairs(located) for place in pair]
    if any(place.norm_after for place in sites):
        return "a norm stands over every sum (post-norm): what a sublayer adds is no function of the stream alone"
    if located.tap is not None and not _one_tensor(located):
        form = "a history, a matrix, an axis of its own"
        return f"its connection keeps the stream in another form than [b t d] ({form}), which this probe does not read"
    return None


def pairs(located: Located) -> list[tuple[SitePlace, SitePlace]]:
    """The attention and the feed-forward site of every layer that has just these two, one after the other."""
    by_layer: dict[int, list[SitePlace]] = {}
    for place in located.sites:
        by_layer.setdefault(place.layer, []).append(place)
    return [
        (sites[0], sites[1])
        for sites in by_layer.values()
        if [s.kind for s in sites] == ["attention", "feed_forward"] and not any(s.parallel for s in sites)
    ]


class Layers:
    """Makes the fields of every layer out of the events of a pass, and calls ``on_layer`` with each; ``calling`` while fields may be called.

    prove: hold every field against what the model added, at the cost of two calls a layer.
    """

    def __init__(self, located: Located, on_layer: Callable[[Layer], Any], *, prove: bool):
        self.located, self.on_layer, self.prove, self.calling = located, on_layer, prove, False
        self._of_site = {place.index: pair for pair in pairs(located) for place in pair}
        self._calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._held: dict[int, Event] = {}

    def attach(self) -> Iterator[Any]:
        """Let it see what sublayers are called with; yields what undoes it."""
        for place in (place for pair in pairs(self.located) for place in pair):
            yield self.located.module(place.sublayer).register_forward_pre_hook(
                self._keep(place.sublayer), with_kwargs=True
            )

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.calling:
                self._calls[name] = args, kwargs

        return hook

    def see(self, event: Event) -> None:
        """An event of the pass. Raises: CaptureError where a field does not give what the model added."""
        pair = self._of_site.get(event.place.index)
        if pair is None:
            return
        if event.place is pair[0]:
            self._held[event.place.layer] = event
            return
        first, self.calling = self._held.pop(event.place.layer), True
        try:
            made = [_field(self.located, e, self._calls[e.place.sublayer]) for e in (first, event)]
            for e, field in zip((first, event), made, strict=True):
                if self.prove:
                    _prove(self.located, e, field)
            narrow = wide(event.state) is not event.state
            updates = None if narrow else (_added(first), _added(event))
            self.on_layer(Layer(event.place.layer, made[0], made[1], wide(first.state), updates, event.real))
        finally:
            self.calling = False


@contextmanager
def watch_layers(located: Located, on_layer: Callable[[Layer], Any], *, prove: bool) -> Iterator[None]:
    """Call ``on_layer`` with every layer as passes of the model go by, which must not fill a cache (``use_cache=False``).

    Fields may be kept, tensors may not. prove: as for :class:`Layers`.
    Raises: CaptureError where a field does not give what the model added.
    """
    layers = Layers(located, on_layer, prove=prove)
    with ExitStack() as stack:
        for handle in layers.attach():
            stack.callback(handle.remove)
        stack.enter_context(watch(located, layers.see))
        yield


@contextmanager
def differentiable() -> Iterator[None]:
    """A region where attention takes the kernel that has forward-mode derivatives, in every place."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _field(located: Located, event: Event, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Field:
    place = event.place
    if located.tap is not None:
        return _field_of_ours(located, event, call)
    before = [] if place.state.module == place.sublayer else [located.module(place.state.module)]
    after = [] if place.update == place.sublayer else [located.module(place.update)]
    run = _caller(located.module(place.sublayer), call)
    norms = [widened(m) for m in before], [widened(m) for m in after]

    def field(x: Tensor) -> Tensor:
        for norm in norms[0]:
            x = item_of(norm((x,), {}), 0)
        x = item_of(run(x), 0)
        for norm in norms[1]:
            x = item_of(norm((x,), {}), 0)
        return x if place.multiplier == 1 else x * place.multiplier

    return field


def _field_of_ours(located: Located, event: Event, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Field:
    """What its site adds; next state minus state, where a connection writes in another way than by addition."""
    assert located.tap is not None
    tap: Any = located.tap(located)
    site, tokens = tap.stream.sites[tap.site_of[event.place.index]], (event.seen or {}).get("tokens")
    run, adds = _caller(located.module(event.place.sublayer), call), _adds(event)

    def field(x: Tensor) -> Tensor:
        read, context = site.read(x, tokens)
        update = item_of(run(read), 0)
        return site.update_norm(update) if adds else site.write(x, update, context) - x

    return field


def _adds(event: Event) -> bool:
    """Whether the next state is the state and the update, no more."""
    tolerance = TOLERANCE.get(event.state.dtype, 1e-2)
    return gap(event.state + event.branch, event.following, event.real) <= tolerance


def _added(event: Event) -> Tensor:
    return event.branch if _adds(event) else event.following - event.state


def _caller(module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Callable[[Tensor], Any]:
    """The module with its own arguments, its first tensor replaced."""
    args, kwargs = _wide(call[0]), {name: _wide(value) for name, value in call[1].items()}
    first = given(call[0], call[1])
    place = next((i for i, value in enumerate(call[0]) if value is first), None)
    name: Any = None if place is not None else next(n for n, value in call[1].items() if value is first)
    run = widened(module)

    def apply(x: Tensor) -> Any:
        if place is not None:
            return run((*args[:place], x, *args[place + 1 :]), kwargs)
        return run(args, {**kwargs, name: x})

    return apply


def widened(module: nn.Module) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """A call of the module, with its 16-bit weights in float32."""
    weights = dict(module.named_parameters()) | dict(module.named_buffers())
    narrow = {n: wide(w) for n, w in weights.items() if w.is_floating_point() and wide(w) is not w}
    if not narrow:
        return lambda args, kwargs: module(*args, **kwargs)
    return lambda args, kwargs: torch.func.functional_call(module, narrow, args, kwargs)


def _wide(value: Any) -> Any:
    """A value of a call with its tensors in float32 or wider; tuples, lists, tables and dataclasses are looked into."""
    if isinstance(value, Tensor):
        return wide(value) if value.is_floating_point() else value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_wide(one) for one in value)
    if isinstance(value, dict):
        return {key: _wide(one) for key, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: _wide(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def _prove(located: Located, event: Event, field: Field) -> None:
    """Raises: CaptureError unless the field gives, at the state that the model had, what the model added."""
    allowed = LOOSE * TOLERANCE.get(dtype_of(located.model), 1e-2)
    with differentiable():
        got = field(wide(event.state))
    off = gap(wide(event.state) + got, wide(event.following), event.real)
    if not off <= allowed:
        raise CaptureError(
            f"{event.place.name} ({event.place.sublayer}) called again does not add what it added: off by {off:.2g} of the state "
            f"(allowed: {allowed:g}); its update is no function of the stream that can be called by itself"
        )


def _one_tensor(located: Located) -> bool:
    assert located.tap is not None
    stream: Any = located.tap(located).stream  # type: ignore[attr-defined]
    weight = next(located.model.parameters())
    with torch.no_grad():
        state = stream.enter(weight.new_zeros(1, 1, located.width))
    return isinstance(state, Tensor) and state.ndim == 3


def logits_of(located: Located, state: Float[Tensor, "b t d"]) -> Float[Tensor, "b t v"]:
    """What the head makes of a last state, scale and soft cap included. Raises: InputError for a model without a head."""
    if located.head is None:
        raise InputError(f"{located.family} has no head that makes logits")
    x = state.to(dtype_of(located.model))
    if located.final_norm is not None:
        x = located.module(located.final_norm)(x)
    x = wide(located.module(located.head)(x)) * located.logit_scale
    return x if located.logit_softcap is None else located.logit_softcap * torch.tanh(x / located.logit_softcap)
