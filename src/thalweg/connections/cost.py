"""What a connection costs, measured and never declared: parameters, FLOPs, bytes kept for the backward pass."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from thalweg import config, connections
from thalweg.connections.base import Site, Stream
from thalweg.errors import InputError, ThalwegError

SAMPLED_LAYERS = 4  # deeper networks are extrapolated from their first layers


@dataclass(frozen=True)
class Cost:
    """The cost of one stream, without its sublayers, and what it has over the additive one with the same norms.

    parameters: each counted once. flops_per_token: of one forward pass; a multiply-add is two, an element-wise operation or a reduction
    one per element (exceptions in the table at the end of this file), data movement none. activation_bytes_per_token: distinct storages
    that autograd keeps because of the connection, parameters left out. uncounted: operations whose arithmetic has no counting rule here
    (the FLOPs are a lower bound then). extrapolated: the network is deeper than what was run.
    """

    parameters: int
    flops_per_token: float
    activation_bytes_per_token: float
    extra_parameters: int
    extra_flops_per_token: float
    extra_activation_bytes_per_token: float
    width: int
    sites: int
    length: int
    dtype: str
    uncounted: tuple[str, ...] = ()
    extrapolated: bool = False


def measure_cost(
    connection: str | type[Stream],
    *,
    width: int,
    sites: Sequence[Site],
    options: Mapping[str, Any] | None = None,
    length: int = 512,
    dtype: torch.dtype = torch.float32,
) -> Cost:
    """Measure a connection on tensors without data (any width is quick).

    ``length`` matters to connections that look along tokens; what does not grow with it (a parameter cast to float32) is spread over it.
    Networks of more than four layers are extrapolated from their first four by second differences: exact where layers cost the same, or
    where the cost grows linearly with the layer.
    Raises: UnknownNameError; InputError for a connection that needs real numbers to run.
    """
    cls = connections.registry[connection] if isinstance(connection, str) else connection
    given = config.build(cls.Options, dict(options or {}), where=connections.registry.name_of(cls) or cls.__name__)
    additive = connections.registry["additive"]
    plain = config.build(additive.Options, {"norm": given.norm, "norm_bias": given.norm_bias})
    own = measure(lambda some: cls(width, some, given), sites, width=width, length=length, dtype=dtype)
    base = measure(lambda some: additive(width, some, plain), sites, width=width, length=length, dtype=dtype)
    return Cost(
        parameters=own.parameters,
        flops_per_token=own.flops_per_token,
        activation_bytes_per_token=own.bytes_per_token,
        extra_parameters=own.parameters - base.parameters,
        extra_flops_per_token=own.flops_per_token - base.flops_per_token,
        extra_activation_bytes_per_token=own.bytes_per_token - base.bytes_per_token,
        width=width,
        sites=len(sites),
        length=length,
        dtype=str(dtype).removeprefix("torch."),
        uncounted=own.uncounted,
        extrapolated=len({site.layer for site in sites}) > SAMPLED_LAYERS,
    )


@dataclass(frozen=True)
class Reading:
    """Parameters, forward FLOPs and kept bytes of one stream; see :class:`Cost`."""

    parameters: int
    flops_per_token: float
    bytes_per_token: float
    uncounted: tuple[str, ...] = ()


def measure(
    build: Callable[[Sequence[Site]], Stream],
    sites: Sequence[Site],
    *,
    width: int,
    length: int,
    dtype: torch.dtype = torch.float32,
) -> Reading:
    """What :func:`measure_cost` measures, of any stream: ``build`` makes it for the sites of the first few layers."""
    layers = [tuple(group) for _, group in itertools.groupby(sites, key=lambda site: site.layer)]

    def run(count: int) -> Reading:
        layout = tuple(itertools.chain.from_iterable(layers[:count]))
        try:
            return _run(build, layout, width, length, dtype)
        except ThalwegError:
            raise
        except Exception as error:
            raise InputError(
                f"cost cannot be measured on tensors without data: {type(error).__name__}: {str(error).splitlines()[0]}; "
                "read and write must not branch on values"
            ) from error

    if len(layers) <= SAMPLED_LAYERS:
        return run(len(layers))
    two, three, four = (run(count) for count in (SAMPLED_LAYERS - 2, SAMPLED_LAYERS - 1, SAMPLED_LAYERS))
    steps = len(layers) - SAMPLED_LAYERS
    return Reading(
        round(_extend(two.parameters, three.parameters, four.parameters, steps)),
        _extend(two.flops_per_token, three.flops_per_token, four.flops_per_token, steps),
        _extend(two.bytes_per_token, three.bytes_per_token, four.bytes_per_token, steps),
        four.uncounted,
    )


def _extend(two: float, three: float, four: float, steps: int) -> float:
    """The quadratic through the values at two, three and four layers, ``steps`` layers further."""
    first, second = four - three, four - 2 * three + two
    return four + steps * first + steps * (steps + 1) / 2 * second


def _run(
    build: Callable[[Sequence[Site]], Stream], layout: Sequence[Site], width: int, length: int, dtype: torch.dtype
) -> Reading:
    with FakeTensorMode():
        stream = build(layout)
        for parameter in stream.parameters():  # Module.to cannot swap fake parameters
            parameter.data = parameter.data.to(dtype)
        embedding = torch.empty(1, length, width, dtype=dtype, requires_grad=True)
        kept = _Kept([*stream.parameters(), *stream.buffers()])
        products, rest = FlopCounterMode(display=False), _ElementCounter()
        with products, rest, torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            stream(embedding, [_opaque] * len(layout))
        parameters = sum(parameter.numel() for parameter in stream.parameters())
        flops = products.get_total_flops() + rest.elements
    return Reading(parameters, flops / length, kept.nbytes / length, tuple(sorted(rest.unknown)))


class _Opaque(torch.autograd.Function):
    """A sublayer of no cost: autograd keeps nothing for it, and its output owes nothing to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


