"""The value-space edit: what a token read from others, scaled along and across its own value, before the output projection.

Axis legend: ``b`` batch, ``t`` tokens, ``h`` query heads, ``kv`` key-value heads, ``dv`` width of a value. Query head h reads value head
h // (h / kv): values are broadcast over their query heads, never repeated.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.ops.precision import wide

Scale = float | Tensor

GROUPS = "head, kv, kv:N or all"


def value_edit(
    o: Float[Tensor, "b t h dv"],
    v: Float[Tensor, "b t kv dv"],
    parallel: Scale = 1.0,
    perpendicular: Scale = 1.0,
    own: Float[Tensor, "b h t"] | None = None,
    group: str = "head",
    eps: float = 0.0,
) -> Float[Tensor, "b t h dv"]:
    """o' = d + parallel * c_along + perpendicular * c_across, with d = A_tt v_t the own part and c = o - d what came from others.

    Shapes: o [b t h dv] (attention output, heads apart, before the output projection), v [b t kv dv] (the values of the same tokens) -> as
    o. own: A_tt [b h t], the edit then leaves d alone (exclude-self); without it d = 0 (full aggregate). With beta =
    :func:`value_coefficient`,

        o' = perpendicular * o + ((1 - perpendicular) * A_tt + (parallel - perpendicular) * beta) * v

    which is the definition multiplied out, head by head also where ``group`` makes one beta for several heads. parallel, perpendicular:
    retained scales, numbers or tensors that broadcast to [b t h]; at 1 and 1 as numbers ``o`` itself comes back. group: the heads that are
    projected together as one long vector: ``head``, ``kv`` (all that read one value head), ``kv:N`` (N value heads side by side), ``all``.
    eps: added to the square that beta divides by. The arithmetic runs in float32 or wider, autocast or not; the result has the dtype of o.
    A value of zeros has no direction: beta 0. Differentiable in all tensors, v and own included (nothing is detached).
    Raises: ShapeError, InputError (unknown group).
    Source: He et al. 2026 (arXiv 2609.15975), eq. of the value-space edit; the closed form is ours. parallel 0, perpendicular 1 without
    ``own`` is XSA (Zhai 2026, arXiv 2603.09078). Deviation: no epsilon unless one is given.
    """
    kv, heads_each, joint = _layout(o, v, own, group)
    parallel, perpendicular = (_scale(s, o.shape[2], kv) for s in (parallel, perpendicular))
    if _is_one(parallel) and _is_one(perpendicular):
        return o
    y, r = _by_value(wide(o), kv), wide(v).unsqueeze(-2)
    a = None if own is None else _by_value_head(own, kv)
    along = (parallel - perpendicular) * _coefficient(y, r, a, joint, heads_each, eps)
    if a is not None and not _is_one(perpendicular):
        along = along + (1 - perpendicular) * a
    kept = y if _is_one(perpendicular) else _over_width(perpendicular) * y
    return (kept + along.unsqueeze(-1) * r).to(o.dtype).flatten(2, 3)


def value_coefficient(
    o: Float[Tensor, "b t h dv"],
    v: Float[Tensor, "b t kv dv"],
    own: Float[Tensor, "b h t"] | None = None,
    group: str = "head",
    eps: float = 0.0,
) -> Float[Tensor, "b t h"]:
    """beta_h = sum_G (o_h . v_h - A_tt^h |v_h|^2) / sum_G |v_h|^2 over the heads G that are projected together with h.

    The signed coefficient along the own value of what was read: of all of it without ``own``, of what came from others with it (then
    o.v / |v|^2 - A_tt for a head alone). Shapes: as :func:`value_edit` -> [b t h], float32 or wider; 0 where the values are all zeros
    (or so small that their squares underflow).
    Raises: ShapeError, InputError.
    """
    kv, heads_each, joint = _layout(o, v, own, group)
    a = None if own is None else _by_value_head(own, kv)
    beta = _coefficient(_by_value(wide(o), kv), wide(v).unsqueeze(-2), a, joint, heads_each, eps)
    return beta.expand(*beta.shape[:-1], heads_each).flatten(-2)


def _coefficient(y: Tensor, r: Tensor, a: Tensor | None, joint: int, heads_each: int, eps: float) -> Tensor:
    """[b t kv g] or, of heads projected together, [b t kv 1]. joint: value heads in a projection; 0: every head alone."""
    along, square = (
        (y * r).sum(-1),
        r.square().sum(-1),
    )  # [b t kv g], [b t kv 1]; not a product of matrices: no autocast
    apart = not joint and not eps  # then A_tt |v|^2 / |v|^2 is A_tt
    if a is not None and not apart:
        along = along - a * square
    if joint:
        along, square = _over_group(along.sum(-1), joint), _over_group(heads_each * square.squeeze(-1), joint)
    beta = along / torch.where(square > 0, square + eps, 1.0)
    if a is not None and apart:
        beta = torch.where(square > 0, beta - a, 0.0)
    return beta


def _over_group(x: Tensor, joint: int) -> Tensor:
    """[b t kv] -> [b t kv 1], the sum over the group of each."""
    total = x.unflatten(-1, (-1, joint)).sum(-1, keepdim=True)
    return total.expand(*total.shape[:-1], joint).flatten(-2).unsqueeze(-1)


def _by_value(x: Tensor, kv: int) -> Tensor:
    """[b t h dv] -> [b t kv g dv]."""
    return x.unflatten(2, (kv, -1))


def _by_value_head(own: Tensor, kv: int) -> Tensor:
    """[b h t] -> [b t kv g]."""
    return wide(own).transpose(1, 2).unflatten(2, (kv, -1))


def _layout(o: Tensor, v: Tensor, own: Tensor | None, group: str) -> tuple[int, int, int]:
    """Value heads, query heads of each, value heads projected together (0: every query head alone)."""
    if o.ndim != 4 or v.ndim != 4 or o.shape[:2] != v.shape[:2] or o.shape[3] != v.shape[3]:
        raise ShapeError(
            f"outputs [b t h dv] and values [b t kv dv] must share b, t and dv, got {list(o.shape)} and {list(v.shape)}"
        )
    heads, kv = o.shape[2], v.shape[2]
    if kv < 1 or heads % kv:
        raise ShapeError(f"{heads} query heads cannot share {kv} key-value heads evenly")
    if own is not None and own.shape != (o.shape[0], heads, o.shape[1]):
        wanted = [o.shape[0], heads, o.shape[1]]
        raise ShapeError(f"own weights must be [b h t] = {wanted}, got shape {list(own.shape)}")
    return kv, heads // kv, _joint(group, kv)


def _joint(group: str, kv: int) -> int:
    if group == "head":
        return 0
    if group == "all":
        return kv
    name, _, count = str(group).partition(":")
    number = int(count) if count.isdecimal() else 1 if group == "kv" else 0
    if name != "kv" or number < 1:
        raise InputError(f"group must be {GROUPS}, got {group!r}")
    if kv % number:
        raise InputError(f"group {group!r} needs a number of value heads that {number} divides, the model has {kv}")
    return number


def _scale(scale: Scale, heads: int, kv: int) -> Scale:
    """A tensor that broadcasts to [b t h] as one that broadcasts to [b t kv g]."""
    if not isinstance(scale, Tensor) or scale.ndim == 0:
        return scale
    if scale.ndim > 3 or scale.shape[-1] not in (1, heads):
        raise ShapeError(f"a scale must be a number or broadcast to [b t {heads}], got shape {list(scale.shape)}")
    return wide(scale).unflatten(-1, (kv, -1) if scale.shape[-1] == heads else (1, 1))


def _over_width(scale: Scale) -> Scale:
    return scale.unsqueeze(-1) if isinstance(scale, Tensor) and scale.ndim else scale


def _is_one(scale: Scale) -> bool:
    return not isinstance(scale, Tensor) and scale == 1
