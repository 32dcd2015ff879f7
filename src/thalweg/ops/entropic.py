"""Attention as entropic transport: the half bridge (softmax) and the full bridge (both marginals), in the log domain.

``logits`` [... q k] are -cost / temperature, -inf where a query may not look. A plan is a matrix of masses, one row a query.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError


class Bridge(NamedTuple):
    """log_plan [... q k]: its rows hold exactly the row marginals. residual: largest total variation, over the batch, of the columns from their
    marginals, as a share of the mass. iterations: that were made."""

    log_plan: Tensor
    residual: float
    iterations: int


def free_energy(cost: Float[Tensor, "*b k"], temperature: float = 1.0) -> Float[Tensor, "*b"]:
    """-T log sum exp(-cost / T): the least value of <cost, p> - T H(p) over distributions p, reached by softmax(-cost / T).

    Infinite costs forbid a key. Raises: InputError for a temperature that is not positive.
    Source: Gibbs variational principle; Liang 2026 (arXiv 2607.17146) reads attention so, the constants are derived by us.
    """
    return -_temperature(temperature) * torch.logsumexp(-cost / temperature, -1)


def half_bridge(cost: Float[Tensor, "*b k"], temperature: float = 1.0) -> Float[Tensor, "*b k"]:
    """softmax(-cost / T): the plan with the row marginals alone, the first half-step of Sinkhorn's iteration. Raises: InputError."""
    return torch.softmax(-cost / _temperature(temperature), -1)


def functional(
    plan: Float[Tensor, "*b k"], cost: Float[Tensor, "*b k"], temperature: float = 1.0
) -> Float[Tensor, "*b"]:
    """<cost, p> - T H(p) of rows, with 0 log 0 = 0 and no mass on infinite costs. Raises: InputError."""
    paid = torch.where(plan > 0, plan * cost, 0.0).sum(-1)
    return paid - _temperature(temperature) * entropy(plan)


