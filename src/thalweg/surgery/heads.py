"""Heads of a trained model: new ones that compute nothing yet, a mask on some of them, some taken away for good."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from thalweg._words import counted
from thalweg.errors import InputError, ShapeError
from thalweg.models.config import DecoderConfig
from thalweg.models.edits import UpdateEdit
from thalweg.models.sublayers import Attention
from thalweg.surgery.change import (
    NEW,
    Grown,
    ParameterMap,
    attentions,
    blocks_of,
    decoder_of,
    rebuild,
    whole_decoder_of,
)


class BornHead(Protocol):
    """Query and key factors [d w] of a new head, as :class:`thalweg.growth.Birth` has them: scores are x W_q W_k^T x^T."""

    @property
    def query(self) -> Tensor: ...

    @property
    def key(self) -> Tensor: ...


Births = int | Sequence[BornHead | tuple[Tensor, Tensor]]


def grow_heads(
    model: Any, births: Mapping[int, Births], *, generator: torch.Generator | None = None, in_place: bool = False
) -> Grown:
    """A model with more heads in some layers that computes what ``model`` computes; ``model`` itself is not changed unless ``in_place``.

    births: layer -> how many query heads come, or for each new head its query and key factors: objects with ``query`` and ``key`` [d w], or
    pairs. New heads stand behind the old ones. Their output map is zero, so no number changes; value map, gate and dictionary start as
    those of a fresh model, biases at 0; query and key rows are the factors given, else fresh.
    Where g queries share keys, heads come by whole groups: a number is a multiple of g, and a birth makes one group, its query factors
    [d w], the same for every query of the group, or [d g*w], side by side.
    generator: of what is drawn. in_place: the given object becomes the new model; parameters whose shape stays are the same objects.
    Raises: InputError for a layer without heads, half a group, a model that norms all heads together (Sub-LN) or projects them together
    (edits with group ``all``); ShapeError for factors of another shape.
    """
    decoder = whole_decoder_of(model)
    config, places = decoder.config, attentions(decoder)
    group, added = config.head_group, {}
    for layer, given in check_layers(births, places).items():
        added[layer] = count = given if isinstance(given, int) else group * len(given)
        if isinstance(given, bool) or count < 1 or count % group:
            shared = f" of {group}, the queries that share keys and values," if group > 1 else ""
            raise InputError(f"layer {layer} takes a whole number of heads{shared} from 1, got {count}")
    joined(decoder, added, "a new head")
    kept = {layer: [*range(config.heads_of(layer)), *[NEW] * count] for layer, count in added.items()}
    factors = {
        layer: [factors_of(config, birth) for birth in given]
        for layer, given in births.items()
        if not isinstance(given, int)
    }

    def fill(new: Any) -> None:
        for layer, modules in attentions(new).items():
            for _, module in modules if layer in added else ():
                begin(module, added[layer], factors.get(layer, []))

    words = ", ".join(f"{counted(count, 'head')} in layer {layer}" for layer, count in added.items())
    return _reshape(model, decoder, kept, f"grew {words}", fill, generator, in_place)


def prune_heads(model: Any, heads: Mapping[int, Iterable[int]], *, in_place: bool = False) -> Grown:
    """A model without some heads: layer -> the query heads that go, by number from 0. What they wrote is gone from its updates.

    Where a head's mask is 0 already (:func:`mask_heads`) no number changes. At least one head stays in a layer; heads that share keys and
    values go together. ``in_place``: as in :func:`grow_heads`.
    Raises: InputError for heads that are not there, parts of a group, all heads of a layer, and models whose heads are normed or projected
    together.
    """
    decoder = whole_decoder_of(model)
    config, places = decoder.config, attentions(decoder)
    kept: dict[int, list[int]] = {}
    for layer, given in check_layers(heads, places).items():
        gone, count, group = (
            check_numbers(layer, given, config.heads_of(layer)),
            config.heads_of(layer),
            config.head_group,
        )
        whole = {head for head in gone if all(head // group * group + i in gone for i in range(group))}
        if gone != whole:
            first = min(gone - whole) // group * group
            raise InputError(
                f"heads {first} to {first + group - 1} of layer {layer} share keys and values and go together, got {sorted(gone)}"
            )
        if len(gone) == count:
            raise InputError(f"layer {layer} has {count} heads, and at least {group} must stay; take fewer away")
        kept[layer] = [head for head in range(count) if head not in gone]
    joined(decoder, kept, "taking a head away")
    words = ", ".join(
        f"{counted(config.heads_of(layer) - len(stay), 'head')} of layer {layer}" for layer, stay in kept.items()
    )
    return _reshape(model, decoder, kept, f"pruned {words}", None, torch.Generator().manual_seed(0), in_place)


@torch.no_grad()
def mask_heads(model: Any, factors: Mapping[int, Mapping[int, float]]) -> None:
    """Multiply what heads give by a factor in [0, 1]: layer -> head -> factor; other heads keep theirs. In place and reversible: 1 restores.

    A head at 0 writes nothing and has no gradient; :func:`prune_heads` then changes no number. Masks are not saved with the weights: a
    masked model refuses ``save_pretrained``.
    Raises: InputError for heads that are not there or a factor outside [0, 1].
    """
    decoder = decoder_of(model)
    for layer, given in check_layers(factors, places := attentions(decoder)).items():
        check_numbers(layer, given, decoder.config.heads_of(layer))
        for head, factor in given.items():
            if not 0 <= factor <= 1:
                raise InputError(f"the factor on head {head} of layer {layer} must lie in [0, 1], got {factor}")
        for _, module in places[layer]:
            mask = mask_of(module)
            for head, factor in given.items():
                mask[head] = factor
            module.head_mask = None if bool((mask == 1).all()) else mask


def head_masks(model: Any) -> dict[int, list[float]]:
    """Layer -> the factor on every head, for layers where some head is masked."""
    return {
        layer: module.head_mask.tolist()
        for layer, modules in attentions(decoder_of(model)).items()
        for _, module in modules
        if module.head_mask is not None
    }


def mask_of(module: Attention) -> Tensor:
    """A copy of the mask of a module, ones where it has none."""
    weight = module.output.weight
    if module.head_mask is None:
        return torch.ones(module.heads, device=weight.device, dtype=torch.float32)
    return module.head_mask.clone()


def check_layers(given: Mapping[int, Any], places: Mapping[int, Any]) -> dict[int, Any]:
    """Raises: InputError unless every layer has heads, and at least one is named."""
    if not isinstance(given, Mapping) or not given:
        raise InputError("name at least one layer, as {layer: heads}")
    for layer in given:
        if layer not in places or isinstance(layer, bool):
            have = f"0 to {max(places)}" if places else "none"
            raise InputError(f"layer {layer} has no heads; layers with heads: {have}")
    return dict(sorted(given.items()))


def check_numbers(layer: int, given: Iterable[int], count: int) -> set[int]:
    """Raises: InputError unless these are heads of the layer, at least one."""
    numbers = list(given)
    for head in numbers:
        if not isinstance(head, int) or isinstance(head, bool) or not 0 <= head < count:
            raise InputError(f"layer {layer} has heads 0 to {count - 1}, got {head!r}")
    if not numbers:
        raise InputError(f"name at least one head of layer {layer}")
    return set(numbers)


def joined(decoder: Any, layers: Iterable[int], what: str) -> None:
    """Raises: InputError where the heads of a layer are not independent of each other before the output map."""
    edit = decoder.config.edits.get("attention_edit")
    for layer in layers:
        for _, module in attentions(decoder)[layer]:
            if module.inner_norm.kind != "none":
                raise InputError(
                    f"{decoder.config.connection!r} norms all heads of a layer together before the output map, so {what} changes all others"
                )
    if edit is not None and edit.space == "value" and edit.group not in ("head", "kv", "kv:1"):
        raise InputError(
            f"attention_edit with group {edit.group!r} projects heads together, so {what} changes all others; use group=head or kv"
        )


def factors_of(config: DecoderConfig, birth: Any) -> tuple[Tensor, Tensor]:
    """Query rows [g*w d] and key rows [w d] of a group. Raises: ShapeError, InputError."""
    query, key = birth if isinstance(birth, tuple) else (getattr(birth, "query", None), getattr(birth, "key", None))
    d, w, g = config.width, config.head_width, config.head_group
    if not isinstance(query, Tensor) or not isinstance(key, Tensor):
        raise InputError(f"a birth has query and key factors [width, head width], got {type(birth).__name__}")
    if query.shape not in ((d, w), (d, g * w)) or key.shape != (d, w):
        several = f" or [{d}, {g * w}]" if g > 1 else ""
        raise ShapeError(
            f"query factors must be [{d}, {w}]{several} and key factors [{d}, {w}], got {list(query.shape)} and {list(key.shape)}"
        )
    rows = query.T if query.shape[1] == g * w else query.T.repeat(g, 1)
    return rows, key.T


def begin(module: Attention, count: int, factors: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Start the last ``count`` heads of a fresh module: output columns zero, query and key rows as given."""
    w = module.head_width
    module.output.weight[:, -count * w :] = 0
    keys = len(factors) * w
    if factors:
        module.query.weight[-count * w :] = torch.cat([query for query, _ in factors]).to(module.query.weight)
        module.key.weight[-keys:] = torch.cat([key for _, key in factors]).to(module.key.weight)


