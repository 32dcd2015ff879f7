"""What the mixing of streams is worth: its matrices replaced in a trained model by the identity or by their token mean, and the loss after."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.connections import StreamSite
from thalweg.data import Batch
from thalweg.data.task import IGNORED
from thalweg.geometry.rows import dtype_of, place_of
from thalweg.geometry.streams import loss_change
from thalweg.models.decoder import Decoder
from thalweg.models.trace import StreamTrace
from thalweg.ops.precision import wide
from thalweg.records import Measurements

PARTS = 3  # of the network, beside every site by itself
NULL = {"null": 0.0, "null_kind": "nothing replaced"}


@dataclass(frozen=True)
class Losses:
    """Summed nats and scored tokens of every sequence [sequences], float64."""

    nats: Tensor
    scored: Tensor

    @property
    def mean(self) -> float:
        """Nats per scored token."""
        return (self.nats.sum() / self.scored.sum()).item()


class Replaced(NamedTuple):
    """Rows of the changes in loss, and the losses with nothing replaced."""

    rows: Measurements
    plain: Losses


@torch.no_grad()
def losses_of(model: Decoder, batches: Sequence[Batch], look: Callable[[StreamTrace], None] | None = None) -> Losses:
    """The loss of every sequence of ``batches``; ``look`` is shown the trace of each batch."""
    device = next(model.parameters()).device
    nats, scored = [], []
    for batch in batches:
        trace = None if look is None else StreamTrace()
        labels = batch["labels"].to(device)
        logits = model(batch["input_ids"].to(device), trace=trace).logits[:, :-1]
        each = F.cross_entropy(wide(logits).mT, labels[:, 1:], ignore_index=IGNORED, reduction="none")
        nats.append(each.double().sum(-1).cpu())
        scored.append((labels[:, 1:] != IGNORED).sum(-1).double().cpu())
        if look is not None and trace is not None:
            look(trace)
    return Losses(torch.cat(nats), torch.cat(scored))


def replacements(
    model: Decoder, batches: Sequence[Batch], on_pass: Callable[[int, int], None] | None = None
) -> Replaced:
    """The change in loss for each replacement, of every site, the first third, the last third and all layers.

    ``identity`` and ``token_mean`` (of the unchanged pass, over all tokens of ``batches``) take the place of the matrices of the sites
    concerned; all else stays. The interval is two standard errors over sequences. on_pass: told how many passes are done, of how many.
    A model that mixes no streams has no rows.
    """
    sites: list[StreamSite] = [site for site in model.stream.sites if site.mixes]
    rows = Measurements()
    if not sites:
        return Replaced(rows, losses_of(model, batches))
    means: dict[int, Tensor] = {}
    dtypes: dict[int, torch.dtype] = {}
    tokens = sum(batch["input_ids"].numel() for batch in batches)

    def add(trace: StreamTrace) -> None:
        for site in sites:
            record = trace.records[site.site.index]
            mixing = site.mixing(record.state_before, record.context)
            assert mixing is not None  # it mixes
            dtypes[site.site.index] = mixing.mix.dtype
            total = mixing.mix.double().sum((0, 1)) / tokens
            means[site.site.index] = means.get(site.site.index, 0) + total

    plain = losses_of(model, batches, add)
    used = {site: means[site.site.index].to(dtypes[site.site.index]) for site in sites}
    singles = [([site], place_of(site.site)) for site in sites]
    groups = [(found, {"site": name}) for name, found in _parts(sites).items()]
    todo = [(found, place, kind) for found, place in [*singles, *groups] for kind in ("identity", "token_mean")]
    for done, (found, place, kind) in enumerate(todo, start=1):
        with forced({site: _matrix(used[site], kind) for site in found}):
            changed = losses_of(model, batches)
        change = loss_change(plain.nats, changed.nats, plain.scored)
        fields = {
            "unit": "nats/token",
            "n": len(plain.nats),
            "dtype": dtype_of(next(iter(used.values()))),
            **place,
            **NULL,
        }
        if change.error is not None:
            spread = {"low": change.mean - 2 * change.error, "high": change.mean + 2 * change.error}
            fields |= {**spread, "interval": "+- 2 standard errors over sequences"}
        rows.add(f"mixer_replaced.{kind}", change.mean, **fields)
        if on_pass is not None:
            on_pass(done, len(todo))
    return Replaced(rows, plain)


@contextmanager
def forced(matrices: dict[StreamSite, Tensor]) -> Iterator[None]:
    """Sites use the given matrices [to from] inside, and their own again after."""
    try:
        for site, matrix in matrices.items():
            site.force_mix(matrix)
        yield
    finally:
        for site in matrices:
            site.force_mix(None)


def _matrix(mean: Tensor, kind: str) -> Tensor:
    return torch.eye(len(mean)).to(mean) if kind == "identity" else mean


def _parts(sites: Sequence[StreamSite]) -> dict[str, list[StreamSite]]:
    """The first third, the last third and all of the layers, by name."""
    depth = sites[0].site.depth
    third = max(1, round(depth / 3))
    parts = {
        f"first third (layers 0-{third - 1})": range(third),
        f"last third (layers {depth - third}-{depth - 1})": range(depth - third, depth),
        f"all layers (0-{depth - 1})": range(depth),
    }
    found = {name: [site for site in sites if site.site.layer in layers] for name, layers in parts.items()}
    return {name: chosen for name, chosen in found.items() if chosen}
