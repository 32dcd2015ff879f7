"""What pruning a head does to the prototypes of the others, and to the residual, on embeddings of a pretrained encoder."""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thalweg.geometry.directional import DirectionalOperator
from thalweg.geometry.eigenpairs import top_eigenpairs
from thalweg.geometry.prototypes import closest_pair, separation_force
from thalweg.growth import time_scales
from thalweg.growth.reading import span
from thalweg.models.sublayers.prototypes import PrototypeLayer
from thalweg.records import Measurements
from thalweg.studies.experiments.base import Progress, register
from thalweg.studies.experiments.growing import rotation, seeded
from thalweg.studies.experiments.subjects import layer_states

ARMS = ("own_at", "own_after", "shared_at", "shared_after")


@dataclass(frozen=True)
class PruningOptions:
    """model: an encoder at hand, a folder or a name on a hub; layer: whose input is embedded; tokens: embeddings; heads, width: heads on the
    leading heads x width principal directions; prototypes: of each dictionary; warm, after: steps before and after a pruning; lr: of Adam."""

    model: str = "minilm"
    layer: int = 3
    tokens: int = 384
    heads: int = 4
    width: int = 16
    prototypes: int = 8
    warm: int = 100
    after: int = 100
    lr: float = 3e-3


@register(
    "pruning_safety",
    options=PruningOptions,
    columns={
        "pruning.force": ARMS,
        "pruning.closest": ARMS,
        "pruning.fit": ARMS,
        "pruning.top": ("direction", "head"),
    },
    summary="prototypes and force of the heads that stay when each head in turn is pruned, and the residual, on real embeddings",
    source="claim reconstructed from the reviews of Cirrincione 2026, arXiv 2604.01880 (pruning safety); interlacing: derived",
)
def pruning_safety(options: PruningOptions, seed: int, progress: Progress) -> Measurements:
    """Log ratios, the worst over pruned heads, against the same network unpruned after as many steps.

    pruning.force, pruning.closest: of the heads that stay, force and closest pair of prototypes; ``own``: a dictionary for each head;
    ``shared``: one for all; ``at`` once, ``after`` some steps. pruning.fit: rise of the reconstruction error.

    pruning.top: the least change of the largest eigenvalue of the residual of the model's own attention, when the direction of a head is given
    back (direction), or its weights leave too (head).
    """
    o, rows = options, Measurements()
    states = layer_states(o.model, seed, o.layer, o.tokens)
    _residual(states.inputs, states.query, states.key, o, rows)
    x = _leading(states.inputs, o.heads * o.width)
    for kind in ("own", "shared"):
        torch.manual_seed(1_000_003 * seed + 11)
        network = Reconstruction(x, o, shared=kind == "shared", seed=seed)
        network.train_steps(o.warm, o.lr)
        kept = copy.deepcopy(network)
        pruned = [copy.deepcopy(network) for _ in range(o.heads)]
        for h, twin in enumerate(pruned):
            twin.mask[h] = 0.0
        for time, steps in (("at", 0), ("after", o.after)):
            for twin in (kept, *pruned):
                twin.train_steps(steps, o.lr)
            worst: dict[str, list[float]] = {"force": [], "closest": [], "fit": []}
            for h, twin in enumerate(pruned):
                rest = [i for i in range(o.heads) if i != h]
                before, after = kept.look(rest), twin.look(rest)
                for name, found in worst.items():
                    found.append(_log_ratio(after[name], before[name]))
            where = {"arm": f"{kind}_{time}", "n": o.heads, "model": o.model}
            for name, found in worst.items():
                value = max(found) if name == "fit" else min(found)
                rows.add(f"pruning.{name}", value, unit="nats", null=0.0, null_kind="as without pruning", **where)
        progress(f"{kind}: fit {kept.look(range(o.heads))['fit']:.3g}")
    return rows


