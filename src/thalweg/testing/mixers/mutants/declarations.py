"""Starts that are missed, claims that are false, parameters that do not learn, and what breaks checkpoints."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.mixers.base import Mixer
from thalweg.ops.forward_mode import jvp
from thalweg.testing.mixers.mutants.catalog import (
    always,
    change_logits,
    change_matrix,
    claim,
    declare,
    has_logits,
    has_parameters,
    mutant,
)
from thalweg.testing.mixers.subjects import MixerSubject, logits_for, start_of
from thalweg.testing.mutants.catalog import Applies, Mutate

WRONG = 0.1  # a false claim is tried where it is false by this much


def matrices(subject: MixerSubject) -> Tensor:
    mixer = subject.random()
    return mixer(logits_for(mixer, 32, scale=5.0)).detach()


def falsely(holds: Callable[[MixerSubject], float]) -> Applies:
    """The condition of a false claim: there are logits, and the claim misses the truth by ``holds(subject)``, which is large."""
    return lambda subject, mutate: subject.start().generators > 0 and holds(subject) > WRONG


def starts_off(subject: MixerSubject, mutate: Mutate) -> bool:
    """The identity is claimed, and the broken start is far from it."""
    mixer = subject.broken_by(mutate).start(torch.float64)
    if not mixer.claims.identity:
        return False
    return float((mixer(start_of(mixer)) - torch.eye(subject.streams).double()).detach().abs().max()) > WRONG


def starts_dead(subject: MixerSubject, mutate: Mutate) -> bool:
    """Motion is claimed, and at the broken start a derivative has vanished."""
    mixer = subject.broken_by(mutate).start(torch.float64)
    if not (mixer.claims.moves and mixer.generators):
        return False
    logits = start_of(mixer)
    steps = torch.eye(mixer.generators, dtype=logits.dtype)
    columns = torch.stack([jvp(mixer, logits, step)[1] for step in steps]).detach()
    return float(columns.flatten(1).norm(dim=1).min()) < 1e-9


@mutant("start", applies=starts_off)
def start_zeroed(mixer: Mixer) -> Mixer:
    """The start is overwritten by zeros, and is not the identity."""
    return _start(mixer, lambda logits: 0 * logits)


@mutant("moves", applies=starts_dead)
def start_dead_at_zero(mixer: Mixer) -> Mixer:
    """The start is overwritten by zeros, where a derivative vanishes."""
    return _start(mixer, lambda logits: 0 * logits)


@mutant("start", applies=starts_off)
def start_far(mixer: Mixer) -> Mixer:
    """The start is far off."""
    return _start(mixer, lambda logits: 1.0 - 2.0 * logits)


@mutant("moves", applies=starts_dead)
def start_saturated(mixer: Mixer) -> Mixer:
    """The start is a thousand times too large, where nothing moves any more."""
    return _start(mixer, lambda logits: 1e3 * logits)


@mutant("start", applies=has_logits)
def start_shared(mixer: Mixer) -> Mixer:
    """The start is handed out, and changed by who takes it."""
    kept = mixer.start()
    return _set(mixer, start=lambda: kept)


@mutant("start", applies=has_logits)
def start_drawn(mixer: Mixer) -> Mixer:
    """The start is drawn anew each time."""
    return _start(mixer, lambda logits: logits + 1e-3 * torch.randn_like(logits))


@mutant("start", applies=lambda subject, _: subject.start().claims.identity and subject.streams > 1)
def identity_denied(mixer: Mixer) -> Mixer:
    """The identity at the start is not declared."""
    return claim(mixer, identity=False)


@mutant("start", applies=lambda subject, _: not subject.start().claims.identity and subject.streams > 1)
def identity_overclaimed(mixer: Mixer) -> Mixer:
    """A start that is not the identity is declared to be."""
    return claim(mixer, identity=True)


@mutant("moves", applies=has_logits)
def motion_misdeclared(mixer: Mixer) -> Mixer:
    """Logits that move are declared dead, or dead ones moving."""
    return claim(mixer, moves=not mixer.claims.moves)


@mutant("marginals", applies=falsely(lambda s: _off(matrices(s), -1) if s.start().claims.rows != "exact" else 0.0))
def rows_overclaimed(mixer: Mixer) -> Mixer:
    """Rows that do not sum to one are claimed to."""
    return claim(mixer, rows="exact")


@mutant("marginals", applies=falsely(lambda s: _off(matrices(s), -2) if s.start().claims.columns != "exact" else 0.0))
def columns_overclaimed(mixer: Mixer) -> Mixer:
    """Columns that do not sum to one are claimed to."""
    return claim(mixer, columns="exact")


@mutant("marginals", applies=lambda s, _: s.start().claims.rows == "none" and _nowhere(s, -1) > 1e-2)
def convergence_overclaimed(mixer: Mixer) -> Mixer:
    """Rows that never sum to one are claimed to converge."""
    return claim(mixer, rows="converging")


@mutant("nonnegative", applies=falsely(lambda subject: -float(matrices(subject).min())))
def sign_overclaimed(mixer: Mixer) -> Mixer:
    """Entries below zero are denied."""
    return claim(mixer, nonnegative=True)


@mutant("spectral", applies=falsely(lambda s: float(torch.linalg.matrix_norm(matrices(s), 2).max()) - 1))
def norm_overclaimed(mixer: Mixer) -> Mixer:
    """Singular values above one are denied."""
    return claim(mixer, spectral=True)


@mutant(
    "orthogonal", applies=falsely(lambda s: float((matrices(s).mT @ matrices(s) - torch.eye(s.streams)).abs().max()))
)
def orthogonality_overclaimed(mixer: Mixer) -> Mixer:
    """Matrices that are not orthogonal are claimed to be."""
    return claim(mixer, orthogonal=True)


@mutant("equivariant", applies=lambda subject, _: _asymmetric(subject))
def streams_not_renamed(mixer: Mixer) -> Mixer:
    """Renaming the streams leaves the logits as they are."""
    return _set(mixer, permute=lambda logits, order: logits)


@mutant("equivariant", applies=lambda subject, _: _asymmetric(subject) and subject.streams > 2)
def streams_renamed_back(mixer: Mixer) -> Mixer:
    """Renaming applies the inverse order."""
    inner = mixer.permute
    return _set(mixer, permute=lambda logits, order: inner(logits, [order.index(i) for i in range(len(order))]))


@mutant("reaches", applies=lambda subject, _: _bounded(subject))
def reach_overclaimed(mixer: Mixer) -> Mixer:
    """A constrained mixer is claimed to reach every matrix."""
    return claim(mixer, reaches="any")


@mutant("facts", applies=always)
def facts_empty(mixer: Mixer) -> Mixer:
    """The equation is not written down."""
    return declare(mixer, facts=dataclasses.replace(mixer.facts, equation=" "))


@mutant("facts", applies=always)
def facts_untupled(mixer: Mixer) -> Mixer:
    """A tuple of one line without its comma is a string."""
    return declare(mixer, facts=dataclasses.replace(mixer.facts, deviations="none"))  # type: ignore[arg-type]


@mutant("facts", applies=lambda subject, _: not subject.start().claims.spectral)
def claims_contradict(mixer: Mixer) -> Mixer:
    """An orthogonal matrix whose singular values exceed one."""
    return claim(mixer, orthogonal=True, spectral=False)


@mutant("reference", applies=always)
def reference_borrowed(mixer: Mixer) -> Mixer:
    """The reference is the code that it should check."""
    return _set(mixer, reference=lambda logits: mixer(logits))


@mutant("reference", applies=always)
def reference_vectorised(mixer: Mixer) -> Mixer:
    """The reference uses a matrix product."""
    inner = mixer.reference
    return _set(mixer, reference=lambda logits: inner(logits) @ torch.eye(mixer.streams, dtype=logits.dtype))


@mutant("shapes", applies=has_logits)
def scales_miscounted(mixer: Mixer) -> Mixer:
    """The groups of logits do not add up."""
    return declare(mixer, scaled=(mixer.generators, 1))


@mutant("shapes", applies=always)
def excess_ignored(mixer: Mixer) -> Mixer:
    """Logits beyond those that are needed are ignored."""
    return change_logits(mixer, lambda logits: logits[..., : mixer.generators])


@mutant("shapes", applies=always)
def batch_axis_added(mixer: Mixer) -> Mixer:
    """One matrix alone comes with a batch axis."""
    return change_matrix(mixer, lambda mix: mix[None] if mix.dim() == 2 else mix)


@mutant("shapes", applies=lambda subject, _: subject.start().generators > 1)
def strides_assumed(mixer: Mixer) -> Mixer:
    """The memory is read as if the logits were contiguous."""

    def change(logits: Tensor) -> Tensor:
        if not logits.dim() or logits.shape[-1] != mixer.generators or type(logits) is not Tensor:
            return logits
        size = min(logits.numel(), logits.untyped_storage().nbytes() // logits.element_size())
        packed = torch.as_strided(logits, (size,), (1,), 0)
        return packed.view(logits.shape) if size == logits.numel() else logits

    return change_logits(mixer, change)


@mutant("parameters", applies=always)
def unused_parameter(mixer: Mixer) -> Mixer:
    """A parameter that nothing uses: distributed training stops on it."""
    mixer.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    return mixer


@mutant("parameters", applies=always)
def stuck_parameter(mixer: Mixer) -> Mixer:
    """A parameter that is multiplied by zero."""
    mixer.register_parameter("stuck", nn.Parameter(torch.zeros(1)))
    return change_matrix(mixer, lambda mix: mix + 0 * mixer.get_parameter("stuck").to(mix.dtype))


@mutant("parameters", applies=always)
def parameter_not_reset(mixer: Mixer) -> Mixer:
    """A parameter keeps what it was overwritten with."""
    mixer.register_parameter("kept", nn.Parameter(torch.ones(1)))
    inner = mixer.reset_parameters

    def reset_parameters() -> None:
        value = mixer.get_parameter("kept").detach().clone()
        inner()
        with torch.no_grad():
            mixer.get_parameter("kept").copy_(value)

    _set(mixer, reset_parameters=reset_parameters)
    return change_matrix(mixer, lambda mix: mix * mixer.get_parameter("kept").to(mix.dtype))


@mutant("parameters", applies=has_parameters)
def start_of_parameters_lost(mixer: Mixer) -> Mixer:
    """The mixer's own parameters keep what a generic initialisation gave them."""
    return _set(mixer, reset_parameters=lambda: None)


