"""How a mutant gets into a stream: the verbs of one instance are replaced."""

import dataclasses
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from thalweg.connections.base import Context, State, Stream, StreamSite, Tokens
from thalweg.ops.norms import Norm


def rewrite(stream: Stream, write: Callable[..., State]) -> Stream:
    """Replace every site's ``write`` by ``write(inner, site, state, update, context)``; a fused form cannot go round it."""
    unfuse(stream)
    for site in stream.sites:

        def patched(state: State, update: Tensor, context: Context, *, inner=site.write, site=site) -> State:
            return write(inner, site, state, update, context)

        site.write = patched
    return stream


def reread(stream: Stream, read: Callable[..., Any]) -> Stream:
    unfuse(stream)
    for site in stream.sites:

        def patched(state: State, tokens: Tokens | None = None, *, inner=site.read, site=site) -> Any:
            return read(inner, site, state, tokens)

        site.read = patched
    return stream


def change_input(stream: Stream, change: Callable[[Tensor], Tensor]) -> Stream:
    """Change what every sublayer is given."""

    def read(inner, site, state, tokens):
        x, context = inner(state, tokens)
        return change(x), context

    return reread(stream, read)


def lose_from_tokens(stream: Stream, **fields: None) -> Stream:
    """Lose a field of the tokens on the way into every verb."""

    def lose(tokens: Tokens | None) -> Tokens | None:
        return tokens and dataclasses.replace(tokens, **fields)

    enter, leave = stream.enter, stream.leave
    stream.enter = lambda embedding, tokens=None: enter(embedding, lose(tokens))
    stream.leave = lambda state, tokens=None: leave(state, lose(tokens))
    return reread(stream, lambda inner, site, state, tokens: inner(state, lose(tokens)))


def change_mix(stream: Stream, change: Callable[[Tensor], Tensor]) -> Stream:
    """Change every mixing matrix [... n n] that a context holds (none in a stream of one)."""

    def write(inner, site, state, update, context):
        n = stream.observe(state).shape[2]

        def mix(leaf: Any) -> Any:
            square = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape[-2:] == (n, n)
            return change(leaf) if square and n > 1 else leaf

        return inner(state, update, tree_map(mix, context))

    return rewrite(stream, write)


def rewrite_under_autocast(stream: Stream, change: Callable[[Any], Any]) -> Stream:
    def write(inner, site, state, update, context):
        after = inner(state, update, context)
        return tree_map(change, after) if torch.is_autocast_enabled("cpu") else after

    return rewrite(stream, write)


def unfuse(stream: Stream) -> None:
    for site in stream.sites:
        site.advance = MethodType(StreamSite.advance, site)
    stream.advance = MethodType(Stream.advance, stream)


def norms_of(module: nn.Module) -> list[Norm]:
    return [norm for norm in module.modules() if isinstance(norm, Norm) and norm.kind != "none"]


def zero(leaf: Any) -> Any:
    return 0 * leaf if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def narrow(leaf: Any) -> Any:
    return leaf.bfloat16() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
