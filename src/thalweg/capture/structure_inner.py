"""The last linear map of a feed-forward sublayer that no table knows: the one that gives what the sublayer gives."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.capture.evaluating import evaluating
from thalweg.capture.layout import Inner, Located, Point, SitePlace
from thalweg.capture.linear import linear_weight
from thalweg.capture.maps import EXPERTS
from thalweg.capture.proof import run
from thalweg.capture.structure import first_tensor

Seen = dict[str, tuple[Tensor | None, Tensor | None]]


def with_inner(located: Located, ids: Tensor) -> Located:
    """The description with the insides of feed-forward sublayers that a pass over a few tokens shows; else with the reason."""
    wanted = [place for place in located.sites if place.kind == "feed_forward" and place.no_inner != EXPERTS]
    seen: Seen = {}
    names = {
        f"{place.sublayer}.{name}".rstrip(".")
        for place in wanted
        for name, module in located.module(place.sublayer).named_modules()
        if not name or linear_weight(module) is not None
    }
    handles = [located.module(name).register_forward_hook(_keep(seen, name), with_kwargs=True) for name in names]
    try:
        with evaluating(located.model), torch.compiler.set_stance("force_eager"):
            run(located.model, ids)
    finally:
        for handle in handles:
            handle.remove()
    found = list(located.sites)
    for place in wanted:
        inner = _found(place, located, seen)
        why = (
            "" if inner else f"no linear map in {place.sublayer} gives what the sublayer gives and gets another vector"
        )
        found[place.index] = replace(place, inner=inner, no_inner=why)
    return replace(located, sites=tuple(found))


def _found(place: SitePlace, located: Located, seen: Seen) -> Inner | None:
    given, gave = seen.get(place.sublayer, (None, None))
    if given is None or gave is None or given.shape != gave.shape or given.shape[-1] != located.width:
        return None
    module: nn.Module = located.module(place.sublayer)
    for name, last in reversed(list(module.named_modules())):
        weight = linear_weight(last)
        hidden, output = seen.get(f"{place.sublayer}.{name}", (None, None))
        if not name or weight is None or hidden is None or output is None or hidden.shape[:-1] != given.shape[:-1]:
            continue
        if output.shape == gave.shape and torch.equal(output, gave) and not torch.equal(hidden, given):
            where = Point(place.sublayer, "input"), Point(place.sublayer, "output")
            return Inner(f"{place.sublayer}.{name}", *where, weight.shape[1])
    return None


def _keep(seen: Seen, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        got = first_tensor((*args, kwargs.get("hidden_states"), *kwargs.values()))
        seen[name] = got, first_tensor(output)

    return hook
