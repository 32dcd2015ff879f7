"""What the mixing of streams is worth: its matrices replaced in a trained model by the identity or by their token mean, and the loss after."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.connections import StreamSite
from thalweg.data import Batch
from thalweg.geometry.rows import dtype_of, place_of
from thalweg.geometry.streams import loss_change
from thalweg.models.trace import StreamTrace
from thalweg.models.transformer import Losses, Transformer
from thalweg.records import Measurements

PARTS = 3  # of the network, beside every site by itself
NULL = {"null": 0.0, "null_kind": "nothing replaced"}


class Replaced(NamedTuple):
    """Rows of the changes in loss, and the losses with nothing replaced."""

    rows: Measurements
    plain: Losses


@torch.no_grad()
def losses_of(
    model: Transformer, batches: Sequence[Batch], look: Callable[[StreamTrace, Batch], None] | None = None
) -> Losses:
    """The loss of every sequence of ``batches``; ``look`` is shown the trace of each batch, and the batch."""
    device = next(model.parameters()).device
    nats, scored = [], []
    for batch in batches:
        trace = None if look is None else StreamTrace()
        inputs = {name: values.to(device) for name, values in batch.items()}
        labels = inputs.pop("labels")
        each = model.losses(model(**inputs, trace=trace).logits, labels)
        nats.append(each.nats.cpu())
        scored.append(each.scored.cpu())
        if look is not None and trace is not None:
            look(trace, batch)
    return Losses(torch.cat(nats), torch.cat(scored))


def replacements(
    model: Transformer,
    batches: Sequence[Batch],
    on_pass: Callable[[int, int], None] | None = None,
    *,
    unit: str = "nats/token",
) -> Replaced:
    """The change in loss for each replacement, of every site, the first third, the last third and all layers.

    ``identity`` and ``token_mean`` (of the unchanged pass, over all real tokens of ``batches``) take the place of the matrices of the sites
    concerned; all else stays. The interval is two standard errors over sequences. on_pass: told how many passes are done, of how many.
    unit: of the loss.
    A model that mixes no streams has no rows.
    """
    sites: list[StreamSite] = [site for site in model.stream.sites if site.mixes]
    rows = Measurements()
    if not sites:
        return Replaced(rows, losses_of(model, batches))
    means: dict[int, Tensor] = {}
    dtypes: dict[int, torch.dtype] = {}
    tokens = sum(int(_real(batch).sum()) for batch in batches)

    def add(trace: StreamTrace, batch: Batch) -> None:
        real = _real(batch)
        for site in sites:
            record = trace.records[site.site.index]
            mixing = site.mixing(record.state_before, record.context)
            assert mixing is not None  # it mixes
            dtypes[site.site.index] = mixing.mix.dtype
            mix = mixing.mix.double()
            total = mix.masked_fill(~real.to(mix.device)[..., None, None], 0.0).sum((0, 1)) / tokens
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
            "unit": unit,
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


def _real(batch: Batch) -> Tensor:
    """Where a batch holds a token and no padding [b t]."""
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


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
