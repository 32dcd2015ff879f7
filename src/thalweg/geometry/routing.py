"""How a router spreads tokens over experts: evenness of the load, decidedness of the scores, what was left out."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real


@measure(
    "routing.max_over_mean",
    summary="tokens sent to the busiest expert over the mean of all experts",
    source="MaxVio + 1 of Wang et al. 2024, arXiv 2408.15664, Eq. 4",
    takes="load [... experts]",
    range=(1.0, None),
    direction="lower",
    null="1: the same load for all experts",
)
def max_over_mean(load: Float[Tensor, "*batch experts"]) -> Float[Tensor, "*batch"]:
    """max load / mean load. Shapes: [... experts] of any number type -> [...] in float64, from 1 to the number of experts.

    Raises: InputError for NaN, a negative load, or no load at all.
    """
    load = _load(load)
    return load.amax(-1) / load.mean(-1)


@measure(
    "routing.entropy",
    summary="entropy of a token's scores over the experts, over its largest value ln(experts)",
    source="definition; scores normalised to sum to one",
    takes="scores [... experts]",
    range=(0.0, 1.0),
    null="1: the same score for all experts",
)
def router_entropy(scores: Float[Tensor, "*batch experts"]) -> Float[Tensor, "*batch"]:
    """-sum p ln p / ln(experts) with p = score / sum of the scores. Shapes: [... experts] -> [...] in float64; 1 where there is one expert.

    Raises: InputError for NaN, a negative score, or scores that are all zero.
    """
    scores = _load(scores)
    if scores.shape[-1] == 1:
        return torch.ones(scores.shape[:-1], dtype=torch.float64, device=scores.device)
    shares = scores / scores.sum(-1, keepdim=True)
    return (torch.special.entr(shares).sum(-1) / math.log(scores.shape[-1])).clamp(0, 1)


@measure(
    "routing.dropped",
    summary="share of the choices of tokens that no expert worked on",
    source="Fedus et al. 2021 (Switch Transformers), arXiv 2101.03961, Section 2.2; 0 where experts have no capacity",
    takes="load [... experts], number of choices",
    range=(0.0, 1.0),
    direction="lower",
)
def dropped(load: Float[Tensor, "*batch experts"], choices: int) -> Float[Tensor, "*batch"]:
    """1 - sum of the loads / choices. Shapes: load [... experts], choices = tokens * active experts -> [...] in float64.

    Raises: InputError for NaN, a negative load, no load at all, or fewer choices than the load sums to.
    """
    done = _load(load).sum(-1)
    if choices < 1 or bool((done > choices).any()):
        raise InputError(f"a load cannot exceed the choices of the tokens, got {done.max().item():g} of {choices}")
    return 1 - done / choices


def _load(values: Tensor) -> Tensor:
    if values.ndim < 1 or values.shape[-1] < 1:
        raise ShapeError(f"loads and scores must be [... experts], got shape {list(values.shape)}")
    values = values.double()
    if bool((real(values, "the load of experts") < 0).any()) or bool((values.sum(-1) == 0).any()):
        raise InputError("loads and scores must not be negative and not all zero; give what a router gave")
    return values
