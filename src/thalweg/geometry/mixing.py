"""What matrices that move streams do to signals and gradients."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real
from thalweg.ops.precision import full_precision, wide


class Gain(NamedTuple):
    """Amax gain: forward (of the signal) and backward (of the gradient), each [...]."""

    forward: Tensor
    backward: Tensor


@measure(
    "amax_gain",
    summary="largest absolute row sum (forward) and column sum (backward) of a stream-mixing matrix or a product",
    source="mHC, arXiv 2512.24880",
    takes="mix [... to from]",
    range=(0.0, None),
    direction="lower",
    null="1 and 1: any doubly stochastic matrix",
)
def amax_gain(mix: Float[Tensor, "*batch to from"]) -> Gain:
    """Largest |sum over ``from``| of any row, and largest |sum over ``to``| of any column.

    Shapes: mix [... to from], moving stream ``from`` to stream ``to`` -> forward [...], backward [...]. It is the
    absolute value of the sum, not the sum of absolute values; the two agree for matrices without negative entries.
    The source averages over the tokens of a sequence: average what comes back.
    Raises: ShapeError, InputError.
    Source: mHC (arXiv 2512.24880), its Amax gain metric.
    """
    if real(mix, "the mixing matrix").ndim < 2:
        raise ShapeError(f"a mixing matrix must be [... to from], got shape {list(mix.shape)}")
    mix = wide(mix)
    return Gain(mix.sum(-1).abs().amax(-1), mix.sum(-2).abs().amax(-1))


def composite(mixes: Sequence[Float[Tensor, "*batch to from"]]) -> Float[Tensor, "*batch to from"]:
    """The product of the mixing matrices of successive sites: mixes[-1] ... mixes[1] mixes[0].

    In float64, because a product of many matrices near the identity is what is looked at.
    Raises: ShapeError when there are none or their streams do not match.
    """
    if not mixes:
        raise ShapeError("the product of no mixing matrices has no shape; give at least one")
    product = mixes[0].double()
    with full_precision(product):
        for mix in mixes[1:]:
            if mix.shape[-1] != product.shape[-2]:
                raise ShapeError(
                    f"a matrix that reads {mix.shape[-1]} streams follows one that writes {product.shape[-2]}"
                )
            product = mix.double() @ product
    return product


def mean_gain(mixes: Sequence[Float[Tensor, "*batch to from"]]) -> Gain:
    """:func:`amax_gain` of the product of successive sites, averaged over batch and tokens: two scalars."""
    gain = amax_gain(composite(mixes))
    return Gain(torch.mean(gain.forward), torch.mean(gain.backward))
