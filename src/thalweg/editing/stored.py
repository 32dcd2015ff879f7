"""What a model and its folder hold of attached edits: the entry of the configuration, and learned scales among the weights."""

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thalweg import config
from thalweg.capture.hub import OnHub, look_up
from thalweg.capture.opening import EDITED
from thalweg.capture.quiet import readable
from thalweg.capture.weights import files_of
from thalweg.errors import CheckpointError, UnknownNameError, first_line
from thalweg.models.edits import UpdateEdit

ENTRY = EDITED  # of the configuration, and the name of the module in every edited layer
SPACES = {"value": "value", "attention": "residual", "mlp": "residual"}  # of the sites
WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"
ANEW = "save the model anew with the edit attached"


def named(model: nn.Module) -> dict[str, UpdateEdit]:
    """The edits that the configuration of a model names, by site; none where it names none.

    Raises: CheckpointError for an entry that is no table; InputError, UnknownNameError for edits that cannot be.
    """
    entry = getattr(getattr(model, "config", None), ENTRY, None) or {}
    if not isinstance(entry, Mapping):
        raise CheckpointError(
            f"{ENTRY} in the configuration must be a table SITE -> edit, got {entry!r:.60}; {ANEW}, or take {ENTRY} out of config.json"
        )
    found: dict[str, UpdateEdit] = {}
    for site, table in entry.items():
        if site not in SPACES:
            raise UnknownNameError(f"site in {ENTRY} of the configuration:", site, SPACES)
        edit = UpdateEdit.of(table, f"{ENTRY}.{site} of the configuration")
        if edit is None:
            raise CheckpointError(f"{ENTRY}.{site} of the configuration must be a table, got null; {ANEW}")
        found[site] = edit
    return found


def enter(model: nn.Module, site: str, edit: UpdateEdit) -> None:
    """Write an edit into the configuration, where the model has one."""
    held: Any = getattr(model, "config", None)
    if held is not None:
        setattr(held, ENTRY, {**(getattr(held, ENTRY, None) or {}), site: config.to_plain(edit)})


def strike(model: nn.Module, site: str) -> None:
    """Take an edit out of the configuration."""
    held: Any = getattr(model, "config", None)
    left = {name: table for name, table in (getattr(held, ENTRY, None) or {}).items() if name != site}
    if left:
        setattr(held, ENTRY, left)
    elif held is not None:
        held.__dict__.pop(ENTRY, None)


def own_configuration(model: nn.Module) -> None:
    """Give a model of transformers a configuration of its own: others may have been made from the same object, and have no edit."""
    from transformers.configuration_utils import PreTrainedConfig

    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        return
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():  # all parts ask the same object which attention is used
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                vars(module)[name] = copies[id(value)]


def stored_tensors(where: str | Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors named as ``wanted`` of the model saved in the folder ``where``, or under that name on a hub; shaped as there, and finite.

    Raises: CheckpointError where the weights, or one of the names in them, are missing, broken or do not fit; what
    :func:`thalweg.capture.hub.look_up` raises.
    """
    place = _place(where)
    index = _file(place, INDEX)
    whole = None if index is not None else _file(place, WHOLE)
    if index is None and whole is None:
        raise CheckpointError(
            f"{str(where) or 'the model'}: no {WHOLE} is there to take learned scales from; give the folder that save_pretrained wrote"
        )
    files = None if index is None else files_of(index)
    found: dict[str, Tensor] = {}
    for name, like in wanted.items():
        for spelled in (name, _earlier(name)):
            path = whole if files is None else _file(place, files.get(spelled, ""))
            value = None if path is None else _tensor(path, spelled)
            if value is not None:
                found[name] = _fitting(value, like, f"{path}: {spelled}")
                break
        else:
            raise CheckpointError(f"{where} names an edit in its configuration but holds no {name}; {ANEW}")
    return found


def _earlier(name: str) -> str:
    """How a scale was named before names said that it does not decay."""
    return re.sub(rf"({ENTRY}\.[a-z]+)_bias\.", r"\1.", name)


def _place(where: str | Path) -> Path | OnHub | None:
    if not str(where):
        return None
    path = config.checked_path(where, expand=True)
    if config.is_path(where) or path.exists():
        return path
    return look_up(str(where), "give the folder that save_pretrained wrote")


def _file(place: Path | OnHub | None, name: str) -> Path | None:
    if not name or place is None:
        return None
    if isinstance(place, Path):
        path = place / name
        return path if path.is_file() else None
    from transformers.utils import cached_file

    with readable(place.name):
        found = cached_file(
            place.name,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **place.options,
        )
    return None if found is None else Path(found)


def _tensor(path: Path, name: str) -> Tensor | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({first_line(error)}); copy it anew, or {ANEW}"
        ) from None


def _fitting(value: Tensor, like: Tensor, where: str) -> Tensor:
    """Raises: CheckpointError for a tensor that cannot take the place of ``like``."""
    if value.shape != like.shape:
        raise CheckpointError(
            f"{where} has the shape {list(value.shape)}, the edit that the configuration names needs {list(like.shape)}; {ANEW}"
        )
    if value.is_floating_point() != like.is_floating_point() or value.is_complex():
        raise CheckpointError(f"{where} is of {value.dtype}, the edit needs {like.dtype}; {ANEW}")
    if not torch.isfinite(value).all() or (not value.is_floating_point() and bool((value < 0).any())):
        raise CheckpointError(
            f"{where} holds {value.flatten().tolist()[:8]}, which is no retained scale or count; {ANEW}"
        )
    return value
