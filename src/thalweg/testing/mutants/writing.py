"""Bugs in what is written, and in who writes it."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from thalweg.connections.base import Context, State, Stream, StreamSite, Tokens, tensors_of
from thalweg.testing.checks.slots import with_update_norm
from thalweg.testing.compare import DoesNotApplyError
from thalweg.testing.mutants.catalog import Mutate, always, changes_output, has_coefficients, mutant
from thalweg.testing.mutants.patches import reread, rewrite, unfuse, zero
from thalweg.testing.subjects import Subject


@mutant("reference")
def update_dropped(stream: Stream) -> Stream:
    """What the sublayer computed is not written."""
    return rewrite(stream, lambda write, site, state, update, context: write(state, 0 * update, context))


@mutant("reference")
def skip_dropped(stream: Stream) -> Stream:
    """The old state is not carried over."""
    return rewrite(stream, lambda write, site, state, update, context: write(tree_map(zero, state), update, context))


@mutant("reference")
def sign_flipped(stream: Stream) -> Stream:
    """The update is subtracted."""
    return rewrite(stream, lambda write, site, state, update, context: write(state, -update, context))


@mutant("reference")
def read_write_swapped(stream: Stream) -> Stream:
    """The sublayer reads the raw state, and its update goes onto what it should have read."""
    unfuse(stream)
    for site in stream.sites:

        def read(state: State, tokens: Tokens | None = None, *, inner=site.read):
            x, context = inner(state, tokens)
            return (state if isinstance(state, Tensor) and state.shape == x.shape else x), context

        def write(state: State, update: Tensor, context: Context, *, reads=site.read, inner=site.write):
            x, _ = reads(state)
            return inner(x if isinstance(state, Tensor) and state.shape == x.shape else state, update, context)

        site.read, site.write = read, write
    return stream


@mutant("reference")
def site_off_by_one(stream: Stream) -> Stream:
    """Every sublayer is served by the site that follows."""
    unfuse(stream)
    verbs = [(site.read, site.write) for site in stream.sites]
    for site, (read, write) in zip(stream.sites, verbs[1:] + verbs[:1], strict=True):
        site.read, site.write = read, write
    return stream


def has_a_free_slot(subject: Subject, mutate: Mutate) -> bool:
    """Whether the norm on the update is off, can be switched on, and then changes anything."""
    try:
        return changes_output(with_update_norm(subject), mutate)
    except DoesNotApplyError:
        return False


@mutant("slots", applies=has_a_free_slot)
def update_norm_ignored(stream: Stream) -> Stream:
    """The norm on the update has its parameters, but the write goes past it."""
    for site in stream.sites:
        site.update_norm.forward = lambda update: update
    return stream


@mutant("purity", applies=always)
def in_place_write(stream: Stream) -> Stream:
    """The old state is overwritten by the write."""

    def write(inner, site, state, update, context):
        after = inner(state, update, context)
        with torch.no_grad():
            for leaf in tensors_of(state):
                if (
                    0 not in leaf.stride()
                ):  # what enters may be one tensor seen several times, which cannot be written to
                    leaf.detach().add_(1)
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, after)

    return rewrite(stream, write)


@mutant("purity", applies=has_coefficients)
def context_hidden(stream: Stream) -> Stream:
    """The context is kept in the module by the last read, whichever pass that was."""
    last: dict[StreamSite, Context] = {}

    def read(inner, site, state, tokens):
        x, context = inner(state, tokens)
        last[site] = context
        return x, context

    reread(stream, read)
    return rewrite(stream, lambda write, site, state, update, context: write(state, update, last[site]))


@mutant("advance")
def fused_form_differs(stream: Stream) -> Stream:
    """The fused write-and-read is not the write and the read."""
    inner = stream.advance

    def advance(index: int, state: State, update: Tensor, context: Context, tokens: Tokens | None = None):
        state, x, context = inner(index, state, update, context, tokens)
        return state, None if x is None else 1.01 * x, context

    stream.advance = advance
    return stream
