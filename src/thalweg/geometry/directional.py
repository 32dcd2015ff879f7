"""The directional residual: what the antisymmetric part of attention does to a layer's input, beside the directions captured already.

Conventions: scores of token i on token j are x_i W_q W_k^T x_j^T, so query and key factors are [d r] (of several heads side by side, r = heads
x head width), M = W_q W_k^T, M_a = (M - M^T) / 2, S = X^T X / tokens. Rotary angles, scales of the scores and norms of queries and keys are
not in M.

Reconstructed from the abstract and reviews of Cirrincione 2026 (INCRT, arXiv 2604.10703), whose text was not available. Ours: the division by
|S|_2 |M|_F, without which thresholds mean nothing across widths and layers, and the option ``center``.
"""

import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import one_point, real, token_matrix

_SOURCE = "reconstructed from the reviews of Cirrincione 2026, arXiv 2604.10703"
_TAKES = "input [n d], query and key factors [d r], captured directions [d c] or None"
_FACTORS = "query and key factors [d r]"
CHANCE = 1 / math.sqrt(2)  # asymmetry of independent Gaussian factors
LARGEST_GRAM = 1024  # side of a matrix whose eigenvalues are all computed
BLOCK = 256  # columns of the operator that are held at a time


class DirectionalOperator:
    """A = P sym(S M_a) P / (|S|_2 |M|_F), known by its products: above a width of 1,024 no [d d] matrix is formed.

    sym(S M_a) = (S M_a - M_a S) / 2, half the commutator: so without P the trace is 0 and A is 0 where S is a multiple of the identity
    (white input grows nothing). P projects the captured directions out. Rank at most 4 r.

    x [n d]: the layer's own input, padding left out. query, key [d r]. captured [d c]: orthonormal columns. center: about the mean token, whose
    direction dominates S otherwise. All in float64. The eigenvalues lie within [-1, 1].
    Raises: ShapeError, InputError for tokens that are not finite, all equal up to rounding, factors that are zero, or captured directions
    whose products are off by more than sqrt(eps) of their dtype.
    """

    def __init__(
        self,
        x: Float[Tensor, "n d"],
        query: Float[Tensor, "d r"],
        key: Float[Tensor, "d r"],
        captured: Float[Tensor, "d c"] | None = None,
        *,
        center: bool = False,
    ):
        given, x = x, token_matrix(x, "the input of the layer").detach()
        self.query, self.key = factors(query, key)
        if x.ndim != 2 or x.shape[1] != len(self.query):
            raise ShapeError(
                f"the input must be [tokens, {len(self.query)}], as wide as the factors, got {list(x.shape)}; flatten batch and time"
            )
        if one_point(given):
            raise InputError(
                f"the {len(x)} tokens of the input are one and the same vector (up to rounding), which has no directions; "
                "give embeddings that differ"
            )
        self.x = x - x.mean(0) if center else x
        self.captured = directions(captured, x.shape[1])

    @property
    def width(self) -> int:
        return self.x.shape[1]

    @property
    def rank(self) -> int:
        """An upper bound: 4 r, and the width."""
        return min(4 * self.query.shape[1], self.width)

    def second_moment(self, u: Float[Tensor, "d ..."]) -> Float[Tensor, "d ..."]:
        """S u = X^T (X u) / n."""
        return self.x.T @ (self.x @ u) / len(self.x) if self.moment is None else self.moment @ u

    def antisymmetric(self, u: Float[Tensor, "d ..."]) -> Float[Tensor, "d ..."]:
        """M_a u, through the factors."""
        return (self.query @ (self.key.T @ u) - self.key @ (self.query.T @ u)) / 2

    def outside(self, u: Float[Tensor, "d ..."]) -> Float[Tensor, "d ..."]:
        """P u: what lies across the captured directions."""
        return u if self.captured is None else u - self.captured @ (self.captured.T @ u)

    def apply(self, u: Float[Tensor, "d ..."], *, raw: bool = False) -> Float[Tensor, "d ..."]:
        """A u; raw: not divided by |S|_2 |M|_F. Cost: O(n d + d r) per column."""
        u = self.outside(u)
        y = self.second_moment(self.antisymmetric(u)) - self.antisymmetric(self.second_moment(u))
        y = self.outside(y) / 2
        return y if raw else y / self.scale

    @functools.cached_property
    def moment(self) -> Float[Tensor, "d d"] | None:
        """S itself where it is small and no larger than the input, made once (its eigenvalues need it there anyway); else None."""
        n, d = self.x.shape
        return self.x.T @ self.x / n if d <= min(n, LARGEST_GRAM) else None

    @functools.cached_property
    def scale(self) -> float:
        """|S|_2 |M|_F."""
        return self.extremes[1] * interaction_norm(self.query, self.key)

    @functools.cached_property
    def extremes(self) -> tuple[float, float]:
        """Smallest and largest eigenvalue of S."""
        return moment_extremes(self.x, self.moment)

    @property
    def condition(self) -> float:
        """kappa(S); infinite where fewer tokens than the width, or all of them in a subspace."""
        return _condition(*self.extremes)

    def dense(self, *, raw: bool = False) -> Float[Tensor, "d d"]:
        """A itself, symmetric to the last bit, for small widths."""
        y = self.apply(torch.eye(self.width, dtype=torch.float64, device=self.x.device), raw=raw)
        return (y + y.T) / 2

    def factored(self) -> tuple[Float[Tensor, "d k"], Float[Tensor, "k k"]]:
        """Orthonormal basis [d k] of the range and A in it [k k], k = 4 r: exact, and small where 4 r is below the width."""
        left, right = torch.cat([self.query, self.key], 1) / 2, torch.cat([self.key, -self.query], 1)
        sides = self.outside(torch.cat([self.second_moment(left), right], 1))
        basis, triangle = torch.linalg.qr(sides)
        first, second = triangle.split(left.shape[1], 1)
        small = first @ second.T / (2 * self.scale)
        return basis, small + small.T

    def frobenius(self) -> float:
        """|A|_F, a block of columns at a time."""
        eye = torch.eye(self.width, dtype=torch.float64, device=self.x.device) if self.width <= BLOCK else None
        total = 0.0
        for start in range(0, self.width, BLOCK):
            if eye is None:
                stop = min(start + BLOCK, self.width)
                columns = torch.zeros(self.width, stop - start, dtype=torch.float64, device=self.x.device)
                columns[start:stop] = torch.eye(stop - start, dtype=torch.float64, device=self.x.device)
            else:
                columns = eye
            total += self.apply(columns).square().sum().item()
        return math.sqrt(total)

    def without(self, captured: Float[Tensor, "d c"] | None) -> "DirectionalOperator":
        """The same operator with other directions captured."""
        other = object.__new__(DirectionalOperator)
        other.__dict__.update(self.__dict__)
        other.captured = directions(captured, self.width)
        return other


