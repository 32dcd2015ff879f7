"""The numbers by which a token reads from, writes to and mixes its streams: static biases, and what the streams themselves add."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from thalweg.ops.precision import full_precision, wide

FLOOR = 1e-24  # of a mean square: a stream of zeros has no direction, and float32 no gradient of the root of less

Source = Literal["concatenated", "per_stream"]


class Coefficients(NamedTuple):
    """What one pass over the streams says of one site: read [b t n], write [b t n], mix [b t to from]; float32 or wider."""

    read: Tensor
    write: Tensor
    mix: Tensor


class Logits(nn.Module):
    """One family of logits: alpha * (projected streams) + bias.

    count: logits of one token. groups: sizes of the parts that have an alpha of their own. projection [rows columns] and alpha [groups]
    exist where the family is dynamic. They and the bias [count] are float32 or wider wherever they are used.
    """

    def __init__(self, count: int, groups: Sequence[int], rows: int, columns: int, *, dynamic: bool):
        super().__init__()
        self.count, self.groups = count, tuple(groups)
        self.bias = nn.Parameter(torch.zeros(count))
        self.projection = nn.Parameter(torch.zeros(rows, columns)) if dynamic else None
        self.alpha = nn.Parameter(torch.zeros(len(self.groups))) if dynamic else None

    def start(self, bias: Tensor, alpha: float, std: float) -> None:
        """Give every parameter its declared start."""
        with torch.no_grad():
            self.bias.copy_(bias)
        if self.projection is not None and self.alpha is not None:
            nn.init.constant_(self.alpha, alpha)
            nn.init.normal_(self.projection, std=std) if std else nn.init.zeros_(self.projection)

    def forward(self, projected: Float[Tensor, "b t count"] | None, shape: Sequence[int]) -> Float[Tensor, "b t count"]:
        """Logits at every token; ``projected`` is None for a static family, whose logits are then expanded over ``shape`` [b t]."""
        if projected is None or self.alpha is None:
            return wide(self.bias).expand(*shape, self.count)
        alpha = wide(self.alpha)
        parts = [alpha[g].expand(size) for g, size in enumerate(self.groups)]
        return torch.cat(parts) * projected + wide(self.bias)

    def extra_repr(self) -> str:
        return f"{self.count}, groups={self.groups}, dynamic={self.projection is not None}"


def project(
    state: Float[Tensor, "b t n d"], families: Sequence[Logits], source: Source, eps: float, *, tanh: bool
) -> list[Tensor | None]:
    """The streams, normalised and projected, for each family: [b t count], or None for a static one. One pass over the streams.

    ``concatenated`` (mHC Eq. 7 and 14-16): RMS over the vector of all streams [n d], divided by after the product. ``per_stream``
    (hyper-connections; mHC Eq. 5): RMS of each stream, which gives its own logits: a family of n has one row, one of n*n has n rows,
    row ``to`` of the projection and stream ``from`` making the logit [to, from].
    """
    dynamic = [family.projection for family in families if family.projection is not None]
    if not dynamic:
        return [None] * len(families)
    x = wide(state)
    with full_precision(x):
        x = x.flatten(2) if source == "concatenated" else x
        power = x.square().mean(-1, keepdim=True) + eps
        scale = torch.rsqrt(power if eps >= FLOOR else power.clamp(min=FLOOR))
        weight = torch.cat([wide(projection) for projection in dynamic])
        products = (x @ weight.mT) * scale
    if tanh:
        products = torch.tanh(products)
    parts = iter(products.split([projection.shape[0] for projection in dynamic], -1))
    found: list[Tensor | None] = []
    for family in families:
        part = None if family.projection is None else next(parts)
        if part is not None and source == "per_stream":
            part = part.mT.flatten(2)  # [b t from rows] -> [b t rows*from]
        found.append(part)
    return found
