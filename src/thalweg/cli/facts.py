"""What the connections of a report say of themselves: whom to cite, and which deviations and choices hold under the options used."""

import dataclasses
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from thalweg import config
from thalweg.errors import ThalwegError

Used = Mapping[str, tuple[str, Mapping[str, Any]]]  # arm or run -> its connection and the options given to it


def used(run) -> tuple[str, dict[str, Any]]:
    """Connection and options of a run, as its record has them."""
    options = run.config.get("connection_options")
    return str(run.config.get("connection", "")), options if isinstance(options, dict) else {}


def explained(options: type, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every option of a dataclass of options with its values, default and meaning, and what was ``given`` for it."""
    return [{**config.to_plain(field), "given": given.get(field.name)} for field in config.describe(options)]


def verified(facts: Any, battery: str | None = None) -> list[str] | str:
    """Against what a part was checked, by its author; else that nothing is said, and the name of what checks it in ``thalweg.testing``."""
    silent = "its author says nothing"
    return list(facts.verified) or (f"{silent}; the battery is thalweg.testing.{battery}" if battery else silent)


def citations(names: Iterable[str]) -> list[str]:
    """BibTeX of the connections used, each once."""
    return [text for text in dict.fromkeys(facts.bibtex for facts in map(_facts, names) if facts) if text]


def deviations(used: Used) -> list[str]:
    """Where the code of the connections used leaves their papers, and what the papers leave open, under the options used.

    What holds for some arms of a connection only is said of these by name.
    """
    from thalweg.reports.text import listed

    found = []
    for name in dict.fromkeys(name for name, _ in used.values()):
        facts = _facts(name)
        if facts is None:
            continue
        options = {arm: _options(name, given) for arm, (other, given) in used.items() if other == name}
        for text, says in [
            *((text, "leaves its source") for text in facts.deviations),
            *((text, "our choice") for text in facts.chosen),
        ]:
            where = [arm for arm, chosen in options.items() if chosen is None or applies(text, chosen)]
            who = name if len(where) == len(options) else f"{name} ({listed(where, 4)})"
            if where:
                found.append(f"{who} {says}: {text}" if says.startswith("leaves") else f"{who}, {says}: {text}")
    return found


def applies(text: str, options: Any) -> bool:
    """Whether a deviation or choice holds under ``options``. One that begins with an option holds only where it is set so:

    ``gate_open divides ...`` (a flag that is on), ``value='code' is ...`` (that value), ``stable: ...`` (a value of some option).
    """
    hints = get_type_hints(type(options))
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    if (set_to := re.match(r"(\w+)='?([\w.]+)'? ", text)) and set_to[1] in values:
        return str(values[set_to[1]]) == set_to[2]
    if (flag := re.match(r"(\w+) ", text)) and hints.get(flag[1]) is bool:
        return values[flag[1]]
    if value := re.match(r"(\w+): ", text):
        having = [name for name in values if get_origin(hints[name]) is Literal and value[1] in get_args(hints[name])]
        return not having or any(values[name] == value[1] for name in having)
    return True


def _facts(name: str):
    from thalweg import connections

    return connections.registry[name].facts if name in connections.registry else None


def _options(name: str, given: Mapping[str, Any]) -> Any:
    """The typed options, or None for those that this version does not take: then everything is shown."""
    from thalweg import connections

    with warnings.catch_warnings():  # training has said them
        warnings.simplefilter("ignore")
        try:
            return connections.make_options(name, dict(given))
        except ThalwegError:
            return None
