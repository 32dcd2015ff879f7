"""The arithmetic of an edit, in float32 or wider: scales on the two parts of an update, and what may stand in their place.

Axis legend: ``b`` batch, ``t`` tokens, ``d`` width, ``h`` query heads, ``kv`` key-value heads, ``dv`` width of a value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from thalweg.editing.options import EditOptions, Scale
from thalweg.editing.passes import Pass
from thalweg.geometry.updates import split_update
from thalweg.ops.precision import wide
from thalweg.ops.value_edit import value_coefficient, value_edit

DIRECTIONS = 64  # random directions of a layer; token p takes number p modulo this


@dataclass
class Change:
    """What an edit does to the update of one layer.

    parallel, perpendicular: retained scales. pool: coefficients [n] (of values [n h]) measured before, that take the place of a token's own:
    their mean, or with ``shuffled`` entry p modulo n for the token at position p. direction: the change of the edit, turned into a random
    direction of the same size. forced: compute, even where the scales say that nothing changes.
    """

    layer: int
    parallel: float = 1.0
    perpendicular: float = 1.0
    pool: Tensor | None = None
    shuffled: bool = False
    direction: bool = False
    group: str = "head"
    forced: bool = False
    seed: int = 0
    _directions: dict[tuple[int, ...], Tensor] = field(default_factory=dict, repr=False)

    @property
    def is_identity(self) -> bool:
        """Whether the update stays as it is, bit by bit."""
        return not self.forced and self.pool is None and self.parallel == 1 and self.perpendicular == 1

    def residual(
        self, reference: Float[Tensor, "b t d"], update: Float[Tensor, "b t d"], now: Pass
    ) -> Float[Tensor, "b t d"]:
        """The edited update, wide: perpendicular * update + (parallel - perpendicular) * its part along the reference.

        The parallel part is alpha * reference with alpha = <update, reference> / |reference|^2, or with the coefficient of the pool.
        """
        u, z = wide(update), wide(reference)
        if self.pool is None:
            along = 0.0 if self.parallel == self.perpendicular else split_update(z, u).parallel
            new = self.perpendicular * u + (self.parallel - self.perpendicular) * along
        else:
            along = split_update(z, u).parallel
            new = self.perpendicular * (u - along) + self.parallel * self._drawn(now, u).unsqueeze(-1) * z
        return self._turned(u, new, now)

    def value(
        self,
        o: Float[Tensor, "b t h dv"],
        v: Float[Tensor, "b t kv dv"],
        own: Float[Tensor, "b h t"] | None,
        now: Pass,
    ) -> Float[Tensor, "b t h dv"]:
        """The edited attention output, wide; own: A_tt, for edits that leave alone what a token reads of itself."""
        y = wide(o)
        scales: list[float | Tensor] = [self.parallel, self.perpendicular]
        if self.forced:  # as tensors they are computed with, at 1 too
            scales = [
                torch.tensor(float(s), dtype=y.dtype, device=y.device) for s in (self.parallel, self.perpendicular)
            ]
        new = value_edit(y, v, *scales, own=own, group=self.group)
        if self.pool is not None:
            each = o.shape[2] // v.shape[2]
            beta = value_coefficient(y, v, own, self.group)
            moved = self.parallel * (self._drawn(now, y) - beta)
            by_value = moved.unflatten(-1, (v.shape[2], each)).unsqueeze(-1) * wide(v).unsqueeze(-2)
            new = new + by_value.view(y.shape)
        return self._turned(y, new, now)

    def _drawn(self, now: Pass, like: Tensor) -> Tensor:
        """Coefficients of the pool for tokens [b t] -> [b t] or [b t h]."""
        assert self.pool is not None
        pool = self.pool.to(like.device, like.dtype)
        if not self.shuffled:
            return pool.mean(0).expand(*now.positions.shape, *pool.shape[1:])
        return pool[now.positions.to(pool.device) % len(pool)]

    def _turned(self, before: Tensor, after: Tensor, now: Pass) -> Tensor:
        if not self.direction:
            return after
        shape = tuple(before.shape[2:])
        if shape not in self._directions:
            generator = torch.Generator().manual_seed(_mixed(self.seed, self.layer))
            drawn = torch.randn(DIRECTIONS, *shape, generator=generator, dtype=torch.float64)
            self._directions[shape] = drawn / drawn.norm(dim=-1, keepdim=True)
        at = self._directions[shape].to(before.device, before.dtype)[now.positions.to(before.device) % DIRECTIONS]
        return before + (after - before).norm(dim=-1, keepdim=True) * at


@dataclass
class Gathering(Change):
    """Changes nothing and keeps the coefficients [n] (of values [n h]) of the real tokens, for a pool."""

    kept: list[Tensor] = field(default_factory=list)

    @property
    def is_identity(self) -> bool:
        return False

    def residual(self, reference, update, now):
        self._keep(split_update(wide(reference), wide(update)).coefficient, now)
        return wide(update)

    def value(self, o, v, own, now):
        self._keep(value_coefficient(o, v, own, self.group), now)
        return wide(o)

    def _keep(self, found: Tensor, now: Pass) -> None:
        found = found.detach().flatten(0, 1) if now.real is None else found.detach()[now.real.to(found.device)]
        self.kept.append(found.cpu())


def changes(
    options: EditOptions, layers: tuple[int, ...], pools: Mapping[int, Tensor] | None = None, *, forced: bool = False
) -> dict[int, Change]:
    """The change of every layer. pools: coefficients measured before, by layer."""
    drawn = _random_scales(options, layers)
    made = {}
    for layer in layers:
        pool = None if pools is None else pools[layer]
        if pool is not None and options.coefficient == "other_token":
            generator = torch.Generator().manual_seed(_mixed(options.seed, layer))
            pool = pool[torch.randperm(len(pool), generator=generator)]
        made[layer] = Change(
            layer,
            drawn.get(layer, at_layer(options.parallel, layer)),
            at_layer(options.perpendicular, layer),
            pool,
            options.coefficient == "other_token",
            options.control == "random_direction",
            options.group,
            forced,
            options.seed,
        )
    return made


def at_layer(scale: Scale, layer: int) -> float:
    """A scale at one layer: 1 where it is given by layer and does not name this one."""
    return float(scale.get(layer, 1.0) if isinstance(scale, Mapping) else scale)


def _random_scales(options: EditOptions, layers: tuple[int, ...]) -> dict[int, float]:
    """Parallel scales of the random controls: uniform on [0, 2], or normal around 1 with deviation 1/3, drawn again outside of it.

    Source: He et al. 2026 (arXiv 2609.15975), random scales by layer. One draw per layer of the model up to the last, so that the scale of
    a layer does not depend on which others are edited.
    """
    if options.control not in ("random", "random_normal"):
        return {}
    generator = torch.Generator().manual_seed(options.seed)
    drawn = {}
    for layer in range(max(layers) + 1):
        while True:
            if options.control == "random":
                scale = 2 * float(torch.rand((), generator=generator, dtype=torch.float64))
            else:
                scale = 1 + float(torch.randn((), generator=generator, dtype=torch.float64)) / 3
            if 0 <= scale <= 2:
                break
        drawn[layer] = scale
    return {layer: drawn[layer] for layer in layers}


def _mixed(seed: int, layer: int) -> int:
    return (seed * 1_000_003 + layer) % 2**63