@mutant("storage", applies=has_parameters)
def state_lost(mixer: Mixer) -> Mixer:
    """A parameter is not saved."""
    lost = next(name for name, _ in mixer.named_parameters())

    def drop(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        del state[prefix + lost]

    mixer._register_state_dict_hook(drop)
    return mixer


@mutant("storage", applies=always)
def buffer_saved(mixer: Mixer) -> Mixer:
    """A buffer that follows from the number of streams is saved."""
    mixer.register_buffer("saved", torch.zeros(1))
    return mixer


@mutant("storage", "reference", applies=always)
def buffer_inexact(mixer: Mixer) -> Mixer:
    """A constant is rounded with the module."""
    mixer.register_buffer("third", torch.tensor(1 / 3), persistent=False)
    return change_matrix(mixer, lambda mix: mix * (3 * mixer.get_buffer("third").to(mix.dtype)))


def _set(mixer: Mixer, **methods: Callable[..., Any]) -> Mixer:
    for name, method in methods.items():
        setattr(mixer, name, method)
    return mixer


def _start(mixer: Mixer, change: Callable[[Tensor], Tensor]) -> Mixer:
    inner = mixer.start
    return _set(mixer, start=lambda: change(inner()))


def _off(mix: Tensor, axis: int) -> float:
    return float((mix.sum(axis) - 1).abs().max())


def _nowhere(subject: MixerSubject, axis: int) -> float:
    """How far sums are from one at best, near zero and near the start."""
    mixer = subject.random()
    noise = logits_for(mixer, 8, scale=0.01)
    return min(_off(mixer(near + noise).detach(), axis) for near in (0.0, start_of(mixer)))


def _asymmetric(subject: MixerSubject) -> bool:
    """Renaming is claimed, and changes the matrices."""
    mix = matrices(subject)
    order = [*range(1, subject.streams), 0]
    return subject.start().claims.equivariant and float((mix[:, order][:, :, order] - mix).abs().max()) > WRONG


def _bounded(subject: MixerSubject) -> bool:
    """There are logits, and a random matrix breaks one of the claims."""
    mixer = subject.start()
    claims = mixer.claims
    stochastic = "exact" in (claims.rows, claims.columns)
    return mixer.generators > 0 and (claims.nonnegative or stochastic or claims.spectral or claims.orthogonal)
