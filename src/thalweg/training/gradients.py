"""The gradient of the loss in the states that enter the sublayers of a model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from thalweg.connections import StreamSite
from thalweg.connections.base import State
from thalweg.geometry.summaries import gradient_measurements
from thalweg.models.trace import StreamTrace
from thalweg.models.transformer import Transformer
from thalweg.records import Measurements


class Entered(NamedTuple):
    """The state that entered one sublayer, in the graph of a loss: its newest tensor, and those that are kept of earlier places."""

    newest: Tensor
    history: Sequence[Tensor]


def gradient_rows(model: Transformer, ids: Tensor, labels: Tensor) -> Measurements:
    """The norm of the gradient of the loss in the state that enters each site, and in each earlier state that the connection keeps there.

    No parameter gets a gradient from this.
    """
    loss, entered = entering(model, ids, labels)
    sites = [site.site for site in model.stream.sites]
    asked = [part for newest, history in entered for part in (newest, *history)]
    if not loss.requires_grad or not all(part.requires_grad for part in asked):
        return Measurements()
    found = iter(torch.autograd.grad(loss, asked, allow_unused=True))
    gradients = [(next(found), [next(found) for _ in history]) for _, history in entered]
    return gradient_measurements(sites, [newest for newest, _ in gradients], [history for _, history in gradients])


def entering(model: Transformer, ids: Tensor, labels: Tensor) -> tuple[Tensor, list[Entered]]:
    """The loss, and for each site the tensors of the state that entered it, each used there and after and nowhere else.

    One tensor that a state holds twice, or that several sites are handed on unchanged, is several: the derivative in one does not hold
    what the others do.
    """
    sites: list[StreamSite] = list(model.stream.sites)
    trace = StreamTrace()
    with torch.enable_grad():
        if isinstance(model.stream.enter(torch.zeros(1, 1, model.config.width).to(model.embedding.weight)), Tensor):
            loss = model(ids, labels=labels, trace=trace).loss
            states = [record.state_before for record in trace.records]
        else:
            with _separate(sites) as states:
                loss = model(ids, labels=labels, trace=trace).loss
    return loss, [Entered(*site.parts(state)) for site, state in zip(sites, states, strict=True)]


@contextmanager
def _separate(sites: Sequence[StreamSite]) -> Iterator[list[State]]:
    """Inside, each site reads and writes a state whose tensors are its own; they are listed in the order of the sites."""
    states: list[State] = []

    def guard(site: StreamSite) -> None:
        read, write = site.read, site.write

        def reading(state, tokens=None):
            states.append(tree_map_only(Tensor, lambda x: x.view_as(x), state))
            return read(states[-1], tokens)

        def writing(state, update, context):
            return write(states[-1], update, context)

        site.read, site.write = reading, writing  # type: ignore[method-assign]

    try:
        for site in sites:
            guard(site)
        yield states
    finally:
        for site in sites:
            for name in ("read", "write"):
                vars(site).pop(name, None)  # the methods of the class again
