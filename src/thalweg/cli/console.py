"""What every subcommand shares: the parser with one-line errors, output for people and for machines."""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from thalweg.config import check_takes_files
from thalweg.errors import InputError, UnknownNameError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises one-line InputErrors with the nearest name, and keeps the layout of its texts."""

    def __init__(self, **kwargs: Any):
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, exit_on_error=False, **kwargs
        )

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")

    def _check_value(self, action, value):  # argparse's own lists the choices and suggests none
        if action.choices is not None and value not in action.choices:
            flag = next((option for option in action.option_strings if option.startswith("--")), None)
            raise UnknownNameError(f"value of {flag}" if flag else action.dest, value, action.choices)

    def parse_args(self, args=None, namespace=None):  # type: ignore[override]  # argparse's overloads say no more
        try:
            parsed, unknown = self.parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            self.error(str(error))
        if unknown:
            if not unknown[0].startswith("-"):
                self.error(f"unexpected argument {unknown[0]!r}")
            known = [o for action in self._actions for o in action.option_strings if o.startswith("--")]
            raise UnknownNameError("flag", unknown[0].split("=")[0], known)
        return parsed

    @staticmethod
    def add_common(parser: argparse.ArgumentParser) -> None:
        """Flags that every command takes."""
        group = parser.add_argument_group("common")
        group.add_argument(
            "--json", action="store_true", help="print the result as JSON on stdout; messages go to stderr"
        )
        group.add_argument("--quiet", action="store_true", help="no progress and no messages but errors")
        group.add_argument("--debug", action="store_true", help="show the traceback of an error")


def say(text: str, *, quiet: bool = False) -> None:
    """A message for the person: on stderr, so that stdout holds results only."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def say_error(line: str) -> None:
    """The one line of an error."""
    print(f"error: {' '.join(line.split())}", file=sys.stderr, flush=True)


def emit(value: Any) -> None:
    """A result for machines: strict JSON on stdout; numbers that are not finite as the strings NaN, Infinity, -Infinity."""
    from thalweg.records import jsonl

    print(jsonl.encode(value, indent=2))


def deliver(
    folder: Path, write: Callable[[], Any], show: Callable[[], Any], plain: dict[str, Any], as_json: bool
) -> None:
    """A result that people are shown, or machines are given, and its folder: one that cannot be written does not lose the result.

    ``plain`` gets ``output``, null where nothing was written. Raises: InputError of ``write``, at the end.
    """
    failed = None
    if not as_json:
        show()
    try:
        write()
    except InputError as error:
        failed = error
    if as_json:
        emit({**plain, "output": None if failed else str(folder)})
    if failed is not None:
        raise failed
    if not as_json:
        print(f"in {folder}")


def table(rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """A result for people: ``columns`` maps keys of the rows to headings. On a terminal with rules, else plain tab-separated lines."""
    if not sys.stdout.isatty():
        print("\t".join(columns.values()))
        for row in rows:
            print("\t".join(str(row.get(key, "")) for key in columns))
        return
    from rich.console import Console
    from rich.table import Table

    shown = Table(*columns.values(), box=None, pad_edge=False, header_style="bold")
    for row in rows:
        shown.add_row(*(str(row.get(key, "")) for key in columns))
    Console().print(shown)


NARROW, WIDEST = 26, 150  # most characters of a column that is not the last; of a line


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table inside running text: aligned, long cells wrapped, the last column as wide as the terminal leaves."""
    room = min(shutil.get_terminal_size((110, 24)).columns, WIDEST) - 4
    cells = [list(columns), *map(list, rows)]
    widths = [min(max(len(row[i]) for row in cells), NARROW) for i in range(len(columns) - 1)]
    widths.append(max(room - sum(widths) - 2 * len(widths), NARROW))
    lines = []
    for row in cells:
        wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
        for i in range(max(map(len, wrapped))):
            parts = [(cell[i] if i < len(cell) else "").ljust(w) for cell, w in zip(wrapped, widths, strict=True)]
            lines.append("  ".join(parts).rstrip())
    return lines


def confirm_output(path: str, overwrite: bool) -> None:
    """Before anything is computed: refuse to write over an existing file, and to write where nothing can be. Raises: InputError."""
    if not path:
        raise InputError("the output needs a name, got an empty one; leave the flag out for the default")
    folder = Path(path).parent
    if Path(path).is_dir():
        raise InputError(f"{path} is a folder; name a file in it")
    if Path(path).exists() and not Path(path).is_file():
        raise InputError(f"{path} is no file (a device or a pipe), and is not written over; name a file")
    if Path(path).exists() and not overwrite:
        raise InputError(f"{path} exists; choose another name or say --overwrite")
    if not folder.exists():
        raise InputError(f"{path} cannot be written: there is no folder {folder}; make it or choose another place")
    check_takes_files(folder, Path(path))
