"""The flags that say which connection, with which options: the same for every command that takes one."""

from collections.abc import Mapping
from typing import Any

from thalweg import config
from thalweg.cli.console import say
from thalweg.cli.flags import with_short
from thalweg.errors import InputError

STREAMS = {"streams": "--streams", "mixer": "--mixer", "mixer_options": "--mixer-option"}  # option -> its short flag


def add(parser) -> None:
    """``--option``, and the short forms of those that people change most."""
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="option of the connection; may be repeated"
    )
    parser.add_argument("--streams", metavar="N", help="number of streams: short for --option streams=N")
    parser.add_argument("--mixer", metavar="MIXER", help="how streams are mixed: short for --option mixer=MIXER")
    parser.add_argument(
        "--mixer-option", action="append", default=[], metavar="NAME=VALUE", help="option of the mixer; may be repeated"
    )


def options(args, connection: Any) -> dict[str, Any]:
    """The options that the flags ask for. Raises: InputError for a flag that is no NAME=VALUE, for two flags that name one option, and
    for a flag on streams where the connection has but one.
    """
    found = with_short(args, ("streams", "mixer"))
    if args.mixer_option:
        if "mixer_options" in found:
            raise InputError("--mixer-option and --option mixer_options name the same options; give one of them")
        found = config.merge(found, {"mixer_options": config.parse_assignments(args.mixer_option, "--mixer-option")})
    if name := next((name for name in STREAMS if name in found), None):
        _require_streams(name, connection)
    return found


def merged(base: Any, over: Mapping[str, Any], connection: str, *, quiet: bool) -> dict[str, Any]:
    """Two tables of options of one connection; ``over`` wins. With another mixer the options of the one before go, and are named.

    What is wrong with ``base`` is left for the place that builds the options.
    """
    kept = dict(base) if isinstance(base, Mapping) else {}
    dropped = kept.get("mixer_options")
    if dropped and isinstance(dropped, Mapping) and "mixer" in over:
        from thalweg import connections

        before = kept.get("mixer", connections.option_defaults(connection)["mixer"])
        if _named(before) != _named(over["mixer"]):
            del kept["mixer_options"]
            names = ", ".join(f"{name}={value}" for name, value in dropped.items())
            say(f"mixer {over['mixer']} takes the place of {before}, whose options go with it: {names}", quiet=quiet)
    return config.merge(kept, over)


def _named(mixer: Any) -> Any:
    """The name under which a mixer is registered; what is no mixer stays, and is refused where the options are built."""
    from thalweg import mixers

    return mixers.registry.entry(mixer).name if isinstance(mixer, str) and mixer in mixers.registry else mixer


def _require_streams(name: str, connection: Any) -> None:
    """Raises: InputError for a connection without option ``name``; what is no connection is refused where it is made."""
    from thalweg import connections

    def takes(one: str) -> bool:
        return name in connections.option_defaults(one)

    if isinstance(connection, str) and connection in connections.registry and not takes(connection):
        having = ", ".join(one for one in connections.names() if takes(one))
        raise InputError(
            f"{STREAMS[name]} belongs to connections with several streams ({having}), got connection {connection}; "
            "name one of them by --connection, or leave the flag out"
        )
