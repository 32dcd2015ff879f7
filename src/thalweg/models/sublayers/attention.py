"""Self-attention, causal or both ways: rotary positions, grouped keys and values, optional gate and inner norms."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from thalweg.capture.attention_call import AttentionCall
from thalweg.models.retained import edit_at
from thalweg.models.rotary import rotate
from thalweg.models.sublayers.base import Map, Sublayer
from thalweg.models.sublayers.prototypes import dictionary_of
from thalweg.models.sublayers.transport import among_real, transport_weights, transported
from thalweg.ops.attention_and_own import attention_and_own, can_attend
from thalweg.ops.entropic import CausalMasses
from thalweg.ops.norms import Norm
from thalweg.ops.own_attention import own_attention
from thalweg.ops.precision import wide


class Attention(Sublayer):
    """y = W_o (gate * softmax(q k^T / sqrt(w)) v), with heads of width w.

    Shapes: [b t d] -> [b t d]. Query head h reads key-value head h // (heads / kv_heads).
    Source: rotary positions, Su et al. 2021 (arXiv 2104.09864); grouped heads, Ainslie et al. 2023 (arXiv 2305.13245); output gate, Qiu et
    al. 2025 (arXiv 2505.06708, position G1: a sigmoid of the sublayer's input on the attention output, before the output map); inner norm,
    Wang et al. 2022 (arXiv 2210.06423); norm of queries and keys per head, before the rotation, Henry et al. 2020 (arXiv 2010.04245).
    With a window of w tokens a token sees itself and the w - 1 before it, in an encoder the w - 1 after it too.
    The cache keeps all tokens, windows or not.
    Deviations: a padded token sees itself, so that no softmax is empty; its output is finite and nobody reads it.
    dictionary: with ``head_prototypes``, a dictionary of prototypes per head on what the softmax gave, edits included, before the gate.
    value_edit: called with what the softmax gave, before gate and inner norm; may return another output [b t h w]. None: nothing is called.
    edit: the edit of values that belongs to the model (``attention_edit``), on what the softmax, or ``value_edit``, gave. The weight of a token
    on itself, which an edit that excludes it needs, comes with the softmax where the kernel says enough of it
    (:func:`thalweg.ops.attention_and_own.attention_and_own`), else from scores that are made again
    (:func:`thalweg.ops.own_attention.own_attention`).
    With ``attention_weights`` "sinkhorn" the weights are a transport plan in place of the softmax: both ways of Sinkhorn's iterations in an
    encoder, Sander et al. 2022 (arXiv 2110.11773); in a decoder the causal bridge, derived by us (:func:`thalweg.ops.entropic.causal_bridge`).
    head_mask [h]: a factor on the output of every head, last before inner norm and output map (:func:`thalweg.surgery.mask_heads`); None,
    as it is but for a head that is being taken away: nothing is multiplied. It is not saved with the weights.
    """

    kind = "attention"

    def __init__(self, config, requirements, index):
        super().__init__(config, requirements, index)
        d, w = config.width, config.head_width
        self.causal = config.causal
        qkv_bias, bias = config.biased_attention != "none", config.biased_attention == "all"
        layer = config.sites[index].layer
        self.heads, self.kv_heads, self.head_width = config.heads_of(layer), config.key_value_heads_of(layer), w
        self.scale, self.window = config.attention_scale, config.window(layer)
        self.iterations = config.attention_iterations if config.attention_weights == "sinkhorn" else None
        self.weights_are_softmax = self.iterations is None
        self.query = nn.Linear(d, self.heads * w, bias=qkv_bias)
        self.key = nn.Linear(d, self.kv_heads * w, bias=qkv_bias)
        self.value = nn.Linear(d, self.kv_heads * w, bias=qkv_bias)
        self.output = nn.Linear(self.heads * w, d, bias=bias)
        gates = {"none": 0, "head": self.heads, "element": self.heads * w}[config.attention_gate]
        self.gate = nn.Linear(d, gates, bias=bias) if gates else None
        self.query_norm, self.key_norm = (
            Norm(w, config.norm if config.qk_norm else "none", eps=config.norm_eps) for _ in range(2)
        )
        self.inner_norm = Norm(self.heads * w, config.norm if requirements.inner_norm else "none", eps=config.norm_eps)
        self.dictionary = dictionary_of(config, w, self.heads) if config.head_prototypes else None
        self.value_edit: Callable[[AttentionCall], Tensor | None] | None = None
        self.edit = edit_at(config.edits.get("attention_edit"), "value", layer, config.depth, self.heads, w)
        self.head_mask: Tensor | None
        self.register_buffer("head_mask", None, persistent=False)

    def forward(self, x, view, cache=None):
        view = view.windowed[self.window] if self.window else view
        q = self.query_norm(self.split(self.query(x)))
        k = self.key_norm(self.split(self.key(x)))
        v = self.split(self.value(x))
        if view.cos is not None and view.sin is not None:
            q, k = rotate(q, view.cos, view.sin), rotate(k, view.cos, view.sin)
        mine = v
        if cache is not None:
            k, v = cache.extend(self.index, k, v)
        allowed, plan, past = view.allowed, None, None
        if self.iterations is not None:
            allowed = among_real(allowed, view.real)
            past = None if cache is None else cache.memory.slots.get(f"attention.{self.index}")
            plan, left = self.plan(q, k, allowed, past)
            if cache is not None:
                cache.memory.slots[f"attention.{self.index}"] = left
        own = None
        if self.edit is not None and self.edit.exclude_self and plan is None and can_attend(q, k, allowed):
            y, own = attention_and_own(q, k, v, self.scale, self.causal)
            y = y.transpose(1, 2)
        else:
            y = self.attend(q, k, v, allowed) if plan is None else transported(plan, v)
        if self.value_edit is not None:
            again = partial(self.again, q, k, v, past)
            y = self.edited(
                AttentionCall(self, q, k, v, allowed, self.scale, None, None, y, again, self.causal, weights=plan)
            )
        if self.edit is not None:
            if own is None and self.edit.exclude_self:
                own = self.own(q, k, allowed, plan)
            y = self.edit(y, mine.transpose(1, 2), own)
        if self.dictionary is not None:
            y = self.dictionary(y, view.real)
        if self.gate is not None:
            gate = torch.sigmoid(wide(self.gate(x))).to(y.dtype)
            y = y * gate.unflatten(-1, (self.heads, -1))
        if self.head_mask is not None:
            y = y * self.head_mask.to(y.dtype).unsqueeze(-1)
        return self.output(self.inner_norm(y.flatten(2)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Float[Tensor, "b t h w"]:
        """softmax(q k^T) v, over whom ``allowed`` lets see; None: plain causal, in an encoder everybody."""
        grouped = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=allowed is None and self.causal, scale=self.scale, enable_gqa=grouped
        )
        return y.transpose(1, 2)

    def plan(
        self, q: Tensor, k: Tensor, allowed: Tensor | None, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Float[Tensor, "b h t k"], Any]:
        """The transport plan, given what the rows of earlier calls left of it, and what these leave: two tensors, nothing in an encoder."""
        assert self.iterations is not None
        before = None if past is None else CausalMasses(*past)
        weights, left = transport_weights(q, k, allowed, before, self.scale, self.iterations, self.causal)
        return weights, tuple(left)

    def own(self, q: Tensor, k: Tensor, allowed: Tensor | None, plan: Tensor | None) -> Float[Tensor, "b h t"]:
        """What every token reads of itself."""
        if plan is None:
            return own_attention(q, k, allowed, self.scale, causal=self.causal)
        return plan.diagonal(k.shape[2] - q.shape[2], -2, -1)

    def again(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: tuple[Tensor, Tensor] | None,
        allowed: Tensor | None,
        key: Tensor | None = None,
        value: Tensor | None = None,
    ) -> Float[Tensor, "b t h w"]:
        """The output anew, over whom ``allowed`` lets see, with other keys and values where they are given."""
        k, v = k if key is None else key, v if value is None else value
        if self.iterations is None:
            return self.attend(q, k, v, allowed)
        return transported(self.plan(q, k, allowed, past)[0], v)

    def edited(self, call: AttentionCall) -> Float[Tensor, "b t h w"]:
        """The output of ``call`` after ``value_edit``."""
        assert self.value_edit is not None
        changed = self.value_edit(call)
        return call.output if changed is None else changed

    def split(self, x: Float[Tensor, "b t hw"]) -> Float[Tensor, "b h t w"]:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def maps(self):
        yield Map(self.query, gained=False)
        yield Map(self.key, gained=False)
        yield Map(self.value)
        if self.gate is not None:
            yield Map(self.gate, gained=False)
        yield Map(self.output, last=True)
