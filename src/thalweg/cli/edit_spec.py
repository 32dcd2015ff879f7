"""An edit as one word on the command line: ``value:parallel=0.5,exclude-self,layers=1:``."""

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from thalweg.errors import InputError, UnknownNameError

FLAGS = {"exclude_self": ("exclude_self", True), "full_aggregate": ("exclude_self", False)}
NUMBERS = ("parallel", "perpendicular")
DOING = ("parallel", "perpendicular", "control", "coefficient")  # the options of an edit that make it one
COUNTS = ("skip_first", "seed")
_NUMBERS = re.compile(r"-?\d+(-\d+)?")
TEXTS = ("group", "layers", "phase", "control", "coefficient", "reference", "route")


def edits_of(given: Sequence[str]) -> dict[str, Any]:
    """Name as given -> ``EditOptions``. Raises: InputError, UnknownNameError for what no edit can be."""
    found = {}
    for text in given:
        if text in found:
            raise InputError(f"the edit {text!r} is given twice")
        found[text] = edit_of(text)
    return found


def edit_of(text: str):
    """One edit. Lists are joined by ``+`` (``heads=0+2``, ``layers=0+3``); a slice of layers is ``5:11``, the same as ``5-10``.

    Raises: InputError.
    """
    from thalweg.editing import EditOptions

    site, _, rest = text.partition(":")
    values: dict[str, Any] = {"site": site.strip()}
    last = ""
    for part in filter(None, (part.strip() for part in rest.split(","))):
        name, sign, value = part.partition("=")
        name, value = name.strip().replace("-", "_"), value.strip()
        if name in FLAGS and not sign:
            key, value = FLAGS[name]
        elif name == "heads":
            key, value = name, tuple(_number(head, part, int) for head in value.split("+"))
        elif name in NUMBERS or name in COUNTS:
            key, value = name, _number(value, part, float if name in NUMBERS else int)
        elif name in TEXTS:
            key, value = name, value.replace("+", ",")
        elif last.startswith(("layers=", "heads=")) and _NUMBERS.fullmatch(part):
            raise InputError(
                f"a comma begins the next option, got {part!r} after {last!r}; join numbers by +: {last}+{part}"
            )
        else:
            known = [f.name for f in fields(EditOptions) if f.name != "site"]
            raise UnknownNameError("option of an edit", name, [n.replace("_", "-") for n in [*known, "full_aggregate"]])
        if key in values:
            raise InputError(f"{text!r} says {key.replace('_', '-')} twice")
        values[key], last = value, part
    made = EditOptions(**values)
    if values.keys().isdisjoint(DOING):
        raise InputError(
            f"nothing says what the edit {text!r} does to {made.site}; give parallel, perpendicular, control or coefficient, "
            f"as in {made.site}:parallel=0"
        )
    return made


def _number(value: str, part: str, kind: type) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise InputError(f"{part!r} needs a {'whole ' * (kind is int)}number after the equals sign") from None
