"""What ``thalweg show probe`` prints: what a probe looks at, what it says, and its options."""

import inspect
import sys
from typing import Any

from thalweg import config
from thalweg.cli.facts import explained


def probe(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Facts and options; given: options, refused where they cannot be. Raises: UnknownNameError, InputError."""
    from thalweg import continuum

    entry = continuum.registry.entry(name)
    kind = entry.value
    module = sys.modules[kind.__module__]
    caveats = getattr(module, "CAVEATS", ())
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "summary": entry.summary,
        "source": entry.source,
        "about": config.unmarked(inspect.getdoc(kind) or ""),
        "looks at": "a trajectory of weights" if kind.kind == "trajectory" else "a model",
        "reads a text": kind.text,
        "caveats": [caveats] if isinstance(caveats, str) else list(caveats),
        "options": config.to_plain(config.build(kind.Options, given, where=f"{entry.name}.")) if given else {},
        "options explained": explained(kind.Options, given),
    }
