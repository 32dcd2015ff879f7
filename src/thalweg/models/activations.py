"""Bytes that autograd keeps for the backward pass, measured on tensors without data."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from thalweg.connections import Tokens
from thalweg.connections.base import tensors_of
from thalweg.models.config import DecoderConfig
from thalweg.models.look import view_of
from thalweg.models.making import make

SAMPLED_LAYERS = 4  # deeper networks are extrapolated from their first layers, as in connections.cost


@dataclass(frozen=True)
class Activations:
    """Bytes for one sequence: all that is kept; with gradient checkpointing, the inputs of the blocks and one block at a time."""

    full: int
    checkpointed: int


def kept_activations(config: DecoderConfig, length: int, dtype: torch.dtype = torch.float32) -> Activations:
    """Measure one sequence of ``length`` tokens, its logits and loss included; weights and stream in ``dtype``."""
    if config.dense_layers and "moe" in config.layers:
        return mixed_activations(config, length, dtype)
    if config.layer_heads:
        return ragged_activations(config, length, dtype)

    @functools.cache
    def measured(depth: int) -> tuple[int, int]:
        windows = (
            (max(config.windows),) * depth if any(config.windows) else ()
        )  # as if every layer had one: the mask is kept
        edits = {name: edit.everywhere() for name, edit in config.edits.items()}  # as if every layer were edited
        return measure(
            config.replace(depth=depth, windows=windows, gradient_checkpointing=False, **edits), length, dtype
        )

    full, before = (
        extend(lambda depth: measured(depth)[0], depth) for depth in (config.depth, max(config.depth - 1, 1))
    )
    inputs = extend(lambda depth: measured(depth)[1], config.depth)
    edges = 2 * measured(1)[0] - measured(2)[0]  # what one block and no block at all would keep
    return Activations(full, min(full, edges + inputs + (full - before if config.depth > 1 else full - edges)))


def mixed_activations(config: DecoderConfig, length: int, dtype: torch.dtype) -> Activations:
    """The same where the first layers are dense and the others have experts: each counts as in a stack of its own kind."""
    kinds = tuple("feed_forward" if kind == "moe" else kind for kind in config.layers)
    dense, experts = (
        kept_activations(config.replace(dense_layers=0, layers=layers), length, dtype)
        for layers in (kinds, config.layers)
    )
    full = experts.full + (dense.full - experts.full) * config.dense_layers // config.depth
    largest = dense if config.dense_layers == config.depth else max(dense, experts, key=lambda kept: kept.checkpointed)
    return Activations(full, min(full, largest.checkpointed))


def ragged_activations(config: DecoderConfig, length: int, dtype: torch.dtype) -> Activations:
    """The same where layers differ in their heads: each keeps what it would in a stack of its own kind."""
    edits = {name: edit.everywhere() for name, edit in config.edits.items()}  # lists of numbers of heads have no place

    def stack(heads: int) -> Activations:
        same = config.replace(
            layer_heads=(), heads=heads, kv_heads=heads // config.head_group, head_size=config.head_width, **edits
        )
        return kept_activations(same, length, dtype)

    stacks = {heads: stack(heads) for heads in set(config.layer_heads)}
    full = sum(stacks[heads].full for heads in config.layer_heads) // config.depth
    return Activations(full, min(full, max(kept.checkpointed for kept in stacks.values())))


def extend(measured: Callable[[int], int], depth: int) -> int:
    """The value at ``depth``; beyond the sampled layers, the quadratic through the last three of them."""
    if depth <= SAMPLED_LAYERS:
        return measured(depth)
    two, three, four = (measured(SAMPLED_LAYERS - back) for back in (2, 1, 0))
    steps = depth - SAMPLED_LAYERS
    return four + steps * (four - three) + steps * (steps + 1) * (four - 2 * three + two) // 2


def measure(config: DecoderConfig, length: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that autograd keeps, and bytes of the states that enter the blocks."""
    with torch.device("meta"):
        decoder = make(config)
    with FakeTensorMode():
        for (
            module
        ) in decoder.modules():  # as on a machine, but without memory: attention takes the kernel it would take there
            for name, parameter in module.named_parameters(recurse=False):
                setattr(
                    module,
                    name,
                    nn.Parameter(torch.empty(parameter.shape, dtype=dtype), requires_grad=parameter.requires_grad),
                )
            for name, buffer in module.named_buffers(recurse=False):
                setattr(
                    module, name, torch.empty(buffer.shape, dtype=dtype if buffer.is_floating_point() else buffer.dtype)
                )
        embedding = torch.empty(1, length, config.width, dtype=dtype, requires_grad=True)
        positions = torch.arange(length)[None]
        view = view_of(config, positions, dtype)
        entering = KeptBytes(decoder)
        for block in decoder.blocks:
            block.register_forward_pre_hook(
                lambda _, args: [entering.pack(tensor) for tensor in tensors_of(args[0])] and None
            )
        with KeptBytes(decoder) as kept:
            logits = decoder.unembed(decoder.run(embedding, Tokens(positions=positions), view))
            decoder.loss(logits, decoder.blank_labels(1, length))
    ids = positions.nbytes  # the embedding keeps the token ids
    return kept.bytes + ids, entering.bytes


class KeptBytes:
    """Inside it, adds up the distinct storages that autograd keeps, those of the parameters of ``module`` left out."""

    def __init__(self, module: nn.Module):
        self.known = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        self.held: list[Tensor] = []  # so that no storage is freed and its address used again
        self.bytes = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.held.append(tensor)
            self.bytes += storage.nbytes()
        return tensor

    def __enter__(self) -> "KeptBytes":
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__(*error)
