"""The scores of every attention of a model, as its softmax sees them, layer by layer, while it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.capture.attention import attention_tap
from thalweg.capture.attention_call import AttentionCall
from thalweg.capture.layout import Located
from thalweg.errors import InputError
from thalweg.ops.precision import wide

OnScores = Callable[[int, AttentionCall], Any]


@contextmanager
def watch_attention(located: Located, see: OnScores) -> Iterator[None]:
    """Call ``see(layer, call)`` at every attention of every pass inside the block; the model has its attention back afterwards.

    Raises: InputError for a model whose attention cannot be tapped, see :func:`thalweg.capture.attention.attention_tap`.
    """
    layers: dict[int, int] = {}
    for place in located.attention:
        layers |= {id(module): place.layer for module in located.module(place.sublayer).modules()}

    def on_attention(call: AttentionCall) -> None:
        layer = layers.get(id(call.module))
        if layer is not None:
            with torch.no_grad():
                see(layer, call)

    with attention_tap(located.model, on_attention):
        yield


def no_attention(located: Located) -> str | None:
    """Why the scores of a model cannot be had, or None."""
    if not located.attention:
        return "it has no attention sublayers"
    modules = [module for place in located.attention for module in located.module(place.sublayer).modules()]
    if not all(getattr(module, "weights_are_softmax", True) for module in modules):
        return "the weights of its attention are no softmax of scores (sinkhorn)"
    try:
        with watch_attention(located, lambda *_: None):
            return None
    except InputError as error:
        return str(error)


def scores_of(call: AttentionCall, last: int | None = None) -> Float[Tensor, "b h q k"]:
    """scale q.k, capped and masked (-inf where a query may not look), in float32 or wider, of the ``last`` queries (None: all).

    Learned sinks, which are logits of no key, are not among them.
    """
    if call.weights is not None:
        raise InputError("the weights of its attention are no softmax of its scores (sinkhorn)")
    query, key = wide(call.query), wide(call.key)
    query = query if last is None else query[:, :, -last:]
    b, h, q, d = query.shape
    kv = key.shape[1]
    scale = d**-0.5 if call.scaling is None else call.scaling
    scores = ((query * scale).reshape(b, kv, h // kv * q, d) @ key.mT).view(b, h, q, key.shape[2])
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    seen = call.visible()[..., -q:, :]
    if call.mask is not None and call.mask.dtype != torch.bool:  # a bias too, as for relative positions
        scores = scores + wide(torch.where(seen, call.mask[..., -q:, : key.shape[2]], 0.0))
    return scores.masked_fill(~seen, -torch.inf)
