"""How a battery runs its checks, and the report of one run: the same for connections and for mixers."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.errors import UnknownNameError
from thalweg.testing.compare import BrokenError, DoesNotApplyError

# Raises BrokenError or DoesNotApplyError; what it returns, if anything, is what it measured.
Check = Callable[[Any], str | None]


@dataclass(frozen=True)
class CheckResult:
    """What one check found. ``reason``: what broke, why the check does not apply, or what a passed check measured; often empty."""

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
    """Every check of one connection or mixer (``name``), with every set of options."""

    name: str
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
            raise AssertionError(f"{self.name} breaks {len(self.broken)} of {len(self.results)} checks:{lines}")

    def __str__(self) -> str:
        state = "passes" if self.passed else f"breaks {len(self.broken)} of"
        return "\n  ".join(
            [f"{self.name} {state} {len(self.results)} checks ({self.seconds:.1f} s)", *map(str, self.results)]
        )


def require_known(checks: Mapping[str, Check], only: Sequence[str] | None) -> None:
    """Raises: UnknownNameError for a check that does not exist."""
    for name in only or ():
        if name not in checks:
            raise UnknownNameError("check", name, checks)


def run_checks(
    checks: Mapping[str, Check], subject: Any, only: Sequence[str] | None, options: Mapping[str, Any]
) -> tuple[CheckResult, ...]:
    """Run ``checks`` (``only``: these) on one subject. Raises: UnknownNameError for a check that does not exist."""
    require_known(checks, only)
    return tuple(_run(name, check, subject, options) for name, check in checks.items() if only is None or name in only)


def _run(name: str, check: Check, subject: Any, options: Mapping[str, Any]) -> CheckResult:
    begin = time.perf_counter()
    passed, applies, reason = True, True, ""
    try:
        reason = check(subject) or ""
    except DoesNotApplyError as why:
        applies, reason = False, str(why)
    except BrokenError as error:
        passed, reason = False, str(error)
    except Exception as error:  # whatever a broken subject raises is the finding
        message = next((line for line in str(error).splitlines() if line.strip()), "no message")
        passed, reason = False, f"raises {type(error).__name__}: {message}"
    return CheckResult(name, passed, reason, time.perf_counter() - begin, applies, dict(options))
