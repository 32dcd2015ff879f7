"""What a mutant is, when it applies, and the list of them all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thalweg.connections.base import tensors_of
from thalweg.testing.compare import Outcome, differentiate
from thalweg.testing.subjects import Subject, embedding_for, random_state, sublayers_for

Mutate = Callable[[Any], Any]  # takes a fresh stream (or mixer), breaks it and returns it
Applies = Callable[[Any, Mutate], bool]


@dataclass(frozen=True)
class Mutant:
    """One bug. ``caught_by``: every check that must reject it (where the check applies). ``mutate`` changes a fresh one and returns it."""

    name: str
    words: str
    caught_by: tuple[str, ...]
    mutate: Mutate
    condition: Applies

    def applies(self, subject: Any) -> bool:
        """Whether the bug is possible here and changes anything (``x' = F(x)`` has no skip to drop)."""
        return self.condition(subject, self.mutate)


MUTANTS: dict[str, Mutant] = {}


def changes_output(subject: Subject, mutate: Mutate) -> bool:
    """The output or a gradient of a stream at random parameters is another one."""
    plain, broken = _outcome(subject), _outcome(subject.broken_by(mutate))
    if distance(plain.output, broken.output) > 1e-6:
        return True
    return any(distance(value, broken.gradients[name]) > 1e-6 for name, value in plain.gradients.items())


def looks_along_tokens(subject: Subject, mutate: Mutate) -> bool:
    return subject.start().looks_along_tokens


def has_parameters(subject: Subject, mutate: Mutate) -> bool:
    return any(True for _ in subject.start().parameters())


def has_coefficients(subject: Subject, mutate: Mutate) -> bool:
    """Whether a write depends on floating-point numbers that the read computed from the state."""
    stream = subject.random()
    site, state = stream.sites[0], random_state(stream.enter(embedding_for(stream)))
    x, context = site.read(state)
    _, other = site.read(random_state(state, seed=8))
    if not any(leaf.is_floating_point() for leaf in tensors_of(context)):
        return False
    pairs = zip(tensors_of(site.write(state, x, context)), tensors_of(site.write(state, x, other)), strict=True)
    return any(distance(a, b) > 1e-6 for a, b in pairs)


def always(subject: Subject, mutate: Mutate) -> bool:
    return True


def collector(into: dict[str, Mutant], default: Applies) -> Callable[..., Callable[[Mutate], Mutate]]:
    """A decorator ``mutant(*caught_by, applies=default)``: the function's name and docstring become those of a mutant in ``into``."""

    def mutant(*caught_by: str, applies: Applies = default) -> Callable[[Mutate], Mutate]:
        def add(mutate: Mutate) -> Mutate:
            into[mutate.__name__] = Mutant(mutate.__name__, (mutate.__doc__ or "").strip(), caught_by, mutate, applies)
            return mutate

        return add

    return mutant


mutant = collector(MUTANTS, changes_output)


def _outcome(subject: Subject) -> Outcome:
    stream = subject.random()
    return differentiate(stream, stream, sublayers_for(stream), embedding_for(stream))


def distance(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return float((a - b).detach().abs().max()) if a.numel() else 0.0
