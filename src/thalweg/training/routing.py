"""How the routers of a model spread the tokens of a traced pass over their experts."""

import torch

from thalweg.geometry.routing import dropped, max_over_mean, router_entropy
from thalweg.geometry.rows import place_of
from thalweg.models.sublayers import MixtureOfExperts
from thalweg.models.trace import StreamTrace
from thalweg.models.transformer import Transformer
from thalweg.records import Measurements


@torch.no_grad()
def routing_measurements(model: Transformer, trace: StreamTrace) -> Measurements:
    """Load, entropy and dropped choices of every site with experts, over all tokens of the pass. Raises: InputError for scores of NaN."""
    rows = Measurements()
    for record, layer in zip(trace.records, model.sublayers, strict=True):
        if not isinstance(layer, MixtureOfExperts):
            continue
        scores = layer.router(record.input.flatten(0, 1))
        _, chosen = layer.router.choose(scores, layer.active)
        load, site = layer.sent(chosen).sum(0), record.site
        place = {**place_of(site), "n": len(chosen)}
        even = {"null": 1.0, "null_kind": "the same load for all experts"}
        rows.add("routing.max_over_mean", max_over_mean(load).item(), **place, **even)
        undecided = {"null": 1.0, "null_kind": "the same score for all experts"}
        rows.add("routing.entropy", router_entropy(scores).mean().item(), **place, **undecided)
        rows.add("routing.dropped", dropped(load, chosen.numel()).item(), **place)
    return rows
