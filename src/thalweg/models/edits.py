"""Edits of updates that belong to a model, in training and in use: how much of an update is kept along, and across, its reference.

As text: ``value:full:0``, ``value:exclude-self:0.5,layers=1:``, ``residual:0``, ``residual:learned``, ``value:full:1..0@1000``.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from thalweg import config
from thalweg.capture.layers import check_spelling, chosen_layers
from thalweg.errors import InputError, UnknownNameError

LEARNED = "learned"
Value = float | str | tuple[float, ...] | tuple[tuple[float, ...], ...]
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_SCHEDULE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})@(\d+)", re.IGNORECASE)
_GROUP = re.compile(r"head|all|kv(:[1-9]\d{0,8})?")
MOST = 10**9  # updates of a schedule, heads of a group: far beyond any, and exact as numbers
SHAPE = "a number, 'learned', a schedule '1..0@1000', or one number per layer"
HOW = "write value:full:0, value:exclude-self:0.5, residual:0 or residual:learned"
SELF = {"full": False, "exclude-self": True}


@dataclass(frozen=True)
class Schedule:
    """A retained scale that goes from ``first`` to ``last`` in a straight line over ``updates`` updates, and stays there."""

    first: float
    last: float
    updates: int


Scale = float | Schedule | tuple[float, ...] | Literal["learned"]  # at one layer; the tuple: one for each head


@dataclass(frozen=True)
class UpdateEdit:
    """What is kept of an update u along its reference r: u' = parallel * (u.r / |r|^2) r + perpendicular * (the rest).

    space: ``value``, what an attention head read, before the output map and a gate, along the token's own value; ``residual``, what the
    connection is handed by the sublayer (after its update norm), along what the site reads of the stream before its norm (``read``; with
    one stream the stream itself).
    parallel, perpendicular: retained scales; 1 keeps, 0 removes. A number; ``learned`` (1 plus a parameter that starts at 0); a schedule
    ``FROM..TO@UPDATES``; a list with one number for each layer, or with one list for each layer that has a number for each head.
    exclude_self: of values, leave alone what a token reads of itself.
    layers: which ones, ``all``, ``1:``, ``last``, ``[0, 3]``.
    group: of values, the heads that are projected together: ``head``, ``kv``, ``kv:N`` or ``all``.
    per: of what is learned, one number for each ``layer`` or, of values, for each ``head``.
    detach: no gradient through the reference (and A_tt). This is another method: the published ones do not detach.
    control: ``random_direction`` takes away as much, with the same sign, but along a fixed random direction of the layer (of each head).
    seed: of that direction.

    Raises: InputError, UnknownNameError for what cannot be.
    """

    space: Literal["value", "residual"]
    parallel: Value = 1.0
    perpendicular: Value = 1.0
    exclude_self: bool = False
    layers: str | tuple[int, ...] = "all"
    group: str = "head"
    per: Literal["layer", "head"] = "layer"
    detach: bool = False
    control: Literal["none", "random_direction"] = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("parallel", "perpendicular"):
            _check(name, getattr(self, name), of_values=self.space == "value")
        if isinstance(self.layers, str):
            check_spelling(self.layers)
        if not _GROUP.fullmatch(self.group):
            raise InputError(f"group must be head, kv, kv:N or all, got {self.group!r}")
        if self.space == "residual":
            for name in ("exclude_self", "group", "per"):
                default = next(f.default for f in fields(self) if f.name == name)
                if getattr(self, name) != default:
                    raise InputError(
                        f"{name} belongs to edits of values, got {getattr(self, name)!r} with space 'residual'; leave it out"
                    )
        if self.per == "head" and LEARNED not in (self.parallel, self.perpendicular):
            raise InputError("per='head' is for scales that are learned; give fixed ones as a list of lists")
        if self.control != "none" and (self.perpendicular != 1 or self.group != "head"):
            raise InputError(
                "control 'random_direction' moves what is taken away along the reference of each head; leave perpendicular and group out"
            )
        if not 0 <= self.seed < 2**31:
            raise InputError(f"seed must lie between 0 and 2**31 - 1, got {self.seed}")

    @classmethod
    def of(cls, given: Any, where: str) -> "UpdateEdit | None":
        """From a text, a table, or one that is made already. Raises: InputError, UnknownNameError that begin with ``where``."""
        if given is None or isinstance(given, cls):
            return given
        try:
            if isinstance(given, str):
                return parse(given)
            if isinstance(given, Mapping):
                return config.build(cls, given)
        except UnknownNameError:
            raise
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        raise InputError(f"{where} must be a text such as 'value:full:0' or a table, got {given!r}")

    @property
    def is_one(self) -> bool:
        """Whether nothing changes, so that nothing is computed."""
        return all(_is_one(value) for value in (self.parallel, self.perpendicular))

    @property
    def learns(self) -> bool:
        """Whether a scale is a parameter."""
        return LEARNED in (self.parallel, self.perpendicular)

    def parameters(self, heads: int) -> int:
        """How many parameters the edit has in one place."""
        return (heads if self.per == "head" else 1) * [self.parallel, self.perpendicular].count(LEARNED)

    def chosen(self, depth: int) -> tuple[int, ...]:
        """The layers of a model with ``depth`` of them. Raises: InputError for layers and lists that do not fit."""
        for name in ("parallel", "perpendicular"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != depth:
                raise InputError(
                    f"{name} lists {len(value)} layers, the model has {depth}; give one entry for each layer"
                )
        return chosen_layers(self.layers, depth)

    def at(self, layer: int) -> tuple[Scale, Scale]:
        """Both scales at one of the chosen layers."""
        return _at(self.parallel, layer), _at(self.perpendicular, layer)

    def check_heads(self, heads: int, layer: int) -> None:
        """Raises: InputError for a list with another number of heads than ``layer`` has."""
        for name, entry in zip(("parallel", "perpendicular"), self.at(layer), strict=True):
            if isinstance(entry, tuple) and len(entry) != heads:
                raise InputError(f"{name} lists {len(entry)} heads in a layer, the model has {heads} in layer {layer}")

    def describe(self) -> str:
        """As text that :func:`parse` reads back, but for lists of heads; what is not at its default."""
        head = self.space if self.space == "residual" else f"value:{'exclude-self' if self.exclude_self else 'full'}"
        parts = [f"{head}:{_said(self.parallel)}"]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in ("space", "parallel", "exclude_self") and value != f.default:
                parts.append(f.name if value is True else f"{f.name}={_said(value).replace(',', '+')}")
        return ",".join(parts)

    def plain(self) -> str | dict[str, Any]:
        """As text, or as a table where that cannot say it."""
        by_head = any(isinstance(entry, tuple) for v in (self.parallel, self.perpendicular) for entry in _entries(v))
        return config.to_plain(self) if by_head else self.describe()

    def everywhere(self) -> "UpdateEdit":
        """The same kind of edit in all layers of a model of any depth, with a scale that is computed; for what it takes."""
        scales = {
            name: 0.5 if isinstance(value, tuple) else value
            for name, value in (("parallel", self.parallel), ("perpendicular", self.perpendicular))
        }
        return replace(self, layers="all", **scales)


def parse(text: str) -> UpdateEdit:
    """``SPACE[:full|:exclude-self]:PARALLEL[,NAME=VALUE...]`` -> the edit; lists of numbers are joined by ``+``.

    Raises: InputError, UnknownNameError.
    """
    head, *rest = (part.strip() for part in text.split(","))
    space, *words = head.split(":")
    if space not in ("value", "residual"):
        raise UnknownNameError("space of an edit", space, ("value", "residual"), more=f"{HOW.capitalize()}.")
    values: dict[str, Any] = {"space": space}
    if space == "value":
        if not words or words[0] not in SELF:
            raise InputError(f"an edit of values says full or exclude-self first, got {text!r}; {HOW}")
        values["exclude_self"] = SELF[words.pop(0)]
    if len(words) != 1:
        raise InputError(f"an edit says one scale for the part along its reference, got {text!r}; {HOW}")
    values["parallel"] = _value(words[0], "parallel")
    known = [f.name for f in fields(UpdateEdit) if f.name not in values]
    for part in rest:
        name, sign, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known:
            raise UnknownNameError("option of an edit", name, known)
        if name in values:
            raise InputError(f"{text!r} says {name} twice")
        values[name] = _option(name, value.strip() if sign else None, text)
    return config.build(UpdateEdit, values)


def _option(name: str, value: str | None, text: str) -> Any:
    if name == "detach" and value is None:
        return True
    if value is None or (name == "detach" and value not in ("true", "false")):
        raise InputError(f"{text!r}: {name} needs a value, {name}={'true or false' if name == 'detach' else 'VALUE'}")
    if name == "detach":
        return value == "true"
    if name == "perpendicular":
        return _value(value, name)
    if name == "seed":
        if not value.isdecimal() or len(value) > 10:
            raise InputError(f"{text!r:.60}: seed must lie between 0 and 2**31 - 1, got {value!r:.30}")
        return int(value)
    return value.replace("+", ",") if name == "layers" else value.replace("-", "_") if name == "control" else value


def _value(text: str, name: str) -> Any:
    if text == LEARNED or _SCHEDULE.fullmatch(text):
        return text
    try:
        numbers = [float(part) for part in text.split("+")] if not re.search(r"e\+", text) else [float(text)]
    except ValueError:
        raise InputError(f"{name} must be {SHAPE} (0.5+1+1), got {text!r}") from None
    return numbers if len(numbers) > 1 else numbers[0]


def _check(name: str, value: Any, *, of_values: bool) -> None:
    if isinstance(value, str):
        if value == LEARNED:
            return
        if not (found := _SCHEDULE.fullmatch(value)):
            raise InputError(f"{name} must be {SHAPE}, got {value!r}")
        if not all(math.isfinite(float(end)) for end in found.groups()[:2]):
            raise InputError(f"{name} goes between finite numbers, got {value!r}")
        if len(found[3].lstrip("0")) > len(str(MOST)) or not 1 <= int(found[3]) <= MOST:
            raise InputError(f"{name} takes 1 to {MOST:,} updates, got {value!r:.60}")
        return
    for entry in _entries(value):
        if isinstance(entry, tuple) and not of_values:
            raise InputError(f"{name} has one number per layer in the residual stream, which has no heads, got {entry}")
        for number in entry if isinstance(entry, tuple) else (entry,):
            if not math.isfinite(number):
                raise InputError(f"{name} is a retained scale (1 keeps, 0 removes), a finite number, got {number}")


def _entries(value: Any) -> Iterable[Any]:
    return value if isinstance(value, tuple) else () if isinstance(value, str) else (value,)


def _is_one(value: Any) -> bool:
    entries = list(_entries(value))
    return bool(entries) and all(
        number == 1 for entry in entries for number in (entry if isinstance(entry, tuple) else (entry,))
    )


def _at(value: Value, layer: int) -> Scale:
    if isinstance(value, str):
        return LEARNED if value == LEARNED else _schedule(value)
    return value[layer] if isinstance(value, tuple) else value


def _schedule(text: str) -> Schedule:
    found = _SCHEDULE.fullmatch(text)
    assert found is not None  # checked when the edit was made
    return Schedule(float(found[1]), float(found[2]), int(found[3]))


def _said(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(_said(v) if not isinstance(v, tuple) else "[" + "+".join(map(_said, v)) + "]" for v in value)
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
