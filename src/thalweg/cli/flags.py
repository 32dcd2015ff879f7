"""What flags of several commands have in common: short forms of options, files of rows, counts, and what is told of a long pass."""

import shlex
from collections.abc import Callable, Iterable
from typing import Any

from thalweg import config
from thalweg.cli.console import confirm_output
from thalweg.errors import InputError


def with_short(args, names: Iterable[str]) -> dict[str, Any]:
    """The options of ``--option``, and of the flags that are short for one. Raises: InputError for an option that is given twice."""
    found = config.parse_assignments(args.option, "--option")
    for name in names:
        given = getattr(args, name)
        if given is None:
            continue
        if name in found:
            raise InputError(
                f"--{name} {given} and --option {name}={found[name]} name the same option; give one of them"
            )
        found |= config.parse_assignments([f"{name}={given}"], f"--{name}")
    return found


def check_rows(args) -> None:
    """That ``--rows`` names a file that can be written. Raises: InputError, MissingExtraError."""
    from thalweg.records.export import check_format

    if args.rows is not None:
        check_format(args.rows)
        confirm_output(args.rows, args.overwrite)


def check_counts(args, names: Iterable[str], least: int = 1) -> None:
    """That counts which were given are large enough. Raises: InputError."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


def first_token(tokenizer: Any) -> int:
    """What ``--bos`` puts before a document. Raises: InputError for a tokenizer without such a token."""
    from thalweg.evaluation.subjects import special

    found = special(tokenizer, "bos", "eos")
    if found is None:
        raise InputError(
            "the tokenizer of this model names neither a BOS nor an EOS to put before a document; leave out --bos"
        )
    return found


def command_line(command: str, given: Iterable[Any], flags: Iterable[tuple[str, Any]]) -> str:
    """A call as a line that a shell takes: places as they were given, flags by the names of their values.

    None, False and an empty list are left out, True is a flag without a value, a list repeats its flag.
    """
    words = ["thalweg", command, *map(str, given)]
    for name, value in flags:
        flag = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            if one is None or one is False:
                continue
            text = str(one)
            words += [flag] if one is True else [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return shlex.join(words)


class Telling:
    """Progress of a pass in parts: the plan, the time that it takes once that is known, and every quarter. unit: what its plan counts the parts
    as, ``batches`` or ``passes``. plan: the last one seen.
    """

    def __init__(self, tell: Callable[[str], None], unit: str):
        self.tell, self.unit = tell, unit
        self.plan: Any = None

    def __call__(self, done: int, plan: Any) -> None:
        parts = getattr(plan, self.unit)
        if done == 0:
            for line in plan.lines:
                self.tell(line)
        elif done == 1 and parts > 1:
            self.tell(plan.lines[-1 - len(plan.notes)])
        elif parts >= 8 and done % (parts // 4) == 0:
            self.tell(f"  {done} of {parts} {self.unit}")
        self.plan = plan
