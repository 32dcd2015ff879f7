"""The linear maps of a feed-forward sublayer, found by replay: y = W act(U x) or y = W (act(G x) * (U x)), and other weights in their place."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from thalweg.capture.inner import mapped
from thalweg.capture.layout import Located, SitePlace
from thalweg.capture.linear import linear_weight
from thalweg.capture.proof import called
from thalweg.capture.watching import Event, watch
from thalweg.geometry.jacobian import extreme_singular_values
from thalweg.ops.precision import wide

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu squared": lambda x: F.relu(x).square(),
    "gelu by sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
RISING = ("relu", "relu squared", "tanh", "sigmoid")  # nowhere falling, so tied maps are positive semidefinite
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}  # of the hidden vector, relative; 3e-2 in 16 bits
Variant = Literal["model", "symmetric", "tied_down", "norm_matched", "rotated", "random_symmetric"]


@dataclass(frozen=True)
class Maps:
    """Where the maps of one sublayer are.

    up, gate, last: dotted modules of U, G (None: not gated) and W. halves: of one module that holds G and U: which half of its rows is U (0
    or 1); None where they are apart. activation: of ``ACTIVATIONS``.
    """

    place: SitePlace
    up: str
    gate: str | None
    last: str
    halves: int | None
    activation: str

    def weights(self, located: Located) -> tuple[Tensor, Tensor | None, Tensor]:
        """U [f d], G [f d] or None, W [d f]; views."""
        up, last = (_weight(located, name) for name in (self.up, self.last))
        if self.halves is not None:
            parts = up.chunk(2)
            return parts[self.halves], parts[1 - self.halves], last
        return up, None if self.gate is None else _weight(located, self.gate), last

    def replaced(self, located: Located, up: Tensor, gate: Tensor | None, last: Tensor) -> dict[str, Tensor]:
        """Other weights by the names of the parameters that they stand in for, laid out and typed as those are."""
        found = {self.last: last}
        if self.halves is not None:
            assert gate is not None
            found[self.up] = torch.cat([up, gate] if self.halves == 0 else [gate, up])
        else:
            found[self.up] = up
            if self.gate is not None and gate is not None:
                found[self.gate] = gate
        return {f"{name}.weight": _stored(located, name, value) for name, value in found.items()}


def find_maps(located: Located, batch: Mapping[str, Any], more: Mapping[str, Any]) -> tuple[list[Maps], list[str]]:
    """The maps of every feed-forward sublayer that a pass over a batch confirms, and a line on each that it does not."""
    found, left = [], []

    def see(event: Event) -> None:
        place = event.place
        if place.kind != "feed_forward":
            return
        if place.inner is None or event.inner is None:
            left.append(f"{place.name}: {place.no_inner or 'its last linear map is not known'}")
            return
        maps = _match(located, place, event.inner.x, event.inner.h)
        if maps is None:
            still = not bool(event.inner.h.any())
            why = "is zero at every token" if still else "is no activation of linear maps of what it is given"
            left.append(f"{place.name}: its hidden vector {why}")
        else:
            found.append(maps)

    with watch(located, see, inner=True):
        located.model(**called(located.model, batch), **more)
    return found, left


def _match(located: Located, place: SitePlace, x: Tensor, h: Tensor) -> Maps | None:
    assert place.inner is not None
    block = located.module(place.block)
    width, last = place.inner.width, place.inner.last
    whole, double = [], []
    for name, module in block.named_modules():
        weight, dotted = linear_weight(module), f"{place.block}.{name}"
        if weight is None or dotted == last or weight.shape[1] != x.shape[-1] or weight.device.type == "meta":
            continue
        if weight.shape[0] in (width, 2 * width):
            (whole if weight.shape[0] == width else double).append((dotted, mapped(module, x.flatten(0, 1)[:64])))
    wanted = h.flatten(0, 1)[:64].double()
    if not bool(wanted.any()):
        return None  # any maps with a zero among them would do
    allowed = TOLERANCE.get(h.dtype, 3e-2)

    def fits(value: Tensor) -> bool:
        return bool(torch.linalg.vector_norm(value - wanted) <= allowed * torch.linalg.vector_norm(wanted))

    for kind, act in ACTIVATIONS.items():
        for up, u in whole:
            if fits(act(u)):
                return Maps(place, up, None, last, None, kind)
        for (gate, g), (up, u) in permutations(whole, 2):
            if fits(act(g) * u):
                return Maps(place, up, gate, last, None, kind)
        for name, both in double:
            parts = both.chunk(2, dim=-1)
            for half in (0, 1):
                if fits(act(parts[1 - half]) * parts[half]):
                    return Maps(place, name, name, last, half, kind)
    return None


def variant_of(
    maps: Maps, located: Located, variant: Variant, generator: torch.Generator
) -> tuple[Tensor, Tensor | None, Tensor]:
    """U, G, W of a variant, in float32 or wider.

    symmetric: W = U^T, and G = U where there is a gate. tied_down: W = U^T and the gate as it is, which is not symmetric. norm_matched: W (and
    G) as they are, scaled to the spectral norm of U. rotated: symmetric, then a random rotation of what it gives: the same singular values.
    random_symmetric: symmetric of U Q with a random rotation Q: the same spectrum in other directions.
    """
    up, gate, last = (None if w is None else wide(w) for w in maps.weights(located))
    assert up is not None and last is not None
    if variant == "model":
        return up, gate, last
    if variant == "tied_down":
        return up, gate, up.T
    if variant == "norm_matched":
        size = spectral_norm(up)
        return up, None if gate is None else _scaled(gate, size), _scaled(last, size)
    tied = None if gate is None else up
    if variant == "symmetric":
        return up, tied, up.T
    turn = rotation(up.shape[1], generator).to(up)
    if variant == "rotated":
        return up, tied, turn @ up.T
    turned = up @ turn
    return turned, None if gate is None else turned, turned.T


def jacobian_of(
    maps: Maps, located: Located, weights: tuple[Tensor, Tensor | None, Tensor], x: Float[Tensor, " d"]
) -> Float[Tensor, "d d"]:
    """Jacobian of y = W act(U x + b) or W (act(G x + c) * (U x + b)) at one token, in float64, with the biases of the model."""
    up, gate, last = (None if w is None else w.double() for w in weights)
    assert up is not None and last is not None
    act = ACTIVATIONS[maps.activation]
    bias = _bias(located, maps.up)
    shift_up, shift_gate = bias, None if maps.gate is None else _bias(located, maps.gate)
    if maps.halves is not None and bias is not None:
        parts = bias.chunk(2)
        shift_up, shift_gate = parts[maps.halves], parts[1 - maps.halves]
    z = x.double()
    u = up @ z if shift_up is None else up @ z + shift_up
    if gate is None:
        return last @ (_slope(act, u)[:, None] * up)
    g = gate @ z if shift_gate is None else gate @ z + shift_gate
    return last @ ((_slope(act, g) * u)[:, None] * gate + act(g)[:, None] * up)


def spectral_norm(weight: Float[Tensor, "out in"]) -> float:
    """The largest singular value, to about 1e-3, by Lanczos steps, in the dtype of the weight, float32 or wider."""
    w = wide(weight)
    return extreme_singular_values(lambda v: w @ v, w.new_zeros(w.shape[1]), steps=24).largest


def _scaled(weight: Tensor, size: float) -> Tensor:
    """The weight at that spectral norm; one of zeros has none and stays."""
    own = spectral_norm(weight)
    return weight * (size / own) if own else weight


def rotation(width: int, generator: torch.Generator) -> Float[Tensor, "d d"]:
    """A random orthogonal matrix, uniform (Haar). Source: Mezzadri 2007 (Notices of the AMS 54, 592)."""
    q, r = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=generator))
    return q * r.diagonal().sign()


def _slope(act: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        return torch.autograd.grad(act(point).sum(), point)[0]


def _weight(located: Located, name: str) -> Tensor:
    weight = linear_weight(located.module(name))
    assert weight is not None
    return weight.detach()


def _bias(located: Located, name: str) -> Tensor | None:
    bias = getattr(located.module(name), "bias", None)
    return None if bias is None else bias.detach().double()


def _stored(located: Located, name: str, weight: Tensor) -> Tensor:
    module = located.module(name)
    value = weight if isinstance(module, nn.Linear) else weight.T  # Conv1D holds [in out]
    return value.to(module.weight.dtype).contiguous()
