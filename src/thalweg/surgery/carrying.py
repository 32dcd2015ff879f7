"""Optimiser state through a change of shape: old entries keep theirs to the last bit, new entries begin as in a fresh optimiser."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.errors import InputError
from thalweg.surgery.change import NEW, Change, ParameterMap, is_sharded

# The power of a parameter's factor that a state takes: gradients are divided by the factor, lengths in the parameter's unit multiplied.
POWERS = {
    "exp_avg": -1,  # Adam and its kin
    "exp_avg_sq": -2,
    "max_exp_avg_sq": -2,
    "exp_inf": -1,  # Adamax
    "momentum_buffer": -1,  # SGD, Muon; that of RMSprop is free of the size of gradients
    "grad_avg": -1,  # RMSprop
    "square_avg": -2,
    "acc_delta": 2,  # Adadelta
    "sum": -2,  # Adagrad
    "prev": -1,  # Rprop
    "step_size": 1,
    "ax": 1,  # ASGD: the mean of the parameter
}
STARTS = {"sum": "initial_accumulator_value", "step_size": "lr"}  # settings with which states begin that do not at zero
NUMBERED = re.compile(r"\.\d+\.")


def carry_optimizer(optimizer: Any, change: Change) -> Any:
    """Let ``optimizer`` go on with the model that ``change`` made; in place, and returned.

    optimizer: one of torch, or several behind ``members`` as :class:`thalweg.training.optim.Optimizers` has them. Every new parameter takes
    the place of the one that it came from, in its group; where a parameter is new as a whole (in a new layer), the group of the parameter of
    the same name in the next layer that has one. So groups keep their rate, decay and number, and a scheduler (``LambdaLR`` and its
    ``base_lrs``, ``lr_lambdas``) goes on without a word; parameters of groups with names stay in the order of the model.
    State of old entries is kept bit by bit, for every optimiser of torch that keeps one number for each entry (all but Adafactor and LBFGS)
    and others whose states have the same names; new entries begin as in a fresh optimiser, mostly at zero. The count of steps of a parameter
    goes on, and a parameter that is new as a whole begins at step 0. Where old entries were multiplied by a factor (norms of a wider model),
    states in the unit of the gradient are divided by it, squares by its square, and lengths of steps multiplied. State of another name goes
    along where entries only go (pruning); what it is on new entries, or on multiplied ones, nobody has said.
    Raises: InputError, before anything changes, for an optimiser that moves none of the old parameters, state that cannot follow (factored,
    quantised, of an unknown name, LBFGS), or parameters that are sharded over ranks (FSDP2).
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
        _check_states(member, change, old_names, heirs)
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


def _check_states(
    member: torch.optim.Optimizer, change: Change, old_names: Mapping[int, str], heirs: Mapping[str, list[str]]
) -> None:
    """Raises: InputError for state that cannot follow its parameter."""
    kind = type(member).__name__
    if isinstance(member, torch.optim.LBFGS):
        raise InputError(
            f"{kind} keeps all parameters in one vector, which no change of shape fits; make a new optimiser"
        )
    for parameter, state in member.state.items():
        for name in heirs.get(old_names.get(id(parameter), ""), ()):
            map = change.maps[name]
            if map is None or map.same:
                continue
            extended = map.factor != 1 or any((taken == NEW).any() for taken in map.taken.values())
            for key, value in state.items():
                if _is_single(value, parameter):
                    continue
                if not _is_by_entry(value, parameter):
                    form = f"as {list(value.shape)}" if isinstance(value, Tensor) else f"as {type(value).__name__}"
                    raise InputError(
                        f"{kind} keeps {key} of {name} {form}, which is no number for each entry of {list(parameter.shape)} and cannot "
                        "follow a change of shape; make a new optimiser"
                    )
                if extended and key not in POWERS:
                    raise InputError(
                        f"{kind} keeps {key} of {name}, and what that is on entries that are new or multiplied is not known; "
                        "make a new optimiser"
                    )


def _is_single(value: Any, parameter: Tensor) -> bool:
    """Whether a state is one value for the whole parameter, such as a count of steps."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.shape != parameter.shape
    return value is None or isinstance(value, bool | int | float | str)


def _is_by_entry(value: Any, parameter: Tensor) -> bool:
    """Whether a state holds a number for each entry, as it is (quantised states are of a class or a dtype of their own)."""
    return type(value) is Tensor and value.shape == parameter.shape and value.is_floating_point()


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
                member.state[new] = carried_state(state, parameter, new, map, {**member.defaults, **group})
    order = {name: i for i, name in enumerate(change.new)}
    entries.sort(
        key=lambda entry: -1 if entry[0] is None else order[entry[0]]
    )  # stable: others keep their places in front
    group["params"] = [parameter for *_, parameter in entries]
    if names is not None:
        group["param_names"] = [given for _, given, _ in entries]


@torch.no_grad()
def carried_state(
    state: Mapping[str, Any], old: Tensor, new: Tensor, map: ParameterMap, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of a new parameter: by the map what holds a number for each entry, new ones as in a fresh optimiser; all else as it is.

    settings: of the parameter's group.
    """
    if map.same:
        return dict(state)
    found = dict(state)
    for key, value in state.items():
        if _is_by_entry(value, old):
            # RMSprop sums gradients over their root mean square, in which the factor is gone.
            free = key == "momentum_buffer" and "square_avg" in state
            factor = 1.0 if free else map.factor ** POWERS.get(key, 0)
            found[key] = map.carry(value, _fresh(key, value, new, settings), factor)
        elif isinstance(value, Tensor):
            found[key] = value.clone()
    return found


def _fresh(key: str, like: Tensor, new: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """What a fresh optimiser begins with, in the shape of the new parameter."""
    if key == "ax":
        return new.detach().to(like, copy=True)
    value = float(settings.get(STARTS.get(key, ""), 0.0))
    return torch.full(new.shape, value, dtype=like.dtype, device=like.device)
