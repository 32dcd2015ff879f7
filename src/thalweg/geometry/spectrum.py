"""How many directions the tokens of a sequence use: measures of the singular values of a matrix [tokens width]."""

import math
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, UnknownNameError
from thalweg.geometry.catalog import Null, measure
from thalweg.geometry.checks import real, token_matrix

Method = Literal["gram", "svd"]

_ROY = "Roy and Vetterli 2007 (EUSIPCO); normalised as in MGT, arXiv 2601.01014, Eq. 8"
_TAKES = "states [... tokens width]"
_GAUSSIAN = "Gaussian matrix of the same shape"


def singular_values(
    x: Float[Tensor, "*batch tokens width"], *, center: bool = False, drop_first: bool = False, method: Method = "gram"
) -> Float[Tensor, "*batch rank"]:
    """Singular values of each matrix [tokens width], largest first, in float64.

    center: subtract the mean over tokens first. drop_first: leave the first token out (it is often an attention sink).
    method: ``gram`` takes roots of the eigenvalues of the smaller Gram matrix and is several times faster; values below
    sqrt(min(tokens, width) * 2.2e-16) of the largest (2.4e-7 at 256) are beyond it and become 0. ``svd`` resolves
    down to max(tokens, width) * 2.2e-16 of the largest. Gradients pass through all values that are not 0.
    Raises: ShapeError, InputError (NaN, infinity, unknown method).
    """
    values, scale = _scaled_values(x, center, drop_first, method)
    return values * scale


@measure(
    "effective_rank.without_first",
    summary="effective rank without the first token, which is often a sink",
    source=_ROY,
    takes=_TAKES,
    range=(0.0, 1.0),
    direction="higher",
    null=_GAUSSIAN,
    options={"drop_first": True},
)
@measure(
    "effective_rank.centred",
    summary="effective rank after subtracting the mean over tokens",
    source=_ROY,
    takes=_TAKES,
    range=(0.0, 1.0),
    direction="higher",
    null=_GAUSSIAN,
    options={"center": True},
)
@measure(
    "effective_rank",
    summary="share of the available directions that the tokens use: exp of the entropy of the singular values",
    source=_ROY,
    takes=_TAKES,
    range=(0.0, 1.0),
    direction="higher",
    null=_GAUSSIAN,
)
def effective_rank(
    x: Float[Tensor, "*batch tokens width"],
    normalize: bool = True,
    center: bool = False,
    drop_first: bool = False,
    method: Method = "gram",
) -> Float[Tensor, "*batch"]:
    """exp(H(p)) / min(tokens, width) with p_i = s_i / sum(s) over the singular values s (not their squares), H in nats.

    Shapes: x [... tokens width], one matrix per sequence -> [...]. From 1 / min(tokens, width) (one direction) to 1
    (all equally), or without ``normalize`` from 1 to min(tokens, width). A matrix of zeros has no direction: 0, by
    definition here. It depends on length, width, mean and sink tokens as much as on the model: state them, and show
    the null beside. Options, precision and errors: :func:`singular_values`.
    Source: Roy and Vetterli 2007; MGT (arXiv 2601.01014) Eq. 8.
    """
    values, _ = _scaled_values(x, center, drop_first, method)
    rank = exp_entropy(values)
    return rank / values.shape[-1] if normalize else rank


@measure(
    "effective_rank.relative",
    summary="effective rank over that of the first state of the stream",
    source=_ROY,
    takes="states and first states [... tokens width]",
    range=(0.0, None),
    direction="higher",
    null="1: the first state itself",
)
def relative_effective_rank(
    x: Float[Tensor, "*batch tokens width"], first: Float[Tensor, "*batch tokens width"], method: Method = "gram"
) -> Float[Tensor, "*batch"]:
    """:func:`effective_rank` of x over that of ``first``; 0 where that is 0. Shapes: [... tokens width] -> [...]."""
    rank, start = effective_rank(x, method=method), effective_rank(first, method=method)
    return torch.where(start > 0, rank / torch.where(start > 0, start, 1.0), 0.0)


