"""Starts that are missed and declarations that are false."""

import dataclasses

import torch
from torch import nn

from thalweg.connections.base import GroupHint, Stream
from thalweg.testing.mutants.catalog import always, changes_output, has_parameters, mutant
from thalweg.testing.mutants.patches import change_input
from thalweg.testing.subjects import Subject, scramble


@mutant("dead_parameters", applies=always)
def unused_parameter(stream: Stream) -> Stream:
    """A parameter that nothing uses: distributed training stops on it."""
    stream.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    return stream


@mutant("dead_parameters", "moves", applies=always)
def stuck_parameter(stream: Stream) -> Stream:
    """A parameter that is multiplied by zero."""
    stream.register_parameter("stuck", nn.Parameter(torch.zeros(1)))
    return change_input(stream, lambda x: x + 0 * stream.get_parameter("stuck").to(x.dtype))


@mutant("reset", applies=lambda subject, _: any(p.dim() < 2 for p in subject.start().parameters()))
def bias_overwritten(stream: Stream) -> Stream:
    """Biases and scalars keep what a later generic initialisation gave them."""
    inner = stream.reset_parameters

    def reset_parameters() -> None:
        kept = {name: p.detach().clone() for name, p in stream.named_parameters() if p.dim() < 2}
        inner()
        with torch.no_grad():
            for name, value in kept.items():
                stream.get_parameter(name).copy_(value)

    stream.reset_parameters = reset_parameters
    return stream


@mutant("declared_start", applies=lambda subject, mutate: _claims(subject) and changes_output(subject, mutate))
def start_missed(stream: Stream) -> Stream:
    """The stream does not start where it says."""
    inner = stream.reset_parameters

    def reset_parameters() -> None:
        inner()
        scramble(stream, seed=6)

    stream.reset_parameters = reset_parameters
    return stream


@mutant("moves", applies=has_parameters)
def falsely_frozen(stream: Stream) -> Stream:
    """Moving parameters are declared frozen."""
    stream.frozen = lambda: {"*": "so it is said"}
    return stream


@mutant("moves", applies=lambda subject, _: bool(subject.start().frozen()))
def silently_frozen(stream: Stream) -> Stream:
    """Parameters that do not move are not declared."""
    stream.frozen = dict
    return stream


@mutant("hints", applies=always)
def stale_hint(stream: Stream) -> Stream:
    """An optimiser hint names a parameter that was renamed."""
    inner = stream.group_hints()
    stream.group_hints = lambda: {**inner, "sites.*.renamed": GroupHint()}
    return stream


@mutant("shapes", applies=always)
def observe_folded(stream: Stream) -> Stream:
    """The streams are folded into the tokens."""
    inner = stream.observe
    stream.observe = lambda state: inner(state).flatten(1, 2)
    return stream


@mutant("reference", applies=always)
def reference_borrowed(stream: Stream) -> Stream:
    """The reference is the code that it should check."""
    stream.reference = stream.forward
    return stream


@mutant("facts", applies=always)
def facts_empty(stream: Stream) -> Stream:
    """The equation is not written down."""
    vars(stream)["facts"] = dataclasses.replace(stream.facts, equation=" ")
    return stream


def _claims(subject: Subject) -> bool:
    return subject.start().equals_at_start() is not None