def directions(captured: Tensor | None, width: int) -> Tensor | None:
    """Captured directions in float64, None where there are none. Raises: ShapeError, InputError unless the columns are orthonormal."""
    if captured is None or captured.numel() == 0:
        return None
    if captured.ndim != 2 or len(captured) != width:
        raise ShapeError(f"captured directions must be [{width}, count], one a column, got {list(captured.shape)}")
    columns = real(captured, "the captured directions").detach().double()
    off = (columns.T @ columns - torch.eye(columns.shape[1], dtype=torch.float64, device=columns.device)).abs().max()
    if off > math.sqrt(torch.finfo(captured.dtype).eps):
        raise InputError(
            f"captured directions must be orthonormal columns, got products that are off by {off.item():.2g}; "
            "give torch.linalg.qr(captured).Q"
        )
    return columns


def factors(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64. Raises: ShapeError, InputError."""
    q, k = token_matrix(query, "the query factor").detach(), token_matrix(key, "the key factor").detach()
    if q.ndim != 2 or q.shape != k.shape:
        raise ShapeError(
            f"query and key factors must both be [width, rank], got {list(q.shape)} and {list(k.shape)}; "
            "repeat shared keys for each of their queries"
        )
    if interaction_norm(q, k) == 0:
        raise InputError("the interaction of queries and keys is zero; give heads whose weights are not")
    return q, k


def interaction_norm(query: Tensor, key: Tensor) -> float:
    """|W_q W_k^T|_F through [r r] products."""
    return math.sqrt(max(((query.T @ query) * (key.T @ key)).sum().item(), 0.0))


@measure(
    "directional.asymmetry",
    summary="share of the interaction of queries and keys that is antisymmetric: |M_a|_F / |M|_F",
    source=_SOURCE,
    takes=_FACTORS,
    range=(0.0, 1.0),
    null="1 / sqrt 2 = 0.7071: independent random factors",
)
def asymmetry(query: Float[Tensor, "d r"], key: Float[Tensor, "d r"]) -> Float[Tensor, ""]:
    """|M_a|_F / |M|_F without a [d d] matrix: |M_a|^2 = (tr(Q^T Q K^T K) - tr((Q^T K)^2)) / 2. Raises: ShapeError, InputError.

    Shapes: [d r], [d r] -> scalar, float64. Chance is 1 / sqrt 2, not 0: report the difference.
    """
    q, k = factors(query, key)
    whole = ((q.T @ q) * (k.T @ k)).sum()
    cross = q.T @ k
    share = (whole - (cross * cross.T).sum()) / (2 * whole)
    return share.clamp(0, 1).sqrt()


@measure(
    "directional.top",
    summary="largest eigenvalue of the directional residual, over |S|_2 |M|_F",
    source=_SOURCE,
    takes=_TAKES,
    range=(-1.0, 1.0),
    null="0: white input, or symmetric interaction",
)
def directional_top(
    x: Float[Tensor, "n d"],
    query: Float[Tensor, "d r"],
    key: Float[Tensor, "d r"],
    captured: Float[Tensor, "d c"] | None = None,
    center: bool = False,
) -> Float[Tensor, ""]:
    """lambda_max of :class:`DirectionalOperator`, by eigh of the matrix. Shapes: -> scalar, float64. Raises: ShapeError, InputError."""
    return torch.linalg.eigvalsh(DirectionalOperator(x, query, key, captured, center=center).dense())[-1]


@measure(
    "directional.residual",
    summary="Frobenius norm of the directional residual, over |S|_2 |M|_F",
    source=_SOURCE,
    takes=_TAKES,
    range=(0.0, None),
    null="0: white input, or symmetric interaction",
)
def directional_residual(
    x: Float[Tensor, "n d"],
    query: Float[Tensor, "d r"],
    key: Float[Tensor, "d r"],
    captured: Float[Tensor, "d c"] | None = None,
    center: bool = False,
) -> Float[Tensor, ""]:
    """Gamma = |A|_F of :class:`DirectionalOperator`. Shapes: -> scalar, float64. Raises: ShapeError, InputError."""
    return torch.linalg.matrix_norm(DirectionalOperator(x, query, key, captured, center=center).dense())


@measure(
    "directional.energy",
    summary="directional energy of one head: |S M_a|_F over |S|_2 |M|_F of all heads",
    source=_SOURCE,
    takes="input [n d], query and key factors [d r] of one head",
    range=(0.0, None),
    null="0: symmetric interaction",
)
def head_energy(
    x: Float[Tensor, "n d"], query: Float[Tensor, "d w"], key: Float[Tensor, "d w"], scale: float | None = None
) -> Float[Tensor, ""]:
    """|S M_a|_F / scale through [n w] and [w w] products; scale None: |S|_2 |M|_F of the head itself. Raises: ShapeError, InputError."""
    operator = DirectionalOperator(x, query, key)
    return energy_of(operator, operator.query, operator.key, operator.scale if scale is None else scale)


def energy_of(operator: DirectionalOperator, query: Tensor, key: Tensor, scale: float) -> Float[Tensor, ""]:
    """|S M_a|_F / scale of the head with these factors, on the input of ``operator``."""
    left = operator.second_moment(torch.cat([query, key], 1)) / 2
    right = torch.cat([key, -query], 1)
    return ((left.T @ left) * (right.T @ right)).sum().clamp(min=0).sqrt() / scale


@measure(
    "directional.condition",
    summary="condition number of the second moment of the input; below 1.05 the residual sees nothing",
    source="derived: the operator vanishes where S is a multiple of the identity",
    takes="input [n d]",
    range=(1.0, None),
    null="1: white input",
)
def input_condition(x: Float[Tensor, "n d"], center: bool = False) -> Float[Tensor, ""]:
    """kappa(S) of the tokens; infinite where they do not fill the width. Shapes: [n d] -> scalar, float64. Raises: ShapeError, InputError."""
    y = token_matrix(x, "the input of the layer")
    y = y - y.mean(-2, keepdim=True) if center else y
    return y.new_tensor(_condition(*moment_extremes(y)))


def moment_extremes(x: Float[Tensor, "n d"], moment: Float[Tensor, "d d"] | None = None) -> tuple[float, float]:
    """Smallest and largest eigenvalue of S = X^T X / n (``moment``, if it is known); by Lanczos where both sides are large."""
    n, d = x.shape
    if moment is not None:
        values = torch.linalg.eigvalsh(moment)
        return max(values[0].item(), 0.0), values[-1].item()
    if min(n, d) <= LARGEST_GRAM:
        values = torch.linalg.eigvalsh(x @ x.T if n < d else x.T @ x) / n
        return (0.0 if n < d else max(values[0].item(), 0.0)), values[-1].item()
    from thalweg.geometry.eigenpairs import lanczos

    def product(u: Tensor) -> Tensor:
        return x.T @ (x @ u) / n

    largest = lanczos(product, d, 1, x.device)[0][0].item()
    # The smallest as the largest of |S| I - S: Lanczos finds outer eigenvalues.
    below = 0.0 if n < d else lanczos(lambda u: largest * u - product(u), d, 1, x.device)[0][0].item()
    return (0.0 if n < d else max(largest - below, 0.0)), largest


def _condition(low: float, high: float) -> float:
    return math.inf if low <= high * 1e-12 else high / low
