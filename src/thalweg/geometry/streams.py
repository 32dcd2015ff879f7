"""Streams side by side: how they are used, how different they are, and what their coefficients depend on."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real, token_matrix
from thalweg.geometry.similarity import token_cosine
from thalweg.geometry.spectrum import effective_rank, exp_entropy

_STREAMS = "streams of a token [... streams width]"


# how they are used


@measure(
    "stream_share.read",
    summary="share of one stream in the absolute weights that a sublayer reads with, mean over tokens",
    source="definition",
    takes="weights [... streams]",
    range=(0.0, 1.0),
    null="1/streams: equal weights",
)
@measure(
    "stream_share.write",
    summary="share of one stream in the absolute weights that an update is written with, mean over tokens",
    source="definition",
    takes="weights [... streams]",
    range=(0.0, 1.0),
    null="1/streams: equal weights",
)
def stream_shares(weights: Float[Tensor, "*batch streams"]) -> Float[Tensor, "*batch streams"]:
    """|w_i| / sum |w|. Shapes: [... streams] -> the same. Weights all zero have shares of zero. Raises: ShapeError, InputError."""
    size = _weights(weights).abs()
    total = size.sum(-1, keepdim=True)
    return size / torch.where(total > 0, total, 1.0)


@measure(
    "effective_streams.read",
    summary="streams that a sublayer reads: exp of the entropy of their shares, mean over tokens",
    source="definition",
    takes="weights [... streams]",
    range=(0.0, None),
    unit="streams",
    null="number of streams: equal weights",
)
@measure(
    "effective_streams.write",
    summary="streams that an update is written to: exp of the entropy of their shares, mean over tokens",
    source="definition",
    takes="weights [... streams]",
    range=(0.0, None),
    unit="streams",
    null="number of streams: equal weights",
)
def effective_streams(weights: Float[Tensor, "*batch streams"]) -> Float[Tensor, "*batch"]:
    """exp(-sum p ln p) of the shares p: 1 for one stream, n for n alike, 0 for none. Shapes: [... streams] -> [...]."""
    return exp_entropy(_weights(weights).abs())


# how different they are


@measure(
    "stream_rank",
    summary="effective rank of the streams of one token, normalised, mean over tokens",
    source="Roy and Vetterli 2007 (EUSIPCO), on [streams width]",
    takes=_STREAMS,
    range=(0.0, 1.0),
    direction="higher",
    null="Gaussian matrix of the same shape",
)
def stream_rank(x: Float[Tensor, "*batch streams width"]) -> Float[Tensor, "*batch"]:
    """:func:`effective_rank` of the n streams of a token over min(n, d): 1/n for copies. Shapes: [... n d] -> [...]."""
    return effective_rank(x)


@measure(
    "stream_cosine",
    summary="mean cosine over all pairs of streams of one token, mean over tokens",
    source="definition",
    takes=_STREAMS,
    range=(-1.0, 1.0),
    direction="lower",
    null="0: independent directions",
)
def stream_cosine(x: Float[Tensor, "*batch streams width"]) -> Float[Tensor, "*batch"]:
    """:func:`token_cosine` over the streams of a token: 1 for copies. Shapes: [... n d] -> [...]. Raises: ShapeError for n < 2."""
    return token_cosine(x)


@measure(
    "difference_share",
    summary="share of the norm of a token's streams that lies in differences between them: its memory of which stream is which",
    source="definition",
    takes=_STREAMS,
    range=(0.0, 1.0),
    null="sqrt(1 - 1/streams): independent streams",
)
def difference_share(x: Float[Tensor, "*batch streams width"]) -> Float[Tensor, "*batch"]:
    """||x - mean over streams|| / ||x||: 0 for copies, 1 where the mean vanishes; zeros: 0. Shapes: [... n d] -> [...].

    Raises: ShapeError, InputError.
    """
    x = token_matrix(x, "the streams", least=2)
    size = torch.linalg.matrix_norm(x)
    rest = torch.linalg.matrix_norm(x - x.mean(-2, keepdim=True))
    return rest / torch.where(size > 0, size, 1.0)


# what their coefficients depend on


def token_sd(values: Float[Tensor, "*batch tokens coefficients"]) -> Float[Tensor, "*batch"]:
    """Standard deviation of each coefficient over tokens, as root mean square over coefficients: 0 for constants.

    Shapes: [... tokens coefficients] -> [...]. Raises: ShapeError, InputError.
    """
    return _root(token_matrix(values, "the coefficients").var(-2, correction=0).mean(-1))


def dynamics(values: Float[Tensor, "*batch tokens coefficients"]) -> Float[Tensor, "*batch"]:
    """:func:`token_sd` over the root mean square of the means over tokens: how dynamic coefficients are, 0 for constants.

    Shapes: [... tokens coefficients] -> [...]. Infinite where the means vanish and the coefficients do not.
    Raises: ShapeError, InputError.
    """
    static = _root(token_matrix(values, "the coefficients").mean(-2).square().mean(-1))
    moving = token_sd(values)
    still = moving == 0
    return torch.where(still, 0.0, moving / torch.where(still, 1.0, static))


for _family in ("read", "write", "mix"):
    measure(
        f"{_family}.token_sd",
        summary=f"standard deviation over tokens of the {_family} coefficients, root mean square over them",
        source="definition",
        takes="coefficients [... tokens coefficients]",
        range=(0.0, None),
        null="0: constants",
    )(token_sd)
    measure(
        f"{_family}.dynamic",
        summary=f"standard deviation over tokens of the {_family} coefficients over the size of their means",
        source="ours",
        takes="coefficients [... tokens coefficients]",
        range=(0.0, None),
        null="0: constants",
    )(dynamics)


# what they are for


class Change(NamedTuple):
    """A change in loss: mean [nats/token], and its standard error over sequences (None for one)."""

    mean: float
    error: float | None


_REPLACING = "ours: the ablations of mHC (arXiv 2512.24880) on a trained model"


@measure(
    "mixer_replaced.identity",
    summary="change in held-out loss when mixing matrices are replaced by the identity",
    source=_REPLACING,
    takes="nats by sequence before and after, scored tokens by sequence",
    range=(None, None),
    unit="nats/token",
    null="0: nothing replaced",
)
@measure(
    "mixer_replaced.token_mean",
    summary="change in held-out loss when mixing matrices are replaced by their mean over tokens",
    source=_REPLACING,
    takes="nats by sequence before and after, scored tokens by sequence",
    range=(None, None),
    unit="nats/token",
    null="0: nothing replaced",
)
def loss_change(before: Float[Tensor, " sequences"], after: Float[Tensor, " sequences"], scored: Tensor) -> Change:
    """sum(after - before) / sum(scored), with the standard error of that ratio over sequences.

    before, after: summed nats of each sequence under the two models; scored: its scored tokens.
    Raises: ShapeError for shapes that differ; InputError for NaN or no scored token.
    """
    if before.shape != after.shape or before.shape != scored.shape or before.ndim != 1:
        raise ShapeError(
            f"losses and counts by sequence must have one shape [sequences], got {list(before.shape)}, {list(after.shape)} "
            f"and {list(scored.shape)}"
        )
    difference = real(after, "the losses after").double() - real(before, "the losses before").double()
    counts, n = scored.double(), len(scored)
    if not counts.sum() > 0:
        raise InputError("no token is scored: there is no loss to compare")
    mean = difference.sum() / counts.sum()
    rest = difference - mean * counts
    error = ((rest.square().sum() * n / (n - 1)).sqrt() / counts.sum()).item() if n > 1 else None
    return Change(mean.item(), error)


def _root(square: Tensor) -> Tensor:
    """The root, with slope 0 at 0."""
    return torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)


def _weights(weights: Tensor) -> Tensor:
    if real(weights, "the weights of streams").ndim < 1 or weights.shape[-1] < 1:
        raise ShapeError(f"weights of streams must be [... streams], got shape {list(weights.shape)}")
    return weights.double()
