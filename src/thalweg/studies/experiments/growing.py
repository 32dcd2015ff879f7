"""One layer of attention that can grow, a dictionary of prototypes for every head, on tokens of a known spectrum: what experiments grow."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from thalweg.errors import InputError
from thalweg.growth import Birth, Controller, GrowthOptions, HeadFactors
from thalweg.models.sublayers.prototypes import PrototypeLayer


def tokens(
    batch: int, time: int, width: int, generator: torch.Generator, *, lowest: float = 0.05, rank: int | None = None
) -> Float[Tensor, "b t d"]:
    """Gaussian tokens with standard deviations from 1 to ``lowest`` (geometric) along random orthogonal directions, none beyond ``rank``."""
    scale = torch.logspace(0, torch.tensor(lowest).log10().item(), width, dtype=torch.float64)
    if rank is not None:
        scale[rank:] = 0
    x = torch.randn(batch, time, width, generator=generator, dtype=torch.float64)
    return x * scale @ rotation(width, generator).T


def rotation(width: int, generator: torch.Generator) -> Float[Tensor, "d d"]:
    """A random orthogonal matrix."""
    return torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]


def planes(
    basis: Float[Tensor, "d m"], strengths: Sequence[float]
) -> tuple[Float[Tensor, "d r"], Float[Tensor, "d r"]]:
    """Query and key factors of M = M_a = sum_i s_i (v_i u_i^T - u_i v_i^T), u_i and v_i being columns 2 i and 2 i + 1 of ``basis``."""
    query, key = [], []
    for i, strength in enumerate(strengths):
        u, v, root = basis[:, 2 * i], basis[:, 2 * i + 1], strength**0.5
        query += [root * v, root * u]
        key += [root * u, -root * v]
    return torch.stack(query, 1), torch.stack(key, 1)


class Head(nn.Module):
    """softmax(x M x^T / sqrt w) x W_V, a dictionary over it, and an output map."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, prototypes: int):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Parameter(w.clone()) for w in (query, key, value, output))
        self.dictionary = PrototypeLayer(value.shape[1], prototypes).double() if prototypes else None
        self.mask = 1.0

    def mixed(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t w"]:
        """What the dictionary is given."""
        scores = (x @ self.query) @ (x @ self.key).mT / self.query.shape[1] ** 0.5
        return torch.softmax(scores, -1) @ (x @ self.value)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        mixed = self.mixed(x)
        return self.mask * (mixed if self.dictionary is None else self.dictionary(mixed)) @ self.output


class GrowingLayer(nn.Module):
    """y = x + sum_h o_h W_O^h, trained to give ``target``; answers :class:`thalweg.growth.Growable`, in float64.

    x [b t d] is data and probe set in one (full batch). query, key: factors of the first head. width: of values and of heads that are born.
    The loss is the mean square error and, with prototypes, the losses of all dictionaries.
    """

    def __init__(
        self,
        x: Float[Tensor, "b t d"],
        target: Float[Tensor, "b t d"],
        query: Float[Tensor, "d r"],
        key: Float[Tensor, "d r"],
        *,
        width: int = 4,
        prototypes: int = 0,
        generator: torch.Generator,
    ):
        super().__init__()
        self.x, self.target, self.width, self.count, self.generator = x, target, width, prototypes, generator
        self.live = nn.ModuleDict()
        self.born = 0
        self._insert(query, key, self._draw(width, x.shape[-1]) / 4)

    @property
    def parts(self) -> dict[str, Head]:
        """The live heads by name."""
        return {name: head for name, head in self.live.items() if isinstance(head, Head)}

    def _draw(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self.generator, dtype=torch.float64) / rows**0.5

    def _insert(self, query: Tensor, key: Tensor, output: Tensor) -> int:
        head = Head(query.double(), key.double(), self._draw(len(query), self.width), output, self.count)
        if head.dictionary is not None:
            with torch.no_grad():
                head.dictionary.start_from(head.mixed(self.x), self.generator)
        self.live[str(self.born)] = head
        self.born += 1
        return self.born - 1

    def forward(self) -> Float[Tensor, "b t d"]:
        return self.x + torch.stack([head(self.x) for head in self.parts.values()]).sum(0)

    def loss(self) -> Tensor:
        """What is trained: error and dictionaries."""
        error = (self() - self.target).square().mean()
        seen = [head.dictionary.last for head in self.parts.values() if head.dictionary is not None]
        parts = [losses.loss.sum() for losses in seen if losses is not None]
        return error + sum(parts) if parts else error

    def train_steps(self, steps: int, lr: float) -> float:
        """Full-batch descent with momentum 0.9 on the three time scales of dictionaries; the last loss."""
        from thalweg.growth import time_scales

        groups = time_scales(self, lr) if self.count else [{"params": list(self.parameters()), "lr": lr}]
        optimizer, value = torch.optim.SGD(groups, lr=lr, momentum=0.9), float("nan")
        for _ in range(steps):
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            optimizer.step()
            value = loss.item()
        return value

    # what the controller asks

    def layers(self) -> int:
        return 1

    def heads(self, layer: int) -> list[HeadFactors]:
        return [HeadFactors(int(name), head.query, head.key, head.mask) for name, head in self.parts.items()]

    def inputs(self, layer: int) -> Float[Tensor, "n d"]:
        return self.x.flatten(0, 1)

    @torch.no_grad()
    def outputs(self) -> Tensor:
        return self()

    @torch.no_grad()
    def fit(self) -> float:
        return self.loss().item()

    def parameters_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def add_heads(self, layer: int, births: Sequence[Birth]) -> list[int]:
        zero = torch.zeros(self.width, self.x.shape[-1], dtype=torch.float64)
        return [self._insert(birth.query, birth.key, zero) for birth in births]

    def mask_head(self, layer: int, head: int, value: float) -> None:
        self.parts[str(head)].mask = value

    def prune_heads(self, layer: int, heads: Sequence[int]) -> None:
        for head in heads:
            del self.live[str(head)]

    def add_layer(self) -> int:
        raise InputError("this layer stands alone; leave most_layers out of the options of growth")


def teacher(
    x: Float[Tensor, "b t d"], query: Float[Tensor, "d r"], key: Float[Tensor, "d r"], generator: torch.Generator
) -> Float[Tensor, "b t d"]:
    """x and what one attention with these factors and random values writes to it: a target that attention can reach."""
    d = x.shape[-1]
    value = torch.randn(d, d, generator=generator, dtype=torch.float64) / d**0.5
    return x + torch.softmax((x @ query) @ (x @ key).mT / query.shape[1] ** 0.5, -1) @ (x @ value)


def seeded(seed: int, purpose: int) -> torch.Generator:
    """A generator of its own for every purpose of a seed."""
    return torch.Generator().manual_seed(1_000_003 * seed + purpose)


def grown(network: GrowingLayer, options: GrowthOptions, steps: int, every: int, lr: float) -> Controller:
    """Let a layer grow until growth ends, at most ``steps``: a look, then ``every`` steps of training. The controller holds the record."""
    controller = Controller(network, options)
    for step in range(0, steps, every):
        controller.check(step)
        if controller.finished:
            break
        network.train_steps(every, lr)
    return controller
