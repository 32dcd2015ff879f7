"""``thalweg list``: what exists, one line each."""

import importlib

from thalweg.cli.console import emit, table

EXAMPLES = """examples:
  thalweg list connections
  thalweg list measures --json"""

KINDS = ("connections", "mixers", "compressors", "experiments", "measures", "plans", "probes", "tasks")


def configure(parser) -> None:
    parser.add_argument("kind", choices=KINDS, help="what to list")


def run(args) -> None:
    rows = rows_of(args.kind)
    if args.json:
        emit(rows)
    else:
        table(rows, {"name": "name", "summary": "summary", "source": "source"})


def rows_of(kind: str) -> list[dict[str, str]]:
    """Objects with at least name, summary and source."""
    if kind in ("connections", "mixers", "compressors"):
        home = importlib.import_module(
            "thalweg.compression.compressors" if kind == "compressors" else f"thalweg.{kind}"
        )
        return [
            {"name": e.name, "summary": e.summary, "source": e.source, "aliases": ", ".join(e.aliases)}
            for e in home.entries()
        ] + (_outside() if kind == "compressors" else [])
    if kind == "measures":
        from thalweg.geometry import catalog

        return [{"name": m.name, "summary": m.summary, "source": m.source, "unit": m.unit} for m in catalog.entries()]
    if kind == "probes":
        from thalweg import continuum

        return [{"name": e.name, "summary": e.summary, "source": e.source} for e in continuum.entries()]
    if kind == "experiments":
        from thalweg.studies.experiments import base

        return [{"name": e.name, "summary": e.summary, "source": e.source} for e in base.entries()]
    if kind == "tasks":
        from thalweg import data

        return [{"name": e.name, "summary": e.summary, "source": e.source} for e in data.entries()]
    from thalweg.studies import library

    return library.rows()


def _outside() -> list[dict[str, str]]:
    """Compressors of other libraries."""
    from thalweg.compression.adapters import LIBRARIES

    return [
        {
            "name": f"{library}:{name}",
            "summary": method.summary,
            "source": f"{found.packages[0]}, in an environment of its own",
            "aliases": "",
        }
        for library, found in LIBRARIES.items()
        for name, method in found.methods.items()
    ]
