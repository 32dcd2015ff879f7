"""What matrices that move streams do to signals and gradients: gains, memory, channels, and how far they are from what they may be.

``mix[to, from]`` everywhere; J is the uniform matrix 1/n, P = I - J the projector on differences between streams.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import ShapeError, UnknownNameError
from thalweg.geometry.catalog import Null, entry, measure
from thalweg.geometry.checks import mixing_matrix, real, square_mixing_matrix
from thalweg.ops import sinkhorn
from thalweg.ops.precision import full_precision, wide

Kind = Literal["amax_gain", "inf_norm_gain", "mean_map_gain"]
Side = Literal["forward", "backward"]

_MHC = "mHC, arXiv 2512.24880, its Amax gain metric"
_TAKES = "mix [... to from]"
# Part of a name -> which matrix it is measured on.
SCOPES = {
    "": "the matrix of one site",
    ".from_start": "the product of all sites before a state",
    ".to_end": "the product of all sites after a state",
    ".window": "the product of the sites of some successive layers",
}


class Gain(NamedTuple):
    """Gain: forward (of the signal) and backward (of the gradient), each [...]."""

    forward: Tensor
    backward: Tensor


@measure(
    "amax_gain",
    summary="largest absolute row sum (forward) and column sum (backward) of a stream-mixing matrix or a product",
    source="mHC, arXiv 2512.24880",
    takes=_TAKES,
    range=(0.0, None),
    direction="lower",
    null="1 and 1: any doubly stochastic matrix",
)
def amax_gain(mix: Float[Tensor, "*batch to from"]) -> Gain:
    """Largest |sum over ``from``| of any row, and largest |sum over ``to``| of any column.

    Shapes: mix [... to from], moving stream ``from`` to stream ``to`` -> forward [...], backward [...]. It is the
    absolute value of the sum, not the sum of absolute values; the two agree for matrices without negative entries.
    The source averages over the tokens of a sequence: average what comes back. In the dtype of the matrix, float32 or wider.
    Raises: ShapeError, InputError.
    Source: mHC (arXiv 2512.24880), its Amax gain metric.
    """
    exact, dtype = mixing_matrix(mix), wide(mix).dtype
    return Gain(exact.sum(-1).abs().amax(-1).to(dtype), exact.sum(-2).abs().amax(-1).to(dtype))


def inf_norm_gain(mix: Float[Tensor, "*batch to from"]) -> Gain:
    """The norms that :func:`amax_gain` is for matrices without negative entries: the largest row and column sum of |entries|.

    Shapes: mix [... to from] -> forward [...] (the operator norm for the largest entry), backward [...] (for the sum of entries).
    Signs cannot cancel here, so it bounds what any signal may grow by. Raises: ShapeError, InputError.
    """
    mix = mixing_matrix(mix).abs()
    return Gain(mix.sum(-1).amax(-1), mix.sum(-2).amax(-1))


def mean_map_gain(mix: Float[Tensor, "*batch tokens to from"]) -> Gain:
    """:func:`amax_gain` of the mean of the matrices over tokens: maps averaged first, where the others average the gains.

    Shapes: mix [... tokens to from] -> forward [...], backward [...]. Never above the average of the gains.
    Raises: ShapeError, InputError.
    """
    if mixing_matrix(mix).ndim < 3:
        raise ShapeError(f"a mean over tokens needs matrices [... tokens to from], got shape {list(mix.shape)}")
    return amax_gain(mixing_matrix(mix).mean(-3))


def gain(mix: Tensor, *, kind: Kind, side: Side) -> Tensor:
    """One side of one of the gains, averaged over the tokens of [... tokens to from] -> [...]. Raises as they do."""
    if kind == "mean_map_gain":
        return getattr(mean_map_gain(mix), side)
    found = getattr({"amax_gain": amax_gain, "inf_norm_gain": inf_norm_gain}[kind](mix), side)
    return found.mean(-1) if found.ndim else found


_KINDS: dict[Kind, tuple[str, str]] = {
    "amax_gain": ("largest absolute {} sum, mean over tokens", _MHC),
    "inf_norm_gain": ("largest {} sum of absolute values, mean over tokens", "definition: operator norms for infinity and 1"),
    "mean_map_gain": ("largest absolute {} sum of the mean map over tokens", f"ours: a second reading of {_MHC}"),
}  # fmt: skip
for _kind, (_words, _source) in _KINDS.items():
    for _scope, _what in SCOPES.items():
        for _side, _sum in (("forward", "row"), ("backward", "column")):
            measure(
                f"{_kind}{_scope}.{_side}",
                summary=f"{_words.format(_sum)}: {_what}",
                source=_source,
                takes="mix [... tokens to from]",
                range=(0.0, None),
                direction="lower",
                null="1: any doubly stochastic matrix",
                options={"kind": _kind, "side": _side},
            )(gain)


def composite(mixes: Sequence[Float[Tensor, "*batch to from"]]) -> Float[Tensor, "*batch to from"]:
    """The product of the mixing matrices of successive sites: mixes[-1] ... mixes[1] mixes[0]; of any two sites by a slice.

    In float64, because a product of many matrices near the identity is what is looked at.
    Raises: ShapeError when there are none or their streams do not match.
    """
    *_, last = running_composites(mixes)
    return last


def running_composites(
    mixes: Sequence[Float[Tensor, "*batch to from"]], *, backwards: bool = False
) -> Iterator[Float[Tensor, "*batch to from"]]:
    """The products that end at each site: mixes[0], mixes[1] mixes[0], ...; from a later site on by a slice.

    backwards: the products that start at each site and end at the last one, the last site first. In float64.
    Raises: ShapeError as :func:`composite`.
    """
    if not mixes:
        raise ShapeError("the product of no mixing matrices has no shape; give at least one")
    product: Tensor | None = None
    for mix in reversed(mixes) if backwards else mixes:
        mix = mix.double()
        if product is not None:
            later, earlier = (product, mix) if backwards else (mix, product)
            if later.shape[-1] != earlier.shape[-2]:
                raise ShapeError(
                    f"a matrix that reads {later.shape[-1]} streams follows one that writes {earlier.shape[-2]}"
                )
            with full_precision(later):
                mix = later @ earlier
        product = mix
        yield product


def mean_gain(mixes: Sequence[Float[Tensor, "*batch to from"]]) -> Gain:
    """:func:`amax_gain` of the product of successive sites, averaged over batch and tokens: two scalars."""
    found = amax_gain(composite(mixes))
    return Gain(torch.mean(found.forward), torch.mean(found.backward))


# memory


def sigma(mix: Float[Tensor, "*batch to from"], *, index: int) -> Float[Tensor, "*batch"]:
    """The singular value of number ``index``, the largest being 1. Shapes: [... to from] -> [...]. Raises: ShapeError, InputError."""
    mix = mixing_matrix(mix)
    if min(mix.shape[-2:]) < index:
        raise ShapeError(f"a matrix of {list(mix.shape[-2:])} streams has no singular value number {index}")
    return torch.linalg.svdvals(mix)[..., index - 1]


def sigma_2(mix: Float[Tensor, "*batch to from"]) -> Float[Tensor, "*batch"]:
    """Second singular value of a mixing matrix or a product. Shapes: [... to from] -> [...].

    A doubly stochastic matrix has the first at 1 (the mean of the streams); the second is the most that a difference
    between streams keeps: 1 for permutations, 0 for the uniform matrix. Raises: ShapeError for one stream, InputError.
    """
    return sigma(mix, index=2)


RANDOM = "random doubly stochastic matrix of as many streams"
for _index, _name in ((1, "sigma_1"), (2, "sigma_2")):
    for _scope, _what in SCOPES.items():
        measure(
            f"{_name}{_scope}",
            summary=f"{'largest' if _index == 1 else 'second'} singular value, mean over tokens: {_what}",
            source="definition",
            takes=_TAKES,
            range=(0.0, None),
            null="1: any doubly stochastic matrix" if _index == 1 else "0: uniform" if _scope else RANDOM,
            options={"index": _index},
        )(sigma)


@measure(
    "horizon",
    summary="sites over which differences between streams are kept: 1/(1 - sigma_2)",
    source="ours, from the singular values of products of doubly stochastic matrices",
    takes="sigma_2 [...]",
    range=(1.0, None),
    unit="sites",
    null=f"{RANDOM}: 1/(1 - its sigma_2)",
)
def horizon(sigma_2: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """1 / (1 - sigma_2), in sites; infinite from 1 on: nothing is forgotten. Shapes: [...] -> [...]. Raises: InputError."""
    kept = real(sigma_2, "sigma_2").double()
    return torch.where(kept < 1, 1 / torch.where(kept < 1, 1 - kept, 1.0), torch.inf)


class Channels(NamedTuple):
    """Norms of a matrix between the mean of the streams and the differences between them, each [...].

    mean: the factor on the mean; difference: the most a difference grows; mean_to_difference: what a difference gets
    from streams all alike; difference_to_mean: the most that a difference moves the mean.
    """

    mean: Tensor
    difference: Tensor
    mean_to_difference: Tensor
    difference_to_mean: Tensor


def channels(mix: Float[Tensor, "*batch to from"]) -> Channels:
    """A mixing matrix in the basis of the mean channel q = 1/sqrt(n) and its complement: the norm of each of the four blocks.

    mean |q^T M q|, difference ||P M P||_2, mean_to_difference ||P M q||, difference_to_mean ||q^T M P||. Doubly stochastic:
    1, sigma_2, 0, 0; rows that sum to one: mean_to_difference 0. Shapes: [... n n] -> [...]. Raises: ShapeError, InputError.
    """
    mix = square_mixing_matrix(mix)
    n = mix.shape[-1]
    to_mean = mix.mean(-2, keepdim=True)  # J M has this in every row
    whole = mix.mean((-2, -1))
    from_mean = mix.mean(-1)
    within = mix - to_mean - from_mean.unsqueeze(-1) + whole[..., None, None]
    return Channels(
        whole.abs() * n,
        torch.linalg.svdvals(within)[..., 0],
        torch.linalg.vector_norm(from_mean - whole.unsqueeze(-1), dim=-1) * n**0.5,
        torch.linalg.vector_norm(to_mean.squeeze(-2) - whole.unsqueeze(-1), dim=-1) * n**0.5,
    )


def channel(mix: Tensor, *, which: str) -> Tensor:
    """One of :func:`channels`. Raises: UnknownNameError, and as that does."""
    if which not in Channels._fields:
        raise UnknownNameError("channel", which, Channels._fields)
    return getattr(channels(mix), which)


_CHANNELS = {
    "mean": ("factor on the mean of the streams", "1: any doubly stochastic matrix", tuple(SCOPES)),
    "difference": ("most that a difference between streams grows by", RANDOM, tuple(SCOPES)),
    "mean_to_difference": ("difference made of streams all alike", "0: rows that sum to one", ("",)),
    "difference_to_mean": ("most that a difference moves the mean", "0: columns that sum to one", ("",)),
}
for _name, (_words, _null, _scopes) in _CHANNELS.items():
    for _scope in _scopes:
        measure(
            f"channel.{_name}{_scope}",
            summary=f"{_words}, mean over tokens: {SCOPES[_scope]}",
            source="definition",
            takes="mix [... n n]",
            range=(0.0, None),
            null="0: uniform" if _name == "difference" and _scope else _null,
            options={"which": _name},
        )(channel)


# nulls


@lru_cache(maxsize=64)
def doubly_stochastic_null(streams: int, name: str, *, draws: int = 256, seed: int = 0) -> Null:
    """A measure of a single matrix for random doubly stochastic ones: mean and sd over ``draws``.

    name: of the catalogue, taking mix [... n n] alone. The matrices are Sinkhorn limits of independent normal logits, drawn from
    their own generator. Raises: UnknownNameError.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(draws, streams, streams, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        values = entry(name).resolve()(sinkhorn(logits, 200))
    kind = f"Sinkhorn limit of normal logits, {streams} streams, {draws} draws"
    return Null(values.mean().item(), values.std().item(), kind)
