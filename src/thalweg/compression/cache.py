"""Compress what attention remembers: keys and values rounded, or forgotten but for the first and the last tokens.

with compression.compress_cache(model, bits=2, residual=32):       # KIVI
    model(**batch)
with compression.compress_cache(model, window=256):                # attention sinks: 4 first, 256 last tokens
    model.generate(**inputs)
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from thalweg.capture.attention import attention_tap
from thalweg.capture.attention_call import AttentionCall
from thalweg.capture.layers import Layers, chosen_layers
from thalweg.capture.layout import Located
from thalweg.capture.locating import locate
from thalweg.compression.compressors.base import STORED, check_whole
from thalweg.compression.rounding import LEAST_BITS, MOST_BITS, round_between
from thalweg.errors import InputError, UnknownNameError
from thalweg.ops.precision import wide

AXES = ("token", "channel")
_active: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


@dataclass(frozen=True)
class CacheOptions:
    """bits: of a number, 2 to 8; None: nothing is rounded. keys, values: what shares a scale: ``group`` channels of one token (``token``) or
    ``group`` tokens of one channel (``channel``). symmetric: levels on both sides of zero alike. residual: so many last tokens, the present
    one included, are not rounded. sink, window: with a window only the first ``sink`` and the last ``window`` tokens, the present one included,
    are seen; None: all. layers: where it holds.

    Raises: InputError, UnknownNameError.
    """

    bits: int | None = None
    keys: str = "channel"
    values: str = "token"
    group: int = 32
    symmetric: bool = False
    residual: int = 0
    sink: int = 4
    window: int | None = None
    layers: Layers = None

    def __post_init__(self) -> None:
        if self.bits is None and self.window is None:
            raise InputError(
                "nothing says what becomes of the cache; give bits (rounding), window (forgetting) or both"
            )
        if self.bits is not None:
            check_whole("bits", self.bits, LEAST_BITS, MOST_BITS)
        for name in ("keys", "values"):
            if getattr(self, name) not in AXES:
                raise UnknownNameError(f"value for {name}:", getattr(self, name), AXES)
        for name, least in (("group", 1), ("residual", 0), ("sink", 0)):
            check_whole(name, getattr(self, name), least)
        if self.window is not None:
            check_whole("window", self.window, 1)

    @property
    def bits_per_number(self) -> float:
        """Of keys and values that are rounded: the bits, and a scale of 16 bits and (asymmetric) a zero of ``bits`` for every group."""
        if self.bits is None:
            return float(STORED)
        return self.bits + (STORED + (0 if self.symmetric else self.bits)) / self.group

    def bytes(self, tokens: int, numbers: int) -> float:
        """Of a cache of ``tokens`` tokens with ``numbers`` numbers of keys and values each, in all layers where it holds."""
        held = tokens if self.window is None else min(tokens, self.sink + self.window)
        whole = 0 if self.bits is not None else held
        whole = min(held, self.residual) if self.bits is not None else whole
        return numbers * (whole * STORED + (held - whole) * self.bits_per_number) / 8


@contextmanager
def compress_cache(model: nn.Module, **options) -> Iterator[CacheOptions]:
    """Every attention of ``model`` reads a compressed memory inside the block; afterwards the model is as it was. Gives the options.

    Fields of :class:`CacheOptions`. With a cache and without, the same: what a token reads depends on nothing after it. Groups along tokens
    (``channel``) are counted from the first token that is no padding; a token is rounded for a query when its group is full and outside
    ``residual``, until then it is read as it is. The memory itself stays dense: what is read is rounded, at every pass.

    Source: rounding, KIVI (Liu et al. 2024, arXiv 2402.02750: keys by channel, values by token, a residual in full precision); forgetting,
    StreamingLLM (Xiao et al. 2024, arXiv 2309.17453: attention sinks and a window).
    Deviations: keys are rounded after their rotation (as in KIVI), and those that are forgotten leave the others at their own positions
    (StreamingLLM counts positions inside the memory). Latent caches (MLA) are rounded after decompression. Where a cache of transformers
    forgets by itself (sliding windows), places are counted in what it holds.
    Raises: InputError for an encoder, a second one on the same model, groups that do not divide a head, and as the attention tap does.
    """
    made = CacheOptions(**options)
    located = locate(model)
    if not located.causal:
        raise InputError(f"an encoder keeps no cache of keys and values, got {located.family}; give a decoder")
    layers = chosen_layers(made.layers, located.depth, to="compress")
    chosen = _modules(located, layers)
    if model in _active:
        raise InputError("the cache of this model is compressed already; give bits and window to one compress_cache")

    def on_attention(call: AttentionCall) -> Tensor | None:
        return compressed_attention(call, made) if call.module in chosen else None

    _active.add(model)
    try:
        with attention_tap(model, on_attention):
            yield made
    finally:
        _active.discard(model)


def compressed_attention(call: AttentionCall, options: CacheOptions) -> Float[Tensor, "b q h dv"]:
    """What attention gives with the compressed memory."""
    if call.weights is not None:
        raise InputError(
            "the weights of this attention are no softmax of its scores (sinkhorn), so its cache cannot be compressed"
        )
    seen = call.visible()
    used = seen.any(-2, keepdim=True)  # [b h 1 k]; padding is not
    if options.window is not None:
        seen = seen & _kept(call, used, options)
    if options.bits is None:
        return call.again(_mask(call, seen, 1))
    keys = rounded_memory(call.key, options.keys, used, options, "keys")
    values = rounded_memory(call.value, options.values, used, options, "values")
    by_key, by_value = (_is_rounded(call, used, axis, options) for axis in (options.keys, options.values))
    parts = []
    for k, first in ((keys, by_key), (call.key, ~by_key)):
        for v, second in ((values, by_value), (call.value, ~by_value)):
            which = seen & first & second
            if bool(which.any()):
                parts.append((k, v, which))
    mask = _mask(call, torch.cat([which for _, _, which in parts], -1), len(parts))
    return call.again(mask, key=torch.cat([k for k, _, _ in parts], 2), value=torch.cat([v for _, v, _ in parts], 2))


def rounded_memory(
    x: Float[Tensor, "b kv k d"], axis: str, used: Bool[Tensor, "b h 1 k"], options: CacheOptions, what: str
) -> Float[Tensor, "b kv k d"]:
    """Keys or values rounded and back. Tokens that are not used (padding) have no say in the scales. Raises: InputError."""
    assert options.bits is not None
    b, kv, k, d = x.shape
    wider, group = wide(x), options.group
    if axis == "token":
        if d % group:
            fitting = ", ".join(str(n) for n in range(1, d + 1) if d % n == 0)
            raise InputError(
                f"group {group} does not divide the {d} channels of the {what} of a head; allowed are {fitting}"
            )
        parts = wider.unflatten(-1, (-1, group))
        made = round_between(
            parts, parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True), options.bits, options.symmetric
        )
        return made.flatten(-2).to(x.dtype)
    real = used.any(1, keepdim=True).transpose(-1, -2).expand(b, 1, k, 1)
    order = real.long().argsort(
        dim=2, descending=True, stable=True
    )  # padding behind the tokens, so that groups begin with the first
    sorted_, there = wider.take_along_dim(order, 2), real.take_along_dim(order, 2)
    short = -k % group
    parts = torch.cat([sorted_, wider.new_zeros(b, kv, short, d)], 2).unflatten(2, (-1, group))
    there = torch.cat([there, there.new_zeros(b, 1, short, 1)], 2).unflatten(2, (-1, group))
    low = parts.masked_fill(~there, torch.inf).amin(3, keepdim=True)
    high = parts.masked_fill(~there, -torch.inf).amax(3, keepdim=True)
    some = there.any(3, keepdim=True)
    low, high = torch.where(some, low, 0.0), torch.where(some, high, 0.0)
    made = round_between(parts, low, high, options.bits, options.symmetric).flatten(2, 3)[:, :, :k]
    return made.take_along_dim(order.argsort(dim=2), 2).to(x.dtype)


def _is_rounded(
    call: AttentionCall, used: Bool[Tensor, "b h 1 k"], axis: str, options: CacheOptions
) -> Bool[Tensor, "b 1 q k"]:
    """Whether query t reads token s rounded: s, or the last of its group, lies before the ``residual`` last tokens."""
    t, s = _places(call, used)
    end = s if axis == "token" else (s // options.group + 1) * options.group - 1
    return end <= t - options.residual


def _kept(call: AttentionCall, used: Bool[Tensor, "b h 1 k"], options: CacheOptions) -> Bool[Tensor, "b 1 q k"]:
    """Whether query t may still look at token s."""
    assert options.window is not None
    t, s = _places(call, used)
    return (s < options.sink) | (t - s < options.window)


def _places(call: AttentionCall, used: Bool[Tensor, "b h 1 k"]) -> tuple[Tensor, Tensor]:
    """Places in the memory, padding not counted, of queries [b 1 q 1] and keys [b 1 1 k]."""
    keys = used.any(1, keepdim=True).long().cumsum(-1) - 1
    queries = keys[..., call.first : call.first + call.query.shape[2]]
    return queries.transpose(-1, -2), keys


def _mask(call: AttentionCall, seen: Bool[Tensor, "b h q k"], copies: int) -> Tensor:
    """Added to the scores: what the model's own mask adds, and the lowest number for what is not seen. copies: of the keys, side by side."""
    dtype = call.query.dtype
    added = torch.zeros((), dtype=dtype, device=seen.device)
    if call.mask is not None and call.mask.is_floating_point():
        added = call.mask[..., : call.key.shape[2]].repeat(1, 1, 1, copies).to(dtype)
    return torch.where(seen, added, torch.finfo(dtype).min)


def _modules(located: Located, layers: tuple[int, ...]) -> "weakref.WeakSet[nn.Module]":
    """Every module that may call attention in these layers."""
    found: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    for layer in layers:
        for module in located.module(located.blocks[layer]).modules():
            found.add(module)
    return found