@measure(
    "pooled_effective_rank.without_first",
    summary="pooled effective rank without the first token of every sequence",
    source=_ROY,
    takes=_TAKES,
    range=(0.0, 1.0),
    direction="higher",
    null=_GAUSSIAN,
    options={"drop_first": True},
)
@measure(
    "pooled_effective_rank.centred",
    summary="pooled effective rank after subtracting the mean over all tokens",
    source=_ROY,
    takes=_TAKES,
    range=(0.0, 1.0),
    direction="higher",
    null=_GAUSSIAN,
    options={"center": True},
)
@measure(
    "pooled_effective_rank",
    summary="effective rank of the tokens of all sequences taken as one matrix; not comparable with effective_rank",
    source=_ROY,
    takes=_TAKES,
    range=(0.0, 1.0),
    direction="higher",
    null=_GAUSSIAN,
)
def pooled_effective_rank(
    x: Float[Tensor, "*batch tokens width"],
    normalize: bool = True,
    center: bool = False,
    drop_first: bool = False,
    method: Method = "gram",
) -> Float[Tensor, ""]:
    """:func:`effective_rank` of the tokens of all sequences stacked into one matrix.

    Shapes: [... tokens width] -> scalar. drop_first leaves the first token of every sequence out.
    """
    x = token_matrix(x, least=2 if drop_first else 1)[..., 1 if drop_first else 0 :, :]
    return effective_rank(x.flatten(0, -2), normalize=normalize, center=center, method=method)


def effective_rank_of_moments(moments: Float[Tensor, "*batch width width"], tokens: int) -> Float[Tensor, "*batch"]:
    """:func:`pooled_effective_rank` of ``tokens`` rows x from X^T X [... width width] alone, which streams; in float64.

    Centred: give X^T X - sum(x) sum(x)^T / tokens. Moments that were summed from float32 products resolve singular values down to about
    3e-4 of the largest of their channels. Shapes: -> [...]. Raises: InputError.
    """
    m = real(moments, "the second moments").double()
    energy = torch.linalg.eigvalsh((m + m.mT) / 2).flip(-1)[..., : min(tokens, m.shape[-1])]
    kept = energy > torch.finfo(torch.float64).eps * m.shape[-1] * energy[..., :1]
    values = torch.where(kept, torch.where(kept, energy, 1.0).sqrt(), 0.0)
    return exp_entropy(values) / values.shape[-1]


@lru_cache(maxsize=64)
def large_gaussian_null(tokens: int, width: int) -> Null:
    """:func:`pooled_effective_rank` of a Gaussian matrix by the law of Marchenko and Pastur, for sizes too large to draw.

    exp(H) / min(tokens, width) -> m exp(-l / m) with m, l the means of s and s ln s under the law. Exact in the limit; at
    most 1 % high at a width of 8, 0.2 % at 32 and 0.1 % at 256 (measured). Source: Marchenko and Pastur 1967.
    """
    small, large = min(tokens, width), max(tokens, width)
    root = (small / large) ** 0.5
    angle = (torch.arange(4096, dtype=torch.float64) + 0.5) * math.pi / 4096
    energy = 1 + root**2 + 2 * root * angle.cos()  # eigenvalue of X X^T / large; density in the angle: sin^2 / energy
    weight = angle.sin().square() / energy
    weight, s = weight / weight.sum(), energy.sqrt()
    mean, entropy = (weight * s).sum(), (weight * s * s.log()).sum()
    return Null(
        (mean * torch.exp(-entropy / mean)).item(), 0.0, f"Marchenko-Pastur law of a Gaussian [{tokens} x {width}]"
    )


@measure(
    "rankme",
    summary="RankMe: exp of the entropy of the singular values, smoothed, not normalised",
    source="Garrido et al. 2023, arXiv 2210.02885",
    takes=_TAKES,
    range=(0.0, None),
    unit="directions",
    direction="higher",
    null=_GAUSSIAN,
)
def rankme(
    x: Float[Tensor, "*batch tokens width"],
    center: bool = False,
    drop_first: bool = False,
    epsilon: float = 1e-7,
    method: Method = "gram",
) -> Float[Tensor, "*batch"]:
    """exp(-sum(p ln p)) with p_i = s_i / sum(s) + epsilon. Shapes: [... tokens width] -> [...]; zeros: 0.

    Source: Garrido et al. 2023 (arXiv 2210.02885); its singular values are not centred.
    """
    return exp_entropy(_scaled_values(x, center, drop_first, method)[0], epsilon)


@measure(
    "stable_rank",
    summary="squared Frobenius norm over squared spectral norm",
    source="Rudelson and Vershynin 2007 (J. ACM 54, 21)",
    takes=_TAKES,
    range=(0.0, None),
    unit="directions",
    direction="higher",
    null=_GAUSSIAN,
)
def stable_rank(
    x: Float[Tensor, "*batch tokens width"], center: bool = False, drop_first: bool = False, method: Method = "gram"
) -> Float[Tensor, "*batch"]:
    """sum(s^2) / max(s)^2: between 1 and the rank; zeros: 0. Shapes: [... tokens width] -> [...]."""
    return _scaled_values(x, center, drop_first, method)[0].square().sum(-1)  # the largest is 1


