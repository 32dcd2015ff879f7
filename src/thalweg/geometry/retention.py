"""How long one relevant key stands out among irrelevant ones, from its margin and the spread of the others: the horizon of a head.

One key has a logit that lies ``margin`` above the mean of the N - 1 others, whose logits are normal with standard deviation ``spread``.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real

_SOURCE = (
    "derived by us; that attention has such a horizon: Liang 2026 (arXiv 2607.17146), whose formula was not available"
)


@measure(
    "horizon.retention",
    summary="weight that one relevant key keeps among so many others, if their logits are normal",
    source=_SOURCE,
    takes="margin, spread, number of keys",
    range=(0.0, 1.0),
    null="1 / N: a key like all others",
)
def retention(
    margin: Float[Tensor, "*b"], spread: Float[Tensor, "*b"], keys: Float[Tensor, "*b"] | float
) -> Float[Tensor, "*b"]:
    """1 / (1 + (N - 1) exp(spread^2 / 2 - margin)), in float64.

    The annealed form: log of the mean of exp, which the sum of so many keys comes near for spread < sqrt(2 ln N); beyond, one of them dominates
    (:func:`frozen`). Raises: InputError.
    """
    m, s = real(margin, "margin").double(), real(spread, "spread").double()
    n = torch.as_tensor(keys, dtype=torch.float64)
    return torch.sigmoid(m - s.square() / 2 - (n - 1).log())


@measure(
    "horizon.length",
    summary="number of keys at which the weight of one relevant key falls to a given share",
    source=_SOURCE,
    takes="margin, spread, share",
    range=(1.0, None),
    null="about 1: a key without margin",
)
def horizon(margin: Float[Tensor, "*b"], spread: Float[Tensor, "*b"], share: float = 0.5) -> Float[Tensor, "*b"]:
    """N_c = 1 + exp(margin - spread^2 / 2) (1 - p) / p, in float64: the inverse of :func:`retention` in N; infinite beyond 1e308.

    Raises: InputError for a share outside (0, 1).
    """
    if not 0 < share < 1:
        raise InputError(f"a share that is retained lies between 0 and 1, got {share}")
    offset = real(margin, "margin").double() - real(spread, "spread").double().square() / 2
    return 1 + offset.exp() * (1 - share) / share


def offset_of(weight: Float[Tensor, "*b"], keys: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """ln(p / (1 - p)) + ln(N - 1): what margin - spread^2 / 2 must be for a measured weight p, whatever the law of the others."""
    p = real(weight, "weight").double().clamp(1e-300, 1 - 1e-16)
    return torch.logit(p) + (torch.as_tensor(keys, dtype=torch.float64) - 1).log()


def frozen(spread: Float[Tensor, "*b"], keys: Float[Tensor, "*b"] | float) -> Tensor:
    """Whether spread >= sqrt(2 ln N): then a few of the others hold most of their mass and the annealed form is no estimate.

    Source: the freezing of the random energy model, Derrida 1981.
    """
    n = torch.as_tensor(keys, dtype=torch.float64)
    return real(spread, "spread").double() >= (2 * n.log()).sqrt()


def shape_of(x: Float[Tensor, "*b n"]) -> tuple[Tensor, Tensor]:
    """Skewness and excess kurtosis of the last axis, both 0 of normal numbers, in float64; 0 where nothing varies."""
    z = x.double() - x.double().mean(-1, keepdim=True)
    sd = z.square().mean(-1).sqrt()
    safe = torch.where(sd > 0, sd, math.inf)
    return z.pow(3).mean(-1) / safe**3, torch.where(sd > 0, z.pow(4).mean(-1) / safe**4 - 3, 0.0)
