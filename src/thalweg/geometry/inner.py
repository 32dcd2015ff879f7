"""Inside a feed-forward sublayer: its hidden vector in blocks as wide as the stream, and what each block writes.

A sublayer whose last linear map W [d m] gets h [... m], m = G d, is read as G blocks h_g = h[I_g] and partial outputs y_g = W[:, I_g] h_g,
whose sum is the output without its bias. Comparing a block with the stream, or a partial output with its block, identifies coordinate i of a
block with channel i of the stream and means no more than that: another order of the neurons leaves the sublayer the same function and
changes these numbers.

Axis legend: ``d`` width of the stream, ``m`` hidden width, ``g`` block, G = m / d of them.
Source: He et al. 2026, arXiv 2609.15975, which scales h_g relative to "the MLP input" and y_g relative to h_g. Whether that input is the
normalised one or the raw stream is not said there: both can be given as ``reference`` and have names of their own.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.geometry.catalog import measure
from thalweg.geometry.checks import real
from thalweg.geometry.lengths import Lengths, lengths

_PAPER = "He et al. 2026, arXiv 2609.15975"
_HIDDEN = "reference [... d], hidden [... g*d]"
_OUTPUT = "hidden [... g*d], last map [d g*d]"
_ZERO, _SHARE = "0: random direction", "mean |cos| of a random direction, about sqrt(2 / (pi d))"


@measure(
    "inner_coefficient.hidden",
    summary="signed size of a block of the hidden vector along what the sublayer is given (normalised), coordinates identified",
    source=_PAPER,
    takes=_HIDDEN,
    range=(None, None),
    null=_ZERO,
)
@measure(
    "inner_coefficient.hidden_of_stream",
    summary="signed size of a block of the hidden vector along the raw stream, coordinates identified",
    source=_PAPER,
    takes=_HIDDEN,
    range=(None, None),
    null=_ZERO,
)
def hidden_coefficient(reference: Float[Tensor, "*b d"], hidden: Float[Tensor, "*b m"]) -> Float[Tensor, "*b g"]:
    """h_g . x / |x|^2 in float64; 0 where the reference is zero. Raises: ShapeError, InputError."""
    return _hidden(reference, hidden).coefficient


@measure(
    "inner_fraction.hidden",
    summary="|cos| of a block of the hidden vector and what the sublayer is given (normalised), coordinates identified",
    source=_PAPER,
    takes=_HIDDEN,
    range=(0.0, 1.0),
    null=_SHARE,
)
@measure(
    "inner_fraction.hidden_of_stream",
    summary="|cos| of a block of the hidden vector and the raw stream, coordinates identified",
    source=_PAPER,
    takes=_HIDDEN,
    range=(0.0, 1.0),
    null=_SHARE,
)
def hidden_fraction(reference: Float[Tensor, "*b d"], hidden: Float[Tensor, "*b m"]) -> Float[Tensor, "*b g"]:
    """|h_g . x| / (|h_g| |x|) in float64; 0 where either is zero. Raises: ShapeError, InputError."""
    return _hidden(reference, hidden).fraction


@measure(
    "inner_coefficient.output",
    summary="signed size of what a block of the hidden vector writes along that block, coordinates identified",
    source=_PAPER,
    takes=_OUTPUT,
    range=(None, None),
    null=_ZERO,
)
def output_coefficient(hidden: Float[Tensor, "*b m"], last: Float[Tensor, "d m"]) -> Float[Tensor, "*b g"]:
    """y_g . h_g / |h_g|^2 with y_g = W[:, I_g] h_g, in float64; 0 where the block is zero. Raises: ShapeError, InputError."""
    return _output(hidden, last).coefficient


@measure(
    "inner_fraction.output",
    summary="|cos| of what a block of the hidden vector writes and that block, coordinates identified",
    source=_PAPER,
    takes=_OUTPUT,
    range=(0.0, 1.0),
    null=_SHARE,
)
def output_fraction(hidden: Float[Tensor, "*b m"], last: Float[Tensor, "d m"]) -> Float[Tensor, "*b g"]:
    """|y_g . h_g| / (|y_g| |h_g|) in float64; 0 where either is zero. Raises: ShapeError, InputError."""
    return _output(hidden, last).fraction


def hidden_blocks(hidden: Float[Tensor, "*b m"], width: int) -> Float[Tensor, "*b g d"]:
    """h in blocks of ``width``, a view. Raises: ShapeError where the blocks do not come out even."""
    if hidden.ndim < 1 or width < 1 or hidden.shape[-1] % width:
        raise ShapeError(
            f"a hidden vector of shape {list(hidden.shape)} has no whole number of blocks of width {width}; "
            f"its width must be a multiple"
        )
    return hidden.unflatten(-1, (-1, width))


def partial_outputs(hidden: Float[Tensor, "*b m"], last: Float[Tensor, "d m"]) -> Float[Tensor, "*b g d"]:
    """y_g = W[:, I_g] h_g for every block; their sum is W h. Raises: ShapeError."""
    if last.ndim != 2 or hidden.ndim < 1 or last.shape[1] != hidden.shape[-1]:
        raise ShapeError(
            f"hidden [... m] and the last map [d m] must share m, got shapes {list(hidden.shape)} and {list(last.shape)}"
        )
    blocks = hidden_blocks(hidden, last.shape[0])
    return torch.einsum("...gi,dgi->...gd", blocks, hidden_blocks(last, last.shape[0]))


def _hidden(reference: Tensor, hidden: Tensor) -> Lengths:
    x, h = real(reference, "the reference").double(), real(hidden, "the hidden vector").double()
    if x.ndim < 1 or x.shape[:-1] != h.shape[:-1]:
        raise ShapeError(
            f"reference [... d] and hidden [... m] must share all but the last axis, got shapes {list(x.shape)} and {list(h.shape)}"
        )
    return lengths(x.unsqueeze(-2), hidden_blocks(h, x.shape[-1]))


def _output(hidden: Tensor, last: Tensor) -> Lengths:
    h, w = real(hidden, "the hidden vector").double(), real(last, "the last map").double()
    y = partial_outputs(h, w)
    return lengths(hidden_blocks(h, w.shape[0]), y)
