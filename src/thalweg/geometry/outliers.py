"""What a few channels, or the first token alone, hold of the energy of a stream."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real, token_matrix

TOP = 4  # channels of the share that is reported
_KURTOSIS = "He et al. 2024, arXiv 2405.19279 (kurtosis of neuron-wise norms)"


class FirstToken(NamedTuple):
    """ratio: norm of the first token over the mean norm of the others [...]; share: of the squared norm of all [...]."""

    ratio: Tensor
    share: Tensor


@measure(
    "outlier_channels.share",
    summary=f"share of the energy of the states in their {TOP} largest channels",
    source="definition",
    takes="states [... tokens width]",
    range=(0.0, 1.0),
    null=f"{TOP} / width: all channels alike",
)
def outlier_channels(x: Float[Tensor, "*batch tokens width"], top: int = TOP) -> Float[Tensor, "*batch"]:
    """Share of the squared norm in the ``top`` channels (all, of fewer) of largest energy over tokens. Shapes: [... tokens width] -> [...].

    Raises: ShapeError, InputError.
    """
    return energy_share(token_matrix(x).square().sum(-2), top)


@measure(
    "outlier_channels.kurtosis",
    summary="mean fourth power over squared mean square of the root mean squares of channels: 1 alike, width: one alone",
    source=_KURTOSIS,
    takes="states [... tokens width]",
    range=(1.0, None),
    null="1: all channels alike",
)
def channel_kurtosis(x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
    """mean_j(s_j^4) / mean_j(s_j^2)^2 over channels j, s_j their root mean square over tokens: from 1 to width.

    Shapes: [... tokens width] -> [...]. Zeros: 1, by definition here. Raises: ShapeError, InputError.
    Source: He et al. 2024 (arXiv 2405.19279); the formula is reconstructed from the abstract's words.
    """
    return energy_kurtosis(token_matrix(x).square().sum(-2))


def energy_share(energy: Float[Tensor, "*batch width"], top: int = TOP) -> Float[Tensor, "*batch"]:
    """:func:`outlier_channels` from the energy of every channel; zeros: top / width."""
    if top < 1:
        raise InputError(f"top must be at least 1 channel, got {top}")
    energy = _scaled(energy)
    return energy.topk(min(top, energy.shape[-1]), dim=-1).values.sum(-1) / energy.sum(-1)


def energy_kurtosis(energy: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch"]:
    """:func:`channel_kurtosis` from the energy of every channel."""
    energy = _scaled(energy)
    return energy.square().mean(-1) / energy.mean(-1).square()


@measure(
    "first_token.ratio",
    summary="norm of the first token's state over the mean norm of the others in its sequence",
    source="Sun et al. 2024, arXiv 2402.17762 (massive activations)",
    takes="norms [... tokens]",
    range=(0.0, None),
    null="1: a token like the others",
)
@measure(
    "first_token.share",
    summary="share of the squared norm of a sequence's states that the first token holds",
    source="Sun et al. 2024, arXiv 2402.17762 (massive activations)",
    takes="norms [... tokens]",
    range=(0.0, 1.0),
    null="1 / tokens: a token like the others",
)
def first_token(norms: Float[Tensor, "*batch tokens"]) -> FirstToken:
    """How much larger the first token is, from the norms of the tokens of a sequence. Shapes: [... tokens] -> [...] each.

    Others all zero: ratio infinite, or 1 if the first is zero too (share 1 / tokens).
    Raises: ShapeError for fewer than two tokens; InputError.
    """
    if norms.ndim < 1 or norms.shape[-1] < 2:
        raise ShapeError(f"norms must be [... tokens] of at least 2 tokens, got shape {list(norms.shape)}")
    x = real(norms, "the norms").double()
    count = torch.tensor(x.shape[-1], device=x.device)
    return first_token_of(x[..., 0], x.sum(-1), x.square().sum(-1), count)


def first_token_of(first: Tensor, total: Tensor, squares: Tensor, count: Tensor) -> FirstToken:
    """:func:`first_token` from the first norm, the sums of all norms and of their squares, and the number of tokens (at least 2)."""
    others = (total - first) / (count - 1).clamp(min=1)
    ratio = torch.where(total > 0, first / others, 1.0)
    return FirstToken(
        ratio, torch.where(squares > 0, first.square() / torch.where(squares > 0, squares, 1.0), 1 / count)
    )


def _scaled(energy: Tensor) -> Tensor:
    """Over the largest, so that squares neither overflow nor underflow; zeros become ones."""
    if energy.ndim < 1 or energy.shape[-1] < 1:
        raise ShapeError(f"energies must be [... width], got shape {list(energy.shape)}")
    energy = real(energy, "the energy of channels").double()
    peak = energy.amax(-1, keepdim=True)
    return torch.where(peak > 0, energy / torch.where(peak > 0, peak, 1.0), 1.0)
