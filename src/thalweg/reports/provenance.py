"""Where numbers come from, in pairs of a name and a line, merged over runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from thalweg.reports.text import NONE, words
from thalweg.studies.store import RunRecord

# First the fields that decide what a number is worth; the others follow as they come.
FIRST = ("platform", "cpu", "device", "device_name", "threads", "ranks", "git", "command")
MOST = 6  # different values of one field that are spelled out


def here(found: Mapping[str, Any]) -> dict[str, str]:
    """What :func:`thalweg.records.provenance.collect` says of this machine, without what it does not know."""
    return {name.replace("_", " "): words(value) for name, value in found.items() if value is not None}


def machine(records: Sequence[RunRecord]) -> dict[str, str]:
    """Field -> the different values that the runs recorded, versions and data last."""
    every = [r.provenance for r in records]
    names = dict.fromkeys([*FIRST, *(name for p in every for name in p)])
    found = {
        name: _different(p[name] for p in every if p.get(name) is not None) for name in names if name != "versions"
    }
    found = {name.replace("_", " "): text for name, text in found.items() if text}
    data = _different(_data(r.result.get("data")) for r in records if r.result.get("data"))
    return {**found, "versions": _different(r.versions for r in records) or NONE, "data": data or NONE}


def _data(data: Any) -> Any:
    if not isinstance(data, Mapping):
        return data
    kept = {k: v for k, v in data.items() if k not in ("content", "notes", "tokenizer")}
    return {
        k: v[:16] if k == "fingerprint" and isinstance(v, str) else v
        for k, v in kept.items()
        if v not in (None, "", {}, [])
    }


def _different(values) -> str:
    found = list(dict.fromkeys(filter(None, map(words, values))))
    return " | ".join(found[:MOST]) + (f" | and {len(found) - MOST} more" if len(found) > MOST else "")
