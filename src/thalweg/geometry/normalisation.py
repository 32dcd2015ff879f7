"""RMSNorm as a map: a diffeomorphism onto an open ball, its inverse, its Jacobian's norm, and how that depends on epsilon.

With ms = mean x^2 and s = ms + eps the map is y = x / sqrt(s). The paper writes sqrt(d) x / sqrt(|x|^2 + eps'): eps' = d eps.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real

_PAPER = "Liang 2026 (arXiv 2607.17146); "
_DERIVED = f"{_PAPER}the exact norm is derived by us"


def rms_map(x: Float[Tensor, "*b width"], eps: float) -> Float[Tensor, "*b width"]:
    """x / sqrt(mean x^2 + eps): for eps > 0 a diffeomorphism of R^d onto the open ball of radius sqrt(d). Raises: InputError for eps < 0."""
    return x * torch.rsqrt(real(x, "x").square().mean(-1, keepdim=True) + _epsilon(eps, least=0.0))


def rms_inverse(y: Float[Tensor, "*b width"], eps: float) -> Float[Tensor, "*b width"]:
    """The x with ``rms_map(x, eps) == y``: y sqrt(eps) / sqrt(1 - mean y^2).

    It divides by 1 - mean y^2 = eps / (mean x^2 + eps), so of y known to a relative error u it is known to about u mean x^2 / eps.
    Raises: InputError for a y outside the open ball, and for eps = 0, at which the map has no inverse.
    """
    eps = _epsilon(eps, least=None)
    left = 1 - real(y, "y").square().mean(-1, keepdim=True)
    if not bool((left > 0).all()):
        raise InputError(
            f"the inverse of RMSNorm takes y with a mean square below 1, got {float(y.square().mean(-1).max()):.9g}; "
            "compute y in float64, or with a larger epsilon"
        )
    return y * (eps / left).sqrt()


@measure(
    "rmsnorm.lipschitz_local",
    summary="how much RMSNorm stretches a small change at a token: norm of its Jacobian, without the gain",
    source=_DERIVED,
    takes="states [... width], eps",
    range=(0.0, None),
    null="1 / rms: what it would be with epsilon 0",
)
def rms_jacobian_norm(x: Float[Tensor, "*b width"], eps: float) -> Float[Tensor, "*b"]:
    """Operator norm of J = s^(-1/2) (I - x x^T / (d s)) at every x, in float64.

    J has the eigenvalue s^(-1/2) across x (width - 1 times) and eps s^(-3/2) along x, so the norm is (mean x^2 + eps)^(-1/2), and of a
    width of 1 the latter. A gain g multiplies it by at most max |g|. Raises: InputError.
    """
    total = real(x, "x").double().square().mean(-1) + _epsilon(eps, least=0.0)
    return total.rsqrt() if x.shape[-1] > 1 else eps * total.pow(-1.5)


@measure(
    "rmsnorm.lipschitz_global",
    summary="the largest stretch of RMSNorm anywhere: max |gain| / sqrt(epsilon), reached at the origin alone",
    source=_PAPER + "the constant is derived by us",
    takes="gain [width], eps",
    range=(0.0, None),
    null="1 / sqrt(epsilon): a gain of one",
)
def rms_lipschitz(gain: Float[Tensor, " width"], eps: float) -> Float[Tensor, ""]:
    """max |g| eps^(-1/2), in float64. Raises: InputError for eps <= 0, where the map is not Lipschitz."""
    return real(gain, "gain").double().abs().max() / _epsilon(eps, least=None) ** 0.5


def power_law(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> tuple[float, float, float]:
    """Least squares of log y on log x: slope, intercept (natural logarithm) and R^2, which is 1 where y does not vary.

    Raises: ShapeError, InputError for values that are not positive.
    """
    if x.ndim != 1 or x.shape != y.shape or x.numel() < 2:
        raise ShapeError(
            f"a fit needs two vectors of one length of at least 2, got {list(x.shape)} and {list(y.shape)}"
        )
    if not bool((x > 0).all() and (y > 0).all()):
        raise InputError("a power law is fitted to positive numbers alone")
    u, v = x.double().log(), y.double().log()
    du, dv = u - u.mean(), v - v.mean()
    slope = float((du * dv).sum() / du.square().sum())
    total = float(dv.square().sum())
    left = float((dv - slope * du).square().sum())
    return slope, float(v.mean() - slope * u.mean()), 1 - left / total if total > 0 else 1.0


@measure(
    "rmsnorm.slope",
    summary="line fitted to log stretch over a range of log epsilon, on which it depends (the probe's: 1e-12 to 0.1)",
    source=f"{_PAPER}values away from the origin are derived by us",
    takes="mean square, epsilons [n]",
    range=(-0.5, 0.0),
    null="0: epsilon is not felt; -1/2 at the origin",
)
def epsilon_slope(mean_square: float, epsilons: Float[Tensor, " n"]) -> tuple[float, float]:
    """Slope and R^2 of log (mean_square + eps)^(-1/2) on log eps, which grow with the largest of ``epsilons``. Raises: ShapeError, InputError.

    At a mean square of 0.0132 it is -1e-5 over 1e-12 to 1e-5 and -0.072 over 1e-12 to 10; :func:`local_slope` asks no range.
    """
    slope, _, r2 = power_law(epsilons, (epsilons.double() + mean_square).rsqrt())
    return slope, r2


@measure(
    "rmsnorm.slope.local",
    summary="d log stretch / d log epsilon at one epsilon and size of activations: -eps / (2 (ms + eps)), exact",
    source=f"{_PAPER}values away from the origin are derived by us",
    takes="mean squares [n], eps",
    range=(-0.5, 0.0),
    null="0: epsilon is not felt; -1/2 at the origin",
)
def local_slope(mean_square: Float[Tensor, "*b"], eps: float) -> Float[Tensor, "*b"]:
    """Derivative of log (mean_square + eps)^(-1/2) in log eps, in float64; 0 for eps = 0. Raises: InputError for eps < 0."""
    total = real(mean_square, "mean_square").double() + _epsilon(eps, least=0.0)
    return -0.5 * eps / total if eps else torch.zeros_like(total)


def _epsilon(eps: float, least: float | None) -> float:
    if not (eps > 0 if least is None else eps >= least) or eps == float("inf"):
        raise InputError(f"epsilon must be {'above' if least is None else 'at least'} 0 and finite, got {eps}")
    return eps
