"""The largest eigenpairs of the directional residual: exact for small widths or few heads, by Lanczos for the rest."""

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from scipy.linalg import qr
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor

from thalweg.errors import InputError, UnknownNameError
from thalweg.geometry.directional import DirectionalOperator

Method = Literal["auto", "dense", "factored", "lanczos"]
METHODS: tuple[Method, ...] = ("auto", "dense", "factored", "lanczos")
DENSE_WIDTH = 1024  # up to it a whole eigh costs less than a second


def choose(operator: DirectionalOperator, method: Method = "auto") -> Method:
    """What ``auto`` stands for here. Raises: UnknownNameError."""
    if method not in METHODS:
        raise UnknownNameError("method", method, METHODS)
    if method != "auto":
        return method
    if operator.width <= DENSE_WIDTH:
        return "dense"
    return "factored" if operator.rank < operator.width // 2 else "lanczos"


def top_eigenpairs(
    operator: DirectionalOperator, count: int, method: Method = "auto"
) -> tuple[Float[Tensor, " k"], Float[Tensor, "d k"]]:
    """The ``count`` largest eigenvalues, descending, and their eigenvectors as columns [d k]; fewer where the width is smaller.

    dense: eigh of the matrix. factored: eigh in the range of the operator, of dimension 4 r at most, zero outside it. lanczos: scipy's
    implicitly restarted Lanczos on products alone (torch.lobpcg takes matrices only, so it would need the one that this avoids).
    The sign of an eigenvector is free: its largest component is made positive. Equal eigenvalues leave a basis free too
    (:func:`canonical_basis`). Raises: UnknownNameError, InputError.
    """
    if count < 1:
        raise InputError(f"count must be at least 1, got {count}")
    count, method = min(count, operator.width), choose(operator, method)
    if method == "dense":
        values, vectors = torch.linalg.eigh(operator.dense())
    elif method == "factored":
        basis, small = operator.factored()
        values, inner = torch.linalg.eigh(small)
        vectors = basis @ inner
        if count > len(values):  # all others are 0, and which directions they have is free
            return _first(values, signed(vectors), len(values))
    elif count >= operator.width - 1:
        values, vectors = torch.linalg.eigh(operator.dense())  # ARPACK wants fewer than all
    else:
        values, vectors = lanczos(operator.apply, operator.width, count, operator.x.device)
    return _first(values, signed(vectors), count)


def spectrum(operator: DirectionalOperator, count: int | None = None, method: Method = "auto") -> Float[Tensor, " k"]:
    """Eigenvalues, descending: all of them where that is exact (those outside the range are zeros and left out), else the ``count`` largest."""
    method = choose(operator, method)
    if method == "dense":
        return torch.linalg.eigvalsh(operator.dense()).flip(0)
    if method == "factored":
        return torch.linalg.eigvalsh(operator.factored()[1]).flip(0)
    return top_eigenpairs(operator, count or 32, "lanczos")[0]


def positive_part(values: Float[Tensor, " k"]) -> float:
    """Sum of the positive eigenvalues: what all directions together still hold."""
    return values.clamp(min=0).sum().item()


def degenerate(values: Float[Tensor, " k"], tolerance: float) -> int:
    """How many of the leading eigenvalues are one: within ``tolerance`` of the largest, relative to it."""
    top = values[0].item()
    return int((values >= top - tolerance * abs(top)).sum()) if math.isfinite(top) else 1


def canonical_basis(vectors: Float[Tensor, "d m"]) -> Float[Tensor, "d m"]:
    """An orthonormal basis of the span of orthonormal columns that depends on the span alone.

    Columns of the projector onto the span, those of the largest norm first, made orthonormal (QR with pivoting), signs as in
    :func:`signed`. Shapes: [d m] -> [d m].
    """
    if vectors.shape[1] == 1:
        return signed(vectors)
    inner: Any = qr(vectors.T.cpu().numpy(), mode="economic", pivoting=True)[0]
    return signed(vectors @ torch.from_numpy(np.ascontiguousarray(inner)).to(vectors))


def signed(vectors: Float[Tensor, "d m"]) -> Float[Tensor, "d m"]:
    """Each column with the sign that makes its largest component positive; of components of one size, the first counts."""
    sizes = vectors.abs()
    largest = (sizes >= sizes.amax(0) * (1 - 1e-9)).double().argmax(0)
    signs = torch.sign(vectors.gather(0, largest[None]))
    return vectors * torch.where(signs == 0, 1.0, signs)


def lanczos(
    product: Callable[[Tensor], Tensor], width: int, count: int, device: torch.device
) -> tuple[Float[Tensor, " k"], Float[Tensor, "d k"]]:
    """The ``count`` largest eigenpairs, ascending, of a symmetric map known by its products with [d] vectors; one start for all."""

    def call(v: np.ndarray) -> np.ndarray:
        return product(torch.from_numpy(np.ascontiguousarray(v, dtype=np.float64)).to(device).flatten()).cpu().numpy()

    start = np.random.default_rng(0).standard_normal(width)
    space = min(
        width, max(4 * count + 1, 40)
    )  # wide enough that equal eigenvalues come out, each as often as it stands there
    make: Any = LinearOperator  # its stubs know neither the factory nor what eigsh takes
    solve: Any = eigsh
    operator = make((width, width), matvec=call, dtype=np.float64)
    values, vectors = solve(operator, k=count, which="LA", v0=start, ncv=space, tol=1e-12, maxiter=100 * width)
    order = np.argsort(values)
    return torch.from_numpy(values[order]).to(device), torch.from_numpy(vectors[:, order]).to(device)


def _first(values: Tensor, vectors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return values.flip(0)[:count], vectors.flip(1)[:, :count]
