"""What the battery of mixers examines: one mixer with one set of options and one number of streams, and random logits for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thalweg import config
from thalweg.mixers.base import Mixer, MixerOptions, name_of
from thalweg.testing.compare import DoesNotApplyError, Outcome
from thalweg.testing.subjects import scramble, seeded

SIZES = (1, 2, 3, 4, 8, 16)  # numbers of streams of a sweep
MORE = (32, 64)  # only whether they are served, and where they start
PREFERRED = (4, 3, 2, 8, 16, 1)  # the first of these that a mixer serves is enough for what is expensive
TOKENS = (2, 3)


@dataclass(frozen=True)
class MixerSubject:
    """A mixer of ``streams`` streams with one set of options. ``mutate`` breaks every module that is made (see ``mixers.mutants``)."""

    mixer: type[Mixer]
    streams: int
    options: Mapping[str, Any] = field(default_factory=dict)
    mutate: Callable[[Mixer], Mixer] | None = None

    def typed_options(self) -> MixerOptions:
        return config.build(self.mixer.Options, dict(self.options), where=name_of(self.mixer))

    def refusal(self) -> str | None:
        """Why the mixer does not serve this number of streams; None when it does."""
        return self.mixer.supports(self.streams, self.typed_options())

    def start(self, dtype: torch.dtype = torch.float32) -> Mixer:
        """A module at its declared start, made in float32 as users make it, then cast."""
        with seeded(0):
            mixer = self.mixer(self.streams, self.typed_options())
            mixer.reset_parameters()
            if self.mutate is not None:
                mixer = self.mutate(mixer)
        return mixer if dtype == torch.float32 else mixer.to(dtype)  # parameters without data cannot be cast

    def random(self, dtype: torch.dtype = torch.float64) -> Mixer:
        """A module away from its start: noise on every parameter of its own."""
        mixer = self.start(torch.float64)
        scramble(mixer, seed=1)
        return mixer.to(dtype)

    def at(self, streams: int) -> "MixerSubject":
        return replace(self, streams=streams)

    def broken_by(self, mutate: Callable[[Mixer], Mixer]) -> "MixerSubject":
        return replace(self, mutate=mutate)


def logits_for(
    mixer: Mixer, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64, seed: int = 3
) -> Tensor:
    """Independent normal logits [*shape generators] of standard deviation ``scale``; ``shape`` is 2 x 3 tokens unless given."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*(shape or TOKENS), mixer.generators, generator=generator, dtype=torch.float64)
    return (scale * drawn).to(dtype)


def start_of(mixer: Mixer, dtype: torch.dtype = torch.float64) -> Tensor:
    """The logits of the untrained network [generators]."""
    return mixer.start().detach().to(dtype)


def require_logits(mixer: Mixer) -> None:
    """Raises: DoesNotApplyError for a constant matrix."""
    if not mixer.generators:
        raise DoesNotApplyError("no logits: the matrix is constant")


def differentiate(
    call: Callable[[Tensor], Tensor], mixer: Mixer, logits: Tensor, *, seed: int = 5, scale: float = 1.0
) -> Outcome:
    """``call(logits)`` with the gradients, once they are read, of the logits and of the mixer's own parameters under a random cotangent.

    The cotangent is random because one of ones is blind to whatever keeps sums (a doubly stochastic map). ``scale`` multiplies it.
    """
    leaf = logits.detach().clone().requires_grad_()
    leaves = {"logits": leaf, **dict(mixer.named_parameters())}
    output = call(leaf)

    def backward() -> dict[str, Tensor | None]:
        generator = torch.Generator().manual_seed(seed)
        cotangent = scale * torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
        gradients: dict[str, Tensor | None] = dict.fromkeys(leaves)  # stay None where the output depends on nothing
        asked = {name: leaf for name, leaf in leaves.items() if leaf.numel()}
        if output.requires_grad and asked:
            found = torch.autograd.grad(output, list(asked.values()), cotangent, allow_unused=True)
            gradients |= zip(asked, found, strict=True)
        return gradients

    return Outcome(output.detach(), [], backward)
