"""Attention and the weight of every token on itself, out of one kernel instead of two.

Axis legend: ``b`` batch, ``h`` heads, ``t`` tokens, ``d`` width of a head.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from thalweg.ops.forward_mode import transformed
from thalweg.ops.precision import wide

KERNEL = "_scaled_dot_product_flash_attention_for_cpu"  # what scaled_dot_product_attention runs on a CPU
DTYPES = (torch.float32, torch.float64)


def can_attend(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Whether :func:`attention_and_own` does this call: on a CPU in float32 or float64, every token seeing itself, nothing masked or cached,
    neither compiled nor under forward-mode derivatives.
    """
    plain = mask is None and query.device.type == "cpu" and query.dtype in DTYPES and query.shape[2] == key.shape[2]
    there = hasattr(torch.ops.aten, KERNEL) and hasattr(torch.ops.aten, f"{KERNEL}_backward")
    return plain and there and query.numel() > 0 and not torch.compiler.is_compiling() and not transformed()


def attention_and_own(
    query: Float[Tensor, "b h t d"],
    key: Float[Tensor, "b kv t d"],
    value: Float[Tensor, "b kv t d"],
    scaling: float | None = None,
    causal: bool = True,
) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b h t"]]:
    """softmax(scaling q k^T) v as ``scaled_dot_product_attention`` gives it, to the bit, and A_tt, for calls that :func:`can_attend` names.

    scaling: 1 / sqrt(d) unless given.
    A_tt = exp(scaling q_t.k_t - L_t), with the log-sum-exp L of its row that the kernel returns. Its backward pass knows no gradient of L:
    with w_t = A_tt dA_tt the scores get A_ts (dP_ts - D_t) + w_t (1[s = t] - A_ts), so w_t is added to D_t = dO_t.O_t, which the kernel
    forms from the output it is handed, and O_t + w_t dO_t / |dO_t|^2 is handed to it. A dO_t of zero is replaced by one too faint to be seen
    in anything but D_t. Differentiable once. Query head h reads key head h // (h / kv).
    Source: the identity is derived here from that of Dao et al. 2022 (arXiv 2205.14135, appendix B.4).
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
    return _Attention.apply(query, key, value, scaling, causal)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, causal: bool) -> Any:
        kernel = getattr(torch.ops.aten, KERNEL)
        output, total = kernel(query, key, value, 0.0, causal, attn_mask=None, scale=scaling)
        ctx.scaling, ctx.causal = query.shape[-1] ** -0.5 if scaling is None else scaling, causal
        own = torch.exp((query * key).sum(-1) * ctx.scaling - total.to(query.dtype))
        ctx.save_for_backward(query, key, value, output, total, own)
        return output, wide(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_output: Tensor, to_own: Tensor) -> Any:
        query, key, value, output, total, own = ctx.saved_tensors
        weight = (to_own.to(own.dtype) * own).unsqueeze(-1)
        square, known = to_output.square().sum(-1, keepdim=True), torch.finfo(own.dtype)
        nothing = square < known.tiny / known.eps
        handed = torch.addcmul(output, to_output, torch.where(nothing, 0.0, weight / square))
        lost = nothing & (weight != 0)
        if bool(lost.any()):  # a stand-in so faint beside what it carries that rounding takes it from everything else
            first = torch.arange(to_output.shape[-1]) == 0
            to_output = torch.where(lost, known.eps**2 * weight * first, to_output)
            handed = torch.where(lost & first, known.eps**-2, handed)
        kernel = getattr(torch.ops.aten, f"{KERNEL}_backward")
        to_query, to_key, to_value = kernel(
            to_output, query, key, value, handed, total, 0.0, ctx.causal, attn_mask=None, scale=ctx.scaling
        )
        weight = weight * ctx.scaling
        return to_query.addcmul_(weight, key), to_key.addcmul_(weight, query), to_value, None, None
