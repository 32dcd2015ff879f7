"""What every measure asks of its input, said once: the right shape, real numbers, all of them finite."""

import torch
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.ops.precision import wide


def real(x: Tensor, what: str) -> Tensor:
    """``x`` if it holds finite real numbers. Raises: InputError."""
    if not isinstance(x, Tensor):
        raise InputError(f"{what} must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise InputError(f"{what} must hold real floating-point numbers, got {x.dtype}")
    if not torch.isfinite(x).all():
        bad = int((~torch.isfinite(x)).sum())
        raise InputError(
            f"{what}: {bad} of {x.numel()} values {'is' if bad == 1 else 'are'} NaN or infinite; a diverged state has no geometry"
        )
    return x


def token_matrix(x: Tensor, what: str = "the states", least: int = 1) -> Tensor:
    """``x`` [... tokens width] in float64, with at least ``least`` tokens. Raises: ShapeError, InputError."""
    if isinstance(x, Tensor) and x.ndim < 2:
        raise ShapeError(f"{what} must be [... tokens width], got shape {list(x.shape)}; one token is [1, width]")
    real(x, what)
    if x.shape[-2] < least or x.shape[-1] < 1 or x.numel() == 0:
        raise ShapeError(f"{what} must be [... tokens width] with at least {least} tokens, got shape {list(x.shape)}")
    return x.double()


def one_point(x: Tensor) -> Tensor:
    """Whether the tokens of each matrix [... tokens width] are one vector up to rounding: none is farther from their mean than its share of it.

    The share: two steps of the dtype, by which vectors are rounded where they are stored, and 64 of the dtype that sums are made in (float32
    or wider): tokens that are all alike leave attention over 1,024 of them up to 6 apart, over 4,096 up to 13 (measured).
    Shapes: [... tokens width] -> [...].
    """
    share = 2 * torch.finfo(x.dtype).eps + 64 * torch.finfo(wide(x[..., :0, :]).dtype).eps
    y = x.detach().double()
    # Over the largest value, so that squares of any size stay in range.
    y = y / y.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(y.dtype).tiny)
    middle = y.mean(-2, keepdim=True)
    return (y - middle).norm(dim=-1).amax(-1) <= share * middle.norm(dim=-1).squeeze(-1)


def mixing_matrix(mix: Tensor) -> Tensor:
    """``mix`` [... to from] in float64. Raises: ShapeError, InputError."""
    if isinstance(mix, Tensor) and (mix.ndim < 2 or 0 in mix.shape[-2:]):
        raise ShapeError(f"a mixing matrix must be [... to from], got shape {list(mix.shape)}")
    return real(mix, "the mixing matrix").double()


def square_mixing_matrix(mix: Tensor) -> Tensor:
    """``mix`` [... n n] in float64, for two streams or more. Raises: ShapeError, InputError."""
    mix = mixing_matrix(mix)
    if mix.shape[-1] != mix.shape[-2] or mix.shape[-1] < 2:
        raise ShapeError(f"streams mix by a square matrix of two or more, got shape {list(mix.shape)}")
    return mix


def same_width(a: Tensor, b: Tensor, what: str) -> None:
    """Refuse two tensors whose shapes do not broadcast or whose last axes differ. Raises: ShapeError."""
    if a.ndim == 0 or b.ndim == 0 or a.shape[-1] != b.shape[-1]:
        raise ShapeError(f"{what} must share their last axis, got shapes {list(a.shape)} and {list(b.shape)}")
    try:
        torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        raise ShapeError(f"{what} must have shapes that broadcast, got {list(a.shape)} and {list(b.shape)}") from None
