"""Makes the tables of measures in docs/measures.md from their catalogue."""

from collections import defaultdict

from generated import ROOT, Part, main, table

from thalweg.geometry import catalog
from thalweg.geometry.catalog import Measure

TITLES = {
    "spectrum": "Rank of the states",
    "similarity": "Size and likeness of states",
    "updates": "Updates",
    "lengths": "Updates, token by token",
    "errors": "Errors of updates beside the dense ones",
    "heads": "Attention heads in value space",
    "inner": "Inside feed-forward sublayers",
    "diagonal": "Edits as changes of the attention diagonal",
    "outliers": "Outlier channels and the first token",
    "alignment": "Likeness of layers",
    "gates": "Gates",
    "jacobian": "Jacobians",
    "gradients": "Gradients",
    "stability": "Stability of a run",
    "mixing": "Mixing of streams",
    "constraint": "What a mixing matrix is near",
    "streams": "Streams side by side",
    "routing": "Routing to experts",
    "prototypes": "Dictionaries of prototypes",
    "directional": "Directional residual of attention",
}
BETTER = {"higher": "higher", "lower": "lower", "neither": ""}


def parts() -> list[Part]:
    """Everything that this script makes."""
    by_module: dict[str, list[Measure]] = defaultdict(list)
    for entry in catalog.entries():
        if entry.function.startswith("thalweg.geometry."):
            by_module[entry.function.split(".")[2]].append(entry)
    order = [*TITLES, *sorted(by_module.keys() - TITLES.keys())]
    chapters = [
        chapter(TITLES.get(module, module.capitalize()), by_module[module]) for module in order if module in by_module
    ]
    return [(ROOT / "docs" / "measures.md", "measures", "\n\n".join(chapters))]


def chapter(title: str, entries: list[Measure]) -> str:
    """The measures of one module."""
    heads = ["measure", "meaning", "unit", "range", "null", "healthier", "source"]
    rows = [
        [f"`{m.name}`", m.summary, m.unit or "1", interval(m), m.null, BETTER[m.direction], m.source] for m in entries
    ]
    return f"## {title}\n\n{table(heads, rows)}"


def interval(measure: Measure) -> str:
    """The range of a measure; an open end is written with a round bracket."""
    low, high = measure.range
    return f"{'(-inf' if low is None else f'[{low:g}'}, {'inf)' if high is None else f'{high:g}]'}"


if __name__ == "__main__":
    main(parts())
