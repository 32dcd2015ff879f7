"""Does a path circulate? Linear stationary diffusions, their theory and what is estimated of them from a path.

dx = -A x dt + sqrt(2 D) dW with stationary covariance C solves A C + C A^T = 2 D. The circulation Q = A C - D is antisymmetric, the
stationary current is J = -Q C^-1 x p(x), and detailed balance is Q = 0. Sign, everywhere here: the area that a path sweeps,
1/2 <x_i dx_j - x_j dx_i> / dt with midpoints (Stratonovich), is **+Q_ij**; the antisymmetric part of the lagged covariance
E[x_t+s x_t^T] is -s Q to first order in s. All in float64, paths are [times, directions]. Derived by us, as in the literature on linear
nonequilibrium states (Weiss 2003, Tellus A 55, 208; Zia and Schmittmann 2007, arXiv cond-mat/0701763; Strang 2024, arXiv 2411.07613, on
area rates).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from scipy.linalg import solve_continuous_lyapunov
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real

_DERIVED = "derived by us; as Zia and Schmittmann 2007, arXiv cond-mat/0701763"
_PATH = "path [times directions]"
SWEPT_BY_WALK = (
    10 / 3
)  # of two cosines of one half turn and of one, which the first components of a long random walk are


def _path(path: Tensor, least: int = 3) -> Tensor:
    if isinstance(path, Tensor) and (path.ndim != 2 or path.shape[0] < least or path.shape[1] < 1):
        raise ShapeError(f"a path must be [times directions] with at least {least} times, got shape {list(path.shape)}")
    return real(path, "the path").double()


def _square(*matrices: Tensor) -> list[Tensor]:
    for m in matrices:
        if m.ndim != 2 or m.shape != matrices[0].shape or m.shape[0] != m.shape[1]:
            raise ShapeError(
                f"drift, diffusion and covariance must be square of one size, got {[list(x.shape) for x in matrices]}"
            )
    return [real(m, "a matrix of the diffusion").double() for m in matrices]


# theory


def stationary_covariance(drift: Float[Tensor, "k k"], diffusion: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    """C with A C + C A^T = 2 D. Raises: ShapeError; InputError for a drift that does not pull back (an eigenvalue
    without positive real part).
    """
    a, d = _square(drift, diffusion)
    if torch.linalg.eigvals(a).real.min() <= 0:
        raise InputError(
            "the drift must pull back in every direction (eigenvalues of A with positive real parts) to be stationary"
        )
    c = torch.from_numpy(solve_continuous_lyapunov(a.cpu().numpy(), 2 * d.cpu().numpy())).to(a)
    return (c + c.mT) / 2


def circulation(
    drift: Float[Tensor, "k k"], diffusion: Float[Tensor, "k k"], covariance: Tensor | None = None
) -> Float[Tensor, "k k"]:
    """Q = A C - D, antisymmetric where C is stationary; 0: detailed balance (then A D = D A^T). Raises: as :func:`stationary_covariance`."""
    a, d = _square(drift, diffusion)
    c = stationary_covariance(a, d) if covariance is None else _square(covariance)[0]
    return a @ c - d


@measure(
    "vortex.entropy_production",
    summary="entropy that a linear stationary diffusion makes in a unit of time: 0 where it runs forward as backward",
    source=_DERIVED,
    takes="circulation, diffusion and covariance [k k]",
    range=(0.0, None),
    unit="nats/step",
    null="the same fit of simulated paths with the same covariance and diffusion and no circulation",
)
def entropy_production(
    circulation: Float[Tensor, "k k"], diffusion: Float[Tensor, "k k"], covariance: Float[Tensor, "k k"]
) -> Float[Tensor, ""]:
    """e_p = -tr(D^-1 Q C^-1 Q), which is tr(A^T D^-1 A C) - tr A at stationarity (:func:`entropy_production_of_drift`)."""
    q, d, c = _square(circulation, diffusion, covariance)
    return -torch.trace(torch.linalg.solve(d, q) @ torch.linalg.solve(c, q))


def entropy_production_of_drift(
    drift: Float[Tensor, "k k"], diffusion: Float[Tensor, "k k"], covariance: Float[Tensor, "k k"]
) -> Float[Tensor, ""]:
    """The second form, tr(A^T D^-1 A C) - tr A."""
    a, d, c = _square(drift, diffusion, covariance)
    return torch.trace(a.mT @ torch.linalg.solve(d, a) @ c) - torch.trace(a)


def simulated(
    drift: Float[Tensor, "k k"],
    diffusion: Float[Tensor, "k k"],
    times: int,
    *,
    paths: int = 1,
    step: float = 1.0,
    generator: torch.Generator,
) -> Float[Tensor, "paths times k"]:
    """Stationary paths of the diffusion, by its exact transition over ``step``. Raises: as :func:`stationary_covariance`."""
    a, d = _square(drift, diffusion)
    c = stationary_covariance(a, d)
    m = torch.linalg.matrix_exp(-a * step)
    kick, root = _root(c - m @ c @ m.mT), _root(c)
    noise = torch.randn(times, paths, len(a), dtype=torch.float64, generator=generator).to(a)
    out = noise @ kick.mT
    out[0] = noise[0] @ root.mT
    for t in range(1, times):
        out[t] += out[t - 1] @ m.mT
    return out.transpose(0, 1)


def _root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
    return vectors * values.clamp(min=0).sqrt()


# what a path says


@measure(
    "vortex.area_rate",
    summary="area swept in the plane found per unit of time, over its spread there, signed: on average a lower bound for the fastest",
    source=f"{_DERIVED}; Strang 2024, arXiv 2411.07613",
    takes=_PATH,
    range=(None, None),
    unit="1/step",
    null="0; the second coordinate with its blocks in another order",
)
def area_rate(path: Float[Tensor, "n k"], step: float = 1.0) -> Float[Tensor, "k k"]:
    """1/2 <x_i dx_j - x_j dx_i> / dt with midpoints about the mean: estimates +Q. Shapes: [n k] -> [k k], antisymmetric.

    step: time between two rows. In a plane chosen on other records it is, in expectation, a lower bound for the fastest plane.
    Raises: ShapeError, InputError.
    """
    x = _path(path)
    x = x - x.mean(0)
    product = x[:-1].mT @ x[1:]  # x_i(t) x_j(t+1); the midpoint and the left end give the same antisymmetric part
    return (product - product.mT) / (2 * step * (len(x) - 1))


def lag_antisymmetry(path: Float[Tensor, "n k"], lag: int = 1, step: float = 1.0) -> Float[Tensor, "k k"]:
    """(C(s) - C(s)^T) / (2 s) with C(s) = E[x_t+s x_t^T] about the mean: estimates -Q for short lags s = lag * step.

    Raises: ShapeError, InputError.
    """
    x = _path(path, lag + 2)
    if lag < 1:
        raise InputError(f"a lag is at least one row, got {lag}")
    x = x - x.mean(0)
    c = x[lag:].mT @ x[:-lag] / (len(x) - lag)
    return (c - c.mT) / (2 * lag * step)


class Fit(NamedTuple):
    """drift A, diffusion D, covariance C of a path, each [k k], and their circulation Q (antisymmetric part of A C)."""

    drift: Tensor
    diffusion: Tensor
    covariance: Tensor
    circulation: Tensor


def fit(path: Float[Tensor, "n k"], step: float = 1.0) -> Fit:
    """Drift and diffusion by least squares on midpoints: dx = -A (x + x') dt / 2 + noise, exact to second order in dt.

    Shapes: [n k]. Raises: ShapeError; InputError for fewer times than 2 k + 2, or directions that do not vary by themselves.
    """
    x = _path(path)
    n, k = x.shape
    if n < 2 * k + 2:
        raise InputError(
            f"drift and diffusion of {k} directions need at least {2 * k + 2} times, got {n}; take fewer directions"
        )
    x = x - x.mean(0)
    before, behind = x[:-1], x[1:]
    c = x.mT @ x / n
    if torch.linalg.cond(c) > 1e12:
        raise InputError(
            "directions of the path depend on each other, so drift and diffusion cannot be told apart; take fewer"
        )
    m = torch.linalg.solve(before.mT @ before, before.mT @ behind).mT  # x' = M x
    one = torch.eye(k, dtype=x.dtype, device=x.device)
    a = torch.linalg.solve((one + m).mT, 2 * (one - m).mT).mT / step
    off = behind - before @ m.mT
    half = one + a * (step / 2)
    d = half @ (off.mT @ off / (n - 1 - k)) @ half.mT / (2 * step)
    ac = a @ c
    return Fit(a, (d + d.mT) / 2, c, (ac - ac.mT) / 2)


@measure(
    "vortex.swept_area",
    summary="area swept about the mean in the plane of the first two principal components, over their standard deviations",
    source="Antognini and Sohl-Dickstein 2018, arXiv 1806.08805 (components of a walk are cosines); the area is derived by us",
    takes=_PATH,
    range=(0.0, None),
    null="10/3: a long random walk in many directions",
)
def swept_area(path: Float[Tensor, "n k"]) -> Float[Tensor, ""]:
    """|1/2 sum (x_t y_t+1 - y_t x_t+1)| / (sd x sd y) of the first two principal components. Shapes: [n k] -> scalar.

    A plain random walk draws such loops (10/3, sd about 0.24 at 2,000 steps): a large value is no vortex. Raises: ShapeError, InputError.
    """
    x = _path(path)
    if x.shape[1] < 2:
        raise ShapeError(f"an area needs two directions, got {x.shape[1]}")
    x = x - x.mean(0)
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    a, b = (u * s)[:, :2].unbind(1)
    size = a.std(correction=0) * b.std(correction=0)
    area = (a[:-1] * b[1:] - b[:-1] * a[1:]).sum().abs() / 2
    return area / torch.where(size > 0, size, 1.0)


def component_shares(path: Float[Tensor, "n k"], count: int = 3) -> list[float]:
    """Shares of the variance of the first principal components; of a long walk in many directions 6 / (pi j)^2: .61, .15, .07."""
    x = _path(path)
    energy = torch.linalg.svdvals(x - x.mean(0)).square()
    total = float(energy.sum())
    return [float(e) / total if total else 0.0 for e in energy[:count]]


class Plane(NamedTuple):
    """Two directions [k 2] in whose coordinates the path has unit covariance, turned so that it circulates from the first to the second.

    kept: directions that came back often enough to be looked at, of all.
    """

    basis: Tensor
    kept: int
    of: int


def fastest_plane(path: Float[Tensor, "n k"], least: float) -> Plane | None:
    """The plane of strongest circulation among the directions that relax at least ``least`` times within the path.

    How fast a direction relaxes is <dx^2> / (2 <x^2>) per row (slow feature analysis); the rest, which has not come back, is left out: there
    a drift and a stationary swirl cannot be told apart. None where fewer than two directions are left. Raises: ShapeError, InputError.
    Source: slow features, Wiskott and Sejnowski 2002 (Neural Computation 14, 715); the choice of the plane is ours.
    """
    x = _path(path)
    x = x - x.mean(0)
    n, k = x.shape
    values, vectors = torch.linalg.eigh(x.mT @ x / n)
    good = values > 1e-12 * values.amax()
    white = vectors[:, good] / values[good].sqrt()
    y = x @ white
    steps = y.diff(dim=0)
    rates, slow = torch.linalg.eigh(steps.mT @ steps / (2 * (n - 1)))
    enough = rates * n >= least
    kept = int(enough.sum())
    if kept < 2:
        return None
    basis = white @ slow[:, enough]
    q = area_rate(x @ basis)
    left, _, _ = torch.linalg.svd(q)
    u = left[:, 0]
    v = -(q @ u)  # q u is normal to u, and u q v > 0
    plane = torch.stack([u, v / torch.linalg.vector_norm(v)], dim=1)
    return Plane(basis @ plane, kept, k)


@measure(
    "vortex.relaxations",
    summary="how often the slower direction of a plane has forgotten its past within a path: n (1 - rho) of a first-order fit",
    source="Dickey and Fuller 1979 (JASA 74, 427)",
    takes=_PATH,
    range=(None, None),
    null="14.1: a random walk stays below it in 95 % of paths",
)
def relaxations(path: Float[Tensor, "n k"]) -> float:
    """n (1 - rho), the smallest over the columns, of x' - mean = rho (x - mean) + noise by least squares. Shapes: [n k] -> number.

    The statistic of Dickey and Fuller with a constant: above 14.1 a random walk is rejected at 5 %. Raises: ShapeError, InputError.
    """
    x = _path(path)
    before, behind = x[:-1], x[1:]
    before, behind = before - before.mean(0), behind - behind.mean(0)
    size = before.square().sum(0)
    rho = (before * behind).sum(0) / torch.where(size > 0, size, 1.0)
    return float(len(before) * (1 - rho.max()))


@measure(
    "vortex.radius_ratio",
    summary="norm of the weights over the norm that weight decay and the size of the updates predict",
    source="derived by us: sqrt(N eta sigma^2 / (lambda (2 - eta lambda))); Kosson et al. 2023, arXiv 2305.17212, for AdamW",
    takes=_PATH,
    range=(0.0, None),
    null="1: stationary and isotropic, updates that do not know each other",
)
def radius_ratio(path: Float[Tensor, "n k"], decay: float) -> float:
    """Root mean square norm over its prediction sqrt(E|x' - rho x|^2 / (1 - rho^2)), rho = 1 - ``decay``. Shapes: [n k], not centred.

    decay: share of the weights that is lost between two rows, 1 - (1 - lr * weight_decay)^rows. With one row a step and noise of variance
    (eta sigma)^2 a direction the prediction is the stationary sqrt(N eta sigma^2 / (lambda (2 - eta lambda))).
    Raises: ShapeError; InputError for a decay outside (0, 1).
    """
    x = _path(path)
    if not 0 < decay < 1:
        raise InputError(f"the decay between two rows must lie between 0 and 1, got {decay}")
    rho = 1 - decay
    power = (x[1:] - rho * x[:-1]).square().sum(1).mean() / (1 - rho**2)
    return math.sqrt(float(x.square().sum(1).mean() / power)) if power > 0 else math.inf


def norm_radius(directions: int, lr: float, noise: float, decay: float) -> float:
    """sqrt(N eta sigma^2 / (lambda (2 - eta lambda))): stationary norm of N weights under x' = (1 - eta lambda) x - eta sigma xi.

    Derived by us.
    """
    return math.sqrt(directions * lr * noise**2 / (decay * (2 - lr * decay)))