@measure(
    "participation_ratio",
    summary="number of principal directions that share the energy",
    source="Gao et al. 2017 (bioRxiv 214262)",
    takes=_TAKES,
    range=(0.0, None),
    unit="directions",
    direction="higher",
    null=_GAUSSIAN,
)
def participation_ratio(
    x: Float[Tensor, "*batch tokens width"], center: bool = False, drop_first: bool = False, method: Method = "gram"
) -> Float[Tensor, "*batch"]:
    """sum(s^2)^2 / sum(s^4): between 1 and the rank; zeros: 0. With ``center`` it is the one of the token covariance.

    Shapes: [... tokens width] -> [...].
    """
    return _participation(_scaled_values(x, center, drop_first, method)[0])


def spectral_measures(
    x: Float[Tensor, "*batch tokens width"], *, method: Method = "gram"
) -> dict[str, Float[Tensor, "*batch"]]:
    """:func:`effective_rank`, :func:`stable_rank` and :func:`participation_ratio` from one decomposition, by name."""
    values, _ = _scaled_values(x, False, False, method)
    return {
        "effective_rank": exp_entropy(values) / values.shape[-1],
        "stable_rank": values.square().sum(-1),
        "participation_ratio": _participation(values),
    }


_WITH_NULL = {
    "effective_rank": effective_rank,
    "rankme": rankme,
    "stable_rank": stable_rank,
    "participation_ratio": participation_ratio,
}


@lru_cache(maxsize=512)
def gaussian_null(
    tokens: int, width: int, measure: str = "effective_rank", *, center: bool = False, draws: int = 16, seed: int = 0
) -> Null:
    """What a measure of this file gives for matrices of independent normal numbers: mean and sd over ``draws``.

    Drawn from its own generator with a fixed seed (the global one is not touched) and remembered. For a measure
    without the first token ask for ``tokens - 1``.
    Raises: UnknownNameError, InputError.
    """
    if measure not in _WITH_NULL:
        raise UnknownNameError("measure with a Gaussian null", measure, _WITH_NULL)
    if draws < 2:
        raise InputError(f"a null needs at least 2 draws to have a spread, got {draws}")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        values = torch.stack(
            [
                _WITH_NULL[measure](torch.randn(tokens, width, dtype=torch.float64, generator=generator), center=center)
                for _ in range(draws)
            ]
        )
    kind = f"Gaussian [{tokens} x {width}]{', centred' if center else ''}, {draws} draws"
    return Null(values.mean().item(), values.std().item(), kind)


def _scaled_values(x: Tensor, center: bool, drop_first: bool, method: str) -> tuple[Tensor, Tensor]:
    """Singular values over the largest one [... rank], noise set to 0, and the largest one [... 1]."""
    if method not in ("gram", "svd"):
        raise UnknownNameError("method", method, ("gram", "svd"))
    x = token_matrix(x, least=2 if center or drop_first else 1)
    if drop_first:
        x = x[..., 1:, :]
    if center:
        x = x - x.mean(-2, keepdim=True)
    peak = x.detach().abs().amax((-2, -1), keepdim=True)
    y = x / torch.where(peak > 0, peak, 1.0)  # squares neither overflow nor underflow
    resolution = torch.finfo(y.dtype).eps
    if method == "svd":
        values = torch.linalg.svdvals(y)
        floor = resolution * max(y.shape[-2:])
    else:
        gram = y @ y.mT if y.shape[-2] <= y.shape[-1] else y.mT @ y
        energy = torch.linalg.eigvalsh(gram).flip(-1)
        kept = energy > resolution * min(y.shape[-2:]) * energy[..., :1]
        values = torch.where(kept, torch.where(kept, energy, 1.0).sqrt(), 0.0)  # no infinite slope at 0
        floor = 0.0
    largest = values[..., :1]
    values = values / torch.where(largest > 0, largest, 1.0)
    values = torch.where(values > floor, values, 0.0)
    return values, largest * peak.squeeze(-1)


def exp_entropy(values: Tensor, epsilon: float = 0.0) -> Tensor:
    """exp(-sum(p ln p)) with 0 ln 0 = 0 and no gradient there; 0 where all values are."""
    total = values.sum(-1, keepdim=True)
    p = values / torch.where(total > 0, total, 1.0) + epsilon
    p = torch.where(p > 0, p, 1.0)
    return torch.exp(-(p * p.log()).sum(-1)) * (total > 0).squeeze(-1)


def _participation(values: Tensor) -> Tensor:
    energy = values.square()
    squares = energy.square().sum(-1)
    return energy.sum(-1).square() / torch.where(squares > 0, squares, 1.0)
