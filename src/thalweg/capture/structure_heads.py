"""Heads of an attention sublayer that no table knows: every map inside that could hold values is tried, and the attention weights decide."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.capture.layout import Heads, Located, SitePlace
from thalweg.capture.maps import text_config
from thalweg.capture.proof import TOLERANCE, dtype_of
from thalweg.capture.structure import PARTS, first_tensor
from thalweg.capture.values import attention_weights, mismatch
from thalweg.errors import InputError, ShapeError


def with_heads(located: Located, ids: Tensor) -> Located:
    """The description with the heads that the attention weights support; without them where none can be proved, with the reason."""
    model, config = located.model, text_config(located.model)
    query = getattr(config, "num_attention_heads", None)
    if not located.attention:
        return located
    if not isinstance(query, int):
        return _without(located, "the model's config does not say how many heads there are")
    inside: dict[int, dict[str, tuple[Tensor | None, Tensor | None]]] = defaultdict(dict)
    handles = []
    for place in located.attention:
        for name, module in located.module(place.sublayer).named_modules():
            handles.append(
                module.register_forward_hook(_keep(inside[place.index], f"{place.sublayer}.{name}".rstrip(".")))
            )
    try:
        weights = attention_weights(model, ids)
    except InputError as error:
        return _without(located, str(error))
    finally:
        for handle in handles:
            handle.remove()
    if len(weights) != len(located.attention):
        return _without(located, "not every attention layer shows its weights")
    real = torch.ones(ids.shape, dtype=torch.bool, device=ids.device)
    found = list(located.sites)
    for place, weight in zip(located.attention, weights, strict=True):
        heads = _found(place, inside[place.index], weight, real, located, config)
        why = (
            ""
            if heads
            else "no map inside the sublayer holds values that its attention weights mix to what its output map gets"
        )
        found[place.index] = replace(place, heads=heads, no_heads=why)
    return replace(located, sites=tuple(found))


def _found(
    place: SitePlace,
    inside: dict[str, tuple[Tensor | None, Tensor | None]],
    weight: Tensor,
    real: Tensor,
    located: Located,
    config: Any,
) -> Heads | None:
    query = weight.shape[1]
    key_values = dict.fromkeys([getattr(config, "num_key_value_heads", None) or query, query, 1])
    allowed = TOLERANCE.get(dtype_of(located.model), 1e-2)
    maps = {
        name: (a, b)
        for name, (a, b) in inside.items()
        if _is_map(located.module(name)) and a is not None and b is not None
    }
    outputs = {name: a for name, (a, b) in maps.items() if b.shape[-1] == located.width and a.shape[-1] % query == 0}
    for output, flat in reversed(outputs.items()):
        width = flat.shape[-1] // query
        for value, (_, projected) in maps.items():
            if value == output or projected.shape[:-1] != flat.shape[:-1]:
                continue
            for key_value in key_values:
                for part in PARTS:
                    heads = Heads(query, key_value, width, value, output, part)
                    try:
                        o, v = heads.outputs(flat), heads.values(projected)
                    except ShapeError:
                        continue
                    if query % key_value == 0 and mismatch(o, v, weight, real) <= allowed:
                        return heads
    return None


def _is_map(module: nn.Module) -> bool:
    return not list(module.children()) and any(p.ndim == 2 for p in module.parameters())


def _keep(kept: dict[str, tuple[Tensor | None, Tensor | None]], name: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        kept[name] = (first_tensor(args), first_tensor(output))

    return hook


def _without(located: Located, why: str) -> Located:
    sites = tuple(replace(place, no_heads=why) if place.kind == "attention" else place for place in located.sites)
    return replace(located, sites=sites)
