"""Losses in the two units that people compare: nats per token (what is trained) and bits per byte (free of the tokenizer)."""

import math


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """A loss in nats per token as bits per byte of the same text."""
    return nats_per_token / (math.log(2) * bytes_per_token)


def nats_per_token(bits_per_byte: float, bytes_per_token: float) -> float:
    """Inverse of :func:`bits_per_byte`."""
    return bits_per_byte * math.log(2) * bytes_per_token
