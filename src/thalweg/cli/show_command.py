"""``thalweg show``: everything about one connection, mixer, compressor, probe, measure, plan or task."""

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from thalweg import config
from thalweg.cli.compressor_facts import compressor
from thalweg.cli.console import emit, grid
from thalweg.cli.facts import explained, verified
from thalweg.cli.mixer_facts import mixer
from thalweg.cli.plan_facts import plan
from thalweg.cli.probe_facts import probe
from thalweg.errors import InputError

EXAMPLES = """examples:
  thalweg show connection mgt
  thalweg show connection delta --width 768 --depth 12 --option value_channels=4
  thalweg show mixer kromhc --streams 8
  thalweg show compressor wanda
  thalweg show probe rotary
  thalweg show plan mgt-ablation
  thalweg show task copy:vocab=32"""

KINDS = ("connection", "mixer", "compressor", "probe", "measure", "plan", "task")
WITH_OPTIONS = KINDS[:4]


def configure(parser) -> None:
    parser.add_argument("kind", choices=KINDS, help="what kind of thing")
    parser.add_argument("name", help="its name, as `thalweg list` prints it; of a plan also its file")
    parser.add_argument("--width", type=int, default=512, help="width at which the cost is measured (512)")
    parser.add_argument("--depth", type=int, default=12, help="layers at which the cost is measured (12)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of the connection, mixer, compressor or probe; may be repeated",
    )
    parser.add_argument("--streams", type=int, default=4, help="mixer: number of streams (4)")
    parser.add_argument(
        "--load",
        action="store_true",
        help="task: load its data (from the hub, if it is there) to give its nulls as numbers",
    )


def run(args) -> None:
    if args.option and args.kind not in WITH_OPTIONS:
        raise InputError(
            f"--option belongs to a connection, a mixer, a compressor or a probe, got {args.kind} {args.name}; leave it out"
        )
    if args.kind in WITH_OPTIONS:
        given = config.parse_assignments(args.option)
        if args.kind == "connection":
            found = connection(args.name, args.width, args.depth, given)
        elif args.kind == "mixer":
            found = mixer(args.name, args.streams, given)
        else:
            found = (compressor if args.kind == "compressor" else probe)(args.name, given)
        shown = {**found, "options": [*map(_option_row, found["options explained"])]}
        del shown["options explained"]
    elif args.kind == "measure":
        found = shown = measure(args.name)
    elif args.kind == "task":
        found = shown = task(args.name, args.load)
    else:
        found, shown = plan(args.name)
    emit(found) if args.json else print(as_text(shown))


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
        "verified": verified(facts, "check_connection"),
        "options": config.to_plain(stream.options),
        "options explained": explained(type(stream.options), options),
        f"cost at width {width}, depth {depth}": config.to_plain(cost),
        "bibtex": facts.bibtex,
    }


def _option_row(field: dict[str, Any]) -> dict[str, str]:
    given = field["given"]
    default = field["default"] if given is None else f"{field['default']} (here {given})"
    return {"name": field["name"], "values": field["allowed"], "default": default, "meaning": field["meaning"]}


def measure(name: str) -> dict:
    """What a measure means, its unit, range, direction, source and null."""
    from thalweg.geometry import catalog

    found = config.to_plain(catalog.entry(name))
    low, high = found["range"]
    return {**found, "range": f"{'-inf' if low is None else low} to {'inf' if high is None else high}"}


def task(spec: str, load: bool) -> dict:
    """What a task is made of, its parameters, and what a model that learned nothing reaches on it."""
    from thalweg import data
    from thalweg.data import tasks
    from thalweg.data.synthetic import SyntheticTask
    from thalweg.training.config import TrainConfig

    entry = tasks.registry.entry(spec.partition(":")[0].strip())
    made_by: Callable = getattr(entry.value, "__self__", entry.value)  # the class of a synthetic task, else its opener
    synthetic = isinstance(made_by, type) and issubclass(made_by, SyntheticTask)
    from_the_run = {"tokenizer", "vocab_size"}
    options = made_by.Options if synthetic else TrainConfig
    rows = [
        {"name": f.name, "values": f.allowed, "default": f.default, "meaning": f.meaning}
        for f in config.describe(options)
        if synthetic or f.name in from_the_run
    ]
    found = {
        "name": entry.name,
        "summary": entry.summary,
        "source": entry.source,
        "about": _plain(made_by),
        "parameters (NAME:KEY=VALUE,...)" if synthetic else "options of the run": rows,
    }
    if not synthetic and not load:
        kind = get_type_hints(made_by).get("return", data.Task)
        return {**found, "nulls": f"{_plain(kind.nulls)}\n--load gives the numbers."}
    opened = data.load(spec)
    return {
        **found,
        "vocabulary": f"{opened.vocab_size:,} entries",
        "splits": list(opened.splits),
        "sequence": f"{opened.natural_length()} tokens" if synthetic else "any length",
        f"nulls ({opened.unit}, shares or as named)": opened.nulls(),
    }


def _plain(thing: Any) -> str:
    """A docstring as it is read in a terminal."""
    return config.unmarked(inspect.getdoc(thing) or "")


def as_text(found: dict) -> str:
    """A table of texts, lists, tables and lists of rows as indented lines."""
    lines: list[str] = []
    for key, value in found.items():
        if value in ("", [], {}, None):
            continue
        lines.append(f"{key}")
        if isinstance(value, dict):
            lines.extend(f"    {k} = {v}" for k, v in value.items())
        elif isinstance(value, list) and isinstance(value[0], dict):
            lines.extend(f"    {line}" for line in grid(list(value[0]), [list(row.values()) for row in value]))
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
