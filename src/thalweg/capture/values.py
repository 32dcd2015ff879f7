"""The proof that what is called values and head outputs are those: with the model's own attention weights A, o_t = sum_s A_ts v_s.

Query head h reads key-value head ``h // group``. Elements of a value are never repeated, heads are.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from thalweg.capture.attention import attention_tap
from thalweg.capture.attention_call import AttentionCall
from thalweg.capture.evaluating import evaluating
from thalweg.capture.layout import Located
from thalweg.capture.proof import TOLERANCE, dtype_of, run
from thalweg.capture.watching import Event, watch
from thalweg.errors import InputError, ProofError

# How transformers marks a model on which it left hooks that capture outputs, and where those hooks are from.
MARK, THEIRS = "_output_capturing_hooks_installed", "transformers.utils.output_capturing"


def prove_values(
    located: Located, batch: Mapping[str, Any] | Tensor, tolerance: float | None = None
) -> dict[str, float]:
    """Largest error of every attention site that has heads, relative to the norm of o at a token and head; empty where none has.

    Runs once: of transformers with the eager backend, whose weights are seen (the backend is put back, and hooks that transformers leaves are
    taken away); of models of ours with their attention tapped, the weights computed anew from queries and keys. Keeps o, v and the weights of
    the whole batch, which should be small.
    Raises: ProofError that names the first site that fails; InputError where the model shows no attention weights.
    """
    kept: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def keep(event: Event) -> None:
        if event.values is not None:
            kept[event.place.name] = (event.values.o, event.values.v, event.real)

    if not any(place.heads for place in located.attention):
        return {}
    allowed = TOLERANCE.get(dtype_of(located.model), 1e-2) if tolerance is None else tolerance
    with watch(located, keep, values=True):
        weights = (
            tapped_weights(located, batch) if located.found_by == "own" else attention_weights(located.model, batch)
        )
    if len(weights) != len(located.attention):
        raise InputError(
            f"{type(located.model).__name__} shows attention weights of {len(weights)} of its {len(located.attention)} attention sites; "
            f"values cannot be proved"
        )
    errors: dict[str, float] = {}
    for place, weight in zip(located.attention, weights, strict=True):
        if place.name not in kept:
            continue
        o, v, real = kept.pop(place.name)
        errors[place.name] = error = mismatch(o, v, weight, real)
        if not error <= allowed:
            raise ProofError(
                f"the heads of {located.family!r} fail at {place.name} ({place.block}): the values of {place.heads and place.heads.value}, "
                f"weighted by the attention weights, are not the input of {place.heads and place.heads.output}, off by {error:.2g} of its norm "
                f"(allowed: {allowed:g}); give a map with other heads"
            )
    return errors


def mismatch(
    o: Float[Tensor, "b t h dv"], v: Float[Tensor, "b t kv dv"], weight: Float[Tensor, "b h t s"], real: Tensor
) -> float:
    """Largest norm of o - A v at a real token and head over the norm of o, in float64."""
    group = o.shape[2] // v.shape[2]
    v = v.masked_fill(~real[..., None, None], 0).double()
    by_group = weight.double().unflatten(1, (v.shape[2], group))
    mixed = torch.einsum("bkgts,bskd->btkgd", by_group, v).flatten(2, 3)
    wanted = o.double()
    off, size = (mixed - wanted).norm(dim=-1)[real], wanted.norm(dim=-1)[real]
    return float(torch.where(off == 0, off, off / size).nan_to_num(torch.inf).max())


def attention_weights(model: nn.Module, batch: Mapping[str, Any] | Tensor) -> tuple[Tensor, ...]:
    """The attention weights [b h t s] of every attention layer, from a pass with the eager backend. Raises: InputError."""
    with evaluating(model), eager(model), without_leftovers(model):
        try:
            found = getattr(run(model, batch, output_attentions=True), "attentions", None)
        except TypeError:
            found = None
    if not found or not all(isinstance(weight, Tensor) and weight.ndim == 4 for weight in found):
        raise InputError(f"{type(model).__name__} does not show its attention weights, so values cannot be proved")
    return tuple(found)


def tapped_weights(located: Located, batch: Mapping[str, Any] | Tensor) -> tuple[Tensor, ...]:
    """The attention weights [b h t s] of every attention site of a model of ours, in the order of its sites, those that were called."""
    found: dict[int, Tensor] = {}
    places = {id(located.module(place.sublayer)): place.index for place in located.attention}

    def see(call: AttentionCall) -> None:
        if id(call.module) in places:
            found[places[id(call.module)]] = weights_of(call)

    with evaluating(located.model), attention_tap(located.model, see):
        run(located.model, batch)
    return tuple(found[index] for index in sorted(found))


def weights_of(call: AttentionCall) -> Float[Tensor, "b h q k"]:
    """softmax(q k^T scale) over those that may be seen, in float64, or what the call says; query head h reads key head h // group."""
    if call.weights is not None:
        return call.weights.double()
    query, key = call.query.double(), call.key.double()
    group = query.shape[1] // key.shape[1]
    scores = torch.einsum("bkgqd,bksd->bkgqs", query.unflatten(1, (-1, group)), key).flatten(1, 2)
    scores = scores * (query.shape[-1] ** -0.5 if call.scaling is None else call.scaling)
    return scores.masked_fill(~call.visible(), -torch.inf).softmax(-1)


@contextmanager
def without_leftovers(model: nn.Module) -> Iterator[None]:
    """Take away what transformers leaves on a model that was asked for attention weights: a hook on every module that it looked into."""
    before = {module: set(module._forward_hooks) for module in model.modules()}
    marked = {module for module in before if MARK in vars(module)}
    try:
        yield
    finally:
        for module, kept in before.items():
            for key, hook in list(module._forward_hooks.items()):
                if key not in kept and getattr(hook, "__module__", "") == THEIRS:
                    del module._forward_hooks[key]
            if module not in marked:
                vars(module).pop(MARK, None)


@contextmanager
def eager(model: Any) -> Iterator[None]:
    """With the eager attention backend of transformers; the backend of before is put back. Raises: InputError."""
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if before is None or not hasattr(model, "set_attn_implementation"):
        raise InputError(f"{type(model).__name__} has no backend of attention to choose, so values cannot be proved")
    if before != "eager":
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        if before != "eager":
            model.set_attn_implementation(before)
