"""Bugs in norms, gates and mixing matrices."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from thalweg.connections.base import Stream
from thalweg.ops.norms import Norm
from thalweg.testing.mutants.catalog import mutant
from thalweg.testing.mutants.patches import change_mix, detach, norms_of, rewrite


@mutant("reference")
def norm_skipped(stream: Stream) -> Stream:
    """The norms at the sites are not applied."""
    for norm in norms_of(stream.sites):
        norm.forward = lambda x: x
    return stream


@mutant("reference")
def final_norm_skipped(stream: Stream) -> Stream:
    """The unembedding sees the raw stream."""
    stream.final_norm.forward = lambda x: x
    return stream


@mutant("reference")
def wrong_last_axis(stream: Stream) -> Stream:
    """The norms take their statistics over the tokens."""
    for norm in norms_of(stream):

        def forward(x: Tensor, norm: Norm = norm) -> Tensor:
            weight = 1.0 if norm.weight is None else norm.weight
            shift = 0.0 if norm.bias is None else norm.bias
            centre = x.mean(1, keepdim=True) if norm.kind == "layernorm" else 0.0
            return (x - centre) * torch.rsqrt((x - centre).square().mean(1, keepdim=True) + norm.eps) * weight + shift

        norm.forward = forward
    return stream


@mutant("reference")
def gate_detached(stream: Stream) -> Stream:
    """No gradient flows through the coefficients of the write."""

    def write(inner, site, state, update, context):
        held = {name: parameter.detach() for name, parameter in site.named_parameters()}
        site.forward = inner
        return torch.func.functional_call(site, held, (state, update, tree_map(detach, context)))

    return rewrite(stream, write)


@mutant("reference")
def gate_of_another_token(stream: Stream) -> Stream:
    """The coefficients of the write come from the neighbouring token."""

    def shifted(leaf: Any, tokens: int) -> Any:
        along = isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == tokens
        return leaf.roll(1, 1) if along else leaf

    return rewrite(
        stream,
        lambda write, site, state, update, context: write(
            state, update, tree_map(lambda leaf: shifted(leaf, update.shape[1]), context)
        ),
    )


@mutant("reference", "routing")
def mix_discarded(stream: Stream) -> Stream:
    """The streams are mixed, and the result is thrown away."""
    return change_mix(stream, lambda mix: torch.eye(mix.shape[-1], dtype=mix.dtype, device=mix.device).expand_as(mix))


@mutant("reference", "routing")
def mix_transposed(stream: Stream) -> Stream:
    """``mix[to, from]`` is applied as ``mix[from, to]``."""
    return change_mix(stream, lambda mix: mix.mT)


@mutant("reference")
def mixing_detached(stream: Stream) -> Stream:
    """No gradient flows into the mixing matrix."""
    return change_mix(stream, torch.Tensor.detach)
