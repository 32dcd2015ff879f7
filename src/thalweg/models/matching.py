"""Widths that make two models equal in parameters or in FLOPs: found by the package, not by hand."""

import functools
from collections.abc import Callable
from typing import Literal

from thalweg.errors import InputError, UnknownNameError
from thalweg.models.config import DecoderConfig
from thalweg.models.size import FEEDING, flops, parameters

Adjust = Literal["ffn_width", "width"]
Count = Literal["total", "non_embedding"]


def match_parameters(
    config: DecoderConfig,
    target: int | DecoderConfig,
    *,
    adjust: Adjust = "ffn_width",
    count: Count = "total",
    tolerance: float = 0.05,
) -> DecoderConfig:
    """``config`` with the width that brings its parameters nearest to ``target`` (a number, or a config to be as large as).

    adjust: ``ffn_width`` in steps of one, or ``width`` in steps of 2 heads (a fixed ``ffn_width`` keeps its ratio to it). count: all
    parameters, or those outside embedding and unembedding. tolerance: largest relative miss.
    Raises: InputError where no width comes that near, with the nearest; UnknownNameError.
    """
    if count not in ("total", "non_embedding"):
        raise UnknownNameError("value for count:", count, ["total", "non_embedding"])

    def counted(candidate: DecoderConfig) -> float:
        parts = parameters(candidate)
        return sum(
            value for name, value in parts.items() if count == "total" or name not in ("embedding", "unembedding")
        )

    return _match(config, counted, target, adjust, tolerance, "parameters")


def match_flops(
    config: DecoderConfig,
    target: float | DecoderConfig,
    *,
    length: int | None = None,
    adjust: Adjust = "ffn_width",
    tolerance: float = 0.05,
) -> DecoderConfig:
    """The same for forward FLOPs per token on sequences of ``length`` tokens (None: ``config.max_length``)."""
    tokens = config.max_length if length is None else length
    return _match(
        config, lambda candidate: sum(flops(candidate, tokens).values()), target, adjust, tolerance, "FLOPs per token"
    )


def _match(
    config: DecoderConfig,
    measure: Callable[[DecoderConfig], float],
    target: float | DecoderConfig,
    adjust: str,
    tolerance: float,
    unit: str,
) -> DecoderConfig:
    wanted = measure(target) if isinstance(target, DecoderConfig) else target
    if isinstance(wanted, bool) or not isinstance(wanted, int | float) or not 0 < wanted < float("inf"):
        raise InputError(f"the target must be a positive number of {unit} or a DecoderConfig, got {target!r}")
    if adjust == "ffn_width":
        if all(kind == "attention" for kind in config.layers):
            raise InputError("an attention-only stack has no ffn_width to adjust; use adjust='width'")
        if config.expert_width is not None and not any(site.kind in FEEDING for site in config.sites):
            raise InputError(
                "ffn_width changes nothing here: leave expert_width out, so that it follows, or use adjust='width'"
            )
        start = config.feed_forward_width
    elif adjust == "width":
        start = config.width // (2 * config.heads)
    else:
        raise UnknownNameError("value for adjust:", adjust, ["ffn_width", "width"])

    def candidate(steps: int) -> DecoderConfig:
        if adjust == "ffn_width":
            return config.replace(ffn_width=steps)
        width = steps * 2 * config.heads
        ffn_width = None if config.ffn_width is None else max(1, round(config.ffn_width * width / config.width))
        return config.replace(width=width, ffn_width=ffn_width)

    best = candidate(nearest(functools.cache(lambda steps: measure(candidate(steps))), wanted, start))
    got = measure(best)
    if abs(got - wanted) > tolerance * wanted:
        raise InputError(
            f"no {adjust} brings {config.connection!r} within {tolerance:.1%} of {wanted:,.0f} {unit}: the nearest is "
            f"{adjust} {getattr(best, adjust)} with {got:,.0f}; change depth or heads, or raise tolerance"
        )
    return best


def nearest(value: Callable[[int], float], target: float, start: int) -> int:
    """The positive integer at which the increasing function ``value`` comes nearest to ``target``; looks outwards from ``start``."""
    low = high = start
    while low > 1 and value(low) > target:
        low = max(1, low // 2)
    while value(high) < target:
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) <= target else (low, middle)
    return min((low, high), key=lambda steps: abs(value(steps) - target))
