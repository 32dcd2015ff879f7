"""How checks say what is broken, and the comparisons that they share."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.connections.base import Stream

EXACT = 1e-9  # relative, float64: what "equal" means where two orders of summation are compared


class BrokenError(AssertionError):
    """What a check found broken; the message is the reason in the report."""


class DoesNotApplyError(Exception):
    """The check asks for something that this connection does not have; the message says what."""


def require(condition: bool, message: str) -> None:
    """Raises: BrokenError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise BrokenError(message)


def require_close(
    what: str, got: Tensor | None, want: Tensor | None, tolerance: float = EXACT, floor: float = 0.0
) -> None:
    """Largest difference at most ``tolerance`` times the largest entry of ``want``, or times ``floor`` where that is larger.

    A missing tensor (a parameter without gradient) equals only another missing one. Raises: BrokenError.
    """
    if got is None or want is None:
        if got is not want:
            raise BrokenError(f"{what} is {'missing' if got is None else 'there, but should not be'}")
        return
    require(got.shape == want.shape, f"{what} has shape {list(got.shape)}, expected {list(want.shape)}")
    if want.numel() == 0:
        return
    got, want = got.detach().double(), want.detach().double()
    require(bool(got.isfinite().all()), f"{what} is not finite")
    scale = max(want.abs().max().item(), floor, 1e-300)
    error = (got - want).abs().max().item() / scale
    require(error <= tolerance, f"{what} is off by {error:.1e} (relative; allowed {tolerance:.0e})")


def finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(tensor.isfinite().all())


def parameters_of(stream: nn.Module, sublayers: nn.Module | None = None) -> dict[str, nn.Parameter]:
    """Every parameter once, by name; those of the sublayers under ``sublayer.``."""
    named = dict(stream.named_parameters())
    if sublayers is not None:
        named |= {f"sublayer.{name}": parameter for name, parameter in sublayers.named_parameters()}
    return named


@dataclass(frozen=True)
class Outcome:
    """One pass: the output, what every sublayer was given, and the gradient of every leaf (None: not reached), computed when first read."""

    output: Tensor
    inputs: list[Tensor]
    backward: Callable[[], Mapping[str, Tensor | None]]

    @cached_property
    def gradients(self) -> Mapping[str, Tensor | None]:
        return self.backward()


def differentiate(
    call: Callable[..., Tensor],
    stream: Stream,
    sublayers: nn.ModuleList,
    embedding: Tensor,
    tokens: Any = None,
    seed: int = 5,
) -> Outcome:
    """Run ``call(embedding, sublayers, tokens)``; its backward pass, under a random cotangent, waits until somebody reads a gradient.

    The cotangent is random because one of ones is blind to whatever keeps sums (a doubly stochastic map).
    """
    leaf = embedding.detach().clone().requires_grad_()
    given: list[Tensor] = []

    def recorded(sublayer: nn.Module) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            given.append(x)
            return sublayer(x)

        return run

    output = call(leaf, [recorded(sublayer) for sublayer in sublayers], tokens)
    leaves = parameters_of(stream, sublayers)
    return Outcome(output.detach(), [x.detach() for x in given], lambda: gradients(output, leaf, leaves, seed))


def gradients(
    output: Tensor, embedding: Tensor, parameters: Mapping[str, Tensor], seed: int = 5
) -> dict[str, Tensor | None]:
    """Gradients of a random linear function of ``output``, by name of the leaf."""
    generator = torch.Generator().manual_seed(seed)
    cotangent = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
    leaves = {"embedding": embedding, **parameters}
    require(output.requires_grad, "the output does not depend on any parameter or on the embedding")
    found = torch.autograd.grad(output, list(leaves.values()), cotangent, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def require_same(got: Outcome, want: Outcome, than: str, tolerance: float = EXACT, least: float = 0.0) -> None:
    """Outputs and sublayer inputs agree, and then all gradients. Raises: BrokenError with everything that does not.

    least: the smallest gradient that is more than rounding.
    """
    broken: list[str] = []

    def collect(what: str, a: Tensor | None, b: Tensor | None, floor: float = 0.0) -> None:
        try:
            require_close(f"{what} against {than}", a, b, tolerance, floor)
        except BrokenError as error:
            broken.append(str(error))

    collect("output", got.output, want.output)
    if len(got.inputs) != len(want.inputs):
        broken.append(f"{len(got.inputs)} sublayers were called, {len(want.inputs)} by {than}")
    for index, (a, b) in enumerate(zip(got.inputs, want.inputs, strict=False)):
        collect(f"input of sublayer {index}", a, b)
    _none(broken)
    # A gradient that is zero in exact arithmetic is compared on the scale of the others.
    floor = 1e-3 * max(
        (g.abs().max().item() for g in want.gradients.values() if g is not None and g.numel()), default=0.0
    )
    floor = max(floor, least)
    for name, gradient in want.gradients.items():
        collect(f"gradient of {name}", got.gradients[name], gradient, floor if math.isfinite(floor) else 0.0)
    _none(broken)


def _none(broken: list[str]) -> None:
    require(not broken, "; ".join(broken[:4]) + (f"; and {len(broken) - 4} more" if len(broken) > 4 else ""))


def rows(names: Sequence[str], limit: int = 5) -> str:
    """A list of names short enough for one line."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
