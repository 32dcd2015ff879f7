"""What the battery examines: tiny seeded streams of one connection, and random nonlinear sublayers to drive them."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from thalweg import config
from thalweg.connections.base import Context, Requirements, Site, State, Stream, Tokens
from thalweg.ops.precision import default_dtype

# Three different sizes, so that a wrong axis cannot fit by chance.
BATCH, LENGTH, WIDTH = 2, 5, 8
DEPTH = 2


@dataclass(frozen=True)
class Subject:
    """One connection with one set of options. ``mutate`` breaks every stream that is made (see :mod:`thalweg.testing.mutants`)."""

    connection: type[Stream]
    options: Mapping[str, Any] = field(default_factory=dict)
    mutate: Callable[[Stream], Stream] | None = None

    def build(self, width: int, sites: Sequence[Site]) -> Stream:
        """The bare module."""
        options = config.build(self.connection.Options, dict(self.options), where=self.connection.__name__)
        stream = self.connection(width, sites, options)
        return stream if self.mutate is None else self.mutate(stream)

    def start(
        self, *, depth: int = DEPTH, width: int = WIDTH, dtype: torch.dtype = torch.float64, seed: int = 0
    ) -> Stream:
        """A stream at its declared start; all of it is drawn from ``seed``."""
        with seeded(seed), default_dtype(torch.float64):
            stream = self.build(width, Site.decoder(depth))
            stream.reset_parameters()
        return stream.to(dtype)

    def random(
        self, *, depth: int = DEPTH, width: int = WIDTH, dtype: torch.dtype = torch.float64, seed: int = 1
    ) -> Stream:
        """A stream away from its start: noise on every parameter, so that no initial value hides a term."""
        stream = self.start(depth=depth, width=width, seed=seed)
        scramble(stream, seed)
        return stream.to(dtype)

    def broken_by(self, mutate: Callable[[Stream], Stream]) -> "Subject":
        return replace(self, mutate=mutate)


def scramble(stream: nn.Module, seed: int) -> None:
    """Add noise to every parameter, in place: 0.4 on scalars and vectors, 0.6/sqrt(columns) on matrices."""
    generator = torch.Generator().manual_seed(seed + 1000)
    with torch.no_grad():
        for parameter in stream.parameters():
            scale = 0.4 if parameter.dim() < 2 else 0.6 * parameter.shape[-1] ** -0.5
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((scale * noise).to(parameter.dtype))


class RandomSublayer(nn.Module):
    """A nonlinear sublayer with parameters: x [b t d] -> tanh(x W1 + b1) W2 + b2, in its own precision, returned in that of ``x``.

    ``along_tokens`` adds the running mean of past tokens to the input: causal, as attention is. ``asked`` are the gains and the inner
    norm that the connection requires of a sublayer.
    """

    def __init__(
        self, width: int, generator: torch.Generator, *, along_tokens: bool, asked: Requirements | None = None
    ):
        super().__init__()
        asked = asked or Requirements()
        self.along_tokens, self.inner_norm = along_tokens, asked.inner_norm

        def draw(*shape: int, scale: float) -> nn.Parameter:
            return nn.Parameter(scale * torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.inner = draw(width, width, scale=asked.gain * width**-0.5)
        self.inner_bias = draw(width, scale=0.1)
        self.outer = draw(width, width, scale=asked.gain * asked.output_gain * width**-0.5)
        self.outer_bias = draw(width, scale=0.1 * asked.gain * asked.output_gain)

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(self.inner.dtype)
        if self.along_tokens:
            counts = torch.arange(1, h.shape[1] + 1, device=h.device, dtype=h.dtype)
            h = h + h.cumsum(1) / counts[:, None]
        h = torch.tanh(h @ self.inner + self.inner_bias)
        if self.inner_norm:
            h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        return (h @ self.outer + self.outer_bias).to(x.dtype)


def sublayers_for(stream: Stream, *, along_tokens: bool = True, asked: bool = False, seed: int = 2) -> nn.ModuleList:
    """One random sublayer per site, float64; with ``asked`` they follow the requirements of the connection."""
    generator = torch.Generator().manual_seed(seed)
    return nn.ModuleList(
        RandomSublayer(
            stream.width, generator, along_tokens=along_tokens, asked=stream.requirements(site.site) if asked else None
        )
        for site in stream.sites
    )


def embedding_for(
    stream: Stream, *, batch: int = BATCH, length: int = LENGTH, dtype: torch.dtype = torch.float64, seed: int = 3
) -> Tensor:
    """A random embedding [b t d]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, stream.width, generator=generator, dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Visit:
    """What happened at one site: ``read`` gave ``x`` and ``context``, the sublayer ``update``, ``write`` gave ``after``."""

    state: State
    x: Tensor
    context: Context
    update: Tensor
    after: State


def walk(stream: Stream, embedding: Tensor, sublayers: Any, tokens: Tokens | None = None) -> list[Visit]:
    """Drive the stack by ``read`` and ``write`` alone, never by ``advance``."""
    state = stream.enter(embedding, tokens)
    visits = []
    for site, sublayer in zip(stream.sites, sublayers, strict=True):
        x, context = site.read(state, tokens)
        update = sublayer(x)
        after = site.write(state, update, context)
        visits.append(Visit(state, x, context, update, after))
        state = after
    return visits


def random_state(state: State, seed: int = 7) -> State:
    """A state of the same structure with random entries (streams that differ, which an entered state may not have)."""
    generator = torch.Generator().manual_seed(seed)

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.dtype)

    return tree_map(fill, state)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global generator at ``seed`` inside, as it was outside."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