class Reconstruction(nn.Module):
    """x^ = sum_h m_h D_h(x V_h) W_h: heads on blocks of the tokens, a dictionary for each or one for all. x [n d] in float32, standardised."""

    def __init__(self, x: Tensor, o: PruningOptions, *, shared: bool, seed: int):
        super().__init__()
        self.x, self.shape, self.shared = x, (o.heads, o.width), shared
        turn = rotation(x.shape[1], seeded(seed, 5)).float()
        self.value, self.output = nn.Parameter(turn.clone()), nn.Parameter(turn.T.clone())
        self.dictionary = PrototypeLayer(o.width, o.prototypes, heads=None if shared else o.heads)
        self.mask = torch.ones(o.heads)
        self.dictionary.start_from(self.blocks().detach(), seeded(seed, 6))

    def blocks(self) -> Tensor:
        """What the dictionaries are given [n h w]."""
        return (self.x @ self.value).unflatten(-1, self.shape)

    def loss(self) -> Tensor:
        """Error and the losses of the heads that live."""
        blocks = self.blocks()
        if self.shared:
            blocks = blocks[:, self.mask > 0]  # a head that is gone gives the common dictionary no token
        y = self.dictionary(blocks)
        assert self.dictionary.last is not None
        parts = self.dictionary.last.loss
        if self.shared:
            full = torch.zeros(len(y), *self.shape)
            full[:, self.mask > 0] = y
            return self.error(full) + parts.sum()
        return self.error(y * self.mask[:, None]) + (parts * self.mask).sum()

    def error(self, y: Tensor) -> Tensor:
        return (y.flatten(1) @ self.output - self.x).square().mean()

    def train_steps(self, steps: int, lr: float) -> None:
        if not steps:
            return
        optimizer = torch.optim.Adam(time_scales(self, lr))
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss().backward()
            optimizer.step()

    @torch.no_grad()
    def look(self, heads) -> dict[str, float]:
        """Mean force and mean closest pair of the dictionaries of some heads on their tokens; the error."""
        blocks, forces, closest = self.blocks(), [], []
        if self.shared:
            blocks = blocks[:, list(heads)].flatten(0, 1)[:, None]
            heads = [0]
        for h in heads:
            temperature = self.dictionary.width * self.dictionary.temperature[h].item()
            forces.append(separation_force(blocks[:, h], self.dictionary.prototypes[h], temperature).item())
            closest.append(closest_pair(blocks[:, h], self.dictionary.prototypes[h]).item())
        y = self.dictionary(self.blocks()) * self.mask[:, None]
        return {"force": sum(forces) / len(forces), "closest": sum(closest) / len(closest), "fit": self.error(y).item()}


def _log_ratio(a: float, b: float) -> float:
    return math.log(max(a, 1e-12) / max(b, 1e-12))


def _leading(x: Tensor, count: int) -> Tensor:
    """The leading principal directions of the embeddings, all at the size of the first together: [n count], float32."""
    y = x - x.mean(0)
    right = torch.linalg.svd(y, full_matrices=False)[2][:count]
    z = y @ right.T
    return (z / z.std()).float()


def _residual(x: Tensor, query: Tensor, key: Tensor, o: PruningOptions, rows: Measurements) -> None:
    """query, key: [heads d w] of the model's own attention on this input. Every head captured the top direction of its own operator."""
    heads = len(query)
    own = [top_eigenpairs(DirectionalOperator(x, query[h], key[h]), 1)[1][:, 0] for h in range(heads)]
    every = span(own, x)
    operator = DirectionalOperator(x, torch.cat(list(query), 1), torch.cat(list(key), 1), every)
    top = top_eigenpairs(operator, 1)[0].item()
    scale = operator.scale
    given_back, gone = [], []
    for h in range(heads):
        rest = [i for i in range(heads) if i != h]
        held = span([own[i] for i in rest], x)
        given_back.append(top_eigenpairs(operator.without(held), 1)[0].item() - top)
        left = DirectionalOperator(x, torch.cat(list(query[rest]), 1), torch.cat(list(key[rest]), 1), held)
        gone.append(top_eigenpairs(left, 1)[0].item() * left.scale / scale - top)
    for arm, values in (("direction", given_back), ("head", gone)):
        kind = "interlacing: it cannot fall" if arm == "direction" else "no change"
        rows.add(
            "pruning.top", min(values), arm=arm, n=heads, null=0.0, null_kind=kind, model=o.model, unit="of |S| |M|"
        )
        fell = sum(v < -1e-12 for v in values) / heads
        rows.add("pruning.top_fell", fell, arm=arm, n=heads, null=0.0, null_kind=kind, model=o.model)
