"""Rounding of numbers in groups that share a scale, and back: what rounding does to them, without the packing."""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.compression.compressors.base import STORED, check_whole
from thalweg.errors import InputError

LEAST_BITS, MOST_BITS = 2, 8
LEAST_GROUP = 8  # of the groups that an error proposes; smaller ones cost more bits for scales than for numbers

Group = int | str


def check_rounding(bits: int, group: Group, symmetric: bool) -> None:
    """Raises: InputError for bits outside 2..8 and for what is no group."""
    check_whole("bits", bits, LEAST_BITS, MOST_BITS)
    if isinstance(group, str):
        if group not in ("row", "tensor"):
            raise InputError(f"group is a number of inputs that share a scale, 'row' or 'tensor', got {group!r}")
    else:
        check_whole("group", group, 1)
    if not isinstance(symmetric, bool):
        raise InputError(f"symmetric must be true or false, got {symmetric!r}")


def check_group(group: Group, shapes: Mapping[str, tuple[int, int]]) -> None:
    """shapes [out in] by name. Raises: InputError for a group that does not divide the inputs, with those that do."""
    if isinstance(group, str):
        return
    for name, (_, inputs) in shapes.items():
        if inputs % group:
            common = math.gcd(*(width for _, width in shapes.values()))
            fitting = [str(n) for n in range(LEAST_GROUP, common + 1) if common % n == 0]
            allowed = f"{', '.join(fitting)} divide those of all maps, or say 'row'" if fitting else "say 'row'"
            raise InputError(f"group {group} does not divide the {inputs} inputs of {name}; {allowed}")


def grouped(x: Float[Tensor, "out in"], group: Group) -> Float[Tensor, "parts size"]:
    """One row for every group that shares a scale: runs of ``group`` neighbouring inputs of one output."""
    if group == "tensor":
        return x.reshape(1, -1)
    return x.reshape(-1, x.shape[-1] if group == "row" else int(group))


def rounded(x: Float[Tensor, "out in"], bits: int, group: Group, symmetric: bool) -> Float[Tensor, "out in"]:
    """x rounded to ``bits`` bits in groups, and back. Shapes: [out in] -> [out in].

    symmetric: x^ = s clamp(round(x / s), -m, m) with m = 2^(b-1) - 1, s = max|x| / m. Else, with low = min(x, 0), high = max(x, 0) and
    n = 2^b - 1: s = (high - low) / n, z = round(-low / s), x^ = s (clamp(round(x / s) + z, 0, n) - z). Zero stays zero in both. A group of
    zeros stays so. Halves are rounded to even.
    """
    return round_parts(grouped(x, group), bits, symmetric).reshape(x.shape)


def round_parts(parts: Float[Tensor, "*parts size"], bits: int, symmetric: bool) -> Float[Tensor, "*parts size"]:
    """:func:`rounded` where the last axis shares a scale."""
    high, low = parts.amax(-1, keepdim=True), parts.amin(-1, keepdim=True)
    return round_between(parts, low, high, bits, symmetric)


def round_between(x: Tensor, low: Tensor, high: Tensor, bits: int, symmetric: bool) -> Tensor:
    """:func:`rounded` by given extremes, which broadcast; numbers outside are clamped."""
    if symmetric:
        most = 2 ** (bits - 1) - 1
        scale = _nonzero(torch.maximum(high.abs(), low.abs()) / most)
        return (x / scale).round().clamp(-most, most) * scale
    levels = 2**bits - 1
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = _nonzero((high - low) / levels)
    zero = (-low / scale).round()
    return ((x / scale).round() + zero).clamp(0, levels).sub(zero) * scale


def rounding_bits(shape: tuple[int, ...], bits: int, group: Group, symmetric: bool) -> float:
    """Bits of a matrix stored so: ``bits`` a number, and for every group a scale of 16 bits and, if not symmetric, a zero of ``bits``."""
    numbers = math.prod(shape)
    size = numbers if group == "tensor" else shape[-1] if group == "row" else int(group)
    return numbers * bits + numbers / size * (STORED + (0 if symmetric else bits))


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))
