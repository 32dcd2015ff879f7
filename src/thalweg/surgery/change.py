"""What a change of shape did to every parameter: which old entry each new one is, so that weights and optimiser state can follow."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from thalweg.errors import InputError
from thalweg.models.config import DecoderConfig
from thalweg.models.hf import in_shell
from thalweg.models.hf_base import ThalwegPreTrainedModel
from thalweg.models.sharing import named_weights
from thalweg.models.sublayers import Attention
from thalweg.models.transformer import Transformer
from thalweg.surgery import families

NEW = -1  # an index that no old entry has


@dataclass(frozen=True, eq=False)
class ParameterMap:
    """Where one new parameter comes from.

    old: name of the old parameter. taken: axis -> for each new index the old one, -1 where the entry is new; an axis that is not named is
    as it was. factor: what old entries were multiplied by (1 but for some norms of a wider model).
    """

    old: str
    taken: Mapping[int, Int[Tensor, " n"]] = field(default_factory=dict)
    factor: float = 1.0

    @property
    def same(self) -> bool:
        """Whether the parameter is the old one, entry by entry."""
        return not self.taken and self.factor == 1

    def carry(self, old: Tensor, new: Tensor, factor: float = 1.0) -> Tensor:
        """``new`` with the old entries, times ``factor``, where they belong; its other entries stay. In place; returns ``new``."""
        places = []
        for axis in range(new.ndim):
            taken = self.taken.get(axis)
            if taken is None:
                places.append(torch.arange(new.shape[axis], device=new.device))
                continue
            kept = (taken >= 0).nonzero().flatten()
            old = old.index_select(axis, taken[kept].to(old.device))
            places.append(kept.to(new.device))
        old = old.to(new.device, new.dtype)
        old = old if factor == 1 else old * factor
        if new.ndim:
            new[torch.meshgrid(*places, indexing="ij")] = old
        else:
            new.copy_(old)
        return new


@dataclass(frozen=True, eq=False)
class Change:
    """What one operation did. what: in words. before, after: the configurations.

    maps: name of each parameter and buffer of the new model -> where it comes from, None where all of it is new. Names are those inside
    the decoder. old, new: the parameters themselves, by name, for :func:`thalweg.surgery.carry_optimizer`; they keep the old weights
    alive, so let a change go once it has been used. drift: 0, or for a warm start by how much of its norm the stream differs on random states.
    """

    what: str
    before: DecoderConfig
    after: DecoderConfig
    maps: Mapping[str, ParameterMap | None]
    old: Mapping[str, nn.Parameter] = field(repr=False)
    new: Mapping[str, nn.Parameter] = field(repr=False)
    drift: float = 0.0

    @property
    def parameters_added(self) -> int:
        """How many more parameters there are; negative where some were taken away."""
        counts = [sum(p.numel() for p in side.values()) for side in (self.new, self.old)]
        return counts[0] - counts[1]


class Grown(NamedTuple):
    """The new model, in the shell of Hugging Face if the given one was, and what became of every parameter."""

    model: Any
    change: Change


Fill = Callable[[Any], None]  # gives new entries of a new model another start than that of a fresh one


def decoder_of(model: Any) -> Transformer:
    """The model inside the shell of Hugging Face, or the model itself. Raises: InputError for one that is not ours."""
    inner = model.transformer if isinstance(model, ThalwegPreTrainedModel) else model
    if not isinstance(inner, Transformer):
        kind = getattr(getattr(model, "config", None), "model_type", None)
        known = isinstance(kind, str) and kind in families.registry
        remedy = (
            "make it one by surgery.convert first"
            if known
            else f"surgery.convert makes one of the families {', '.join(families.registry.names())}, and this is none of them"
        )
        raise InputError(f"only a model of thalweg can be grown or pruned, got {type(model).__name__}; {remedy}")
    return inner


def whole_decoder_of(model: Any) -> Transformer:
    """The same of a model whose shape is to change. Raises: InputError for one that is sharded over ranks, too."""
    inner = decoder_of(model)
    if is_sharded(inner.parameters()):
        raise InputError(
            "this model is sharded (FSDP2), and a change of shape needs its weights whole; change it before it is sharded, or hold it whole "
            "on every rank (DDP)"
        )
    return inner


def is_sharded(parameters: Iterable[Tensor]) -> bool:
    """Whether any of them is spread over ranks (a DTensor, told by its mesh: importing the class takes long)."""
    return any(hasattr(parameter, "device_mesh") for parameter in parameters)


def settings_of(config: Any) -> dict[str, Any]:
    """What a configuration of transformers holds beside the shape of a model: special tokens, and the names of classes."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    found = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    if getattr(config, "classes", None) is not None:
        found |= {"id2label": config.id2label, "label2id": config.label2id}
    return found


# What of a generation_config belongs to the classes of the model it was made for.
OF_ITS_CLASSES = (
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "compile_config",
    "continuous_batching_config",
)