_opaque: Callable[[Tensor], Tensor] = _Opaque.apply


class _Kept:
    """Distinct storages that autograd keeps, except those of the module itself."""

    def __init__(self, own: list[Tensor]):
        self.known = {tensor.untyped_storage()._cdata for tensor in own}
        self.held: list[Tensor] = []  # so that no storage is freed and its address used again
        self.nbytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.held.append(tensor)
            self.nbytes += storage.nbytes()
        return tensor


class _ElementCounter(TorchDispatchMode):
    """Counts the elements that element-wise operations make and reductions read; matrix products are counted elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in MOVES or name in PRODUCTS or func.is_view or name.startswith("prim::"):
            return result
        if torch.Tag.pointwise in func.tags:
            self.elements += result.numel() if isinstance(result, Tensor) else 0
        elif name in REDUCTIONS:
            self.elements += REDUCTIONS[name] * args[0].numel()
        else:
            self.unknown.add(name)
        return result


def _aten(*names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names)


# Creation, copies, conversions of dtype and selection: data movement, no arithmetic.
MOVES = _aten(
    "empty", "empty_like", "empty_strided", "new_empty", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full",
    "full_like", "new_full", "arange", "linspace", "eye", "scalar_tensor", "lift_fresh", "_to_copy", "copy_", "clone", "fill_", "zero_", "cat",
    "stack", "split", "roll", "flip", "repeat", "constant_pad_nd", "index", "index_select", "index_put", "gather", "scatter",
    "slice_scatter", "select_scatter", "tril", "triu", "where", "masked_fill", "_unsafe_view", "_local_scalar_dense",
)  # fmt: skip
PRODUCTS = _aten("mm", "bmm", "addmm", "baddbmm", "convolution", "_convolution")
# Not element-wise: operations per element read.
REDUCTIONS = dict.fromkeys(
    _aten("sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "argmax", "cumsum"), 1
) | {
    "aten::linalg_vector_norm": 2,
    "aten::var": 3,
    "aten::var_mean": 3,
    "aten::logsumexp": 3,
    "aten::_softmax": 4,
    "aten::_log_softmax": 4,
    "aten::native_layer_norm": 8,
}
