"""Two models side by side: how each is opened and closed, what must be alike, which layer is which."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thalweg.capture.layout import Located
from thalweg.capture.limits import longest_of, window_length
from thalweg.capture.locating import locate
from thalweg.capture.measure import LENGTH
from thalweg.capture.weights import check_finite
from thalweg.compression.compressing import Compressed
from thalweg.compression.error_statistics import Matching
from thalweg.compression.likeness import block_bytes, block_cosines, check_order, shown, sketch
from thalweg.compression.record import RECORD, CompressionRecord, read_record
from thalweg.compression.shape import check_same, check_shared, norm_of, shared
from thalweg.errors import InputError


class Read(NamedTuple):
    """What opening gives. notes: what a reader should know; record: how the model was compressed, where that is known."""

    model: nn.Module
    tokenizer: Any = None
    notes: tuple[str, ...] = ()
    record: CompressionRecord | None = None


@dataclass(frozen=True)
class Side:
    """One of the two models. open: reads it; around: what is entered for every pass of it. map: of its layers."""

    name: str
    open: Callable[[], Read]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    map: Any = None


@dataclass
class Standing:
    """A model that is open. tokenizer: None where there is none."""

    side: Side
    model: nn.Module
    tokenizer: Any
    located: Located
    notes: tuple[str, ...]
    record: CompressionRecord | None


@dataclass(frozen=True)
class Description:
    """What is kept of a model when it is closed: enough to tell whether another is its twin, and to say where numbers came from.

    longest: the most tokens that it takes, None where it does not say. norm: kind of its last norm, empty where it cannot be told.
    """

    name: str
    located: Located  # its model is not to be used
    shared: Mapping[str, Any]
    vocabulary: Mapping[str, int] | None
    sketch: Mapping[str, Tensor]
    dtypes: tuple[str, ...]
    bytes: Mapping[int, int]
    provenance: Mapping[str, Any]
    record: CompressionRecord | None
    longest: int | None = None
    norm: str = ""


@contextmanager
def standing(side: Side) -> Iterator[Standing]:
    """Open a side; nothing here holds it afterwards. Raises: as opening and locating do."""
    found = side.open()
    yield Standing(side, found.model, found.tokenizer, locate(found.model, side.map), found.notes, found.record)


def side_of(
    model: Any, name: str, *, tokenizer: Any = None, map: Any = None, options: Mapping[str, Any] | None = None
) -> Side:
    """A model, or the folder, GGUF file or name of one, which is opened when it is needed. options: of ``open_model``."""
    if isinstance(model, nn.Module):
        found = name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
        return Side(found, lambda: Read(model, tokenizer), map=map)
    if not isinstance(model, str | Path):
        raise InputError(
            f"a model is a torch module, a folder, a GGUF file or a name, got {type(model).__name__}; a transform stands in the second place"
        )

    def opens() -> Read:
        from thalweg.capture.opening import open_model

        opened = open_model(model, tokenizer=tokenizer, **{"quantised": True, **(options or {})})
        return Read(opened.model, opened.tokenizer, opened.notes, read_record(model))

    return Side(name or str(model), opens, map=map)


def twin_of(base: Side, change: Any, name: str) -> Side:
    """The base with a transform: a context manager that acts on it, or a function of a copy of it.

    A context manager is entered around every pass, again and again. A function gets a copy of the model; what it gives is the compressed model
    (or what :func:`thalweg.compression.compress` gives), or None where it changed the copy, or a context manager of the copy.
    Raises: InputError for anything else.
    """
    if isinstance(change, AbstractContextManager):
        return Side(name or "with a transform", base.open, partial(_again, change), map=base.map)
    if not callable(change):
        raise InputError(
            f"the compressed model is a model, a place, a context manager or a function of a copy of the model, got {type(change).__name__}"
        )
    entered: list[AbstractContextManager[Any]] = []

    def opens() -> Read:
        read = base.open()
        copy = deepcopy(read.model)
        made = change(copy)
        entered.clear()
        if isinstance(made, nn.Module):
            return read._replace(model=made)
        if isinstance(made, Compressed):
            return read._replace(model=made.model, record=made.record)
        if made is not None and not isinstance(made, AbstractContextManager):
            raise InputError(
                f"a transform gives a model, what compress gives, a context manager or None, got {type(made).__name__}"
            )
        if made is not None:
            entered.append(made)
        return read._replace(model=copy)

    def around() -> AbstractContextManager[Any]:
        return _again(entered[0]) if entered else nullcontext()

    return Side(name or getattr(change, "__name__", "") or "with a transform", opens, around, map=base.map)


def _again(manager: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """The manager, to be entered once more; those that ``contextlib.contextmanager`` made are made anew, as contextlib does for decorators."""
    anew = getattr(manager, "_recreate_cm", None)
    return manager if anew is None else anew()


def describe(stands: Standing) -> Description:
    """Everything that is asked of a model later, while it is open. Raises: InputError for weights that are not finite."""
    model, located = stands.model, stands.located
    check_finite(model, stands.side.name, comparing=True)
    return Description(
        name=stands.side.name,
        located=replace(located, model=nn.Module(), tap=located.tap and _gone),
        shared=shared(model),
        vocabulary=vocabulary_of(stands.tokenizer),
        sketch=sketch(located),
        dtypes=tuple(
            sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()})
        ),
        bytes=block_bytes(located),
        provenance=_provenance(stands),
        record=stands.record,
        longest=longest_of(model),
        norm=norm_of(located),
    )


def match(base: Description, compressed: Description) -> tuple[Matching, list[str]]:
    """Which layer is which, and what a reader should know. Raises: InputError in one line for models that are no pair."""
    one, two = base.located, compressed.located
    pair = f"{base.name} and {compressed.name}"
    if one.causal != two.causal:
        kinds = ["a decoder" if found.causal else "an encoder" for found in (one, two)]
        raise InputError(f"{pair} are no pair: {kinds[0]} and {kinds[1]}; give two of one kind")
    check_shared(pair, base.shared, compressed.shared)
    check_same(pair, "width", one.width, two.width)
    check_same(pair, "count of streams", one.streams, two.streams)
    _same_tokenizers(pair, base.vocabulary, compressed.vocabulary)
    layer_of = _layers(base, compressed)
    site_of = _sites(pair, one, two, layer_of)
    notes = []
    if base.dtypes != compressed.dtypes:
        notes.append(
            f"{base.name} has weights in {' and '.join(base.dtypes)}, {compressed.name} in {' and '.join(compressed.dtypes)}: "
            f"rounding of the narrower one is part of every error"
        )
    if base.norm and compressed.norm and base.norm != compressed.norm:
        # told and not refused: a compressor may have folded one kind into the other
        notes.append(
            f"{base.name} has {base.norm}, {compressed.name} {compressed.norm}: another kind of norm is part of every error"
        )
    if (base.vocabulary is None) != (compressed.vocabulary is None):
        without = base.name if base.vocabulary is None else compressed.name
        notes.append(f"{without} has no tokenizer beside it; that of the other one is used")
    cosines = block_cosines(base.sketch, compressed.sketch)
    if cosines is None:
        notes.append(
            "the weights cannot be compared block by block (packed, or under other names): the order of the blocks is taken as given"
        )
    else:
        notes += check_order(cosines, layer_of, base.name, compressed.name)
    dropped = tuple(layer for layer in range(one.depth) if layer not in set(layer_of.values()))
    if dropped:
        notes.append(f"dropped layers ({', '.join(map(str, dropped))}) count with an update of zero")
    return Matching(layer_of, dropped, site_of), notes


def window_of(base: Description, compressed: Description, asked: int | None) -> int:
    """Tokens of a window (None: 512, or what both models take). Raises: InputError for more than one of them takes."""
    known = [(about.longest, about.name) for about in (base, compressed) if about.longest is not None]
    longest, name = min(known, key=lambda one: one[0], default=(None, ""))
    return window_length(longest, asked, LENGTH, name)


def _layers(base: Description, compressed: Description) -> dict[int, int]:
    one, two, kept = base.located.depth, compressed.located.depth, compressed.record and compressed.record.kept_blocks
    if kept is None:
        if one != two:
            raise InputError(
                f"{base.name} has {one} blocks, {compressed.name} {two}; give models with the same blocks, or list those that were kept in "
                f"{RECORD} (kept_blocks)"
            )
        return {layer: layer for layer in range(one)}
    if list(kept) != sorted(set(kept)) or len(kept) != two or not all(0 <= i < one for i in kept):
        raise InputError(
            f"kept_blocks of {compressed.name} must be {two} blocks of {base.name} (0 to {one - 1}) in rising order, got {str(kept)[:80]}"
        )
    return dict(enumerate(kept))


def _sites(pair: str, one: Located, two: Located, layer_of: Mapping[int, int]) -> dict[int, int]:
    of_base: dict[int, list[Any]] = {}
    for place in one.sites:
        of_base.setdefault(place.layer, []).append(place)
    found: dict[int, int] = {}
    seen: dict[int, int] = {}
    for place in two.sites:
        nth = seen.get(place.layer, 0)
        seen[place.layer] = nth + 1
        theirs = of_base.get(layer_of[place.layer], [])
        if nth >= len(theirs) or theirs[nth].kind != place.kind or theirs[nth].parallel != place.parallel:
            raise InputError(
                f"{pair} are no pair: their sublayers differ at {place.name}; give models with the same blocks"
            )
        found[place.index] = theirs[nth].index
    if any(seen[layer] != len(of_base[own]) for layer, own in layer_of.items()):
        raise InputError(
            f"{pair} are no pair: their blocks have other numbers of sublayers; give models with the same blocks"
        )
    return found


def _same_tokenizers(pair: str, one: Mapping[str, int] | None, two: Mapping[str, int] | None) -> None:
    if one is None or two is None or one == two:
        return
    differ = sorted((k for k in one.keys() | two.keys() if one.get(k) != two.get(k)), key=str)
    raise InputError(
        f"{pair} are no pair: their tokenizers differ in {len(differ):,} of {len(one):,} tokens ({differ[0]!r} ...); "
        f"give two models with one tokenizer"
    )


def vocabulary_of(tokenizer: Any) -> dict[str, int] | None:
    """Token -> id; None where there is no tokenizer or it does not say."""
    get = getattr(tokenizer, "get_vocab", None)
    if get is not None:
        return dict(get())
    get = getattr(getattr(tokenizer, "tokenizer", None), "get_vocab", None)
    return None if get is None else dict(get())


def _gone(located: Located) -> Any:
    raise AssertionError("the model of a description is closed")


def _provenance(stands: Standing) -> dict[str, Any]:
    config = getattr(stands.model, "config", None)
    quantised = getattr(config, "quantization_config", None)
    table = quantised.to_dict() if hasattr(quantised, "to_dict") else quantised  # type: ignore[union-attr]
    record = stands.record
    tokenizer = vocabulary_of(stands.tokenizer)
    found: dict[str, Any] = {
        "opened as": "; ".join(stands.notes) or type(stands.model).__name__,
        "tokenizer": "none" if tokenizer is None else f"{type(stands.tokenizer).__name__}, {len(tokenizer):,} tokens",
        "quantisation": table if isinstance(table, dict) else "none stated",
        "SHA-256 of the weights as loaded": digest(stands.model),
    }
    return found | ({"compressed by": "; ".join(record.lines())} if record is not None else {})


def digest(model: nn.Module) -> str:
    """Over names and values of all parameters, as loaded; says so where a weight does not show its values."""
    made = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        values = shown(weight) if not isinstance(weight, Tensor) or weight.is_floating_point() else weight.detach()
        if values is None:
            return f"not taken: {name} does not show its values"
        made.update(f"{name} {list(values.shape)} {values.dtype}".encode())
        made.update(values.cpu().contiguous().view(torch.uint8).numpy().data)
    return made.hexdigest()
