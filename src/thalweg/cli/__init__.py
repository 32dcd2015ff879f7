"""The command line: ``main`` finds the subcommand, runs it, and turns errors into one line and an exit code.

Nothing here imports torch; a subcommand's module is imported when it is called.
"""

import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from thalweg.cli.console import Parser, say, say_error
from thalweg.errors import (
    ExitCode,
    InputError,
    ThalwegError,
    ThalwegWarning,
    UnknownNameError,
    first_line,
    is_memory,
)

COMMANDS = {
    "demo": "train several connections on real text, judge a small study, write a report",
    "list": "what exists: connections, mixers, compressors, probes, experiments, measures, plans, tasks",
    "show": "everything about one of them",
    "train": "train one model, or go on with a run",
    "generate": "text from a trained run",
    "measure": "how layers write to the residual stream, of anybody's model or of a trained run",
    "study": "plan files: new, check, lock, run, verdict",
    "report": "one offline HTML file from a plan or a run",
    "compare-runs": "two runs side by side: first difference, losses, cost",
    "eval": "what a model can do on texts, long contexts and tasks, and what an edit costs it",
    "edit": "scale the part of a model's updates along or across the stream: what it costs, or what it writes",
    "sweep": "every site by every scale, each beside its matched no-op, as one page",
    "compress": "a smaller twin of a model: rounded, pruned, of low rank or without some layers, with the record of it",
    "compare": "what compression did to the updates of a model, layer by layer, and which layers to protect",
    "convert": "a trained model to another connection, with the proof that it computes what it computed",
    "grow": "train a model that adds heads while a directional residual remains, with the record of why",
    "prune": "a model without some of its heads, named or chosen by a measured score, with what that cost",
    "probe": "read-only probes of the continuous picture: normalisation, positions, bridges, depth, training",
    "models": "trained models that packages carry: what is here, how to get the rest",
    "doctor": "check this installation",
}

# Commands whose work is on the disk as it is done, so that an interrupted one leaves what was finished; one that keeps something in another
# case says so by the words of the KeyboardInterrupt.
KEEPING = ("demo", "train", "grow", "study", "eval", "sweep")

EPILOG = """examples:
  thalweg demo
  thalweg train --connection mgt --depth 4 --data austen --seed 0

exit codes: 0 done (verdict: supported), 1 refuted, 2 usage or input error, 3 inconclusive, 4 void, 5 a proof failed,
70 internal error, 130 interrupted"""


def module_of(command: str) -> str:
    """Module that holds a subcommand: one file per command."""
    return f"thalweg.cli.{command.replace('-', '_')}_command"


def _top_parser() -> Parser:
    width = max(map(len, COMMANDS))
    table = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        prog="thalweg",
        description=f"The residual stream of deep transformers.\n\ncommands:\n{table}",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    parser.add_argument("command", nargs="?", help="one of the commands above; COMMAND --help explains it")
    return parser


def _run(argv: Sequence[str]) -> int:
    if nul := next((a for a in argv if "\0" in a), None):
        raise InputError(f"an argument cannot hold a NUL byte, got {nul!r}")
    flags = [a for a in argv if a.startswith("-")]
    if not argv or argv[0] in ("-h", "--help", "--version") or (flags and argv[0] == flags[0]):
        args = _top_parser().parse_args(list(argv))
        if args.version:
            from thalweg._version import __version__

            print(f"thalweg {__version__}")
            return ExitCode.OK
        _top_parser().print_help()
        return ExitCode.INPUT
    if argv[0] not in COMMANDS:
        raise UnknownNameError("command", argv[0], COMMANDS)
    command = importlib.import_module(module_of(argv[0]))
    parser = Parser(prog=f"thalweg {argv[0]}", description=COMMANDS[argv[0]], epilog=command.EXAMPLES)
    command.configure(parser)
    parser.add_common(parser)
    args = parser.parse_args(list(argv[1:]))
    return int(command.run(args) or 0)


@contextmanager
def _one_line_warnings(quiet: bool) -> Iterator[None]:
    """Warnings that are meant for a reader become one line on stderr; all others stay as they are."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def shown(message, category, *where, **more):
            if issubclass(category, ThalwegWarning):
                say(f"warning: {' '.join(str(message).split())}", quiet=quiet)
            else:
                show(message, category, *where, **more)

        warnings.showwarning = shown
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit code; prints at most one line on stderr for an error."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    try:
        with _one_line_warnings("--quiet" in argv):
            return int(_run(argv))
    except ThalwegError as error:
        if debug:
            raise
        say_error(str(error))
        return int(error.exit_code)
    except KeyboardInterrupt as stopped:
        kept = "what was finished is kept" if argv[:1] and argv[0] in KEEPING else "nothing is kept"
        say_error(f"interrupted; {str(stopped) or kept}")
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:  # the reader of a pipe went away: no error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except OSError as error:
        if debug:
            raise
        say_error(f"{error.filename or 'the system'}: {error.strerror or error}")
        return int(ExitCode.INPUT)
    except Exception as error:
        if debug:
            raise
        if is_memory(error):
            say_error(f"out of memory ({first_line(error)}); choose a smaller model, batch or length")
            return int(ExitCode.INPUT)
        say_error(
            f"internal error: {type(error).__name__}: {' '.join(str(error).split())[:300]}; this is a bug, --debug shows where"
        )
        return int(ExitCode.INTERNAL)
