"""What a dictionary of prototypes is like: used or not, apart or collapsed, soft or hard, near its critical temperature.

Usage alone does not show a collapse: prototypes that lie at one point are used evenly. So pair distances stand beside it.
Prototypes are rows [k d], tokens [n d], weights [n k] (:func:`thalweg.ops.prototypes.assignment`).
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real, token_matrix
from thalweg.ops.prototypes import GRADIENTS, Gradient, assignment, critical_temperature

_SOURCE = "reconstructed from the reviews of Cirrincione 2026, arXiv 2604.01740"
_TOKENS = "tokens [n d], prototypes [k d], temperature"
SAME_POINT = 1e-3  # of the tokens' standard deviation sqrt(tr C): prototypes nearer than this are one


@measure(
    "prototypes.usage",
    summary="perplexity of how often each prototype is chosen, softly; all prototypes at one point are used evenly",
    source=_SOURCE,
    takes="weights [n k]",
    range=(1.0, None),
    unit="prototypes",
    direction="higher",
    null="K for collapsed prototypes: read it beside prototypes.effective",
)
def usage_perplexity(weights: Float[Tensor, "n k"]) -> Float[Tensor, ""]:
    """exp of the entropy of the mean weights. Shapes: [n k] -> scalar in [1, k], float64. Raises: ShapeError, InputError."""
    mean = token_matrix(weights, "the weights").mean(-2)
    return torch.exp(-torch.xlogy(mean, mean).sum())


@measure(
    "prototypes.hardness",
    summary="mean entropy of the assignment over ln K: 1 soft (all prototypes alike), 0 hard",
    source=_SOURCE,
    takes="weights [n k]",
    range=(0.0, 1.0),
    null="1: all prototypes at one point",
)
def relative_entropy(weights: Float[Tensor, "n k"]) -> Float[Tensor, ""]:
    """H(q) / ln k, mean over tokens; one prototype: 0. Shapes: [n k] -> scalar, float64. Raises: ShapeError, InputError."""
    q = token_matrix(weights, "the weights")
    if q.shape[-1] == 1:
        return q.new_zeros(())
    return -torch.xlogy(q, q).sum(-1).mean() / math.log(q.shape[-1])


@measure(
    "prototypes.closest",
    summary="smallest distance between two prototypes, over the standard deviation sqrt(tr C) of the tokens",
    source=_SOURCE,
    takes="tokens [n d], prototypes [k d]",
    range=(0.0, None),
    direction="higher",
    null="0: two prototypes are one",
)
def closest_pair(x: Float[Tensor, "n d"], prototypes: Float[Tensor, "k d"]) -> Float[Tensor, ""]:
    """min over pairs of |p_j - p_k| / sqrt(tr C); one prototype: infinite. Raises: ShapeError, InputError."""
    pairs = _pairs(x, prototypes)
    return pairs.min() if len(pairs) else pairs.new_tensor(math.inf)


@measure(
    "prototypes.farthest",
    summary="largest distance between two prototypes, over the standard deviation sqrt(tr C) of the tokens",
    source=_SOURCE,
    takes="tokens [n d], prototypes [k d]",
    range=(0.0, None),
    direction="higher",
    null="0: all prototypes are one",
)
def farthest_pair(x: Float[Tensor, "n d"], prototypes: Float[Tensor, "k d"]) -> Float[Tensor, ""]:
    """max over pairs of |p_j - p_k| / sqrt(tr C); one prototype: 0. Raises: ShapeError, InputError."""
    pairs = _pairs(x, prototypes)
    return pairs.max() if len(pairs) else pairs.new_zeros(())


@measure(
    "prototypes.effective",
    summary="perplexity of usage after prototypes at one point are counted as one",
    source="ours",
    takes=_TOKENS,
    range=(1.0, None),
    unit="prototypes",
    direction="higher",
    null="1: all prototypes at one point",
)
def effective_prototypes(
    x: Float[Tensor, "n d"], prototypes: Float[Tensor, "k d"], temperature: float
) -> Float[Tensor, ""]:
    """exp of the entropy of usage, summed over groups of prototypes nearer than 1e-3 sqrt(tr C) to one another.

    Shapes: [n d], [k d] -> scalar in [1, k], float64. Raises: ShapeError, InputError.
    """
    x, p = checked(x, prototypes, temperature)
    group = groups(x, p)
    used = assignment(x, p, temperature).mean(0)
    mass = torch.zeros(len(p), dtype=torch.float64, device=p.device).index_add(0, group, used)
    return torch.exp(-torch.xlogy(mass, mass).sum())


@measure(
    "prototypes.temperature_ratio",
    summary="temperature over the critical one: at 1 or above, prototypes at one point never part",
    source="derived; for the free energy Rose 1998 (Proc. IEEE 86, 2210)",
    takes=_TOKENS,
    range=(0.0, None),
    direction="lower",
    null="1: the critical temperature",
)
def temperature_ratio(x: Float[Tensor, "n d"], temperature: float, gradient: Gradient = "through") -> Float[Tensor, ""]:
    """tau / (4 lambda_max(C)), or tau / (2 lambda_max(C)) with the assignment detached; tokens without spread: infinite."""
    if gradient not in GRADIENTS:
        raise InputError(f"gradient must be through or detached, got {gradient!r}")
    critical = critical_temperature(token_matrix(x, "the tokens"), gradient=gradient)
    return torch.where(critical > 0, temperature / torch.where(critical > 0, critical, 1.0), math.inf)


@measure(
    "prototypes.force",
    summary="separation force: Frobenius norm of 2 P Sigma_q, the gradient of the variance term at a fixed assignment",
    source=_SOURCE,
    takes=_TOKENS,
    range=(0.0, None),
    null="0: all prototypes at one point, or a hard assignment",
)
def separation_force(
    x: Float[Tensor, "n d"], prototypes: Float[Tensor, "k d"], temperature: float
) -> Float[Tensor, ""]:
    """|| mean over tokens of 2 P (diag q - q q^T) ||_F, in the units of the tokens, float64.

    It separates only if ascended: descending the variance term at a fixed assignment pulls prototypes together
    (:func:`repulsive_mass` is what separates under the gradient through the assignment). Raises: ShapeError, InputError.
    """
    x, p = checked(x, prototypes, temperature)
    q = assignment(x, p, temperature)
    about = q @ p
    per_prototype = 2 * (q.mean(0)[:, None] * p - q.T @ about / len(x))
    return torch.linalg.matrix_norm(per_prototype)


@measure(
    "prototypes.repulsion",
    summary="share of the assignment that repels: sum of q_k max(0, (d_k - d) / tau - 1), mean over tokens",
    source="derived from the gradient through the assignment",
    takes=_TOKENS,
    range=(0.0, None),
    null="0: no prototype is farther than d + tau from its token",
)
def repulsive_mass(x: Float[Tensor, "n d"], prototypes: Float[Tensor, "k d"], temperature: float) -> Float[Tensor, ""]:
    """Of the gradient 2 q_k [1 - (d_k - d) / tau] (p_k - x) of L_q, the part of negative sign; float64. Raises: ShapeError, InputError."""
    x, p = checked(x, prototypes, temperature)
    q = assignment(x, p, temperature)
    distances = torch.cdist(x, p, compute_mode="donot_use_mm_for_euclid_dist").square()
    mean = (q * distances).sum(-1, keepdim=True)
    return (q * ((distances - mean) / temperature - 1).clamp(min=0)).sum(-1).mean()


def groups(x: Float[Tensor, "n d"], prototypes: Float[Tensor, "k d"]) -> Int[Tensor, " k"]:
    """For every prototype the first one that it is the same point with, directly or by others in between. Shapes: -> [k]."""
    pairs = torch.cdist(prototypes, prototypes, compute_mode="donot_use_mm_for_euclid_dist")
    same = pairs < SAME_POINT * spread(x)
    same |= pairs == 0
    reach = same
    while not torch.equal(wider := (reach.double() @ reach.double()) > 0, reach):
        reach = wider
    return reach.double().argmax(-1)


def spread(x: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """sqrt(tr C) of the tokens."""
    return (x - x.mean(0)).square().sum(-1).mean().sqrt()


def checked(x: Tensor, prototypes: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Both in float64. Raises: ShapeError, InputError with one line."""
    x, p = token_matrix(x, "the tokens"), token_matrix(prototypes, "the prototypes")
    if x.ndim != 2 or p.ndim != 2 or x.shape[-1] != p.shape[-1]:
        raise ShapeError(
            f"tokens [n d] and prototypes [k d] must share their width, got {list(x.shape)} and {list(p.shape)}; one head at a time"
        )
    if not 0 < float(temperature) < math.inf:
        raise InputError(f"the temperature must be positive and finite, got {float(temperature):g}")
    return x, p


def _pairs(x: Tensor, prototypes: Tensor) -> Tensor:
    x, p = token_matrix(x, "the tokens"), real(prototypes, "the prototypes").double()
    size = spread(x)
    return torch.pdist(p) / torch.where(size > 0, size, 1.0)
