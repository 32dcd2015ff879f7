"""A layer of prototypes beside a trained and a frozen random feed-forward layer of equal parameters: accuracy, and which directions survive."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from thalweg.errors import InputError
from thalweg.models.sublayers.prototypes import PrototypeLayer
from thalweg.records import Measurements
from thalweg.studies.experiments.base import Progress, register
from thalweg.studies.experiments.growing import rotation, seeded

ARMS = ("prototypes", "trained", "frozen")


@dataclass(frozen=True)
class PrototypeLayerOptions:
    """labels: by the nearest of ``classes`` points (centres), or the largest output of a random two-layer network (network). width: of tokens;
    prototypes: the feed-forward layers get half as many hidden units, which is as many parameters; tokens: for training and as many held out;
    steps, lr: of Adam; dictionary: weight of the dictionary's own loss."""

    labels: Literal["centres", "network"] = "network"
    classes: int = 6
    width: int = 24
    prototypes: int = 16
    tokens: int = 768
    steps: int = 300
    lr: float = 0.02
    dictionary: float = 0.1

    def __post_init__(self) -> None:
        if self.prototypes % 2 or self.prototypes < 4:
            raise InputError(f"prototypes must be even and at least 4, got {self.prototypes}")


class FeedForward(nn.Module):
    """W relu(U x), no biases: 2 d h parameters."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@register(
    "prototype_layer",
    options=PrototypeLayerOptions,
    columns={"layer.accuracy": ARMS, "layer.kept": ARMS, "layer.parameters": ARMS},
    summary="accuracy and share of directional energy kept by a prototype layer, a trained and a frozen random feed-forward layer",
    source="claim reconstructed from the reviews of Cirrincione 2026, arXiv 2604.01880 (less directional loss); null: Ky Fan's theorem",
)
def prototype_layer(options: PrototypeLayerOptions, seed: int, progress: Progress) -> Measurements:
    """layer.kept: tr(P C) / tr C, P the projector on the span of what the layer can write (differences of prototypes, or columns of W), C the
    covariance of held-out tokens; its null is r / d, what a random span of that dimension keeps. layer.best: the r largest eigenvalues of C.
    """
    o, rows = options, Measurements()
    scale = torch.logspace(0, -1, o.width)
    turn = rotation(o.width, seeded(seed, 0)).float()
    x = torch.randn(2 * o.tokens, o.width, generator=seeded(seed, 1)) * scale @ turn.T
    labels = _labels(o, x, seed)
    train, held = slice(0, o.tokens), slice(o.tokens, None)
    covariance = torch.cov(x[held].double().T)
    eigenvalues = torch.linalg.eigvalsh(covariance).flip(0)
    for arm in ARMS:
        torch.manual_seed(1_000_003 * seed + 7)
        layer = (
            PrototypeLayer(o.width, o.prototypes) if arm == "prototypes" else FeedForward(o.width, o.prototypes // 2)
        )
        if isinstance(layer, PrototypeLayer):
            layer.start_from(x[train], seeded(seed, 2))
        read = nn.Linear(o.width, o.classes)
        _fit(layer, read, x[train], labels[train], o, arm == "frozen")
        with torch.no_grad():
            found = read(layer(x[held])).argmax(-1)
        accuracy = (found == labels[held]).double().mean().item()
        most = labels[held].bincount().max().item() / o.tokens
        rows.add("layer.accuracy", accuracy, arm=arm, n=o.tokens, null=most, null_kind="the most frequent class")
        span = _span(layer)
        r = span.shape[1]
        kept = (torch.trace(span.T @ covariance @ span) / torch.trace(covariance)).item()
        rows.add("layer.kept", kept, arm=arm, n=r, null=r / o.width, null_kind="r / d: a random span of that dimension")
        rows.add("layer.best", (eigenvalues[:r].sum() / eigenvalues.sum()).item(), arm=arm, n=r, null=r / o.width)
        rows.add("layer.parameters", sum(p.numel() for p in layer.parameters()), arm=arm)
        progress(f"{arm}: accuracy {accuracy:.3f}, kept {kept:.3f} with {r} directions")
    return rows


def _labels(o: PrototypeLayerOptions, x: Tensor, seed: int) -> Tensor:
    generator = seeded(seed, 3)
    if o.labels == "centres":
        chosen = x[torch.randperm(len(x), generator=generator)[: o.classes]]
        return torch.cdist(x, chosen).argmin(-1)
    up = torch.randn(o.width, 4 * o.width, generator=generator)
    down = torch.randn(4 * o.width, o.classes, generator=generator)
    scores = torch.relu(x @ up) @ down
    return (scores - scores.mean(0)).argmax(-1)


def _fit(layer: nn.Module, read: nn.Linear, x: Tensor, labels: Tensor, o: PrototypeLayerOptions, frozen: bool) -> None:
    parameters = [*read.parameters(), *(() if frozen else layer.parameters())]
    optimizer = torch.optim.Adam(parameters, lr=o.lr)
    for _ in range(o.steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(read(layer(x)), labels)
        if isinstance(layer, PrototypeLayer):
            assert layer.last is not None
            loss = loss + o.dictionary * layer.last.loss.sum()
        loss.backward()
        optimizer.step()


def _span(layer: nn.Module) -> Tensor:
    """An orthonormal basis [d r] of what the output can move along."""
    if isinstance(layer, PrototypeLayer):
        p = layer.prototypes.detach()[0].double()
        written = (p - p.mean(0)).T
    else:
        assert isinstance(layer, FeedForward)
        written = layer.down.weight.detach().double()
    left, values, _ = torch.linalg.svd(written, full_matrices=False)
    return left[:, values > 1e-6 * values[0]]
