"""A norm slot that the options can switch on is a norm, not a parameter that nothing uses."""

from dataclasses import replace

from thalweg import config
from thalweg.errors import InputError
from thalweg.testing.checks.reference import reference
from thalweg.testing.checks.start import dead_parameters
from thalweg.testing.compare import BrokenError, DoesNotApplyError
from thalweg.testing.subjects import Subject


def with_update_norm(subject: Subject) -> Subject:
    """``subject`` with the norm on the update. Raises: DoesNotApplyError where it is on already or the options refuse it."""
    cls = subject.connection
    if config.build(cls.Options, dict(subject.options), where=cls.__name__).update_norm:
        raise DoesNotApplyError("the norm on the update is on already; the other checks see it")
    options = {**subject.options, "update_norm": True}
    try:
        config.build(cls.Options, options, where=cls.__name__)
    except InputError as error:
        raise DoesNotApplyError(f"the options refuse it: {error}") from None
    return replace(subject, options=options)


def slots(subject: Subject) -> None:
    """The norm on the update, where it is off, works when it is switched on: it has its part in the output and learns.

    With options other than the defaults it is only asked to learn: the slot is the same module under all.
    """
    on = with_update_norm(subject)
    for check in (dead_parameters,) if subject.options else (dead_parameters, reference):
        try:
            check(on)
        except BrokenError as error:
            raise BrokenError(f"with update_norm: {error}") from None
