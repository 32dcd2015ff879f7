"""What every maker of rows needs: one row from one value per sequence, where it was measured, in which dtype."""

from typing import Any

import torch
from torch import Tensor

from thalweg.geometry.catalog import Null
from thalweg.records import Measurements


def add_row(
    rows: Measurements, name: str, values: Tensor, tokens: int | str, null: Null | None = None, **fields: Any
) -> None:
    """One row from one value per sequence [b]: their mean, and where all are finite one standard deviation about it.

    tokens: of a sequence, or in words which of them.
    """
    mean, count = values.mean().item(), values.numel()
    if count > 1 and bool(torch.isfinite(values).all()):
        sd = values.std().item()
        interval = f"mean +- sd over sequences of {tokens} tokens"
        fields |= {"low": mean - sd, "high": mean + sd, "interval": interval}
    if null is not None:
        fields |= {"null": null.value, "null_kind": null.kind}
    rows.add(name, mean, n=count, **fields)


def place_of(site: Any) -> dict[str, Any]:
    """The fields of a row at a site with ``layer`` and ``kind``."""
    return {"site": f"layers.{site.layer}.{site.kind}", "layer": site.layer, "branch": site.kind}


def end_of(site: Any) -> dict[str, Any]:
    """The fields of a row on the state after the last ``site``."""
    return {"site": "stream.end", "layer": site.layer + 1}


def dtype_of(x: Tensor) -> str:
    """``float32``, ``bfloat16`` ..."""
    return str(x.dtype).removeprefix("torch.")
