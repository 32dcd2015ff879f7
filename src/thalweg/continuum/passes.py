"""One pass over a text for every probe that only looks on: what a probe can ask of a pass, and the pass that gives it to all of them.

    class Sizes(Collector):
        needs = frozenset({"sites"})
        def site(self, event): ...          # called at every site of every batch

A collector keeps what it needs of what goes by and nothing else; no state outlives its batch.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from thalweg.capture.attention_call import AttentionCall
from thalweg.capture.evaluating import evaluating
from thalweg.capture.layout import Located
from thalweg.capture.proof import called
from thalweg.capture.watching import Event, given, watch
from thalweg.capture.windows import Batch, Text
from thalweg.continuum.fields import Layer, Layers
from thalweg.continuum.scores import watch_attention

Need = Literal["sites", "layers", "attention", "inputs"]


class Collector:
    """What one probe keeps of a pass; subclass it, and override what ``needs`` names.

    needs: ``sites`` (every site's event), ``layers`` (the two fields of every layer), ``attention`` (every call of the attention function),
    ``inputs`` (what the modules of ``modules`` are given, by dotted name). prove: hold every field of ``layers`` against the model.
    Tensors are the model's own: look at them during the call, do not keep or change them. Only what the model itself does is told, not the
    calls of its modules that fields make.
    """

    needs: ClassVar[frozenset[Need]] = frozenset()
    modules: Sequence[str] = ()
    prove: bool = False

    def begin(self, batch: Batch) -> None:
        """Before the model reads a batch."""

    def site(self, event: Event) -> None:
        """At every site, in order."""

    def layer(self, layer: Layer) -> None:
        """At the end of every layer that is an attention and a feed-forward sublayer."""

    def attention(self, layer: int, call: AttentionCall) -> None:
        """At every attention of the layers."""

    def given(self, module: str, x: Tensor) -> None:
        """When a module is called, with its first tensor."""

    def end(self, batch: Batch) -> None:
        """After the model has read a batch."""


@dataclass
class Reading:
    """How a pass went. failed: what collectors raised, by name; seconds: what each took; rest: seconds that the pass took beside."""

    failed: dict[str, Exception] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    rest: float = 0.0


def read(located: Located, text: Text, collectors: Mapping[str, Collector], size: int, padding_id: int = 0) -> Reading:
    """Let the model read a text once, in batches of ``size`` windows, for all collectors. One that raises is left out from there on.

    Fills no cache and makes no logits but the last token's. The model is left as it was. Raises: what the pass itself raises, as CaptureError.
    """
    told = _Told(located, collectors)
    began = time.perf_counter()
    with evaluating(located.model), told.watching():
        for batch in text.batches(size, padding_id):
            told.tell(None, "begin", batch)
            if not told.live:
                break
            located.model(**called(located.model, batch.call), **states_only(located.model))
            told.tell(None, "end", batch)
    told.reading.rest = time.perf_counter() - began - sum(told.reading.seconds.values())
    return told.reading


def states_only(model: nn.Module) -> dict[str, Any]:
    """What a model is called with where nobody reads its logits: no cache is filled, and no logits are made but the last token's."""
    named = inspect.signature(model.forward).parameters
    wanted = {"use_cache": False, "logits_to_keep": 1}
    return {name: value for name, value in wanted.items() if name in named}


class _Told:
    """Hands what goes by to the collectors that need it."""

    def __init__(self, located: Located, collectors: Mapping[str, Collector]):
        self.located, self.live = located, dict(collectors)
        self.reading = Reading(seconds=dict.fromkeys(collectors, 0.0))
        self.layers: Layers | None = None
        if self.asked("layers"):
            prove = any(one.prove for one in collectors.values())
            self.layers = Layers(located, lambda layer: self.tell("layers", "layer", layer), prove=prove)

    def asked(self, need: Need) -> bool:
        return any(need in one.needs for one in self.live.values())

    def tell(self, need: Need | None, method: str, *args: Any) -> None:
        for name, one in list(self.live.items()):
            if need is None or need in one.needs:
                self.tell_one(name, one, method, *args)

    def tell_one(self, name: str, one: Collector, method: str, *args: Any) -> None:
        if name not in self.live:
            return
        began = time.perf_counter()
        try:
            with torch.no_grad():
                getattr(one, method)(*args)
        except Exception as error:  # one probe never takes another with it
            self.reading.failed[name] = error
            del self.live[name]
        self.reading.seconds[name] += time.perf_counter() - began

    @property
    def muted(self) -> bool:
        """Whether fields are being called: what modules do then is no part of the pass."""
        return self.layers is not None and self.layers.calling

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.asked("attention"):
                stack.enter_context(watch_attention(self.located, self._attention))
            for name, one in self.live.items():
                for module in one.modules if "inputs" in one.needs else ():
                    handle = self.located.module(module).register_forward_pre_hook(
                        self._input(name, one, module), with_kwargs=True
                    )
                    stack.callback(handle.remove)
            if self.layers is not None:
                for handle in self.layers.attach():
                    stack.callback(handle.remove)
            if self.asked("sites") or self.layers is not None:
                stack.enter_context(watch(self.located, self._site))
            yield

    def _site(self, event: Event) -> None:
        self.tell("sites", "site", event)
        if self.layers is None or not self.asked("layers"):
            return
        try:
            self.layers.see(event)
        except Exception as error:  # a field that is none ends those that need fields, and no others
            for name in [name for name, one in self.live.items() if "layers" in one.needs]:
                self.reading.failed[name] = error
                del self.live[name]

    def _attention(self, layer: int, call: AttentionCall) -> None:
        if not self.muted:
            self.tell("attention", "attention", layer, call)

    def _input(self, name: str, one: Collector, module: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.muted:
                self.tell_one(name, one, "given", module, given(args, kwargs))

        return hook


__all__ = ["Collector", "Need", "Reading", "read", "states_only"]
