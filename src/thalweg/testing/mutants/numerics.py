"""Wrong gradients, lost precision, and what breaks compilers and checkpoints."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from thalweg.connections.base import Stream
from thalweg.testing.mutants.catalog import always, has_coefficients, has_parameters, mutant
from thalweg.testing.mutants.patches import change_input, narrow, reread, rewrite, rewrite_under_autocast


class ScaledGradient(torch.autograd.Function):
    """Identity, with a wrong backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradient, None


@mutant("reference", "gradient")
def wrong_backward(stream: Stream) -> Stream:
    """A hand-written backward pass loses a tenth."""
    return change_input(stream, lambda x: ScaledGradient.apply(x, 0.9))


@mutant("depth", applies=always)
def gradient_grows(stream: Stream) -> Stream:
    """The gradient grows ten times at every site."""

    def write(inner, site, state, update, context):
        return tree_map(lambda leaf: ScaledGradient.apply(leaf, 10.0), inner(state, update, context))

    return rewrite(stream, write)


@mutant("bfloat16", applies=always)
def overflow_between(stream: Stream) -> Stream:
    """An intermediate value leaves the range of single precision."""
    return change_input(stream, lambda x: x * 1e30 * 1e30 * 1e-60)


@mutant("bfloat16", applies=always)
def cancellation(stream: Stream) -> Stream:
    """A large number is added and taken away again."""
    return change_input(stream, lambda x: (x + 256) - 256)


@mutant("autocast", applies=has_coefficients)
def coefficients_narrowed(stream: Stream) -> Stream:
    """Coefficients are in bfloat16 under autocast."""

    def read(inner, site, state, tokens):
        x, context = inner(state, tokens)
        return x, tree_map(narrow, context) if torch.is_autocast_enabled("cpu") else context

    return reread(stream, read)


@mutant("autocast", applies=always)
def stream_narrowed(stream: Stream) -> Stream:
    """The stream turns to bfloat16 under autocast."""
    return rewrite_under_autocast(stream, narrow)


@mutant("autocast", applies=always)
def product_narrowed(stream: Stream) -> Stream:
    """The write is computed in bfloat16 under autocast and returned in the dtype of the stream."""
    return rewrite_under_autocast(
        stream, lambda leaf: narrow(leaf).to(leaf.dtype) if isinstance(leaf, Tensor) else leaf
    )


@mutant("storage", applies=has_parameters)
def state_lost(stream: Stream) -> Stream:
    """A parameter is not saved."""
    lost = next(name for name, _ in stream.named_parameters())

    def drop(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        del state[prefix + lost]

    stream._register_state_dict_hook(drop)
    return stream


@mutant("compiled", "cost", applies=always)
def branch_on_values(stream: Stream) -> Stream:
    """Python looks at a value of the state: the graph breaks there."""
    return change_input(stream, lambda x: x if float(x.detach().sum()) > 0 else 1 * x)
