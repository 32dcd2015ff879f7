"""The Jacobian of a map at a point: does a site, or only its skip path, preserve signals?"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real
from thalweg.ops.forward_mode import jvp

Map = Callable[[Tensor], Tensor]

START_SEED = 7_071_067  # of the start vector; a common seed would give data drawn by the caller


def jacobian_matrix(
    function: Map, point: Float[Tensor, "..."], *, limit: int = 4096, chunk: int = 64, vectorize: bool = True
) -> Float[Tensor, "outputs inputs"]:
    """All columns of the Jacobian of ``function`` at ``point``, exactly, by forward differentiation.

    Shapes: point of any shape, flattened -> [outputs inputs], in the dtype of the point (take float64 for small
    singular values). For the skip path of a site freeze update and gates in ``function``; for the whole block do not.
    ``chunk`` columns are made at once; ``vectorize=False`` makes them one by one, for functions that
    ``torch.func.vmap`` refuses.
    Raises: InputError for NaN or more than ``limit`` inputs (use :func:`extreme_singular_values` there).
    """
    real(point, "the point of a Jacobian")
    size = point.numel()
    if not 1 <= size <= limit:
        raise InputError(
            f"a full Jacobian is made for 1 to {limit} inputs, got {size}; take one token or extreme_singular_values"
        )
    point = point.detach()

    def column(direction: Tensor) -> Tensor:
        return _push(function, point, direction)

    directions = torch.eye(size, dtype=point.dtype, device=point.device)
    if vectorize:
        columns = [torch.func.vmap(column)(part) for part in directions.split(chunk)]
        return torch.cat(columns).mT.detach()
    return torch.stack([column(direction) for direction in directions], dim=-1).detach()


def jacobian_singular_values(function: Map, point: Float[Tensor, "..."], **options) -> Float[Tensor, " rank"]:
    """All singular values of the Jacobian at a point, largest first. Options and errors: :func:`jacobian_matrix`."""
    return torch.linalg.svdvals(jacobian_matrix(function, point, **options).double())


class Extremes(NamedTuple):
    """Estimated extreme singular values: ``largest`` from below, ``smallest`` from above; ``steps`` taken."""

    largest: float
    smallest: float
    steps: int


def extreme_singular_values(
    function: Map, point: Float[Tensor, "..."], *, steps: int = 32, generator: torch.Generator | None = None
) -> Extremes:
    """Extreme singular values of a Jacobian too large to write down, by Golub-Kahan-Lanczos bidiagonalisation.

    Each step is one forward and one backward differentiation. The largest converges fast and is a lower bound; the
    smallest (of the map on its inputs, 0 when it loses one) converges slowly and is an upper bound. With as many
    steps as inputs both are exact. generator: for the start vector (default: a fixed seed).
    Raises: InputError.
    Source: Golub and Kahan 1965 (SIAM J. Numer. Anal. 2, 205), with full reorthogonalisation.
    """
    if steps < 1:
        raise InputError(f"at least one step is needed, got {steps}")
    point = real(point, "the point of a Jacobian").detach()
    generator = generator or torch.Generator().manual_seed(START_SEED)
    start = torch.randn(point.shape, dtype=torch.float64, generator=generator).to(point)
    value, pullback = torch.func.vjp(function, point)[:2]

    def push(v: Tensor) -> Tensor:
        return _push(function, point, v).detach()

    def pull(u: Tensor) -> Tensor:
        return pullback(u.reshape(value.shape))[0].flatten().detach()

    v = start.flatten() / start.norm()
    right, left = [v], []
    diagonal: list[float] = []
    above: list[float] = []
    tiny = torch.finfo(point.dtype).eps ** 0.75  # a remainder this small is rounding; its size bounds the error
    for step in range(min(steps, point.numel())):
        u = _orthogonal(push(right[-1]), left)
        diagonal.append(u.norm().item())
        if diagonal[-1] <= tiny * max(diagonal):  # this direction is lost: a singular value of 0
            diagonal[-1] = 0.0
            break
        left.append(u / diagonal[-1])
        w = _orthogonal(pull(left[-1]), right)
        if step + 1 == min(steps, point.numel()) or w.norm().item() <= tiny * max(diagonal):
            break  # every distinct singular value that the start vector touches is found
        above.append(w.norm().item())
        right.append(w / above[-1])
    band = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    band += torch.diag(torch.tensor(above[: len(diagonal) - 1], dtype=torch.float64), 1)
    values = torch.linalg.svdvals(band)
    return Extremes(values[0].item(), values[-1].item(), len(diagonal))


def _push(function: Map, point: Tensor, direction: Tensor) -> Tensor:
    return jvp(function, point, direction.reshape(point.shape))[1].flatten()


def _orthogonal(x: Tensor, basis: list[Tensor]) -> Tensor:
    for _ in range(2):  # twice is enough (Kahan)
        for direction in basis:
            x = x - (x @ direction) * direction
    return x


def _values(values: Tensor) -> Tensor:
    if real(values, "the singular values").ndim < 1 or values.shape[-1] == 0:
        raise ShapeError(f"singular values must be [... rank], got shape {list(values.shape)}")
    return values.double()


def largest(values: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch"]:
    """Largest singular value: the most that a signal can grow. Shapes: [... rank] -> [...]."""
    return _values(values).amax(-1)


def smallest(values: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch"]:
    """Smallest singular value: the most that a signal can shrink. Shapes: [... rank] -> [...]."""
    return _values(values).amin(-1)


def mean_square(values: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch"]:
    """||J||_F^2 / rank: growth of the energy of a random signal. Shapes: [... rank] -> [...]."""
    return _values(values).square().mean(-1)


def near_one(values: Float[Tensor, "*batch rank"], tolerance: float = 0.1) -> Float[Tensor, "*batch"]:
    """Share of singular values s with |s - 1| <= tolerance. Shapes: [... rank] -> [...]."""
    return ((_values(values) - 1).abs() <= tolerance).double().mean(-1)


_STATISTICS = (
    (largest, "largest singular value", (0.0, None)),
    (smallest, "smallest singular value", (0.0, None)),
    (mean_square, "mean squared singular value", (0.0, None)),
    (near_one, "share of singular values within 0.1 of 1", (0.0, 1.0)),
)
for _path, _words in (("skip", "the skip path, update and gates frozen"), ("block", "a whole layer")):
    for _function, _what, _range in _STATISTICS:
        measure(
            f"jacobian.{_path}.{_function.__name__}",
            summary=f"{_what} of the Jacobian of {_words}",
            source="Pennington et al. 2017 (dynamical isometry), arXiv 1711.04735",
            takes="singular values [... rank]",
            range=_range,
            null="1: the identity",
        )(_function)
