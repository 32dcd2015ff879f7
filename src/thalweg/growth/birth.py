"""Where a new head begins: on the plane that captures most of what is left along one direction, or at random, as a control."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError
from thalweg.geometry.directional import DirectionalOperator
from thalweg.growth.protocol import Birth

SEEN_AS_ZERO = 1e-10  # |P S u| / |S|: u is an eigenvector of S, and no plane captures anything along it


def on_the_plane(
    operator: DirectionalOperator,
    direction: Float[Tensor, " d"],
    eigenvalue: float,
    head_width: int,
    *,
    strength: float | None = None,
    noise: float = 1e-3,
    generator: torch.Generator | None = None,
) -> Birth:
    """A head on the plane {v, u}: W_q = sqrt(sigma) [v, u, ...], W_k = sqrt(sigma) [u, -v, ...], so that M = M_a = sigma (v u^T - u v^T).

    v = P S u / |P S u|, P across u: of all unit partners the one that captures most, u^T sym(S M_a) u = sigma |P S u|. direction: u, a unit
    vector [d]; eigenvalue: of the normalised operator along it. strength sigma: None for eigenvalue / |P S u| (not normalised), with which
    the head captures along u just what was left there; it is then at most |M_a|_2 of the heads that there are. noise: size of the further
    columns beside sqrt(sigma), so that they can learn; they add to M_a in the order of its square.
    Raises: InputError where u is an eigenvector of S (nothing can be captured), or for heads narrower than 2.
    Reconstructed (the paper has the plane in words); factors and partner are derived.
    """
    if head_width < 2:
        raise InputError(f"a head on a plane needs a width of at least 2, got {head_width}")
    u = torch.nn.functional.normalize(direction.double(), dim=0)
    across = operator.second_moment(u)
    across = across - (u @ across) * u
    reach = across.norm().item()
    if reach <= SEEN_AS_ZERO * operator.extremes[1]:
        raise InputError(
            "the direction is an eigenvector of the input's second moment: no head captures anything along it; take another"
        )
    v = across / reach
    left = eigenvalue * operator.scale
    sigma = left / reach if strength is None else strength
    if not 0 < sigma < math.inf:
        raise InputError(f"a head needs a positive finite strength, got {sigma:g} (eigenvalue {eigenvalue:g})")
    query, key = (
        noise * torch.randn(len(u), head_width, dtype=torch.float64, generator=generator).to(u) / math.sqrt(len(u))
        for _ in range(2)
    )
    query[:, 0], query[:, 1] = v, u
    key[:, 0], key[:, 1] = u, -v
    root = math.sqrt(sigma)
    return Birth(root * query, root * key, u, v, sigma, left, sigma * reach)


def noise_rise(birth: Birth, operator: DirectionalOperator) -> float:
    """By how much at most the columns of a birth beside its plane raise R, the sum of the positive eigenvalues (normalised).

    They add a symmetric E = sym(P S N P) of rank r to the residual, and the positive part of a sum is at most the sum of the positive parts:
    at most sqrt(r) |E|_F <= sqrt(r) |S|_2 |N_q|_F |N_k|_F, with r at most four times the number of those columns (derived).
    """
    query, key = birth.query[:, 2:], birth.key[:, 2:]
    rank = min(len(query), 4 * query.shape[1])
    return math.sqrt(rank) * operator.extremes[1] * (query.norm() * key.norm()).item() / operator.scale


def at_random(
    operator: DirectionalOperator,
    direction: Float[Tensor, " d"],
    eigenvalue: float,
    head_width: int,
    *,
    generator: torch.Generator | None = None,
) -> Birth:
    """The control: Gaussian query and key factors with entries of variance 1 / d; the direction is only noted, as first-party code does."""
    u = torch.nn.functional.normalize(direction.double(), dim=0)
    d = len(u)
    query, key = (
        torch.randn(d, head_width, dtype=torch.float64, generator=generator).to(u) / math.sqrt(d) for _ in range(2)
    )
    image = operator.second_moment((query @ (key.T @ u) - key @ (query.T @ u)) / 2)
    return Birth(query, key, u, torch.zeros_like(u), 0.0, eigenvalue * operator.scale, (u @ image).item())
