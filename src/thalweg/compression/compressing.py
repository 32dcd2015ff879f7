"""Compress a model in place, layer after layer: what a layer is calibrated on is what the compressed layers before it give."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.capture.attention import refuse_compiled
from thalweg.capture.evaluating import evaluating
from thalweg.capture.layers import Layers
from thalweg.capture.layout import Located
from thalweg.capture.limits import longest_of, vocabulary_of
from thalweg.capture.locating import locate
from thalweg.capture.weights import check_finite
from thalweg.compression import compressors
from thalweg.compression.calibration import Calibration, Inputs, Samples
from thalweg.compression.compressors.base import STORED, Compressor, Made
from thalweg.compression.planning import CompressionPlan, plan_of
from thalweg.compression.record import CompressionRecord, LinearRecord
from thalweg.compression.replay import Replay
from thalweg.compression.targets import Target, chosen_sites, layers_of, left_dense, targets_of
from thalweg.config import to_plain
from thalweg.errors import InputError
from thalweg.ops.precision import full_precision, wide
from thalweg.records import provenance

OnProgress = Callable[[int, CompressionPlan], Any]


@dataclass(frozen=True)
class Compressed:
    """The model that was given, compressed, and what was done to it."""

    model: nn.Module = field(repr=False)
    record: CompressionRecord

    def save(self, folder: str | Path, tokenizer: Any = None) -> Path:
        """A folder of transformers with ``thalweg_compression.json`` in it. Raises: InputError for a folder in use."""
        from thalweg.compression.folder import save

        return save(self.model, self.record, folder, tokenizer=tokenizer)


def compress(
    model: nn.Module,
    method: str,
    *,
    calibration: Calibration | Samples | None = None,
    layers: Layers = None,
    skip: Layers = None,
    sites: str | Sequence[str] | None = None,
    batch_size: int = 1,
    progress: OnProgress | None = None,
    source: str = "",
    **options: Any,
) -> Compressed:
    """Compress the linear maps inside the blocks of ``model``, in place.

    model: a decoder or encoder that :func:`thalweg.capture.locate` finds. method: a name of ``thalweg list compressors``; options: of it.
    calibration: a list of lists of token numbers, each a sample; without padding, of any lengths that the model takes. layers, skip: the
    layers that are compressed, without those that are protected, as lists or text (``"1:"``, ``"0,29"``). sites: ``attention``, ``mlp`` or
    both (None).
    batch_size: samples of one length that are run side by side. progress: called with the number of layers done (0 before the first)
    and the plan. source: what the record calls the model.

    Weights become dense floats with the values of the compressed model. With a calibration the layers are taken in order: block l is run on
    what the compressed blocks before it give, its inputs are gathered, all of its maps are compressed, and it is run again for the next one
    (the order of Wanda and AWQ). Bounded memory: the states of one depth over all samples, and in^2 numbers for the inputs of each of its maps.
    Embeddings, unembedding, norms and biases stay. An error raised before the first layer leaves the model untouched.
    Raises: UnknownNameError for an unknown method or option; InputError for what cannot be compressed, in one line.
    """
    refuse_compiled(model)
    compressor = compressors.create(method, **options)
    name = compressors.registry.entry(method).name
    located = locate(model)
    check_finite(located.model, source or located.family)
    if calibration is not None:
        calibration = Calibration.of(calibration, vocabulary_of(located.model), longest_of(located.model))
    elif compressor.needs_calibration:
        raise InputError(
            f"{name} needs to see text: give calibration=, a list of lists of token numbers (thalweg compress: --text FILE)"
        )
    facts = {"method": name, "options": to_plain(compressor.options), "source": source or located.family}
    facts |= {"calibration": None if calibration is None else calibration.plain(), "provenance": provenance.collect()}
    if compressor.structural:
        if skip not in (None, "") or layers is not None or sites is not None:
            raise InputError(
                f"{name} takes whole layers away, which its own options name; leave layers, skip and sites out"
            )
        return _structural(located, compressor, calibration, batch_size, facts)
    chosen = layers_of(located.depth, layers, skip)
    wanted = chosen_sites(sites)
    targets = targets_of(located, chosen, wanted)
    compressor.check({target.name: target.shape for target in targets})
    plan = plan_of(located.model, targets, located.width, located.streams, calibration)
    if progress is not None:
        progress(0, plan)
    rows: list[LinearRecord] = []
    with evaluating(located.model), torch.compiler.set_stance("force_eager"):
        steps = _plainly(targets) if calibration is None else _in_order(located, targets, calibration, batch_size)
        for group, inputs, last in steps:
            rows += _apply(compressor, group, inputs)
            if last and progress is not None:
                progress(plan.layers - _left(targets, group), plan)
    return finished(model, located, targets, rows, chosen, wanted, facts, _notes(rows))


def finished(
    model: nn.Module,
    located: Located,
    targets: Sequence[Target],
    rows: Sequence[LinearRecord],
    layers: tuple[int, ...],
    sites: tuple[str, ...] | None,
    facts: dict[str, Any],
    notes: tuple[str, ...],
) -> Compressed:
    """The record of maps that were compressed, and the model. facts: the fields that say what was asked."""
    sizes = [row.shape[0] * row.shape[1] for row in rows]
    numbers, dense = sum(sizes), _sixteen(located.model)
    bits = sum(row.bits_per_weight * size for row, size in zip(rows, sizes, strict=True))
    record = CompressionRecord(
        **facts,
        layers=layers,
        skipped=tuple(layer for layer in range(located.depth) if layer not in layers),
        sites=sites or tuple(dict.fromkeys(target.site for target in targets)),
        kept_blocks=None,
        bits_per_weight=bits / numbers,
        bytes=round(dense + (bits - STORED * numbers) / 8),
        bytes_dense=dense,
        sparsity=sum(row.sparsity * size for row, size in zip(rows, sizes, strict=True)) / numbers,
        left_dense=tuple(left_dense(located, targets)),
        linears=tuple(rows),
        notes=notes,
    )
    return Compressed(model, record)


def _plainly(targets: list[Target]) -> Iterator[tuple[list[Target], None, bool]]:
    """Every map by itself, without looking at inputs."""
    for i, target in enumerate(targets):
        yield [target], None, i + 1 == len(targets) or targets[i + 1].layer != target.layer


def _in_order(
    located: Located, targets: list[Target], calibration: Calibration, batch_size: int
) -> Iterator[tuple[list[Target], Inputs, bool]]:
    """Groups of maps that read one tensor, with their inputs, layer after layer; apply what is yielded before asking for the next."""
    replay = Replay(located, calibration.batches(batch_size), targets)
    chosen = sorted({target.layer for target in targets})
    for layer in range(chosen[-1] + 1):
        if layer in chosen:
            groups = replay.groups(target for target in targets if target.layer == layer)
            for i, (group, inputs) in enumerate(zip(groups, replay.gather(layer, groups), strict=True)):
                yield group, inputs, i + 1 == len(groups)
        if layer < chosen[-1]:
            replay.advance(layer)


def _apply(compressor: Compressor, group: Sequence[Target], inputs: Inputs | None) -> list[LinearRecord]:
    """Compress a group in place; what was done to every map."""
    names = [target.name for target in group]
    before = [wide(target.weight.detach()).clone() for target in group]
    with full_precision(before[0]):
        if inputs is not None and not inputs.tokens:
            inputs = None
        if inputs is None and compressor.needs_calibration:
            made = [Made(weight, float(STORED * weight.numel()), {"left_dense": UNSEEN}) for weight in before]
        else:
            made = compressor.compress(names, before, inputs)
        found = []
        for target, weight, result in zip(group, before, made, strict=True):
            target.weight.copy_(result.weight)
            found.append(row_of(target, weight, wide(target.weight.detach()), result, inputs))
    return found


UNSEEN = "no token of the calibration reached it"


def row_of(target: Target, before: Tensor, after: Tensor, made: Made, inputs: Inputs | None) -> LinearRecord:
    """What became of one map. inputs: None where they were not seen."""
    change = after - before
    square = change.square().mean(dtype=torch.float64)
    return LinearRecord(
        name=target.name,
        layer=target.layer,
        site=target.site,
        shape=target.shape,
        bits_per_weight=made.bits / before.numel(),
        sparsity=float((after == 0).double().mean()),
        mean_square_error=float(square),
        relative_error=_ratio(square, before.square().mean(dtype=torch.float64)),
        output_error=None if inputs is None else _ratio(inputs.energy(change), inputs.energy(before)),
        facts=made.facts,
    )


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if float(whole) else 0.0


def _notes(rows: Sequence[LinearRecord]) -> tuple[str, ...]:
    unseen = [row.name for row in rows if row.facts.get("left_dense") == UNSEEN]
    return (
        (f"left dense, since {UNSEEN}: {', '.join(unseen[:3])}{', ...' if len(unseen) > 3 else ''} ({len(unseen)})",)
        if unseen
        else ()
    )


def _left(targets: list[Target], group: Sequence[Target]) -> int:
    """Layers behind that of the group."""
    return len({target.layer for target in targets if target.layer > group[0].layer})


def _sixteen(model: nn.Module) -> int:
    """Bytes of all parameters, each counted once, in 16 bits."""
    return sum({id(p): p.numel() for p in model.parameters()}.values()) * STORED // 8


def _structural(
    located: Located, compressor: Any, calibration: Calibration | None, batch_size: int, facts: dict[str, Any]
) -> Compressed:
    """Take layers away."""
    dense = _sixteen(located.model)
    kept, notes = compressor.remove(located, calibration, batch_size)
    left = _sixteen(located.model)
    record = CompressionRecord(
        **facts,
        layers=tuple(layer for layer in range(located.depth) if layer not in kept),
        skipped=(),
        sites=(),
        kept_blocks=tuple(kept),
        bits_per_weight=float(STORED),
        bytes=left,
        bytes_dense=dense,
        sparsity=0.0,
        notes=tuple(notes),
    )
    return Compressed(located.model, record)
