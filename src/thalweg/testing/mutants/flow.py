"""Information that flows where it must not, or is lost on its way."""

import torch

from thalweg.connections.base import Stream
from thalweg.testing.mutants.catalog import looks_along_tokens, mutant
from thalweg.testing.mutants.patches import change_input, lose_from_tokens


@mutant("causality")
def future_leak(stream: Stream) -> Stream:
    """The sublayer input holds the mean over all tokens."""
    return change_input(stream, lambda x: x + 0.1 * x.mean(1, keepdim=True))


@mutant("batch")
def batch_leak(stream: Stream) -> Stream:
    """The sublayer input holds the mean over the batch."""
    return change_input(stream, lambda x: x + 0.1 * x.mean(0, keepdim=True))


@mutant("token_order", "decoding", "padding", "packing")
def past_leak(stream: Stream) -> Stream:
    """The sublayer input holds the mean of past tokens of the call: causal, but lost in decoding and soiled by padding."""
    return change_input(stream, lambda x: x + 0.1 * x.cumsum(1) / torch.arange(1, x.shape[1] + 1).to(x)[:, None])


@mutant("decoding", applies=looks_along_tokens)
def memory_dropped(stream: Stream) -> Stream:
    """Cached decoding forgets the tokens of earlier calls."""
    return lose_from_tokens(stream, memory=None)


@mutant("padding", applies=looks_along_tokens)
def mask_ignored(stream: Stream) -> Stream:
    """Padding is taken for tokens."""
    return lose_from_tokens(stream, mask=None)


@mutant("packing", applies=looks_along_tokens)
def segments_ignored(stream: Stream) -> Stream:
    """A packed document sees the one before it."""
    return lose_from_tokens(stream, segments=None)
