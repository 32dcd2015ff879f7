"""Soft nearest-neighbour assignment to prototypes, its losses, and where prototypes start.

Axis legend: ``n`` tokens, ``k`` prototypes, ``d`` width; leading axes (heads) broadcast. Prototypes are rows [... k d].

Reconstructed from the abstracts and reviews of Cirrincione 2026 (arXiv 2604.01740, arXiv 2604.01880), whose texts were not available: the
rule of assignment, the split of the loss and the gradient of its variance at a fixed assignment are reported there; what is proved here is
proved from these definitions.
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.ops.precision import full_precision, wide

Gradient = Literal["through", "detached"]
GRADIENTS: tuple[Gradient, ...] = ("through", "detached")
LOG_TEMPERATURE = (math.log(1e-3), math.log(1e3))  # what a learned log-temperature is clamped to


class Assigned(NamedTuple):
    """Tokens assigned to prototypes, one number per token.

    weights [... n k]: q, on the simplex. reconstruction [... n d]: x^ = sum q_k p_k. fit [... n]: |x - x^|^2. variance [... n]:
    sum q_k |p_k - x^|^2. entropy [... n]: of q, in nats. fit + variance = sum q_k |x - p_k|^2, exactly, for any q on the simplex.
    """

    weights: Float[Tensor, "*b n k"]
    reconstruction: Float[Tensor, "*b n d"]
    fit: Float[Tensor, "*b n"]
    variance: Float[Tensor, "*b n"]
    entropy: Float[Tensor, "*b n"]

    @property
    def loss(self) -> Float[Tensor, "*b n"]:
        """L_q = fit + variance."""
        return self.fit + self.variance

    def free_energy(self, temperature: Tensor | float, *, normalised: bool = False) -> Float[Tensor, "*b n"]:
        """F = L_q - tau H(q) = -tau log sum_k exp(-|x - p_k|^2 / tau), where q is the assignment at this temperature.

        normalised: with (1/K) before the sum, F + tau ln K. Descending F in tau warms without bound (dF/dtau = -H), descending the normalised
        form cools (dF/dtau = ln K - H >= 0).
        """
        tau = _over_tokens(temperature)
        free = self.loss - tau * self.entropy
        return free + tau * math.log(self.weights.shape[-1]) if normalised else free


def squared_distances(x: Float[Tensor, "*#b n d"], prototypes: Float[Tensor, "*#b k d"]) -> Float[Tensor, "*b n k"]:
    """|x - p_k|^2, never below zero. Shapes: [... n d], [... k d] -> [... n k]."""
    cross = x @ prototypes.mT
    sizes = x.square().sum(-1, keepdim=True) + prototypes.square().sum(-1).unsqueeze(-2)
    return (sizes - 2 * cross).clamp(min=0)


def assignment(
    x: Float[Tensor, "*#b n d"], prototypes: Float[Tensor, "*#b k d"], temperature: Float[Tensor, "*#b"] | float
) -> Float[Tensor, "*b n k"]:
    """q = softmax over k of -|x - p_k|^2 / tau. Shapes: [... n d], [... k d], [...] -> [... n k]."""
    return at_temperature(nearness(x, prototypes), temperature)


def nearness(x: Float[Tensor, "*#b n d"], prototypes: Float[Tensor, "*#b k d"]) -> Float[Tensor, "*b n k"]:
    """2 x.p_k - |p_k|^2: minus the squared distance, but for |x|^2, which is common to all prototypes.

    About the mean of the prototypes, which distances do not see and which keeps the digits when all lie far from the origin.
    """
    centre = prototypes.detach().mean(-2, keepdim=True)
    y, p = x - centre, prototypes - centre
    return 2 * y @ p.mT - p.square().sum(-1).unsqueeze(-2)


def at_temperature(
    scores: Float[Tensor, "*b n k"], temperature: Float[Tensor, "*#b"] | float
) -> Float[Tensor, "*b n k"]:
    """softmax of scores / tau."""
    tau = temperature[..., None, None] if isinstance(temperature, Tensor) else temperature
    return torch.softmax(scores / tau, -1)


def assign(
    x: Float[Tensor, "*#b n d"],
    prototypes: Float[Tensor, "*#b k d"],
    temperature: Float[Tensor, "*#b"] | float,
    *,
    gradient: Gradient = "through",
) -> Assigned:
    """Assign tokens to prototypes and take the loss apart, in float32 or wider, autocast or not.

    Shapes: x [... n d], prototypes [... k d], temperature [...] or a number -> :class:`Assigned`.
    gradient: of fit and variance, ``through`` the assignment: dL_q/dp_k = 2 q_k [1 - (d_k - d) / tau] (p_k - x) with d_k = |x - p_k|^2 and
    d = sum q_k d_k, so that a prototype with d_k > d + tau is repelled; or with the assignment ``detached`` for tokens and prototypes:
    2 q_k (p_k - x), which is also the gradient of the free energy. The temperature has its gradient in both, Var_q(d) / tau^2. So have
    weights, reconstruction and entropy: a layer whose output is the reconstruction would otherwise pass nothing back.
    """
    with full_precision(x):
        x, prototypes = wide(x), wide(prototypes)
        scores = nearness(x, prototypes)
        q = at_temperature(scores, temperature)
        reconstruction = q @ prototypes
        held, about = q, reconstruction
        if gradient == "detached":
            held = at_temperature(scores.detach(), temperature)
            about = held @ prototypes
        fit = (x - about).square().sum(-1)
        # Distances between vectors of about one size, not a difference of large squares: exact where prototypes coincide.
        variance = (held * squared_distances_of(prototypes, about)).sum(-1)
        entropy = -torch.xlogy(q, q).sum(-1)
    return Assigned(q, reconstruction, fit, variance, entropy)


def squared_distances_of(
    prototypes: Float[Tensor, "*#b k d"], points: Float[Tensor, "*#b n d"]
) -> Float[Tensor, "*b n k"]:
    """|p_k - y_n|^2 about the mean of the prototypes. Shapes: [... k d], [... n d] -> [... n k]."""
    centre = prototypes.detach().mean(-2, keepdim=True)
    return squared_distances(points - centre, prototypes - centre)


def critical_temperature(x: Float[Tensor, "*b n d"], *, gradient: Gradient = "through") -> Float[Tensor, "*b"]:
    """Below it prototypes that lie together at the mean of the tokens part; at or above it they stay one point, whatever their number.

    4 lambda_max(C) for L_q with the gradient through the assignment, 2 lambda_max(C) for the detached rule and the free energy; C is the
    covariance of the tokens (over n, not n - 1). Shapes: [... n d] -> [...], in the units of a squared distance, float64.
    Source: derived for L_q; for the free energy Rose 1998 (Proc. IEEE 86, 2210), the first phase transition.
    """
    return (4 if gradient == "through" else 2) * largest_variance(x)


def largest_variance(x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b"]:
    """lambda_max of the covariance of the tokens. Shapes: [... n d] -> [...], float64."""
    y = x.detach().double()
    y = y - y.mean(-2, keepdim=True)
    gram = y @ y.mT if y.shape[-2] < y.shape[-1] else y.mT @ y
    return torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0) / y.shape[-2]


@torch.no_grad()
def kmeans_plus_plus(
    x: Float[Tensor, "n d"], count: int, generator: torch.Generator | None = None
) -> Float[Tensor, "k d"]:
    """``count`` of the tokens, each drawn with a probability that grows as the square of its distance to those before it.

    A token that is drawn already has none, so the points differ as long as the tokens do. Shapes: [n d] -> [count d].
    Source: Arthur and Vassilvitskii 2007 (k-means++, SODA), the plain form with one candidate a step.
    """
    y = x.detach().double()
    first = int(torch.randint(len(y), (), generator=generator))
    chosen, nearest = [first], (y - y[first]).square().sum(-1)
    for _ in range(count - 1):
        total = nearest.sum()
        weights = nearest if total > 0 else torch.ones_like(nearest)  # fewer different tokens than prototypes
        # By hand: torch.multinomial takes 2^24 categories at most and draws differently on every device.
        at = torch.rand((), generator=generator, dtype=torch.float64).to(y.device) * weights.sum()
        following = int((weights.cumsum(0) <= at).sum().clamp(max=len(y) - 1))
        chosen.append(following)
        nearest = torch.minimum(nearest, (y - y[following]).square().sum(-1))
    return x[chosen].detach().clone()


def _over_tokens(temperature: Tensor | float) -> Tensor | float:
    return temperature[..., None] if isinstance(temperature, Tensor) else temperature
