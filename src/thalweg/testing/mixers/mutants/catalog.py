"""The list of mutants, when they apply, and how they get into a module: the methods of one instance are replaced."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from thalweg.mixers.base import Mixer
from thalweg.testing.mixers.subjects import MixerSubject, differentiate, logits_for
from thalweg.testing.mutants.catalog import Mutant, Mutate, always, collector, distance

MUTANTS: dict[str, Mutant] = {}


def changes_output(subject: MixerSubject, mutate: Mutate) -> bool:
    """The matrix or a gradient at random logits is another one."""
    plain, broken = (differentiate(m, m, logits_for(m)) for m in (subject.random(), subject.broken_by(mutate).random()))
    if distance(plain.output, broken.output) > 1e-6:
        return True
    return any(distance(value, broken.gradients[name]) > 1e-6 for name, value in plain.gradients.items())


def has_logits(subject: MixerSubject, mutate: Mutate) -> bool:
    return subject.start().generators > 0


def has_parameters(subject: MixerSubject, mutate: Mutate) -> bool:
    return any(True for _ in subject.start().parameters())


mutant = collector(MUTANTS, changes_output)


def change_matrix(mixer: Mixer, change: Callable[[Tensor], Tensor]) -> Mixer:
    inner = mixer.forward
    mixer.forward = lambda logits: change(inner(logits))
    return mixer


def change_logits(mixer: Mixer, change: Callable[[Tensor], Tensor]) -> Mixer:
    inner = mixer.forward
    mixer.forward = lambda logits: inner(change(logits))
    return mixer


def declare(mixer: Mixer, **attributes: Any) -> Mixer:
    """Give the one module a class of its own with these attributes; an instance cannot overrule a property."""
    kind = type(mixer)
    mixer.__class__ = type(kind.__name__, (kind,), {"__doc__": kind.__doc__, **attributes})
    return mixer


def claim(mixer: Mixer, **fields: Any) -> Mixer:
    return declare(mixer, claims=dataclasses.replace(mixer.claims, **fields))


__all__ = [
    "MUTANTS",
    "always",
    "change_logits",
    "change_matrix",
    "changes_output",
    "claim",
    "declare",
    "has_logits",
    "has_parameters",
    "mutant",
]
