"""What a mutant is, when it applies, and the list of them all."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from thalweg.connections.base import Stream, tensors_of
from thalweg.testing.compare import Outcome, differentiate
from thalweg.testing.subjects import Subject, embedding_for, random_state, sublayers_for

Mutate = Callable[[Stream], Stream]
Applies = Callable[[Subject, Mutate], bool]


@dataclass(frozen=True)
class Mutant:
    """One bug. ``caught_by``: every check that must reject it (where the check applies). ``mutate`` changes a fresh stream and returns it."""

    name: str
    words: str
    caught_by: tuple[str, ...]
    mutate: Mutate
    condition: Applies

    def applies(self, subject: Subject) -> bool:
        """Whether the bug is possible here and changes anything (``x' = F(x)`` has no skip to drop)."""
        return self.condition(subject, self.mutate)


MUTANTS: dict[str, Mutant] = {}


def changes_output(subject: Subject, mutate: Mutate) -> bool:
    """The output or a gradient of a stream at random parameters is another one."""
    plain, broken = _outcome(subject), _outcome(subject.broken_by(mutate))
    if _distance(plain.output, broken.output) > 1e-6:
        return True
    return any(_distance(value, broken.gradients[name]) > 1e-6 for name, value in plain.gradients.items())


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
    return any(_distance(a, b) > 1e-6 for a, b in pairs)


def always(subject: Subject, mutate: Mutate) -> bool:
    return True


def mutant(*caught_by: str, applies: Applies = changes_output) -> Callable[[Mutate], Mutate]:
    """Decorator: the function's name and docstring become the mutant's."""

    def add(mutate: Mutate) -> Mutate:
        MUTANTS[mutate.__name__] = Mutant(mutate.__name__, (mutate.__doc__ or "").strip(), caught_by, mutate, applies)
        return mutate

    return add


def _outcome(subject: Subject) -> Outcome:
    stream = subject.random()
    return differentiate(stream, stream, sublayers_for(stream), embedding_for(stream))


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return float((a - b).detach().abs().max()) if a.numel() else 0.0
