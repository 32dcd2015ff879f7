"""Tokens as points that move with depth: how fast, how straight, and whether they come together."""

import math

import torch
from jaxtyping import Float
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from scipy.special import hyp0f1
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import token_matrix
from thalweg.geometry.lengths import token_relative_update
from thalweg.geometry.similarity import state_cosine, token_cosine, unit

_PATHS = "trajectories [... places width], one state a row"
_STATES = "states [... tokens width]"
_CLUSTERS = "Geshkovski et al. 2023, arXiv 2312.10794"


def _path(states: Tensor, least: int) -> Tensor:
    return token_matrix(states, "a trajectory", least)


measure(
    "depth.speed",
    summary="norm of the step of a token through a layer over the norm of its state",
    source="definition",
    takes="states and steps [... width]",
    range=(0.0, None),
    null="none",
)(token_relative_update)
for _name, _words in (("within", "one window"), ("across", "different windows")):
    measure(
        f"depth.{_name}_cosine",
        summary=f"mean cosine of two tokens of {_words}, the first token left out",
        source="Noci et al. 2022, arXiv 2206.03126; the comparison is ours",
        takes=_STATES,
        range=(-1.0, 1.0),
        null="0: independent directions without a common mean",
    )(token_cosine)


@measure(
    "depth.turning",
    summary="angle between one step of a token through depth and the next",
    source="Hosseini and Fedorenko 2023, arXiv 2311.04930 (there along the text, here along depth)",
    takes=_PATHS,
    range=(0.0, math.pi),
    unit="rad",
    null="pi/2: independent steps",
)
def turning(states: Float[Tensor, "*batch places width"]) -> Float[Tensor, "*batch turns"]:
    """Angle at every inner place between the step before and the step behind it. Shapes: [... places width] -> [... places-2].

    A step of zero length has no direction and turns by pi/2. Raises: ShapeError for fewer than three places; InputError.
    """
    steps = _path(states, 3).diff(dim=-2)
    return state_cosine(steps[..., :-1, :], steps[..., 1:, :]).clamp(-1, 1).arccos()


@measure(
    "depth.straightness",
    summary="distance from the first state to the last over the length of the way between them",
    source="definition",
    takes=_PATHS,
    range=(0.0, 1.0),
    null="about 1/sqrt(steps): independent steps of one length",
)
def straightness(states: Float[Tensor, "*batch places width"]) -> Float[Tensor, "*batch"]:
    """||x_L - x_0|| / sum ||x_l+1 - x_l||; 1 on a line, 0 for a token that does not move. Shapes: [... places width] -> [...]."""
    x = _path(states, 2)
    way = torch.linalg.vector_norm(x.diff(dim=-2), dim=-1).sum(-1)
    return torch.linalg.vector_norm(x[..., -1, :] - x[..., 0, :], dim=-1) / torch.where(way > 0, way, 1.0)


@measure(
    "depth.energy",
    summary="interaction energy of the directions of the tokens, from 0 (as if on opposite sides) to 1 (all the same)",
    source=_CLUSTERS,
    takes=_STATES,
    range=(0.0, 1.0),
    null="uniform directions on the sphere",
)
def energy(x: Float[Tensor, "*batch tokens width"], beta: float = 1.0) -> Float[Tensor, "*batch"]:
    """Mean over all pairs i, j (i = j too) of exp(beta (cos(x_i, x_j) - 1)). Shapes: [... tokens width] -> [...].

    Source: Geshkovski et al. 2023 (arXiv 2312.10794), E_beta, which self-attention with identity maps never lowers. Deviation: divided by its
    largest value exp(beta) / (2 beta), so that depths and betas compare. Raises: ShapeError; InputError (NaN, a beta that is not positive).
    """
    if not beta > 0:
        raise InputError(f"beta must be positive, got {beta}")
    e = unit(token_matrix(x))
    return torch.exp(beta * (e @ e.mT - 1)).mean((-2, -1))


def energy_null(tokens: int, width: int, beta: float = 1.0) -> float:
    """:func:`energy` of uniform directions: 1/n + (1 - 1/n) exp(-beta) 0F1(width/2, beta^2 / 4). Derived by us."""
    pair = math.exp(-beta) * float(
        hyp0f1(width / 2, beta**2 / 4)
    )  # mean of exp(beta (u - 1)), u one coordinate of a direction
    return 1 / tokens + (1 - 1 / tokens) * pair


@measure(
    "depth.clusters",
    summary="groups of tokens that are linked by cosines above a threshold, over the number of tokens",
    source=f"{_CLUSTERS}; counting by linked cosines is ours",
    takes="states of one sequence [tokens width]",
    range=(0.0, 1.0),
    null="1: every token by itself",
)
def clusters(x: Float[Tensor, "tokens width"], cosine: float = 0.9) -> float:
    """Connected components of the graph that links two tokens with cos > ``cosine``, over the number of tokens.

    Shapes: [tokens width] -> number.

    Raises: ShapeError for anything but one sequence; InputError for a threshold outside (-1, 1).
    """
    if not -1 < cosine < 1:
        raise InputError(f"the cosine must lie between -1 and 1, got {cosine}")
    matrix = token_matrix(x)
    if matrix.ndim != 2:
        raise ShapeError(f"clusters are counted in one sequence [tokens width], got shape {list(matrix.shape)}")
    e = unit(matrix)
    linked = (e @ e.mT > cosine).cpu().numpy()
    return int(connected_components(csr_array(linked), directed=False)[0]) / len(e)