def entropy(plan: Float[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
    """-sum p log p of rows, nats."""
    return torch.special.entr(plan).sum(-1)


def causal_columns(
    length: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Float[Tensor, " k"]:
    """Column masses of the plan in which every query spreads a mass of 1 evenly over itself and the past: sum_(i >= j) 1 / (i + 1).

    Under a causal mask these can be met. Uniform ones force the identity, the only triangular doubly stochastic matrix. Derived by us.
    """
    each = 1.0 / torch.arange(1, length + 1, dtype=torch.float64, device=device)
    return each.flip(0).cumsum(0).flip(0).to(dtype)


def full_bridge(
    logits: Float[Tensor, "*b q k"],
    columns: Float[Tensor, "*#b k"] | None = None,
    rows: Float[Tensor, "*#b q"] | None = None,
    iterations: int = 100,
    tolerance: float = 1e-4,
) -> Bridge:
    """The plan nearest to exp(logits) in Kullback-Leibler divergence with both marginals, by alternating log-softmax.

    rows: masses of queries, None: 1 each. columns: of keys, None: the mass spread evenly. Both add up to one mass. Stops when the columns are
    within ``tolerance`` of the mass everywhere, or after ``iterations``; the residual says which. Differentiable through the iterations.
    Without gradients the same iterations are made on factors of rows and columns, five times as fast, as long as no factor comes near the end
    of its range; else, and with gradients, on logarithms. The two agree to rounding.
    Raises: ShapeError, InputError for marginals that differ in mass or are not positive.
    Source: Sinkhorn and Knopp 1967; Peyre and Cuturi 2019 (arXiv 1803.00567), section 4.4 (log domain).
    """
    if logits.ndim < 2:
        raise ShapeError(f"a bridge takes logits [... q k], got shape {list(logits.shape)}")
    if iterations < 1 or not tolerance >= 0:
        raise InputError(
            f"a bridge needs at least 1 iteration and a tolerance of at least 0, got {iterations} and {tolerance}"
        )
    q, k = logits.shape[-2:]
    a = _marginal(rows, q, "rows", logits, 1.0)
    mass = a.sum(-1, keepdim=True)
    b = _marginal(columns, k, "columns", logits, q / k)
    if bool(((b.sum(-1, keepdim=True) - mass).abs() > 1e-3 * mass).any()):
        raise InputError(
            f"the marginals of a bridge must hold one mass, got rows of {float(mass.max()):.6g} and columns of {float(b.sum(-1).max()):.6g}"
        )
    log_a, log_b = a.log().unsqueeze(-1), b.log().unsqueeze(-2)
    z = torch.log_softmax(logits, -1) + log_a
    if not (torch.is_grad_enabled() and z.requires_grad):
        found = _by_factors(z, a, b, iterations, tolerance)
        if found is not None:
            return found
    residual, done = float("inf"), 0
    for done in range(1, iterations + 1):
        z = torch.log_softmax(z, -2) + log_b
        z = torch.log_softmax(z, -1) + log_a
        if done % 5 == 0 or done == iterations:
            off = (z.detach().exp().sum(-2) - b).abs().sum(-1, keepdim=True) / (2 * mass)
            residual = float(off.max())
            if residual <= tolerance:
                break
    return Bridge(z, residual, done)


def _by_factors(z: Tensor, a: Tensor, b: Tensor, iterations: int, tolerance: float) -> Bridge | None:
    """The plan u_i exp(z_ij) v_j of :func:`full_bridge`, z [... q k] with rows of mass a; None where a factor leaves the safe range.

    An entry below the smallest normal number counts as none. What its column loses by that is below q tiny max(u) max(v) / min(b) of it.
    """
    tiny = torch.finfo(z.dtype).tiny
    kernel = z.exp()
    kernel = kernel.masked_fill_(kernel < tiny, 0.0)  # what is left below it would be slow and without digits
    most = LOST * float(b.min()) / (z.shape[-2] * tiny)
    mass = a.sum(-1, keepdim=True)
    u = torch.ones_like(z[..., 0])
    columns = kernel.sum(-2)
    residual, done, v = float("inf"), 0, columns
    for done in range(1, iterations + 1):
        v = b / columns
        u = a / (kernel * v.unsqueeze(-2)).sum(-1)
        columns = (kernel * u.unsqueeze(-1)).sum(-2)
        if done % 5 == 0 or done == iterations:
            if not float(u.max()) * float(v.max()) < most:  # also where one is no number
                return None
            residual = float(((columns * v - b).abs().sum(-1, keepdim=True) / (2 * mass)).max())
            if residual <= tolerance:
                break
    return Bridge(z + u.log().unsqueeze(-1) + v.log().unsqueeze(-2), residual, done)


class CausalMasses(NamedTuple):
    """What later rows of a causal bridge need of earlier ones. columns [... iterations k]: log masses that keys have received, by iteration;
    prior [... k]: what uniform attention over the visible keys has given them."""

    columns: Tensor
    prior: Tensor


def causal_bridge(logits: Float[Tensor, "*b t t"], iterations: int = 5) -> Float[Tensor, "*b t t"]:
    """A bridge whose row i depends on rows up to i alone: log weights [... t t], each row normalised, with column masses drawn to their prior.

    Plain Sinkhorn under a causal mask lets a row see later ones through the column sums, and with uniform columns gives the identity. Here the
    column potential that row i meets is made of the rows up to i: g_ij = log c_ij - log sum_(i' <= i) exp(z_i'j + f_i'), where c_ij =
    sum_(i' <= i) 1 / (keys that i' sees), over the i' that see j, is what uniform attention has given to key j so far, and
    f_i = -log sum_j exp(z_ij + g_ij). Rows come last, so they sum to one; the columns are drawn to c and do not meet it. ``logits`` are -inf
    where a query may not look; every query sees one key at least. Without iterations it is softmax. Derived by us.
    Shapes: [... t t] -> [... t t]. Cost: t^2 for every iteration.
    """
    return causal_bridge_on(logits, None, iterations)[0]


def causal_bridge_on(
    logits: Float[Tensor, "*b q k"], past: CausalMasses | None, iterations: int
) -> tuple[Float[Tensor, "*b q k"], CausalMasses]:
    """:func:`causal_bridge` of the last q of the k tokens, given what the rows before them left (None: there are none); and what they leave.

    Rows in any pieces, one after the other, give what all at once give. Raises: InputError for masses of another number of iterations or of
    more keys.
    """
    k = logits.shape[-1]
    visible = logits > -torch.inf
    even = visible.to(logits.dtype)
    prior = (even / even.sum(-1, keepdim=True).clamp(min=1)).cumsum(-2)
    received = None
    if past is not None:
        if past.columns.shape[-2] != iterations or past.prior.shape[-1] > k:
            raise InputError(
                f"the masses are of {past.columns.shape[-2]} iterations and {past.prior.shape[-1]} keys, these logits of {iterations} and {k}; "
                "give those of the rows before"
            )
        new = (0, k - past.prior.shape[-1])
        prior = prior + F.pad(past.prior, new).unsqueeze(-2)
        received = F.pad(past.columns, new, value=FLOOR)
    log_prior = torch.where(visible, prior, 1.0).log()
    z = torch.log_softmax(logits, -1)
    f, g = torch.zeros_like(z[..., :1]), torch.zeros_like(z)
    columns = []
    for step in range(iterations):
        mass = torch.logcumsumexp(torch.where(visible, z + f, FLOOR), -2)
        if received is not None:
            mass = torch.logaddexp(mass, received[..., step, :].unsqueeze(-2))
        columns.append(mass[..., -1, :])
        g = torch.where(visible, log_prior - mass, 0.0)
        f = -torch.logsumexp(z + g, -1, keepdim=True)
        f = torch.where(torch.isfinite(f), f, 0.0)
    left = torch.stack(columns, -2) if columns else z.new_zeros(*z.shape[:-2], 0, k)
    return (torch.log_softmax(z + g, -1) if iterations else z), CausalMasses(left, prior[..., -1, :])


def two_way_bridge(logits: Float[Tensor, "*b t t"], iterations: int = 5) -> Float[Tensor, "*b t t"]:
    """Sinkhorn's iterations between uniform marginals, rows last: log weights [... t t], doubly stochastic in the limit.

    ``logits`` are -inf where a query may not look, on the same places above and below the diagonal, which is visible, so that a plan with both
    marginals exists. Without iterations it is softmax. Differs from :func:`full_bridge` in that nothing depends on values: it can be compiled.
    Source: Sander et al. 2022 (arXiv 2110.11773), Sinkformers.
    """
    z = torch.log_softmax(logits, -1)
    for _ in range(iterations):
        z = torch.log_softmax(torch.log_softmax(z, -2), -1)
    return z


LOST = 1e-6  # share of a column that entries too small for a float may be
FLOOR = -1e4  # the logarithm of nothing, where -inf would give NaN gradients


def _temperature(value: float) -> float:
    if not 0 < value < float("inf"):
        raise InputError(f"a temperature must be above 0 and finite, got {value}")
    return value


def _marginal(given: Tensor | None, size: int, what: str, logits: Tensor, even: float) -> Tensor:
    if given is None:
        return torch.full((size,), even, dtype=logits.dtype, device=logits.device)
    if given.shape[-1] != size:
        raise ShapeError(f"{what} of a bridge must hold {size} masses, got shape {list(given.shape)}")
    if not bool((given > 0).all()):
        raise InputError(f"{what} of a bridge must be positive masses; leave out tokens without any")
    return given.to(logits.device, logits.dtype)
