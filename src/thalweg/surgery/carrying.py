"""Optimiser state through a change of shape: old entries keep theirs to the last bit, new entries begin at zero."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.errors import InputError
from thalweg.surgery.change import Change, ParameterMap, is_sharded

SQUARED = re.compile(r"sq|square")  # states in the square of the gradient
NUMBERED = re.compile(r"\.\d+\.")


def carry_optimizer(optimizer: Any, change: Change) -> Any:
    """Let ``optimizer`` go on with the model that ``change`` made; in place, and returned.

    optimizer: one of torch, or several behind ``members`` as :class:`thalweg.training.optim.Optimizers` has them. Every new parameter takes
    the place of the one that it came from, in its group; where a parameter is new as a whole (in a new layer), the group of the parameter of
    the same name in the next layer that has one. So groups keep their rate, decay and number, and a scheduler (``LambdaLR`` and its
    ``base_lrs``, ``lr_lambdas``) goes on without a word; parameters of groups with names stay in the order of the model.
    State of old entries is kept bit by bit (AdamW, SGD with momentum, Muon, and any state in the shape of its parameter), that of new
    entries is zero; the count of steps of a parameter goes on, and a parameter that is new as a whole begins at step 0. Where old
    entries were multiplied by a factor (norms of a wider model), their first moments are divided by it and their second by its square, as
    their gradients are.
    Raises: InputError for an optimiser that moves none of the old parameters, or parameters that are sharded over ranks (FSDP2).
    """
    members = list(getattr(optimizer, "members", {}).values()) or [optimizer]
    old_names = {id(p): name for name, p in change.old.items()}
    moved = [p for member in members for group in member.param_groups for p in group["params"]]
    if is_sharded([*moved, *change.new.values()]):
        raise InputError(
            "this optimiser or the new model is sharded (FSDP2), and state is carried whole; carry it before the model is sharded, or make a "
            "new optimiser"
        )
    held = {id(p) for p in moved}
    if not held & set(old_names):
        raise InputError(
            "this optimiser moves no parameter of the model that was changed; carry it through every change, in order"
        )
    heirs: dict[str, list[str]] = {}
    for name in change.new:
        map = change.maps.get(name)
        if map is not None:
            heirs.setdefault(map.old, []).append(name)
    unplaced = [name for name in change.new if change.maps.get(name) is None and change.new[name].requires_grad]
    home = {name: model_of(name, change) for name in unplaced}
    if lone := next((name for name, model in home.items() if model is None), None):
        raise InputError(f"{lone} is new and has no like in the old model to share a group with; make a new optimiser")
    for member in members:
        for group in member.param_groups:
            _carry_group(member, group, change, old_names, heirs, home)
    return optimizer


def model_of(name: str, change: Change) -> str | None:
    """The old parameter whose group a wholly new one joins: that of the same name in the nearest layer, or any of the same name."""
    pattern = NUMBERED.sub(".*.", name)
    found = [old for old in change.old if NUMBERED.sub(".*.", old) == pattern]
    return min(found, key=lambda old: _distance(old, name)) if found else None


def _distance(one: str, other: str) -> int:
    numbers = [[int(n) for n in re.findall(r"(?<=\.)\d+(?=\.)", name)] for name in (one, other)]
    return sum(abs(a - b) for a, b in zip(*numbers, strict=False))


def _carry_group(
    member: torch.optim.Optimizer,
    group: dict[str, Any],
    change: Change,
    old_names: Mapping[int, str],
    heirs: Mapping[str, list[str]],
    home: Mapping[str, str | None],
) -> None:
    params, names = group["params"], group.get("param_names")
    entries: list[tuple[str | None, str | None, nn.Parameter]] = []  # name in the decoder, name in the group, parameter
    for i, parameter in enumerate(params):
        old = old_names.get(id(parameter))
        given = None if names is None else names[i]
        if old is None:
            entries.append((None, given, parameter))
            continue
        prefix = None if given is None else given.removesuffix(old)
        state = member.state.pop(parameter, None)
        for name in (*heirs.get(old, ()), *(new for new, model in home.items() if model == old)):
            new = change.new[name]
            entries.append((name, None if prefix is None else prefix + name, new))
            map = change.maps.get(name)
            if state is not None and map is not None:
                member.state[new] = carried_state(state, parameter, new, map)
    order = {name: i for i, name in enumerate(change.new)}
    entries.sort(
        key=lambda entry: -1 if entry[0] is None else order[entry[0]]
    )  # stable: others keep their places in front
    group["params"] = [parameter for *_, parameter in entries]
    if names is not None:
        group["param_names"] = [given for _, given, _ in entries]


@torch.no_grad()
def carried_state(state: Mapping[str, Any], old: Tensor, new: Tensor, map: ParameterMap) -> dict[str, Any]:
    """The state of a new parameter: tensors in the shape of the old one by the map, zero where entries are new; all else as it is."""
    if map.same:
        return dict(state)
    found = dict(state)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == old.shape and value.ndim:
            power = 2 if SQUARED.search(key) else 1
            found[key] = map.carry(
                value, torch.zeros(new.shape, dtype=value.dtype, device=value.device), map.factor**-power
            )
        elif isinstance(value, Tensor):
            found[key] = value.clone()
    return found
