"""Optimisers: which parameter goes to which group, and by which rule it moves."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thalweg.connections.base import GroupHint
from thalweg.errors import CheckpointError, InputError
from thalweg.models.sublayers.prototypes import dictionaries
from thalweg.training.parallel import like

OptimizerKind = Literal["adamw", "muon", "sgd"]
STREAM = "stream."  # where a decoder keeps its connection
KEPT = {
    "adamw": frozenset({"step", "exp_avg", "exp_avg_sq"}),
    "muon": frozenset({"momentum_buffer"}),
    "sgd": frozenset({"momentum_buffer"}),
}  # of each parameter
HIDDEN = re.compile(r"blocks\.\d+\.")  # the sublayers' own weights
EDIT = re.compile(r"\.edit\.(parallel|perpendicular)\.")  # learned scales of edits
# Of the learning rate, in dictionaries of prototypes that learn from their own loss; the weights of the network have 1.
TIME_SCALES = {"prototypes": 10.0, "log_temperature": 0.1}


@dataclass(frozen=True)
class Group:
    """Parameters that share an optimiser, a factor on the learning rate and a weight decay; ``names`` in the order of the model."""

    optimizer: OptimizerKind
    lr_mul: float
    weight_decay: float
    names: tuple[str, ...]


def layer_of(name: str) -> int | None:
    """The block that a parameter belongs to, or None outside the blocks."""
    found = HIDDEN.match(name)
    return int(found.group().split(".")[1]) if found else None


def hint_of(name: str, hints: Mapping[str, GroupHint]) -> GroupHint:
    """The first of the stream's hints whose pattern fits the name inside the stream; no hint outside the stream."""
    if name.startswith(STREAM):
        for pattern, hint in hints.items():
            if fnmatchcase(name.removeprefix(STREAM), pattern):
                return hint
    return GroupHint()


def dictionary_scales(model: nn.Module) -> dict[str, float]:
    """The factor on the learning rate of every parameter that belongs to a dictionary of prototypes, by its name in ``model``."""
    return {f"{name}.{kind}": factor for name, _ in dictionaries(model) for kind, factor in TIME_SCALES.items()}


def make_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    hints: Mapping[str, GroupHint],
    *,
    optimizer: OptimizerKind = "adamw",
    weight_decay: float = 0.1,
    scales: Mapping[str, float] | None = None,
) -> list[Group]:
    """Sort named parameters into groups.

    Matrices (two axes or more) decay and vectors do not, unless a hint of the stream says otherwise. With ``muon`` the two-axis
    weights of the blocks move by Muon; embeddings, vectors and everything that belongs to the stream stay with AdamW, because an
    orthogonalised step has no meaning for a gate. With ``sgd`` everything moves by it.
    Learned scales of edits have a group of their own, which does not decay. scales: factors on the learning rate of parameters, by name;
    those do not decay either, and stay with AdamW where others move by Muon.
    """
    groups: dict[tuple[OptimizerKind, float, float, bool], list[str]] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        hint = hint_of(name, hints)
        if scales and name in scales:
            hint = GroupHint(lr_mul=scales[name], weight_decay=0.0)
        decay = hint.weight_decay
        if decay is None:
            decay = weight_decay if parameter.ndim >= 2 else 0.0
        scale = EDIT.search(name) is not None
        if scale:
            decay = 0.0
        by_muon = optimizer == "muon" and parameter.ndim == 2 and HIDDEN.match(name) is not None
        kind: OptimizerKind = "sgd" if optimizer == "sgd" else "muon" if by_muon else "adamw"
        groups.setdefault((kind, hint.lr_mul, decay, scale), []).append(name)
    return [Group(kind, lr_mul, decay, tuple(names)) for (kind, lr_mul, decay, _), names in groups.items()]


class Optimizers:
    """One optimiser or two behind one interface; the learning rate of each group is the run's, times its ``lr_mul``."""

    def __init__(
        self,
        model: nn.Module,
        groups: list[Group],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.0,
        fused: bool = True,
    ):
        named = dict(model.named_parameters())
        tables: dict[OptimizerKind, list[dict]] = {}
        for group in groups:
            tables.setdefault(group.optimizer, []).append(
                {
                    "params": [(name, named[name]) for name in group.names],
                    "lr_mul": group.lr_mul,
                    "weight_decay": group.weight_decay,
                }
            )
        self.members: dict[str, torch.optim.Optimizer] = {}
        if "adamw" in tables:
            self.members["adamw"] = torch.optim.AdamW(tables["adamw"], lr=0.0, betas=betas, eps=eps, fused=fused)
        if "muon" in tables:  # the update has AdamW's size, so that one learning rate serves both
            self.members["muon"] = torch.optim.Muon(tables["muon"], lr=0.0, adjust_lr_fn="match_rms_adamw")
        if "sgd" in tables:  # its decay is of the gradient: with momentum it is carried on as the gradient is
            self.members["sgd"] = torch.optim.SGD(tables["sgd"], lr=0.0, momentum=momentum)
        if not self.members:
            raise InputError("the model has no parameter to train; unfreeze some")

    def step(self, lr: float) -> None:
        """Move every parameter with the run's learning rate ``lr``."""
        for optimizer in self.members.values():
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_mul"]
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.members.values():
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, dict]:
        return {name: optimizer.state_dict() for name, optimizer in self.members.items()}

    def load_state_dict(self, state: dict[str, dict], source: Path) -> None:
        """Take over whole tensors, sharded as the parameters are. Raises: CheckpointError if they belong to other parameters."""
        if set(state) != set(self.members):
            raise CheckpointError(
                f"{source} holds the state of {_list(state)}, this run moves by {_list(self.members)}; "
                "resume with the configuration of its run"
            )
        for name, optimizer in self.members.items():
            saved = state[name]
            if _names(saved) != _names(optimizer.state_dict()):
                raise CheckpointError(
                    f"{source} holds the state of other {name} groups; resume with the configuration of its run"
                )
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            _check_entries(saved["state"], parameters, KEPT[name], f"{source}: {name}")
            states = {
                index: {
                    key: like(value, parameters[index]) if isinstance(value, Tensor) else value
                    for key, value in entry.items()
                }
                for index, entry in saved["state"].items()
            }
            # The groups are those of the configuration: of the saved ones nothing but the names matters beyond a step.
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


def _names(state: dict) -> list[list[str]]:
    return [group["param_names"] for group in state["param_groups"]]


def _list(names: Iterable[str]) -> str:
    return " and ".join(sorted(map(str, names))) or "no optimiser"


def _check_entries(
    entries: Mapping[int, Any], parameters: list[nn.Parameter], kept: frozenset[str], where: str
) -> None:
    """Raises: CheckpointError unless each entry holds what the optimiser keeps of its parameter, in the parameter's shape."""
    for index, entry in entries.items():
        if index not in range(len(parameters)):
            raise CheckpointError(
                f"{where} has an entry for parameter {index} of {len(parameters)}; use another checkpoint"
            )
        if set(entry) != kept:
            raise CheckpointError(
                f"{where} keeps {', '.join(sorted(map(str, entry))) or 'nothing'} of parameter {index} in place of {', '.join(sorted(kept))}; "
                "use another checkpoint, or the version that wrote it"
            )
        for key, value in entry.items():
            shape = () if key == "step" else tuple(parameters[index].shape)
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if got != shape:
                raise CheckpointError(
                    f"{where} has {key} of parameter {index} with {got} in place of a tensor of shape {shape}; use another checkpoint"
                )
