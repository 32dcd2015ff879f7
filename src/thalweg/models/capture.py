"""Our own decoders and encoders, located and watched: every connection, whatever its state is.

``read`` and ``write`` are not calls of modules, so that hooks do not see them: while watched, each site's ``advance`` is wrapped. What a
site reads is seen where its input norm gets it, the update where the sublayer or its update norm gives it.
"""

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.capture import Event, Heads, Inner, Located, Point, SitePlace
from thalweg.capture.layout import named_apart
from thalweg.capture.maps import EXPERTS
from thalweg.capture.watching import Handle, Recorder
from thalweg.models.sublayers import Sublayer
from thalweg.models.sublayers.attention import Attention
from thalweg.models.sublayers.feed_forward import FeedForward
from thalweg.models.sublayers.parallel import Parallel

KINDS = {"moe": "feed_forward"}  # kinds of sublayers that are known by another name outside


def locate_transformer(model: nn.Module, prefix: str = "") -> Located:
    """The description of a model of ours; ``prefix``: its dotted name inside ``model`` with a dot behind, empty where it is the model."""
    decoder: Any = model.get_submodule(prefix.rstrip(".")) if prefix else model
    config, stream = decoder.config, decoder.stream
    norms = [f"{prefix}stream.sites.{k}.input_norm" for k in range(len(stream.sites))]
    states = [Point(name, "input") for name in (*norms, f"{prefix}stream.final_norm")]
    streams = streams_of(decoder)
    places: list[SitePlace] = []
    for k, (site, sublayer) in enumerate(zip(stream.layout, decoder.sublayers, strict=True)):
        name = f"{prefix}blocks.{site.layer}.sublayers.{k % len(config.layers)}"
        for kind, part, computes, update in _branches(prefix, stream, k, sublayer, name):
            heads, why = _heads(computes, part) if kind == "attention" else (None, "")
            inner, why_not = _inner(computes, part) if kind == "feed_forward" else (None, "")
            places.append(
                SitePlace(
                    index=len(places),
                    layer=site.layer,
                    kind=kind,
                    name=f"layers.{site.layer}.{kind}",
                    block=f"{prefix}blocks.{site.layer}",
                    parallel=update == part and part != name,
                    sublayer=part,
                    update=update,
                    state=states[k],
                    following=states[k + 1],
                    read=states[k] if streams > 1 else None,
                    heads=heads,
                    no_heads=why,
                    inner=inner,
                    no_inner=why_not,
                )
            )
    return Located(
        model=model,
        family=f"thalweg {config.connection}",
        found_by="own",
        causal=config.causal,
        width=config.width,
        depth=config.depth,
        sites=named_apart(places),
        blocks=tuple(f"{prefix}blocks.{i}" for i in range(config.depth)),
        streams=streams,
        base=prefix.rstrip("."),
        final_norm=f"{prefix}stream.final_norm",
        head=f"{prefix}head",
        logit_softcap=config.logit_softcap,
        tap=functools.partial(DecoderTap, decoder=decoder),
    )


def streams_of(decoder: Any) -> int:
    """How many streams the state of a decoder shows."""
    weight = decoder.embedding.weight
    with torch.no_grad():
        return decoder.stream.observe(decoder.stream.enter(weight.new_zeros(1, 1, decoder.config.width))).shape[2]


def _branches(
    prefix: str, stream: Any, k: int, sublayer: Sublayer, name: str
) -> Iterator[tuple[str, str, nn.Module, str]]:
    """Kind, sublayer, its module and its update, for every branch of a site that can be told apart."""
    normed = stream.sites[k].update_norm.kind != "none"
    if isinstance(sublayer, Parallel) and not normed:
        for kind in ("attention", "feed_forward"):
            yield kind, f"{name}.{kind}", getattr(sublayer, kind), f"{name}.{kind}"
        return
    yield (
        KINDS.get(sublayer.kind, sublayer.kind),
        name,
        sublayer,
        f"{prefix}stream.sites.{k}.update_norm" if normed else name,
    )


