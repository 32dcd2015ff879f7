"""Makes the table of mixers and the chapters on them in docs/streams.md, from what they say of themselves."""

from connection_table import linked, marked, sentence
from generated import ROOT, Part, main, table

from thalweg import config, mixers
from thalweg.errors import InputError
from thalweg.registry import Entry

STREAMS = (4, 8, 16)


def parts() -> list[Part]:
    """Everything that this script makes."""
    page = ROOT / "docs" / "streams.md"
    return [(page, "mixers", overview()), (page, "each mixer", "\n\n".join(map(chapter, own_entries())))]


def own_entries() -> list[Entry]:
    """The mixers of this package, the published one of mHC first."""
    own = [entry for entry in mixers.entries() if entry.value.__module__.startswith("thalweg.mixers.")]
    return sorted(own, key=lambda entry: (entry.name != "sinkhorn", entry.name))


def overview() -> str:
    """One row for each mixer: what holds of every matrix, and how many logits it takes."""
    rows = []
    for entry in own_entries():
        claims = mixers.create(entry.name, streams=4).claims
        norm = "orthogonal" if claims.orthogonal else "at most 1" if claims.spectral else "free"
        signs = "no" if claims.nonnegative else "yes"
        counts = [logits_of(entry.name, n) for n in STREAMS]
        name = f"[`{entry.name}`](#{entry.name})"
        rows.append([name, claims.rows, claims.columns, signs, norm, *counts, "yes" if claims.identity else "no"])
    head = ["mixer", "row sums 1", "column sums 1", "negative entries", "spectral norm"]
    return table([*head, *(f"logits, n = {n}" for n in STREAMS), "starts near I"], rows)


def logits_of(name: str, streams: int) -> str:
    try:
        return f"{mixers.create(name, streams=streams).generators:,}"
    except InputError:
        return "refused"


def chapter(entry: Entry) -> str:
    """All that a mixer says of itself."""
    facts = entry.value.facts
    also = f" Also called {', '.join(f'`{alias}`' for alias in entry.aliases)}." if entry.aliases else ""
    notes = [
        ("Source", linked(facts.source)),
        ("Reaches", facts.coverage),
        ("Cost", facts.cost),
        ("Start", facts.start),
        ("Chosen by us", "; ".join(facts.chosen)),
        ("Deviations", "; ".join(facts.deviations)),
        ("Checked against", "; ".join(facts.verified)),
    ]
    fields = config.describe(entry.value.Options)
    rows = [[f"`{f.name}`", f.allowed, f"`{f.default}`", marked(f.meaning)] for f in fields]
    lines = [
        f"### {entry.name}",
        f"{sentence(entry.summary)}{also}",
        f"```text\n{facts.equation}\n```",
        facts.words,
        "\n".join(f"- **{what}:** {text}." for what, text in notes if text),
        table(["option", "values", "default", "meaning"], rows) if rows else "",
    ]
    return "\n\n".join(line for line in lines if line)


if __name__ == "__main__":
    main(parts())
