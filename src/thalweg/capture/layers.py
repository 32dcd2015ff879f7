"""Which layers are meant: a list, a number, or text as people write it."""

import re
from collections.abc import Iterable, Sequence

from thalweg.errors import InputError

Layers = str | int | Sequence[int] | None
_RANGE = re.compile(r"\s*(\d+)\s*-\s*(\d+)\s*")


def chosen_layers(layers: Layers, depth: int, skip_first: int = 0, *, to: str = "edit") -> tuple[int, ...]:
    """Layers from a list, a number, or text: ``last``, ``first``, ``all``, a slice ``5:11``, the same as a range ``5-10`` with both ends,
    numbers ``0,3``; negative ones count from the end.

    skip_first: layers left out at the beginning. to: what is done with them, for the error where none is left.
    Raises: InputError for a layer that the model does not have, or if none is left.
    """
    if layers is None or layers == "all":
        found = list(range(depth))
    elif isinstance(layers, str):
        found = check_spelling(layers)
        found = list(range(depth))[found] if isinstance(found, slice) else found
    else:
        found = list(layers) if isinstance(layers, Iterable) else [layers]
    whole = []
    for layer in found:
        if isinstance(layer, bool) or not isinstance(layer, int) or not -depth <= layer < depth:
            raise InputError(f"layers are numbers from 0 to {depth - 1} (or from the end, -1), got {layer!r}")
        whole.append(layer % depth)
    kept = tuple(sorted({layer for layer in whole if layer >= skip_first}))
    if not kept:
        raise InputError(f"no layer is left to {to}: layers {layers!r}, skip_first {skip_first}, the model has {depth}")
    return kept


def check_spelling(text: str) -> slice | list[int]:
    """The slice or the numbers that a text spells, before the depth of a model is known. Raises: InputError."""
    named = {"all": slice(None), "last": [-1], "first": [0]}
    if text in named:
        return named[text]
    try:
        if ":" in text:
            found = slice(*(int(part) if part.strip() else None for part in text.split(":")))
            range(1)[found]  # a step of 0 is none
            return found
        numbers: list[int] = []
        for part in text.split(","):
            ends = _RANGE.fullmatch(part)
            low, high = map(int, ends.groups()) if ends else (int(part), int(part))
            if low > high:
                raise ValueError
            numbers += range(low, high + 1)
        return numbers
    except (TypeError, ValueError):
        raise InputError(
            f"layers are numbers 0,3, a slice 1: or 5:11 (= 5-10, layers 5 to 10), first, last or all, got {text!r}"
        ) from None
