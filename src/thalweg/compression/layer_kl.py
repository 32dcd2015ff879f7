"""What the error of one layer alone does to the predictions: its output put through the remaining dense network."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.capture.layout import Located, Point
from thalweg.capture.states import Tokens
from thalweg.capture.tables import Entry, Table, Units, add_rows
from thalweg.capture.watching import given
from thalweg.compression.dense_pass import HIDDEN, Kept, blocks_of, like, see, unembedded
from thalweg.compression.logits import CHUNK, Unembedding, kl_of
from thalweg.errors import InputError
from thalweg.models.block import Block
from thalweg.records import Measurements

MEASURE = "kl.layer"


class LayerKL:
    """KL(dense || dense with one layer compressed), layer by layer. Every layer costs a pass through the layers behind it."""

    def __init__(self, base: Located, units: Units):
        self.base = base
        self.table = Table({str(layer): None for layer in range(base.depth)}, units)

    @property
    def bytes(self) -> int:
        return self.table.bytes

    def add(self, run: Any, dense: Kept, outputs: Mapping[int, Any], tokens: Tokens) -> None:
        """Count a batch. run: calls the dense model; dense: its record, with ``HIDDEN``; outputs: what every compressed layer gave on the dense
        input, by layer of the base. A layer that is missing there gives what it was given (it was dropped)."""
        head, last = Unembedding.of(self.base), unembedded(self.base)
        wanted = _flat(dense.tensor(HIDDEN), tokens)
        columns = []
        for layer in range(self.base.depth):
            found = Kept()
            with resumed(self.base, layer, outputs.get(layer)), _hidden(self.base, last, found):
                run()
            got = _flat(found.tensor(HIDDEN), tokens)
            parts = range(0, len(got), CHUNK)
            columns.append(torch.cat([kl_of(head(wanted[i : i + CHUNK]), head(got[i : i + CHUNK])) for i in parts]))
        self.table.add(torch.stack(columns), tokens.unit)

    def measurements(self, dtype: str) -> Measurements:
        """One row for every layer."""
        rows = Measurements()
        for layer in range(self.base.depth):
            where = {"site": f"layers.{layer}", "layer": layer, "branch": "layer", "dtype": dtype}
            add_rows(rows, self.table, [Entry(MEASURE, str(layer), unit="nats/token")], where)
        return rows

    def values(self) -> dict[int, float]:
        """The mean of every layer."""
        return {
            layer: float(self.table.total(str(layer)).sum()) / self.table.tokens for layer in range(self.base.depth)
        }


@contextmanager
def _hidden(located: Located, last: Point, found: Kept) -> Iterator[None]:
    handle = see(located, last, found.put, HIDDEN)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def resumed(located: Located, layer: int, output: Any) -> Iterator[None]:
    """Passes inside begin behind ``layer``, with ``output`` as what it gave (None: what it was given); layers before it are not computed."""
    with ExitStack() as stack:
        for i, block in enumerate(blocks_of(located)[: layer + 1]):
            before = block.__dict__.get("forward")
            block.__dict__["forward"] = _standing_in(block, output if i == layer else None)
            stack.callback(_restore, block, before)
        yield


def _restore(block: nn.Module, before: Any) -> None:
    if before is None:
        block.__dict__.pop("forward", None)
    else:
        block.__dict__["forward"] = before


def _standing_in(block: nn.Module, output: Any) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if isinstance(block, Block):
            (state, *_), _, following, tokens, *_ = args
            state = state if output is None else like(output, state)
            return (state, *((None, None) if following is None else following.read(state, tokens)))
        state = given(args, kwargs)
        return state if output is None else like(output, state)

    return forward


@contextmanager
def outputs_of(located: Located, layer_of: Mapping[int, int], found: dict[int, Any]) -> Iterator[None]:
    """Keep what every block gives, by layer of the base."""
    handles = []

    def keep(layer: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not isinstance(output, Tensor) and not isinstance(module, Block):
                raise InputError(
                    f"a block of {located.family} gives {type(output).__name__} and no tensor, so its output cannot be put through the layers "
                    f"behind it; leave layer-wise KL out"
                )
            value = output[0] if isinstance(module, Block) else output
            kept = Kept()
            kept.put("state", value)
            found[layer] = kept.tree("state")

        return hook

    try:
        for layer, block in enumerate(blocks_of(located)):
            handles.append(block.register_forward_hook(keep(layer_of[layer])))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _flat(x: Tensor, tokens: Tokens) -> Tensor:
    return x.flatten(0, 1) if tokens.real is None else x[tokens.real]
