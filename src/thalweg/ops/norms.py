"""The one normalisation module of the package, with its statistics in float32 or wider."""

from typing import Literal

import torch
from torch import Tensor, nn

from thalweg.errors import InputError
from thalweg.ops.precision import wide

NormKind = Literal["rmsnorm", "layernorm", "none"]


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis.

    Shapes: [... width] -> [... width], in the dtype of the input; the statistics and the affine map are computed in float32 or wider.
    ``bias`` adds a learned shift (LayerNorm's default in the literature; off here unless asked for).
    Source: RMSNorm, Zhang and Sennrich 2019 (arXiv 1910.07467) Eq. 4; LayerNorm, Ba et al. 2016 (arXiv 1607.06450) Eq. 4.
    """

    def __init__(
        self, width: int, kind: NormKind = "rmsnorm", *, eps: float = 1e-6, affine: bool = True, bias: bool = False
    ):
        super().__init__()
        if kind not in ("rmsnorm", "layernorm", "none"):
            raise InputError(f"norm must be rmsnorm, layernorm or none, got {kind!r}")
        self.kind, self.eps, self.width = kind, eps, width
        used = affine and kind != "none"
        self.weight = nn.Parameter(torch.ones(width)) if used else None
        self.bias = nn.Parameter(torch.zeros(width)) if used and bias else None

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "none":
            return x
        y = wide(x)
        if self.kind == "layernorm":
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * wide(self.weight)
        if self.bias is not None:
            y = y + wide(self.bias)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.width}, {self.kind}, eps={self.eps}, affine={self.weight is not None}, bias={self.bias is not None}"
        )