def _heads(sublayer: nn.Module, name: str) -> tuple[Heads | None, str]:
    if not isinstance(sublayer, Attention):
        return None, f"{type(sublayer).__name__} shows no heads"
    for part, present in (
        ("gate", sublayer.gate is not None),
        ("norm", sublayer.inner_norm.kind != "none"),
        ("dictionary", sublayer.dictionary is not None),
        ("mask", sublayer.head_mask is not None),
        ("scaling (attention_edit)", sublayer.edit is not None),
    ):
        if present:
            return None, f"the heads pass a {part} before the output map"
    heads = Heads(sublayer.heads, sublayer.kv_heads, sublayer.head_width, f"{name}.value", f"{name}.output")
    return heads, ""


def _inner(sublayer: nn.Module, name: str) -> tuple[Inner | None, str]:
    if not isinstance(sublayer, FeedForward):
        return None, EXPERTS
    return Inner(f"{name}.down", Point(name, "input"), Point(name, "output"), sublayer.down.in_features), ""


@dataclass
class Replaced:
    """A method of one module that stands in for its own until it is removed."""

    module: nn.Module
    name: str
    before: Any

    def remove(self) -> None:
        if self.before is None:
            self.module.__dict__.pop(self.name, None)
        else:
            self.module.__dict__[self.name] = self.before


class DecoderTap:
    """How a decoder of ours is watched, and how its writes are replayed."""

    def __init__(self, located: Located, decoder: Any):
        self.located, self.stream = located, decoder.stream
        self.at_site: dict[int, list[SitePlace]] = defaultdict(list)  # site of the connection -> places
        self.site_of: dict[int, int] = {}
        k = -1
        for place in located.sites:
            if not place.parallel or k < 0 or self.at_site[k][-1].state != place.state:
                k += 1
            self.at_site[k].append(place)
            self.site_of[place.index] = k

    def parts(self, place: SitePlace) -> set[str]:
        return {"state", "read", "update", "given", "following", "next_read"}

    def attach(self, recorder: Recorder) -> Iterator[Handle]:
        for k, site in enumerate(self.stream.sites):
            yield self._wrap(recorder, k, site)
            for place in self.at_site[k]:
                yield recorder.at(Point(place.update, "output"), recorder.see, place.index, "update")
                yield recorder.at(place.state, recorder.see, place.index, "read")
                yield recorder.at(place.following, recorder.see, place.index, "next_read")

    def _wrap(self, recorder: Recorder, k: int, site: Any) -> Handle:
        """Site ``k`` tells the recorder what it is handed and what it hands on."""
        own, before = site.advance, site.__dict__.get("advance")
        indices = [place.index for place in self.at_site[k]]

        @functools.wraps(own)
        def advance(following: Any, state: Any, update: Tensor, context: Any, tokens: Any = None) -> Any:
            if not recorder.running:
                return own(following, state, update, context, tokens)
            for i in indices:
                for part, value in (("state", state), ("given", update), ("context", context), ("tokens", tokens)):
                    recorder.see(i, part, value)
            found = own(following, state, update, context, tokens)
            for i in indices:
                recorder.see(i, "following", found[0])
            return found

        site.__dict__["advance"] = advance
        return Replaced(site, "advance", before)

    def event(self, place: SitePlace, seen: dict[str, Any], real: Tensor, values: Any) -> Event:
        one = isinstance(seen["state"], Tensor) and seen["state"].ndim == 3  # the state is the stream itself
        state, following = (seen["state"], seen["following"]) if one else (seen["read"], seen["next_read"])
        if self.located.streams == 1:
            return Event(place, state, seen["update"], following, real, values=values, seen=seen)
        before, after = self.stream.observe(seen["state"]), self.stream.observe(seen["following"])
        return Event(place, state, seen["update"], following, real, before, after, values, seen)

    def write(self, events: list[Event]) -> Any:
        seen: dict[str, Any] = events[0].seen or {}
        update = seen["given"] if len(events) == 1 else functools.reduce(torch.add, [e.branch for e in events])
        site = self.stream.sites[self.site_of[events[0].place.index]]
        return site.write(seen["state"], update, seen.get("context"))

    def observed(self, event: Event) -> Any:
        return (event.seen or {})["following"]

    def begun(self, event: Event) -> Any:
        return (event.seen or {})["state"]

    def end(self, event: Event) -> Tensor:
        return self.stream.leave(self.observed(event), (event.seen or {}).get("tokens"))
