"""Causal self-attention: rotary positions, grouped keys and values, optional gate and inner norms."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from thalweg.capture.attention_call import AttentionCall
from thalweg.models.retained import edit_at
from thalweg.models.rotary import rotate
from thalweg.models.sublayers.base import Map, Sublayer
from thalweg.models.sublayers.prototypes import dictionary_of
from thalweg.ops.norms import Norm
from thalweg.ops.own_attention import own_attention
from thalweg.ops.precision import wide


class Attention(Sublayer):
    """y = W_o (gate * softmax(q k^T / sqrt(w)) v), with heads of width w.

    Shapes: [b t d] -> [b t d]. Query head h reads key-value head h // (heads / kv_heads).
    Source: rotary positions, Su et al. 2021 (arXiv 2104.09864); grouped heads, Ainslie et al. 2023 (arXiv 2305.13245); output gate, Qiu et
    al. 2025 (arXiv 2505.06708, position G1: a sigmoid of the sublayer's input on the attention output, before the output map); inner norm,
    Wang et al. 2022 (arXiv 2210.06423); norm of queries and keys per head, before the rotation, Henry et al. 2020 (arXiv 2010.04245).
    With a window of w tokens a token sees itself and the w - 1 before it. The cache keeps all tokens, windows or not.
    Deviations: a padded token sees itself, so that no softmax is empty; its output is finite and nobody reads it.
    dictionary: with ``head_prototypes``, a dictionary of prototypes per head on what the softmax gave, edits included, before the gate.
    value_edit: called with what the softmax gave, before gate and inner norm; may return another output [b t h w]. None: nothing is called.
    edit: the edit of values that belongs to the model (``attention_edit``), on what the softmax, or ``value_edit``, gave. The weight of a token
    on itself, which an edit that excludes it needs, is computed a second time (:func:`thalweg.ops.own_attention.own_attention`).
    """

    kind = "attention"

    def __init__(self, config, requirements, index):
        super().__init__(config, requirements, index)
        d, w = config.width, config.head_width
        qkv_bias, bias = config.biased_attention != "none", config.biased_attention == "all"
        self.heads, self.kv_heads, self.head_width = config.heads, config.key_value_heads, w
        self.scale, self.window = config.attention_scale, config.window(config.sites[index].layer)
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
        self.dictionary = dictionary_of(config, w, config.heads) if config.head_prototypes else None
        self.value_edit: Callable[[AttentionCall], Tensor | None] | None = None
        self.edit = edit_at(
            config.edits.get("attention_edit"), "value", config.sites[index].layer, config.depth, self.heads, w
        )

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
        y = self.attend(q, k, v, view.allowed)
        if self.value_edit is not None:
            y = self.edited(
                AttentionCall(self, q, k, v, view.allowed, self.scale, None, None, y, partial(self.again, q, k, v))
            )
        if self.edit is not None:
            own = own_attention(q, k, view.allowed, self.scale) if self.edit.exclude_self else None
            y = self.edit(y, mine.transpose(1, 2), own)
        if self.dictionary is not None:
            y = self.dictionary(y, view.real)
        if self.gate is not None:
            gate = torch.sigmoid(wide(self.gate(x))).to(y.dtype)
            y = y * gate.unflatten(-1, (self.heads, -1))
        return self.output(self.inner_norm(y.flatten(2)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Float[Tensor, "b t h w"]:
        """softmax(q k^T) v, over whom ``allowed`` lets see; None: plain causal."""
        grouped = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=allowed is None, scale=self.scale, enable_gqa=grouped
        )
        return y.transpose(1, 2)

    def again(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        allowed: Tensor | None,
        key: Tensor | None = None,
        value: Tensor | None = None,
    ) -> Float[Tensor, "b t h w"]:
        """:meth:`attend` anew, with other keys and values where they are given."""
        return self.attend(q, k if key is None else key, v if value is None else value, allowed)

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
