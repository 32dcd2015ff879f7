"""Errors that reach a person: one clear line, a documented exit code, never a traceback without ``--debug``."""

import difflib
import re
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process says when it ends; documented in ``docs/cli.md`` and pinned by a test."""

    OK = 0  # done; for a verdict: supported
    REFUTED = 1
    INPUT = 2  # usage, input or environment (disk full, missing file)
    INCONCLUSIVE = 3
    VOID = 4
    CAPTURE = 5  # a proof failed: of a capture, or of a conversion
    INTERNAL = 70  # a bug of ours
    INTERRUPTED = 130


class ThalwegError(Exception):
    """Base of every error meant for a reader. ``str(error)`` is the line that is shown."""

    exit_code: ExitCode = ExitCode.INPUT

    def __reduce__(
        self,
    ) -> tuple:  # errors cross from worker processes; some are made from other arguments than they hold
        return _rebuilt, (type(self), self.args), self.__dict__ or None


def _rebuilt(kind: type[ThalwegError], args: tuple) -> ThalwegError:
    return kind.__new__(kind, *args)


class ThalwegWarning(UserWarning):
    """Something is missing or was left out, and the rest goes on; the command line shows it as one line on stderr."""


_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|not enough memory", re.IGNORECASE)


def is_memory(error: BaseException) -> bool:
    """Whether there was no memory left: Python's own error, or what torch says on a CPU or a GPU."""
    return isinstance(error, MemoryError) or _MEMORY.search(str(error)) is not None


def first_line(error: BaseException) -> str:
    """What an error of another library says first, to stand inside one of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    whole = next(
        (i for i, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1
    )  # "Validation error for field 'x':"
    return " ".join(lines[: whole + 1]).removeprefix("Error ").rstrip(".:")


class InputError(ThalwegError, ValueError):
    """What was given cannot be used: says what was got, what is allowed and what to do."""


class InUseError(InputError):
    """Another process writes into a folder that was to be written into."""


class ShapeError(InputError):
    """A tensor or file has another shape than its place needs."""


class MissingExtraError(ThalwegError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str):
        super().__init__(f"{what} is not installed; run: pip install 'thalweg[{extra}]'")


class OfflineError(ThalwegError):
    """A hub was needed and cannot be reached."""


class CheckpointError(ThalwegError):
    """A checkpoint is missing, truncated, foreign, or does not fit its configuration."""


class CaptureError(ThalwegError):
    """What was captured is not the residual stream."""

    exit_code = ExitCode.CAPTURE


class ProofError(ThalwegError):
    """A model was changed and is not the function that it was."""

    exit_code = ExitCode.CAPTURE


MOST_NAMES = 40  # shown in one line


def nearest(name: str, known: Iterable[str], *, n: int, cutoff: float) -> list[str]:
    """Those of ``known`` that read most like ``name``, whatever the case of their letters, best first."""
    folded: dict[str, list[str]] = {}
    for one in known:
        folded.setdefault(one.casefold(), []).append(one)
    found = difflib.get_close_matches(name.casefold(), folded, n=n, cutoff=cutoff)
    return [one for key in found for one in folded[key]][:n]


def _known(name: str, known: list[str]) -> str:
    if len(known) <= MOST_NAMES:
        return f"Known: {', '.join(known) or '(none)'}"
    near = nearest(name, known, n=MOST_NAMES // 2, cutoff=0.3)
    return f"Nearest of {len(known)}: {', '.join(near or known[: MOST_NAMES // 2])}"


class UnknownNameError(InputError, KeyError):
    """A name that no registry or schema holds; suggests the nearest."""

    def __init__(self, kind: str, name: object, known: Iterable[str], *, more: str = ""):
        known = sorted(known)
        near = nearest(str(name), known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        self.line = f"unknown {kind} {str(name)!r}.{hint} {_known(str(name), known)}.{(' ' + more) if more else ''}"
        super().__init__(self.line)

    def __str__(self) -> str:  # KeyError would show the repr
        return self.line