def axes_of(name: str, module: Attention, edit: UpdateEdit | None) -> dict[str, dict[int, tuple[bool, int]]]:
    """Name of each parameter or buffer that has a part for every head -> its axis, whether that counts key-value heads, entries of a head."""
    w = module.head_width
    found = {f"{name}.output.weight": {1: (False, w)}}
    for part, shared in (("query", False), ("key", True), ("value", True)):
        found |= {f"{name}.{part}.{which}": {0: (shared, w)} for which in ("weight", "bias")}
    if module.gate is not None:
        size = module.gate.out_features // module.heads
        found |= {f"{name}.gate.{which}": {0: (False, size)} for which in ("weight", "bias")}
    if module.dictionary is not None:
        found |= {f"{name}.dictionary.{which}": {0: (False, 1)} for which in ("prototypes", "log_temperature")}
    found[f"{name}.edit.direction"] = {0: (False, 1)}
    if edit is not None and edit.per == "head":
        found |= {f"{name}.edit.{which}.offset": {0: (False, 1)} for which in ("parallel", "perpendicular")}
    return found


def _reshape(
    model: Any,
    decoder: Any,
    kept: Mapping[int, list[int]],
    what: str,
    fill: Any,
    generator: torch.Generator | None,
    in_place: bool,
) -> Grown:
    config: DecoderConfig = decoder.config
    heads = tuple(len(kept.get(layer, range(config.heads_of(layer)))) for layer in range(config.depth))
    after = config.replace(layer_heads=heads, **edits_with(config, kept))
    group, taken = config.head_group, {}
    masks = {layer: [mask_of(module) for _, module in modules] for layer, modules in attentions(decoder).items()}
    for layer, units in kept.items():
        pairs = units[::group]
        shared = [NEW if unit == NEW else unit // group for unit in pairs]
        for name, module in attentions(decoder)[layer]:
            for part, axes in axes_of(name, module, config.edits.get("attention_edit")).items():
                taken[part] = {axis: blocks_of(shared if kv else units, size) for axis, (kv, size) in axes.items()}
    grown = rebuild(
        model,
        after,
        what,
        lambda name, _: ParameterMap(name, taken.get(name, {})),
        fill,
        generator=generator,
        in_place=in_place,
    )
    for layer, modules in attentions(decoder_of(grown.model)).items():
        for mask, (_, module) in zip(masks[layer], modules, strict=True):
            units = torch.tensor(kept.get(layer, range(len(mask))), device=mask.device)
            mask = torch.where(units < 0, 1.0, mask[units.clamp(min=0)])
            module.head_mask = None if bool((mask == 1).all()) else mask
    return grown


def edits_with(config: DecoderConfig, kept: Mapping[int, list[int]]) -> dict[str, Any]:
    """Edits whose scales list heads, with the new lists: a new head is left as it is."""
    edit = config.edits.get("attention_edit")
    if edit is None:
        return {}
    changes = {}
    for name in ("parallel", "perpendicular"):
        value = getattr(edit, name)
        if isinstance(value, tuple) and any(isinstance(entry, tuple) for entry in value):
            changes[name] = tuple(
                tuple(1.0 if head < 0 else entry[head] for head in kept[layer])
                if layer in kept and isinstance(entry, tuple)
                else entry
                for layer, entry in enumerate(value)
            )
    return {"attention_edit": dataclasses.replace(edit, **changes)} if changes else {}
