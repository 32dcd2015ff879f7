"""What ``thalweg show compressor`` prints: what a compressor says of itself, or a library's, and its options."""

from typing import Any

from thalweg import config
from thalweg.cli.facts import explained, verified


def compressor(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Facts and options; given: options, refused where they cannot be. Raises: UnknownNameError, InputError."""
    from thalweg.compression import compressors
    from thalweg.compression.adapters.libraries import external, is_external

    if is_external(name):
        library, _, method = external(name)
        return {
            "name": name,
            "summary": method.summary,
            "source": ", ".join(library.packages),
            "calibration": "tokens" if method.calibrated else "none",
            "environment": library.install,
            "options": config.to_plain(config.build(method.options, given, where=name)) if given else {},
            "options explained": explained(method.options, given),
        }
    entry = compressors.registry.entry(name)
    facts = entry.value.facts
    if given:
        compressors.create(name, **given)
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "summary": entry.summary,
        "source": facts.source,
        "equation": facts.equation,
        "words": facts.words,
        "calibration": facts.calibration,
        "bits": facts.bits,
        "chosen by us": list(facts.chosen),
        "deviations": list(facts.deviations),
        "verified": verified(facts),
        "options": given,
        "options explained": explained(entry.value.Options, given),
        "bibtex": facts.bibtex,
    }
