"""Whether the weights of a file are those that a model needs, and whether those of a model are numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from thalweg._words import counted
from thalweg.errors import CheckpointError, InputError, ThalwegError
from thalweg.records.jsonl import read_object

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
SIZES = ("vocab_size", "hidden_size", "n_embd", "d_model", "width")


def check_fit(info: Mapping[str, Any], where: object) -> None:
    """Of the loading info of transformers. Raises: CheckpointError that names what is missing, left over or of another shape, in one line."""
    shapes = [f"{name} {list(stored)} for {list(own)}" for name, stored, own in info.get("mismatched_keys", ())]
    for problem, found in (
        ("missing keys", info.get("missing_keys")),
        ("unexpected keys", info.get("unexpected_keys")),
        ("mismatched keys", shapes),
    ):
        if found:
            raise CheckpointError(
                f"{where}: {len(found)} {problem} ({few(found)}); the weights do not fit config.json: use the one they were saved with"
            )


def shown(weight: Any) -> Tensor | None:
    """The values of a weight, unpacked where it knows how; None where it does not show them."""
    if not isinstance(weight, Tensor):
        return None
    weight = weight.detach()
    if type(weight) not in (Tensor, nn.Parameter) and hasattr(weight, "dequantize"):
        weight = weight.dequantize()
    return weight if weight.is_floating_point() and weight.device.type != "meta" else None


def not_finite(model: nn.Module) -> str:
    """``NAME holds N values that are NaN or infinite`` of the first such weight; empty where all are numbers."""
    for name, weight in model.named_parameters():
        values = shown(weight)
        if values is None or bool(
            values.sum(dtype=torch.float32).isfinite()
        ):  # one value that is not finite makes the sum so
            continue
        if bad := int((~torch.isfinite(values)).sum()):
            return f"{name} holds {counted(bad, 'value')} that {'is' if bad == 1 else 'are'} NaN or infinite"
    return ""


def few(names: Any) -> str:
    """The first three names, in order."""
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")


def check_sizes(table: Mapping[str, Any], folder: Path, packed: bool = False) -> None:
    """Whether what ``config.json`` says of a model can be in the weights beside it, by the headers of the safetensors files alone: before
    anything is built, which a number of layers from nowhere would never end.

    Every layer has a tensor (or shares one with fewer layers than there are tensors), and vocabulary and width are sizes of tensors, unless
    the weights are packed. Raises: CheckpointError.
    """
    shapes = stored(folder)
    if not shapes:
        return
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    bounds = [(name, len(shapes), f"are {counted(len(shapes), 'tensor')}") for name in LAYERS]
    bounds += [] if packed else [(name, largest, f"have no side above {largest:,}") for name in SIZES]
    for part in (table, table.get("text_config")):
        for name, most, are in bounds:
            value = part.get(name) if isinstance(part, Mapping) else None
            if isinstance(value, int) and value > most:
                raise CheckpointError(
                    f"{folder}: config.json says {name} {value:,}, its weights {are}; use the config that they were saved with"
                )


def stored(folder: Path) -> dict[str, list[int]]:
    """Name and shape of every tensor in the safetensors files of a folder; none where one is broken or missing, which who reads it says."""
    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
        except (SafetensorError, OSError):
            return {}
    try:
        named = [files_of(index) for index in folder.glob("*.safetensors.index.json")]
    except (ThalwegError, OSError):
        return {}
    return found if all(found.keys() >= files.keys() for files in named) else {}


def files_of(index: Path) -> dict[str, str]:
    """Name of a tensor -> name of the file beside ``index``, the index of a model whose weights lie in several. Raises: CheckpointError."""
    files = read_object(index, "index of weights").get("weight_map")
    if not isinstance(files, dict) or any(not isinstance(f, str) or Path(f).name != f for f in files.values()):
        raise CheckpointError(
            f"{index} is broken: its weight_map is no table NAME -> FILE; restore the file, or save the model anew"
        )
    return files


def check_finite(model: nn.Module, name: str, *, comparing: bool = False) -> None:
    """For whoever makes another model of it, or compares it with another. name: of the model.

    Raises: InputError that names the first weight that holds NaN or infinity.
    """
    if found := not_finite(model):
        what, advice = (
            ("compared with", "compress or save it") if comparing else ("made of", "take other weights or save them")
        )
        raise InputError(f"{name}: {found}; nothing can be {what} it; {advice} anew")
