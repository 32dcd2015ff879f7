"""The standard battery: the list of checks, and the report of one run."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg import config, connections
from thalweg.connections.base import Stream
from thalweg.errors import InputError, UnknownNameError
from thalweg.testing.checks.causality import batch, causality, token_order
from thalweg.testing.checks.compiled import compiled
from thalweg.testing.checks.declarations import cost, facts, hints, shapes
from thalweg.testing.checks.decoding import decoding, packing, padding
from thalweg.testing.checks.deep import depth
from thalweg.testing.checks.precision import autocast, bfloat16
from thalweg.testing.checks.reference import advance, gradient, purity, reference
from thalweg.testing.checks.routing import routing
from thalweg.testing.checks.slots import slots
from thalweg.testing.checks.start import dead_parameters, declared_start, moves, reset
from thalweg.testing.checks.storage import storage
from thalweg.testing.compare import BrokenError, DoesNotApplyError
from thalweg.testing.subjects import Subject

Check = Callable[[Subject], None]

# In the order in which they run: the cheap and telling first.
CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        facts,
        shapes,
        reference,
        routing,
        advance,
        purity,
        causality,
        batch,
        token_order,
        decoding,
        padding,
        packing,
        dead_parameters,
        moves,
        declared_start,
        reset,
        hints,
        slots,
        storage,
        bfloat16,
        autocast,
        gradient,
        cost,
        depth,
        compiled,
    )
}


@dataclass(frozen=True)
class CheckResult:
    """What one check found. ``reason``: what broke, or why the check does not apply; empty when it passed."""

    name: str
    passed: bool
    reason: str
    seconds: float
    applies: bool = True
    options: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        verdict = ("passed" if self.passed else "BROKEN") if self.applies else "does not apply"
        where = f" with {dict(self.options)}" if self.options else ""
        return f"{self.name}{where}: {verdict}{': ' + self.reason if self.reason else ''} ({self.seconds:.2f} s)"


@dataclass(frozen=True)
class BatteryReport:
    """Every check of one connection, with every set of options."""

    connection: str
    results: tuple[CheckResult, ...]

    @property
    def broken(self) -> tuple[CheckResult, ...]:
        return tuple(result for result in self.results if not result.passed)

    @property
    def passed(self) -> bool:
        return not self.broken

    @property
    def seconds(self) -> float:
        return sum(result.seconds for result in self.results)

    def raise_if_broken(self) -> None:
        """Raises: AssertionError that names every broken check and says what exactly is wrong."""
        if self.broken:
            lines = "".join(f"\n  {result}" for result in self.broken)
            raise AssertionError(f"{self.connection} breaks {len(self.broken)} of {len(self.results)} checks:{lines}")

    def __str__(self) -> str:
        state = "passes" if self.passed else f"breaks {len(self.broken)} of"
        return "\n  ".join(
            [f"{self.connection} {state} {len(self.results)} checks ({self.seconds:.1f} s)", *map(str, self.results)]
        )


def run(subject: Subject, only: Sequence[str] | None = None) -> tuple[CheckResult, ...]:
    """Run the checks (``only``: these) on one subject. Raises: UnknownNameError for a check that does not exist."""
    for name in only or ():
        if name not in CHECKS:
            raise UnknownNameError("check", name, CHECKS)
    return tuple(_run(name, check, subject) for name, check in CHECKS.items() if only is None or name in only)


def _run(name: str, check: Check, subject: Subject) -> CheckResult:
    begin = time.perf_counter()
    passed, applies, reason = True, True, ""
    try:
        check(subject)
    except DoesNotApplyError as why:
        applies, reason = False, str(why)
    except BrokenError as error:
        passed, reason = False, str(error)
    except Exception as error:  # whatever a broken connection raises is the finding
        message = next((line for line in str(error).splitlines() if line.strip()), "no message")
        passed, reason = False, f"raises {type(error).__name__}: {message}"
    return CheckResult(name, passed, reason, time.perf_counter() - begin, applies, dict(subject.options))


def subjects_of(
    connection: str | type[Stream], options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
) -> list[Subject]:
    """One subject per set of options; without ``options`` the defaults and all that ``variants`` names.

    Raises: UnknownNameError for an unknown connection or option; InputError for what is no connection.
    """
    cls = connections.registry[connection] if isinstance(connection, str) else connection
    if not (isinstance(cls, type) and issubclass(cls, Stream)):
        raise InputError(f"a connection is a registered name or a subclass of Stream, got {cls!r}")
    sets = [{}, *cls.variants()] if options is None else [options] if isinstance(options, Mapping) else list(options)
    for given in sets:
        config.build(cls.Options, dict(given), where=cls.__name__)
    return [Subject(cls, dict(given)) for given in sets]


def check_connection(
    connection: str | type[Stream],
    *,
    options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    only: Sequence[str] | None = None,
    raises: bool = True,
) -> BatteryReport:
    """Run the battery that every connection of this package passes; takes a few seconds a set of options.

    connection: a registered name, or a class (registered or not). options: one set or several; None runs the defaults and every set that
    the class names in ``variants``. only: names of checks (default: all, see ``thalweg.testing.CHECKS``).
    Raises: AssertionError that names what broke and why, unless ``raises`` is False; UnknownNameError for an unknown connection,
    option or check.
    """
    subjects = subjects_of(connection, options)
    name = connection if isinstance(connection, str) else connection.__name__
    report = BatteryReport(name, tuple(result for subject in subjects for result in run(subject, only)))
    if raises:
        report.raise_if_broken()
    return report
