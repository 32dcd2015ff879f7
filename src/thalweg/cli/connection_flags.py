"""The flags that say which connection, with which options: the same for every command that takes one."""

from typing import Any

from thalweg import config
from thalweg.errors import InputError


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


def options(args) -> dict[str, Any]:
    """The options that the flags ask for. Raises: InputError for a flag that is no NAME=VALUE, and for two flags that name one option."""
    found = config.parse_assignments(args.option, "--option")
    for name in ("streams", "mixer"):
        given = getattr(args, name)
        if given is None:
            continue
        if name in found:
            raise InputError(
                f"--{name} {given} and --option {name}={found[name]} name the same option; give one of them"
            )
        found |= config.parse_assignments([f"{name}={given}"])
    if args.mixer_option:
        if "mixer_options" in found:
            raise InputError("--mixer-option and --option mixer_options name the same options; give one of them")
        found = config.merge(found, {"mixer_options": config.parse_assignments(args.mixer_option, "--mixer-option")})
    return found
