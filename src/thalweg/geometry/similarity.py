"""How alike tokens, and states, are."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import UnknownNameError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real, same_width, token_matrix

_TAKES = "states [... tokens width]"
_DONG = "Dong et al. 2021, arXiv 2103.03404"


@measure(
    "token_cosine",
    summary="mean cosine over all pairs of tokens",
    source="Noci et al. 2022, arXiv 2206.03126",
    takes=_TAKES,
    range=(-1.0, 1.0),
    direction="lower",
    null="0: independent directions without a common mean",
)
def token_cosine(x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
    """Mean of cos(x_i, x_j) over all pairs i < j of the tokens of a sequence. Shapes: [... tokens width] -> [...].

    A token of zeros has no direction and counts 0 in its pairs.
    Raises: ShapeError for fewer than two tokens; InputError for NaN or infinity.
    """
    e = unit(token_matrix(x, least=2))
    return mean_pairwise_cosine(e.sum(-2), e.square().sum((-2, -1)), e.shape[-2])


@measure(
    "anisotropy",
    summary="mean cosine over all pairs of tokens of all sequences taken together; not comparable with token_cosine",
    source="Ethayarajh 2019, arXiv 1909.00512",
    takes=_TAKES,
    range=(-1.0, 1.0),
    direction="lower",
    null="0: independent directions without a common mean",
)
def anisotropy(x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, ""]:
    """:func:`token_cosine` of the tokens of all sequences stacked into one matrix. Shapes: [... tokens width] -> scalar.

    Deviation from the source: all pairs by the closed form :func:`mean_pairwise_cosine`, not a random sample of them.
    """
    return token_cosine(token_matrix(x, least=1).flatten(0, -2))


def mean_pairwise_cosine(
    total: Float[Tensor, "*batch width"], squares: Float[Tensor, "*batch"] | float, count: float
) -> Float[Tensor, "*batch"]:
    """(|sum_i e_i|^2 - sum_i |e_i|^2) / (count (count - 1)): the mean of e_i . e_j over all pairs i < j from sums over i.

    total: sum of the unit vectors e_i of ``count`` tokens [... width]; squares: sum of their squared norms, the number of
    tokens that are not zero. Streams: no pair is ever looked at. Shapes: -> [...].
    """
    return (total.square().sum(-1) - squares) / (count * (count - 1))


@measure(
    "rms",
    summary="root of the mean square of all entries",
    source="definition",
    takes=_TAKES,
    range=(0.0, None),
    unit="stream units",
)
def rms(x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
    """Root mean square over tokens and width. Shapes: [... tokens width] -> [...]. Raises: ShapeError, InputError."""
    x = token_matrix(x)
    peak = x.detach().abs().amax((-2, -1), keepdim=True)
    peak = torch.where(peak > 0, peak, 1.0)
    mean = (x / peak).square().mean((-2, -1))
    safe = torch.where(mean > 0, mean, 1.0)
    return torch.where(mean > 0, safe.sqrt(), 0.0) * peak.squeeze((-2, -1))


@measure(
    "residual_to_rank_one",
    summary="distance of the tokens from being all equal, relative to their size",
    source=_DONG,
    takes=_TAKES,
    range=(0.0, 1.0),
    direction="higher",
    null="sqrt(1 - 1/tokens): independent tokens without a common mean",
)
def residual_to_rank_one(
    x: Float[Tensor, "*batch tokens width"],
    relative: bool = True,
    norm: Literal["frobenius", "composite"] = "frobenius",
) -> Float[Tensor, "*batch"]:
    """||x - 1 m^T|| with m the mean over tokens; over ||x|| if ``relative``. Shapes: [... tokens width] -> [...].

    norm: ``frobenius`` (the mean is then the m of least distance), or Dong et al.'s ``composite`` sqrt(||.||_1
    ||.||_inf) of the largest absolute column sum and row sum (the mean is then near the best m, so the value is an
    upper bound, and the relative one may exceed 1). Tokens all equal, zeros included: 0.
    Raises: ShapeError, InputError, UnknownNameError.
    Source: Dong et al. 2021 (arXiv 2103.03404), definition of res(X).
    """
    if norm not in ("frobenius", "composite"):
        raise UnknownNameError("norm", norm, ("frobenius", "composite"))
    x = token_matrix(x)
    peak = x.detach().abs().amax((-2, -1), keepdim=True)
    peak = torch.where(peak > 0, peak, 1.0)
    y = x / peak
    size = _frobenius if norm == "frobenius" else _composite
    distance = size(y - y.mean(-2, keepdim=True))
    if not relative:
        return distance * peak.squeeze((-2, -1))
    whole = size(y)
    return distance / torch.where(whole > 0, whole, 1.0)


def residual_null(tokens: int) -> float:
    """:func:`residual_to_rank_one` of independent tokens without a common mean: sqrt(1 - 1/tokens)."""
    return (1 - 1 / tokens) ** 0.5


@measure(
    "entered_cosine",
    summary="cosine between the state and what entered the stream, mean over tokens",
    source="definition",
    takes="two states [... width]",
    range=(-1.0, 1.0),
    null="0: independent directions",
)
@measure(
    "layer_cosine",
    summary="cosine between the states of the same token at two depths, mean over tokens",
    source="definition",
    takes="two states [... width]",
    range=(-1.0, 1.0),
    null="0: independent directions",
)
@measure(
    "state_cosine",
    summary="cosine between the states before and after a site, mean over tokens",
    source="definition",
    takes="two states [... width]",
    range=(-1.0, 1.0),
    null="0: independent directions",
)
def state_cosine(a: Float[Tensor, "*batch width"], b: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch"]:
    """cos(a, b) on the last axis, 0 where either is zero. Shapes: [... width] twice -> [...].

    Raises: ShapeError, InputError.
    """
    same_width(real(a, "the first state"), real(b, "the second state"), "two states")
    return (unit(a.double()) * unit(b.double())).sum(-1)


def unit(x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
    """x over its norm on the last axis; zeros where it is zero."""
    peak = x.detach().abs().amax(-1, keepdim=True)
    y = x / torch.where(peak > 0, peak, 1.0)
    square = y.square().sum(-1, keepdim=True)
    return y / torch.where(square > 0, square, 1.0).sqrt()


def _frobenius(x: Tensor) -> Tensor:
    square = x.square().sum((-2, -1))
    return torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)


def _composite(x: Tensor) -> Tensor:
    square = x.abs().sum(-2).amax(-1) * x.abs().sum(-1).amax(-1)
    return torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)
