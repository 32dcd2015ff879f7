"""Locate the residual stream of a model: by its own answer, by a map, by its family, or by its structure."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from thalweg.capture import families
from thalweg.capture.layout import Located
from thalweg.capture.maps import Map, place, read_map, text_config
from thalweg.errors import InputError


def locate(model: nn.Module, map: Map | Mapping[str, Any] | str | Path | None = None) -> Located:
    """Where the residual stream runs through ``model``.

    map: how its layers are spelled, a dict or the path of a TOML file (see :mod:`thalweg.capture.maps`); None: as the model itself says,
    else by its family (``config.model_type``), else by its structure, which is decided by replay on a few tokens.
    Raises: InputError, UnknownNameError for a map that names what the model does not have; CaptureError where nothing fits.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"a model is a torch module, got {type(model).__name__}")
    model = unwrapped(model)
    if map is not None:
        return place(model, read_map(map), found_by="map")
    own = getattr(model, "locate_stream", None)
    if own is not None:
        return own()
    found = by_family(model)
    if found is not None:
        return found
    from thalweg.capture.structure import by_structure

    return by_structure(model)


def by_family(model: nn.Module) -> Located | None:
    """The description that the table of families gives, None for a family that it does not have."""
    config = text_config(model)
    kind = getattr(config, "model_type", None)
    if not kind or kind not in families.registry:
        return None
    spelled = families.registry[kind](config)
    base = base_of(model, spelled.blocks)

    def full(name: str) -> str:
        return ".".join(part for part in (base, name) if part)

    head = head_of(model) if spelled.causal else ""
    return place(
        model,
        replace(
            spelled,
            family=kind,
            base=base,
            blocks=full(spelled.blocks),
            final_norm=spelled.final_norm and full(spelled.final_norm),
            contract=spelled.contract and full(spelled.contract),
            head=head,
        ),
        found_by="family",
    )


def base_of(model: nn.Module, blocks: str) -> str:
    """Dotted name of the module that holds the list ``blocks``, the outermost."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    fitting = [n for n in names if n == blocks or n.endswith("." + blocks)]
    if not fitting:
        raise InputError(f"{type(model).__name__} has no list of blocks called {blocks}; give a map of its layers")
    language = [n for n in fitting if "language_model" in n] or fitting
    return min(language, key=lambda n: n.count(".")).removesuffix(blocks).rstrip(".")


def head_of(model: nn.Module) -> str:
    """Dotted name of the unembedding, empty where the model ends at its hidden state."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    return next((name for name, module in model.named_modules() if module is head), "") if head is not None else ""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch. Raises: InputError for those that cannot be watched."""
    kind = type(model).__name__
    if kind == "OptimizedModule":
        return unwrapped(model._orig_mod)  # type: ignore[arg-type]  # what torch.compile wraps
    if kind == "DistributedDataParallel":
        return unwrapped(model.module)  # type: ignore[arg-type]
    if kind in ("DataParallel", "FullyShardedDataParallel"):
        raise InputError(f"a model inside {kind} cannot be watched; use DistributedDataParallel or fully_shard")
    return model
