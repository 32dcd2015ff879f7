"""The geometry of a model in training: measured on held-out text at the start and at the end, the same sequences for every arm."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from thalweg.connections import Mixing
from thalweg.data import Batch, Task
from thalweg.geometry import jacobian
from thalweg.geometry.mixing_summaries import mixing_measurements
from thalweg.geometry.stability import spikes, variation
from thalweg.geometry.summaries import LEAST_SEQUENCES, stream_measurements
from thalweg.models.look import look
from thalweg.models.making import make
from thalweg.models.trace import StreamTrace
from thalweg.models.transformer import Transformer
from thalweg.records import Measurements
from thalweg.training.config import TrainConfig
from thalweg.training.evaluation import held_out_length
from thalweg.training.gradients import gradient_rows
from thalweg.training.routing import routing_measurements

JACOBIAN_TOKENS = 8  # length of the sequence whose last token is differentiated
WIDEST_JACOBIAN = 512  # state entries of a token; wider ones cost more than they tell
STATISTICS = {
    "largest": jacobian.largest,
    "smallest": jacobian.smallest,
    "mean_square": jacobian.mean_square,
    "near_one": jacobian.near_one,
}


def geometry_of(config: TrainConfig, task: Task) -> Callable[[Transformer, int], Measurements]:
    """A function that measures a model on at least 16 held-out sequences, the same for every arm: see :func:`measure_model`."""
    batch, split = held_out_batch(config, task), split_of(task)
    return lambda model, step: measure_model(model, batch).stamped(step=step, split=split)


def measure_model(model: Transformer, batch: Batch) -> Measurements:
    """Every stream measure by depth, the mixing of several streams, the routing to experts, the gradient by depth, and Jacobian spectra."""
    was_training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device
        ids, labels = batch["input_ids"].to(device), batch["labels"].to(device)
        trace = StreamTrace()
        with torch.no_grad():
            model(ids, trace=trace)
        observe = model.stream.observe
        rows = stream_measurements(trace, observe=observe, gates=lambda record: gates_of(model, record))
        rows.extend(mixing_measurements(trace, lambda record: mixing_of(model, record), observe=observe))
        rows.extend(routing_measurements(model, trace))
        del trace  # the next pass keeps its graph
        rows.extend(gradient_rows(model, ids, labels))
        rows.extend(jacobian_measurements(model, ids[:1, :JACOBIAN_TOKENS]))
        return rows
    finally:
        model.train(was_training)


def held_out_batch(config: TrainConfig, task: Task, sequences: int = LEAST_SEQUENCES) -> Batch:
    """What is measured on, at least as many sequences as a batch of training; fewer than asked where the data does not hold more."""
    split = split_of(task)
    length, wanted = held_out_length(task, split, config), max(sequences, config.batch_size)
    return task.unpadded(split, length, wanted)


def held_out_sequences(config: TrainConfig, task: Task) -> Tensor:
    """The token ids [b t] of :func:`held_out_batch`."""
    return held_out_batch(config, task)["input_ids"]


def split_of(task: Task) -> str:
    """The split that is measured on: the first held-out one."""
    return next(iter(task.watched), "train")


def gates_of(model: Transformer, record) -> dict[str, Tensor]:
    """Gate values of one site of a traced pass."""
    return model.stream.sites[record.site.index].gates(record.state_before, record.context, record.update)


def mixing_of(model: Transformer, record) -> Mixing | None:
    """How one site of a traced pass mixed its streams, if it does."""
    return model.stream.sites[record.site.index].mixing(record.state_before, record.context)


def jacobian_measurements(model: Transformer, ids: Tensor) -> Measurements:
    """Singular values of the Jacobian of every site in the state of the last token of ``ids`` [1 t], in float64.

    ``jacobian.skip.*``: update, gates and past tokens frozen, the path that theorems speak of. ``jacobian.block.*``: the whole layer,
    sublayers and gates included. Only for states that are one tensor and no wider than 512 entries a token.
    """
    rows = Measurements()
    model = _copy_in_float64(model)
    trace = StreamTrace()
    with torch.no_grad():
        model(ids, trace=trace)
    states = [record.state_before for record in trace.records]
    if not all(isinstance(s, Tensor) and s[0, -1].numel() <= WIDEST_JACOBIAN for s in states):
        return rows
    for record in trace.records:
        site, before = model.stream.sites[record.site.index], record.state_before

        def skip(last: Tensor, site=site, before=before, record=record) -> Tensor:
            return site.write(_with_last(before, last), record.update, record.context)[0, -1]

        _add(rows, "skip", skip, before[0, -1], record.site.layer, f"layers.{record.site.layer}.{record.site.kind}")
    per_layer = len(model.config.layers)
    tokens, view = look(model.config, torch.float64, ids, None, None, None, None)
    for index, block in enumerate(model.blocks):
        sites = list(model.stream.sites[index * per_layer : (index + 1) * per_layer])
        before = states[index * per_layer]

        def whole(last: Tensor, block=block, sites=sites, before=before) -> Tensor:
            state = _with_last(before, last)
            return block((state, *sites[0].read(state, tokens)), sites, None, tokens, view)[0][0, -1]

        _add(rows, "block", whole, before[0, -1], index, f"layers.{index}")
    return rows


def stability_measurements(losses: list[float], norms: list[float], warmup: int) -> Measurements:
    """How smoothly a run went, from its logged series: share of loss spikes, variation of the gradient norm after the warm-up."""
    rows = Measurements()
    window = max(4, min(20, len(losses) // 4))
    if len(losses) > window:
        found = spikes(losses, window=window, quantile=0.9)
        rows.add("stability.spikes", found.share, n=found.judged, null=found.null, null_kind="a series without order")
    if len(norms) - warmup >= 2:
        rows.add("stability.gradient_variation", variation(norms, skip=warmup), n=len(norms) - warmup)
    return rows


def _add(
    rows: Measurements, kind: str, function: Callable[[Tensor], Tensor], point: Tensor, layer: int, site: str
) -> None:
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no forward derivative
        values = jacobian.jacobian_singular_values(function, point.clone(memory_format=torch.contiguous_format))
    for name, statistic in STATISTICS.items():
        null = {"null": 1.0, "null_kind": "the identity"}
        rows.add(
            f"jacobian.{kind}.{name}", statistic(values).item(), layer=layer, site=site, n=1, dtype="float64", **null
        )


def _with_last(state: Tensor, last: Tensor) -> Tensor:
    return torch.cat([state[:, :-1], last[None, None]], 1)


def _copy_in_float64(model: Transformer) -> Transformer:
    spare = torch.Generator()  # the weights are replaced; the run's own generator must not move
    twin = make(model.config, generator=spare).to(device=next(model.parameters()).device, dtype=torch.float64)
    twin.load_state_dict(model.state_dict())
    return twin.eval()
