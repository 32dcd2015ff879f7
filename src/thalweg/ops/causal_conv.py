"""Causal convolution along the token axis, separate for every feature."""

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F


def causal_conv(
    x: Float[Tensor, "b s m d"],
    taps: Float[Tensor, "k n d"],
    length: int | None = None,
    *,
    mask: Bool[Tensor, "b s"] | None = None,
    segments: Int[Tensor, "b s"] | None = None,
    contract: bool = False,
) -> Tensor:
    """y[t, n] = sum over lags j of taps[k - 1 - j, n] * x[t - j, n]: the last tap weighs the present token.

    length: how many of the last tokens to return (default all); those before them are their past. mask: True where a
    token is real, others count as zero. segments: a token sees only its own segment. contract: also sum over n.
    Shapes: x [b s m d] with m = n, or m = 1 as one input for all n; taps [k n d] -> [b length n d], with ``contract``
    [b length d]; in the wider of both dtypes. Kept for the backward pass: x and the taps, no product of theirs.
    """
    length = x.shape[1] if length is None else length
    past = x.shape[1] - length
    if mask is not None:
        x = x.masked_fill(~mask[:, :, None, None], 0)
    total: Tensor | None = None
    for lag in range(taps.shape[0]):
        first = max(lag - past, 0)  # the first returned token that has a token this far back
        if first >= length and lag:
            break
        source = slice(past + first - lag, past + length - lag)
        term = x[:, source] * taps[-1 - lag]
        term = term.sum(2) if contract else term
        if segments is not None and lag:
            other = segments[:, past + first :] != segments[:, source]
            term = term.masked_fill(other.reshape(*other.shape, *[1] * (term.dim() - 2)), 0)
        if first:
            term = F.pad(term, (0, 0) * (term.dim() - 2) + (first, 0))
        total = term if total is None else total + term
    assert total is not None  # taps has at least one entry
    return total
