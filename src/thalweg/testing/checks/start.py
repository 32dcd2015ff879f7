"""Does it start as declared, and does everything learn from there?"""

from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from thalweg import connections
from thalweg.connections.base import Stream
from thalweg.ops.precision import default_dtype
from thalweg.testing.compare import (
    BrokenError,
    DoesNotApplyError,
    differentiate,
    gradients,
    parameters_of,
    require,
    require_close,
    rows,
)
from thalweg.testing.subjects import DEPTH, Subject, embedding_for, scramble, seeded, sublayers_for

DRAWS = 3  # of random parameters; the second and third only where the first finds a gradient of zero
STEPS, RATE = 3, 1e-2
MOVED = 1e-4 * RATE  # Adam moves by RATE a step unless the gradient is noise
STILL = 1e-2 * RATE  # what is declared frozen may move by noise that Adam makes large


def dead_parameters(subject: Subject) -> None:
    """After one backward pass every parameter of the whole stack has a gradient, and at random parameters none is zero at every draw.

    One draw does not decide: a scalar behind a clamp has none where the draw leaves every token outside the range.
    """
    _gradients(subject.start(), "the declared start")
    dead: set[str] = set()
    for draw in range(1, DRAWS + 1):
        zero = _zero_gradients(subject.random(seed=draw))
        dead = zero if draw == 1 else dead & zero
        if not dead:
            return
    raise BrokenError(
        f"the gradient is zero at random parameters: {rows(sorted(dead))}; multiplied by nothing, or saturated"
    )


def _zero_gradients(stream: Stream) -> set[str]:
    found = _gradients(stream, "random parameters")
    sizes = {name: float(value.abs().max()) for name, value in found.items() if not _frozen(stream, name)}
    largest = max((float(value.abs().max()) for value in found.values()), default=0.0)
    return {name for name, size in sizes.items() if size <= 1e-12 * largest}


def _gradients(stream: Stream, place: str) -> dict[str, Tensor]:
    """Of every parameter of the whole stack. Raises: BrokenError where one has none."""
    found = differentiate(stream, stream, sublayers_for(stream), embedding_for(stream)).gradients
    missing = [name for name, value in found.items() if value is None]
    require(not missing, f"no gradient at {place}: {rows(missing)}; a parameter that nothing uses must not exist")
    return {name: value for name, value in found.items() if value is not None}


def moves(subject: Subject) -> None:
    """Every parameter moves within three optimiser steps from the declared start, or is declared in ``frozen`` and does not."""
    stream = subject.start()
    sublayers = sublayers_for(stream)
    before = {name: parameter.detach().clone() for name, parameter in parameters_of(stream).items()}
    optimiser = torch.optim.Adam([*stream.parameters(), *sublayers.parameters()], lr=RATE)
    for step in range(STEPS):
        output = stream(embedding_for(stream, seed=10 + step), sublayers)
        loss = (output - embedding_for(stream, seed=20 + step)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for name, parameter in parameters_of(stream).items():
        distance = (parameter.detach() - before[name]).abs().max().item() if parameter.numel() else 0.0
        reason = _frozen(stream, name)
        if reason is None:
            require(
                distance > MOVED,
                f"{name} does not move within {STEPS} steps from the declared start; declare it in frozen() or free it",
            )
        else:
            require(
                distance <= STILL,
                f"{name} is declared frozen ({reason}) but moves by {distance:.1e} within {STEPS} steps",
            )
    for pattern, reason in stream.frozen().items():
        require(
            any(fnmatchcase(name, pattern) for name in before),
            f"frozen() names {pattern!r}, which matches no parameter",
        )
        require(bool(reason.strip()), f"frozen() gives no reason for {pattern!r}")


def declared_start(subject: Subject) -> None:
    """The untrained stream equals what ``equals_at_start`` says, within its tolerance: outputs, and the gradient of the embedding."""
    claim = subject.start().equals_at_start()
    if claim is None:
        raise DoesNotApplyError("nothing is declared to be equal at the start")
    for depth in (DEPTH, 3 * DEPTH):
        stream = subject.start(depth=depth)
        sublayers, embedding = sublayers_for(stream), embedding_for(stream).requires_grad_()
        with seeded(0), default_dtype(torch.float64):
            twin = connections.create(claim.name, width=stream.width, sites=stream.layout, **claim.options).double()
        got, want = stream(embedding, sublayers), twin(embedding, sublayers)
        what = f"of the untrained stream of depth {depth} against {claim.name}"
        require_close(f"output {what}", got, want, claim.tolerance)
        require_close(
            f"gradient of the embedding {what}",
            gradients(got, embedding, {})["embedding"],
            gradients(want, embedding, {})["embedding"],
            max(100 * claim.tolerance, 1e-9),
        )


def reset(subject: Subject) -> None:
    """``reset_parameters`` gives every parameter its declared start back after a generic initialisation overwrote it."""
    stream = subject.start()
    for overwrite in (_generic_initialisation, lambda s: scramble(s, seed=4)):
        with seeded(0):
            stream.reset_parameters()
        start = {name: parameter.detach().clone() for name, parameter in stream.named_parameters()}
        overwrite(stream)
        with seeded(0):
            stream.reset_parameters()
        for name, parameter in stream.named_parameters():
            same = torch.equal(parameter.detach(), start[name])
            require(same, f"reset_parameters does not restore {name} after a generic initialisation")


def _generic_initialisation(stream: Stream) -> None:
    """What model code does to the modules that it knows, bias and all."""
    with seeded(9):
        for module in stream.modules():
            weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
            if isinstance(weight, Tensor):
                nn.init.normal_(weight, std=0.5)
            if isinstance(bias, Tensor):
                nn.init.constant_(bias, 0.25)


def _frozen(stream: Stream, name: str) -> str | None:
    return next((reason for pattern, reason in stream.frozen().items() if fnmatchcase(name, pattern)), None)
