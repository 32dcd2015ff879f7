"""The same weights under another connection, started where the function stays what it was if the connection can."""

from typing import Any, cast

import torch
from torch import nn

from thalweg import connections
from thalweg.config import merge
from thalweg.connections import Stream
from thalweg.errors import InputError
from thalweg.models import Decoder
from thalweg.ops.norms import Norm

# Targets with a name of their own: a connection and the options that make it so.
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    # x' = x + beta (u - alpha k k^T x), k along the update u, beta = 1, alpha = 0 and learned: the additive stream with its erasure shut.
    # The k-map of Deep Delta Learning cannot do this: it writes along k with a learned length and forgets that of the update.
    "closed_delta": ("mgt", {"form": "delta_rank1", "preset": "residual"}),
}


def options_of(name: str, additive: Decoder, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The connection and its options for a target called ``name``: the slots of the model, what lets it start equal, what a person gave.

    Raises: UnknownNameError, InputError.
    """
    name, recipe = RECIPES.get(name, (name, {}))
    clash = sorted(key for key, value in recipe.items() if given.get(key, value) != value)
    if clash:
        raise InputError(
            f"{', '.join(clash)} is what makes this target; give the connection {name!r} by name to choose it"
        )
    given = merge(recipe, given)
    stream = connections.registry[name]
    slots = additive.stream.options.slots()
    own = {
        key: value for key, value in slots.items() if key not in ("norm", "norm_eps")
    }  # those are fields of the model
    return connections.registry.entry(name).name, {**own, **stream.additive_options(given), **given}


@torch.no_grad()
def under(additive: Decoder, name: str, options: dict[str, Any]) -> tuple[Decoder, bool, tuple[str, ...]]:
    """A new decoder of connection ``name`` with the weights of ``additive``; whether it claims to be the same function; notes.

    Raises: UnknownNameError, InputError.
    """
    config = additive.config.replace(connection=name, connection_options=options)
    parameter = next(additive.parameters())
    made = Decoder(config, generator=torch.Generator().manual_seed(0)).to(parameter.device, parameter.dtype)
    factors = cast(Stream, made.stream).start_as_additive()
    own, given = dict(made.named_parameters()), dict(additive.named_parameters())
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
