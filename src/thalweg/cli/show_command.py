"""``thalweg show``: everything about one connection, measure or plan."""

from thalweg import config
from thalweg.cli.console import emit

EXAMPLES = """examples:
  thalweg show connection mgt
  thalweg show connection delta --width 768 --depth 12 --option value_channels=4"""

KINDS = ("connection", "measure", "plan")


def configure(parser) -> None:
    parser.add_argument("kind", choices=KINDS, help="what kind of thing")
    parser.add_argument("name", help="its name, as `thalweg list` prints it")
    parser.add_argument("--width", type=int, default=512, help="width at which the cost is measured (512)")
    parser.add_argument("--depth", type=int, default=12, help="layers at which the cost is measured (12)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="option of the connection; may be repeated"
    )


def run(args) -> None:
    if args.kind == "connection":
        found = connection(args.name, args.width, args.depth, config.parse_assignments(args.option))
    elif args.kind == "measure":
        found = measure(args.name)
    else:
        found = plan(args.name)
    emit(found) if args.json else print(as_text(found))


def connection(name: str, width: int, depth: int, options: dict) -> dict:
    """Facts, options and measured cost of a connection."""
    from thalweg import connections
    from thalweg.connections.cost import measure_cost

    entry = connections.registry.entry(name)
    sites = connections.Site.decoder(depth)
    stream = connections.create(
        name, width=8, sites=connections.Site.decoder(2), **options
    )  # refuses wrong options first
    facts, start = stream.facts, stream.equals_at_start()
    cost = measure_cost(entry.name, width=width, sites=sites, options=options)
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "summary": entry.summary,
        "source": facts.source,
        "equation": facts.equation,
        "words": facts.words,
        "constraint": facts.constraint,
        "precision": facts.precision,
        "at initialisation": _claim(start),
        "looks along tokens": stream.looks_along_tokens,
        "chosen by us": list(facts.chosen),
        "deviations": list(facts.deviations),
        "verified": list(facts.verified),
        "options": config.to_plain(stream.options),
        f"cost at width {width}, depth {depth}": config.to_plain(cost),
        "bibtex": facts.bibtex,
    }


def measure(name: str) -> dict:
    """What a measure means, its unit, range, direction, source and null."""
    from thalweg.geometry import catalog

    return config.to_plain(catalog.entry(name))


def plan(name: str) -> dict:
    """A plan with its hash."""
    from thalweg.studies import library
    from thalweg.studies.plan import load

    path = library.find(name)
    found = load(path)
    return {"path": str(path), "hash": found.hash(), **config.to_plain(found)}


def as_text(found: dict) -> str:
    """A table of texts, lists and tables as indented lines."""
    lines: list[str] = []
    for key, value in found.items():
        if value in ("", [], {}, None):
            continue
        lines.append(f"{key}")
        if isinstance(value, dict):
            lines.extend(f"    {k} = {v}" for k, v in value.items())
        elif isinstance(value, list):
            lines.extend(f"    - {v}" for v in value)
        else:
            lines.extend(f"    {line}" for line in str(value).splitlines())
    return "\n".join(lines)


def _claim(start) -> str:
    """What an untrained connection equals, in words."""
    if start is None:
        return "nothing claimed"
    return f"equals {start.name} {dict(start.options) or ''} within {start.tolerance:g}"
