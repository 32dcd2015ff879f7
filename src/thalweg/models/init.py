"""Initialisation, in one place and last: the generic pass, what the connection requires of the sublayers, then the stream's own start."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from thalweg.connections import Requirements
from thalweg.errors import InputError
from thalweg.models.retained import edits_of
from thalweg.models.sublayers import Map, PrototypeLayer, Prototypes, Sublayer
from thalweg.ops.norms import Norm

if TYPE_CHECKING:
    from thalweg.models.transformer import Transformer


@contextmanager
def one_seed(generator: torch.Generator | None) -> Iterator[int]:
    """Take one seed from ``generator`` (None: torch's own) and leave the rest of the global CPU generator as it was.

    So a model takes the same from the generator whatever it is made of, and two models of one seed that differ in the connection alone
    start from the same sublayers.
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(
            f"generator must be a torch.Generator, got {type(generator).__name__}; give torch.Generator().manual_seed(SEED)"
        )
    seed = int(torch.randint(2**62, (), generator=generator, device="cpu", dtype=torch.int64).item())
    with torch.random.fork_rng(devices=[]):
        yield seed


@torch.no_grad()
def initialise(model: "Transformer", seed: int) -> None:
    """Give every parameter its start, from ``seed``; uses the global CPU generator."""
    torch.default_generator.manual_seed(seed)
    config = model.config
    nn.init.normal_(model.embedding.weight, std=config.embedding_std)
    model.initialise_head()
    if model.position_embedding is not None:
        nn.init.normal_(model.position_embedding.weight, std=config.embedding_std)
    for sublayer in model.sublayers:
        for linear_map in sublayer.maps():
            initialise_map(linear_map, sublayer.requirements, config.initial_std)
        for module in sublayer.modules():
            if isinstance(module, Norm):
                module.reset_parameters()
            elif isinstance(module, PrototypeLayer):
                module.reset_parameters(prototype_std(sublayer))
    model.stream.reset_parameters()
    for edit in edits_of(model).values():
        edit.reset_parameters()


def prototype_std(sublayer: Sublayer) -> float:
    """Size of the prototypes at the start: that of a normed input, times what the connection asks of a map that is first and last at once."""
    required = sublayer.requirements
    return required.gain * required.output_gain if isinstance(sublayer, Prototypes) else 1.0


def initialise_map(linear_map: Map, required: Requirements, std: float) -> None:
    """Normal weights of the required size, zero bias."""
    linear = linear_map.linear
    if required.init == "xavier":
        std = (2 / (linear.in_features + linear.out_features)) ** 0.5
    gain = (required.gain if linear_map.gained else 1.0) * (required.output_gain if linear_map.last else 1.0)
    nn.init.normal_(linear.weight)
    linear.weight.mul_(std * gain)  # scaled after drawing, so that the draw is the same for every connection
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
