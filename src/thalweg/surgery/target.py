"""The same weights under another connection, started where the function stays what it was if the connection can."""

from typing import Any, cast

import torch
from torch import nn

from thalweg import connections
from thalweg.config import merge
from thalweg.connections import Stream
from thalweg.errors import InputError, UnknownNameError
from thalweg.models.making import make
from thalweg.models.sharing import named_weights
from thalweg.models.transformer import Transformer
from thalweg.ops.norms import Norm

# Targets with a name of their own: a connection and the options that make it so.
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    # x' = x + beta (u - alpha k k^T x), k along the update u, beta = 1, alpha = 0 and learned: the additive stream with its erasure shut.
    # The k-map of Deep Delta Learning cannot do this: it writes along k with a learned length and forgets that of the update.
    "closed_delta": ("mgt", {"form": "delta_rank1", "preset": "residual"}),
}


def wanted(name: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The connection that ``name`` stands for, and its options: what a person gave, and what lets it start equal.

    Raises: UnknownNameError, InputError, before any model is loaded.
    """
    if name not in RECIPES and name not in connections.registry:
        raise UnknownNameError("connection or recipe", name, [*connections.names(), *RECIPES])
    name, recipe = RECIPES.get(name, (name, {}))
    name = connections.registry.entry(name).name
    clash = sorted(key for key, value in recipe.items() if given.get(key, value) != value)
    if clash:
        raise InputError(
            f"{', '.join(clash)} is what makes this recipe; give the connection {name!r} by name to choose it"
        )
    fixed = sorted({"norm", "norm_eps", "norm_bias"} & set(given))
    if fixed:
        raise InputError(f"{', '.join(fixed)} come from the model, whose norms are kept; leave them out")
    given = merge(recipe, given)
    found = {**connections.registry[name].additive_options(given), **given}
    connections.make_options(name, found)
    return name, found


def options_of(name: str, additive: Transformer, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The same, with the norm slots of the model under them. Raises: UnknownNameError, InputError."""
    name, found = wanted(name, given)
    slots, usual = additive.stream.options.slots(), connections.option_defaults(name)
    own = {key: value for key, value in slots.items() if key not in ("norm", "norm_eps") and value != usual[key]}
    return name, {**own, **found}


@torch.no_grad()
def under(additive: Transformer, name: str, options: dict[str, Any]) -> tuple[Transformer, bool, tuple[str, ...]]:
    """A new model of connection ``name`` with the weights of ``additive``; whether it claims to be the same function; notes.

    Raises: UnknownNameError, InputError.
    """
    config = additive.config.replace(connection=name, connection_options=options)
    parameter = next(additive.parameters())
    made = make(config, generator=torch.Generator().manual_seed(0)).to(parameter.device, parameter.dtype)
    factors = cast(Stream, made.stream).start_as_additive()
    own, given = named_weights(made), named_weights(additive)
    lost = sorted(key for key in given if key not in own)
    for key, value in given.items():
        if key in own:
            own[key].copy_(value)
    inner = any(sublayer.requirements.inner_norm for sublayer in made.sublayers)
    same_slots = made.stream.options.slots() == additive.stream.options.slots()
    notes = (
        [f"{len(lost)} parameters of norms have no place in {name} and are left out ({lost[0]}, ...)"] if lost else []
    )
    if inner:
        notes.append(f"{name} adds norms inside the sublayers, which start at scale one")
    if factors is None or inner or not same_slots:
        return made, False, tuple(notes)
    for site, sublayer, factor in zip(made.stream.sites, made.sublayers, factors, strict=True):
        if factor != 1:
            divide(site.update_norm, sublayer, factor)
    return made, True, tuple(notes)


def divide(update_norm: Norm, sublayer: Any, factor: float) -> None:
    """Make an update smaller by ``factor``, in the norm on it or, without one, in the last maps of the sublayer."""
    parts = [update_norm] if update_norm.weight is not None else [m.linear for m in sublayer.maps() if m.last]
    for part in parts:
        for parameter in (part.weight, part.bias):
            if parameter is not None:
                cast(nn.Parameter, parameter).div_(factor)
