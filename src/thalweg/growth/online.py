"""Online trackers of one extreme eigenvector, product by product: Oja's rule, and MCA EXIN with what it does on an indefinite operator.

Reconstructed from public first-party code of INCRT (Cirrincione 2026, arXiv 2604.10703; the paper's text was not available). Deviations: the
step is divided by the size of the operator, since with a fixed step the rule converges only while step x (largest - smallest eigenvalue) < 2;
the minor tracker follows the shifted operator.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import InputError
from thalweg.geometry.eigenpairs import signed

Product = Callable[[Tensor], Tensor]


class OjaTracker:
    """The dominant eigenvector of a symmetric operator that may change from call to call.

    u <- norm(u + (rate / |A|) (A u - (u^T A u) u)). |A| is followed by a power iteration of one product a call, warm-started, its largest
    value kept with a slow decay: an estimate from below, so ``rate`` stays well under the limit of 1 (where largest and smallest eigenvalue
    are of one size). Shapes: u [d], float64.
    Raises: InputError for a rate outside (0, 0.9].
    """

    def __init__(self, width: int, rate: float = 0.5, seed: int = 0):
        if not 0 < rate <= 0.9:
            raise InputError(
                f"the rate must be above 0 and at most 0.9 (the step is rate / |A|, and beyond it the rule need not converge), got {rate:g}"
            )
        generator = torch.Generator().manual_seed(seed)
        self.rate = rate
        self.vector, self._power = torch.nn.functional.normalize(
            torch.randn(2, width, dtype=torch.float64, generator=generator), dim=-1
        )
        self.norm = 0.0
        self.value = 0.0

    def update(self, product: Product) -> float:
        """One step with this operator; returns the Rayleigh quotient before it."""
        image = product(self._power)
        size = image.norm().item()
        self.norm = max(0.999 * self.norm, size)
        if size > 0:
            self._power = image / size
        y = product(self.vector)
        self.norm = max(self.norm, y.norm().item())
        self.value = (self.vector @ y).item()
        if self.norm > 0:
            step = self.rate / self.norm * (y - self.value * self.vector)
            self.vector = torch.nn.functional.normalize(self.vector + step, dim=-1)
        return self.value

    def track(self, product: Product, steps: int) -> Float[Tensor, " d"]:
        """``steps`` updates with one operator; the vector, its largest component positive."""
        for _ in range(steps):
            self.update(product)
        self.value = (self.vector @ product(self.vector)).item()
        return signed(self.vector[:, None])[:, 0]


def mca_exin(
    product: Product, start: Float[Tensor, " d"], steps: int, rate: float, *, shift: float = 0.0
) -> tuple[Float[Tensor, " d"], float]:
    """MCA EXIN for the minor eigenvector of A: the vector and its Rayleigh quotient on A.

    u <- norm(u - rate (y / |u|^2) (A u - (y / |u|^2) u)), y = u^T A u. **On an indefinite A it converges to a Rayleigh quotient of 0, not to
    the smallest eigenvalue**: the step has the factor y, which descends where y is positive and ascends where it is negative. The directional
    residual is traceless, so always indefinite. ``shift`` >= -(smallest eigenvalue) makes A + shift I positive and the rule right; for the
    normalised residual 1 is enough.
    Source: Cirrincione et al. 2002 (IEEE Trans. Neural Networks 13, 160), the rule; what it does on indefinite operators is derived.
    """
    u = torch.nn.functional.normalize(start.double(), dim=-1)
    for _ in range(steps):
        image = product(u) + shift * u
        y = (u @ image).item()
        u = torch.nn.functional.normalize(u - rate * y * (image - y * u), dim=-1)
    return u, (u @ product(u)).item()
