"""Attention heads in value space: how much of what a token reads lies along its own value."""

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real
from thalweg.ops.precision import wide
from thalweg.ops.value_edit import value_coefficient

_PAPER = "He et al. 2026, arXiv 2609.15975"
_TAKES = "o [b t h dv], v [b t kv dv]"


@measure(
    "value_coefficient.full",
    summary="signed size of what a head read along the token's own value, in units of that value",
    source=_PAPER,
    takes=_TAKES,
    range=(None, None),
    null="A_tt: values of others that are independent of the own one",
)
def full_coefficient(o: Float[Tensor, "b t h dv"], v: Float[Tensor, "b t kv dv"], group: str = "head") -> Tensor:
    """o_t . v_t / |v_t|^2 -> [b t h], in float64, the token's reading of itself included.

    group: heads that are projected together, see :func:`thalweg.ops.value_edit.value_edit`. Raises: ShapeError, InputError.
    """
    return value_coefficient(real(o, "outputs").double(), real(v, "values").double(), group=group)


@measure(
    "value_coefficient.exclude_self",
    summary="signed size of what a head read from other tokens along the token's own value, in units of that value",
    source=_PAPER,
    takes=f"{_TAKES}, A_tt [b h t]",
    range=(None, None),
    null="0: values of others that are independent of the own one",
)
def context_coefficient(
    o: Float[Tensor, "b t h dv"], v: Float[Tensor, "b t kv dv"], own: Float[Tensor, "b h t"], group: str = "head"
) -> Tensor:
    """beta_t = o_t . v_t / |v_t|^2 - A_tt -> [b t h], in float64: it may be negative. Raises: ShapeError, InputError."""
    own = real(own, "own weights").double()
    return value_coefficient(real(o, "outputs").double(), real(v, "values").double(), own, group)


@measure(
    "value_fraction",
    summary="|cos| between what a head read and the token's own value",
    source="Zhai 2026, arXiv 2603.09078 (attention similarity bias)",
    takes=_TAKES,
    range=(0.0, 1.0),
    null="mean |cos| of a random direction, about sqrt(2 / (pi dv))",
)
def value_fraction(o: Float[Tensor, "b t h dv"], v: Float[Tensor, "b t kv dv"]) -> Tensor:
    """|o_t . v_t| / (|o_t| |v_t|) -> [b t h], in float64; 0 where either is zero. Raises: ShapeError, InputError."""
    return fraction_of(real(o, "outputs").double(), real(v, "values").double())


@measure(
    "own_weight",
    summary="A_tt, the weight of a token's attention on itself",
    source="definition",
    takes="attention weights [... t t]",
    range=(0.0, 1.0),
    null="mean of 1/t over the tokens: all that is visible alike",
)
def own_weight(weights: Float[Tensor, "*batch t t"]) -> Float[Tensor, "*batch t"]:
    """The diagonal of attention weights; :func:`thalweg.ops.own_attention.own_attention` gives it without the matrix.

    Raises: ShapeError, InputError.
    """
    if weights.ndim < 2 or weights.shape[-1] != weights.shape[-2]:
        raise ShapeError(f"attention weights must be [... t t], got shape {list(weights.shape)}")
    return real(weights, "attention weights").double().diagonal(dim1=-2, dim2=-1)


def fraction_of(o: Tensor, v: Tensor) -> Tensor:
    """:func:`value_fraction` in float32 or wider, from :func:`thalweg.ops.value_edit.value_coefficient` and two norms."""
    coefficient = value_coefficient(o, v).abs()
    heads = o.shape[2] // v.shape[2]
    own = torch.linalg.vector_norm(wide(v), dim=-1).unsqueeze(-1).expand(*v.shape[:3], heads).flatten(2)
    size = torch.linalg.vector_norm(wide(o), dim=-1)
    return torch.where(size > 0, coefficient * own / torch.where(size > 0, size, 1.0), 0.0).clamp(max=1.0)
