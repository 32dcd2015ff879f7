"""The value channels of the delta connection: an embedding expanded into n, n compressed into what a sublayer reads.

    embedding [b t d] --expand--> state [b t n d] --compress--> [b t d]

The token convolutions are causal, take padding for zero, stay within a segment, and go on in cached decoding where the
last call ended.
"""

import torch
from torch import Tensor, nn

from thalweg.connections.base import Site, Tokens
from thalweg.errors import InputError
from thalweg.ops.causal_conv import causal_conv
from thalweg.ops.precision import wide


def convolve(x: Tensor, taps: Tensor, tokens: Tokens | None, place: Site | str, *, contract: bool = False) -> Tensor:
    """Causal token convolution of x [b t m d], whose past in cached decoding is kept by ``place``.

    Shapes: those of :func:`causal_conv`.
    Raises: InputError when one call of cached decoding gives segments and another does not.
    """
    length, keep = x.shape[1], taps.shape[0] - 1
    taps = wide(taps)
    if tokens is None:
        return causal_conv(x, taps, contract=contract)
    mask, segments, memory = tokens.mask, tokens.segments, tokens.memory
    if mask is not None:
        mask = mask.bool()
    if memory is not None:
        # the key is made here and not by the caller, so that one compiled graph serves all sites
        key = f"delta.{place.index if isinstance(place, Site) else place}"
        real, segments_key = tokens.real(x), f"{key}.segments"
        if key in memory.slots and (segments_key in memory.slots) != (segments is not None):
            got, before = ("without", "with") if segments is None else ("with", "without")
            raise InputError(
                f"a call {got} segments follows one {before} them in cached decoding; give segments in all or in none"
            )
        if segments is not None:
            segments, _ = memory.extend(segments_key, segments, real, keep)
        x, mask = memory.extend(key, x, real, keep)
    return causal_conv(x, taps, length, mask=mask, segments=segments, contract=contract)


def identity_taps_(taps: Tensor) -> None:
    """Set taps [k n d] so that every channel is the present token unchanged."""
    with torch.no_grad():
        taps.zero_()
        taps[-1] = 1.0


class Repeat(nn.Module):
    """Every value channel starts as the embedding: [b t d] -> [b t n d] (a view)."""

    def __init__(self, channels: int):
        super().__init__()
        self.channels = channels

    def reset_parameters(self) -> None:
        """Nothing to set."""

    def forward(self, embedding: Tensor, tokens: Tokens | None, place: Site | str) -> Tensor:
        return embedding.unsqueeze(2).expand(-1, -1, self.channels, -1)


class ExpandTokens(nn.Module):
    """EC: a causal token convolution of every feature into n, [b t d] -> [b t n d]; starts as :class:`Repeat`."""

    def __init__(self, width: int, channels: int, kernel: int):
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(kernel, channels, width))

    def reset_parameters(self) -> None:
        identity_taps_(self.taps)

    def forward(self, embedding: Tensor, tokens: Tokens | None, place: Site | str) -> Tensor:
        return convolve(embedding.unsqueeze(2), self.taps, tokens, place).to(embedding.dtype)


class Only(nn.Module):
    """The one channel of the vector state: [b t 1 d] -> [b t d] (a view)."""

    def reset_parameters(self) -> None:
        """Nothing to set."""

    def forward(self, state: Tensor, tokens: Tokens | None, place: Site | str) -> Tensor:
        return state.squeeze(2)


class CompressTokens(nn.Module):
    """TC: a depthwise causal token convolution on n * d channels, then a read vector over n; starts as the mean over n.

    The two linear steps are applied as one: sum over n and lags of read[n] taps[k - 1 - lag, n] state[t - lag, n].
    """

    def __init__(self, width: int, channels: int, kernel: int):
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(kernel, channels, width))
        self.read = nn.Parameter(torch.zeros(channels))

    def reset_parameters(self) -> None:
        identity_taps_(self.taps)
        nn.init.constant_(self.read, 1 / self.read.numel())

    def forward(self, state: Tensor, tokens: Tokens | None, place: Site | str) -> Tensor:
        taps = wide(self.taps) * wide(self.read).unsqueeze(-1)
        return convolve(state, taps, tokens, place, contract=True).to(state.dtype)


class CompressChannels(nn.Module):
    """CC: sum over n of weight[n] * state[t, n], a weight for every feature and channel; starts as the mean over n."""

    def __init__(self, width: int, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, width))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1 / self.weight.shape[0])

    def forward(self, state: Tensor, tokens: Tokens | None, place: Site | str) -> Tensor:
        return (state * wide(self.weight)).sum(2).to(state.dtype)