def generation_of(model: Any) -> Any:
    """What a model of transformers says of how it generates (further ends, sampling), without its cache.

    None where it says nothing, or something that transformers would refuse to write into a folder.
    """
    found = copy.deepcopy(getattr(model, "generation_config", None))
    if found is None:
        return None
    for name in OF_ITS_CLASSES:
        if getattr(found, name, None) is not None:
            setattr(found, name, None)
    try:
        found.validate(strict=True)
    except ValueError:
        return None
    return found


def generates_as(model: Any, shell: ThalwegPreTrainedModel) -> ThalwegPreTrainedModel:
    """The shell, which generates by default as ``model`` did."""
    if shell.can_generate() and (found := generation_of(model)) is not None:
        cast(Any, shell).generation_config = found
    return shell


def attentions(decoder: Any) -> dict[int, list[tuple[str, Attention]]]:
    """Layer -> its attention modules by their name in the decoder."""
    found: dict[int, list[tuple[str, Attention]]] = {}
    for layer, block in enumerate(decoder.blocks):
        for name, module in block.named_modules():
            if isinstance(module, Attention):
                found.setdefault(layer, []).append((f"blocks.{layer}.{name}", module))
    return found


@torch.no_grad()
def rebuild(
    model: Any,
    config: DecoderConfig,
    what: str,
    maps: Callable[[str, Tensor], ParameterMap | None],
    fill: Fill | None = None,
    finish: Fill | None = None,
    *,
    generator: torch.Generator | None = None,
    in_place: bool = False,
) -> Grown:
    """A model of ``config`` whose parameters come from ``model`` by ``maps`` (name, fresh tensor).

    What is new starts as a fresh model does, then ``fill`` has the word, then old entries are put in, and ``finish`` is last.
    Raises: InputError for an old parameter that has no place in the new model.
    """
    old = decoder_of(model)
    weight = next(old.parameters())
    new = type(old)(config, generator=generator).to(weight.device, weight.dtype)
    if fill is not None:
        fill(new)
    before, after = named_weights(old), named_weights(new)
    found = {name: maps(name, value) for name, value in after.items()}
    lost = sorted(set(before) - {map.old for map in found.values() if map is not None})
    if lost:
        raise InputError(
            f"{len(lost)} parameters have no place in the new model ({lost[0]}, ...): those of {config.connection!r} depend on its shape"
        )
    for name, map in found.items():
        if map is not None:
            check_shape(name, map, before[map.old], after[name])
            map.carry(before[map.old], after[name], map.factor)
    if finish is not None:
        finish(new)
    settle(old, new)
    named_old, named_new = dict(old.named_parameters()), dict(new.named_parameters())
    for name, parameter in named_new.items():
        map = found[name]
        if map is not None and isinstance(source := before[map.old], nn.Parameter):
            parameter.requires_grad_(source.requires_grad)
    if in_place:
        keep(new, {n: named_old[m.old] for n, m in found.items() if m is not None and m.same and m.old in named_old})
        named_new = dict(new.named_parameters())
    change = Change(what, old.config, config, found, named_old, named_new)
    return Grown(put_back(model, old, new, in_place), change)


def check_shape(name: str, map: ParameterMap, old: Tensor, new: Tensor) -> None:
    """Raises: InputError for a parameter that changed its shape in a way that nobody has said."""
    for axis in range(max(old.ndim, new.ndim)):
        sizes = [tensor.shape[axis] if axis < tensor.ndim else 0 for tensor in (old, new)]
        if sizes[0] != sizes[1] and axis not in map.taken:
            raise InputError(
                f"{name} changes its shape from {list(old.shape)} to {list(new.shape)}, and nothing says which entry is which; "
                "this model has a part that cannot change so"
            )


def settle(old: Transformer, new: Transformer) -> None:
    """What belongs to a model beside its weights."""
    new.train(old.training)
    new.gradient_checkpointing = old.gradient_checkpointing


def keep(new: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Put the very objects of parameters that did not change into the new model, under every name that they have there."""
    swapped = {id(value): parameters[name] for name, value in new.named_parameters() if name in parameters}
    for module in new.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            if id(value) in swapped:
                module.register_parameter(name, swapped[id(value)])


def put_back(model: Any, old: Any, new: Any, in_place: bool) -> Any:
    """The new model as the given one was: bare or in its shell; ``in_place``: the given object itself becomes it."""
    if in_place:
        old.__dict__.clear()
        old.__dict__.update(new.__dict__)
        new = old
    if not isinstance(model, ThalwegPreTrainedModel):
        return new
    shell = generates_as(model, in_shell(new, **settings_of(model.config)))
    shell.train(model.training)
    if not in_place:
        return shell
    model.__dict__.clear()
    model.__dict__.update(shell.__dict__)
    return model


def blocks_of(kept: list[int], size: int) -> Int[Tensor, " n"]:
    """Old index of each entry where every unit of ``kept`` (-1: a new one) has ``size`` entries."""
    units = torch.tensor(kept)
    entries = units[:, None] * size + torch.arange(size)
    return torch.where(units[:, None] < 0, NEW, entries).flatten()
