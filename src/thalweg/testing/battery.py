"""The standard battery of connections: the list of checks, and what runs them."""

from collections.abc import Mapping, Sequence
from typing import Any

from thalweg import config, connections
from thalweg.connections.base import Stream
from thalweg.errors import InputError
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
from thalweg.testing.report import BatteryReport, Check, CheckResult, run_checks
from thalweg.testing.subjects import Subject

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


def run(subject: Subject, only: Sequence[str] | None = None) -> tuple[CheckResult, ...]:
    """Run the checks (``only``: these) on one subject. Raises: UnknownNameError for a check that does not exist."""
    return run_checks(CHECKS, subject, only, subject.options)


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
        config.build(cls.Options, dict(given), where=connections.registry.name_of(cls) or cls.__name__)
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
