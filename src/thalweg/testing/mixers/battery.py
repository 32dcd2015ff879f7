"""The standard battery of mixers: the list of checks, the sizes at which a sweep makes them, and what runs them."""

from collections.abc import Mapping, Sequence
from typing import Any

from thalweg import config, mixers
from thalweg.errors import InputError
from thalweg.mixers.base import Mixer, name_of
from thalweg.testing.compare import DoesNotApplyError
from thalweg.testing.mixers.checks.claims import equivariant, marginals, nonnegative, orthogonal, reaches, spectral
from thalweg.testing.mixers.checks.declarations import facts, shapes, supports
from thalweg.testing.mixers.checks.equation import gradient, purity, reference, transforms
from thalweg.testing.mixers.checks.machinery import compiled, dataless, storage
from thalweg.testing.mixers.checks.numbers import extremes, precision
from thalweg.testing.mixers.checks.start import moves, parameters, start
from thalweg.testing.mixers.subjects import MORE, PREFERRED, SIZES, MixerSubject
from thalweg.testing.report import BatteryReport, Check, CheckResult, require_known, run_checks

# In the order in which they run: the cheap and telling first. A sweep makes each at these numbers of streams, or, where that is None,
# at one number of streams only: it is expensive, or has nothing new to see at another size.
SWEEP: dict[Check, tuple[int, ...] | None] = {
    supports: (*SIZES, *MORE),
    facts: None,
    shapes: SIZES,
    reference: (1, 2, 3, 4, 8),
    purity: (4, 16),
    marginals: SIZES,
    nonnegative: SIZES,
    spectral: SIZES,
    orthogonal: SIZES,
    equivariant: SIZES,
    start: (*SIZES, *MORE),
    moves: SIZES,
    parameters: (2, 4),
    extremes: SIZES,
    precision: (4, 16),
    gradient: (3, 4),
    transforms: None,
    dataless: None,
    storage: (3, 8),
    reaches: None,
    compiled: None,
}

CHECKS: dict[str, Check] = {check.__name__: check for check in SWEEP}


def run(subject: MixerSubject, only: Sequence[str] | None = None) -> tuple[CheckResult, ...]:
    """Run the checks (``only``: these) on one subject. Raises: UnknownNameError for a check that does not exist."""
    why = subject.refusal()

    def refused(_: MixerSubject) -> None:
        raise DoesNotApplyError(f"{subject.streams} streams are refused: {why}")

    checks = (
        CHECKS if why is None else {name: check if check is supports else refused for name, check in CHECKS.items()}
    )
    return run_checks(checks, subject, only, {"streams": subject.streams, **subject.options})


def swept(subject: MixerSubject) -> list[str]:
    """The checks that a sweep makes at this number of streams: all in all each check, at the sizes where it sees most."""
    served = [n for n in (*SIZES, *MORE) if subject.at(n).refusal() is None]
    if subject.streams not in served:
        return [supports.__name__]
    once = [next(n for n in PREFERRED if n in served)]
    return [
        check.__name__
        for check, sizes in SWEEP.items()
        if subject.streams in ([n for n in sizes or () if n in served] or once)
    ]


def subjects_of(
    mixer: str | type[Mixer],
    options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    streams: int | Sequence[int] | None = None,
) -> list[MixerSubject]:
    """One subject per set of options and number of streams; by default all that ``variants`` names, at 1 to 64 streams.

    Raises: UnknownNameError for an unknown mixer or option; InputError for what is no mixer.
    """
    cls = mixers.registry[mixer] if isinstance(mixer, str) else mixer
    if not (isinstance(cls, type) and issubclass(cls, Mixer)):
        raise InputError(f"a mixer is a registered name or a subclass of Mixer, got {cls!r}")
    sets = [{}, *cls.variants()] if options is None else [options] if isinstance(options, Mapping) else list(options)
    for given in sets:
        config.build(cls.Options, dict(given), where=name_of(cls))
    several = (*SIZES, *MORE) if streams is None else streams
    sizes = tuple(several) if isinstance(several, Sequence) else (several,)
    for n in sizes:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InputError(f"streams must be whole numbers from 1, got {n!r}")
    return [MixerSubject(cls, n, dict(given)) for given in sets for n in sizes]


def check_mixer(
    name_or_class: str | type[Mixer],
    *,
    options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    only: Sequence[str] | None = None,
    streams: int | Sequence[int] | None = None,
    raises: bool = True,
) -> BatteryReport:
    """Run the battery that every mixer of this package passes; takes about a second a set of options.

    name_or_class: a registered name, or a class (registered or not). options: one set or several; None runs the defaults and every set
    that the class names in ``variants``. only: names of checks (default: all, see ``thalweg.testing.mixers.CHECKS``). streams: one number
    or several, each with every check; None sweeps 1 to 64, each check at the sizes where it sees most. A number of streams that the
    mixer refuses is checked for its message alone.
    Raises: AssertionError that names what broke and why, unless ``raises`` is False; UnknownNameError for an unknown mixer,
    option or check.
    """
    require_known(CHECKS, only)
    results: list[CheckResult] = []
    for subject in subjects_of(name_or_class, options, streams):
        names = only if streams is not None else [n for n in swept(subject) if only is None or n in only]
        results += run(subject, names)
    name = name_or_class if isinstance(name_or_class, str) else name_or_class.__name__
    report = BatteryReport(name, tuple(results))
    if raises:
        report.raise_if_broken()
    return report
