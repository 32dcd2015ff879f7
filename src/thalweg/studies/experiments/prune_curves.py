"""How much a classifier loses as its heads go one by one, the cheapest first: one that grew, and a fixed one of the same shape."""

import dataclasses
import itertools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from thalweg.errors import InputError
from thalweg.records import Measurements
from thalweg.studies.experiments.base import HAS_LEARNED, DivergedError, Progress, check_train, ended, nothing, register

MODELS, ORDERS = ("grown", "fixed"), ("energy", "loss", "random")
ARMS = tuple(f"{model}_{order}" for model in MODELS for order in ORDERS)
RISE = 0.01  # nats/sequence that a head may cost and still count as free
BATCH = 128  # texts of a pass


@dataclass(frozen=True)
class PruneCurvesOptions:
    """train: fields of the training of both models, without heads; head_width: of every head; growth: options of growth. scored: validation
    texts by which heads are put in order; held_out: batches of 128 test texts on which the curves are, 0 for all of them."""

    train: dict[str, Any] = field(default_factory=dict)
    head_width: int = 16
    growth: dict[str, Any] = field(default_factory=dict)
    scored: int = 256
    held_out: int = 0


def _columns(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The columns of some of the models."""
    arms = tuple(arm for arm in ARMS if arm.split("_")[0] in names)
    curves: dict[str, tuple[str, ...]] = dict.fromkeys(
        ("prune.area", "prune.free", "prune.loss", "prune.accuracy"), arms
    )
    return {**curves, **dict.fromkeys(("prune.heads", "classifier.loss", "classifier.accuracy"), names)}


@register(
    "prune_curves",
    options=PruneCurvesOptions,
    columns=_columns(MODELS),
    summary="heads of a grown and of a fixed classifier of one shape pruned one by one, by energy, loss or at random: what is lost after each",
    source="claims reconstructed from the reviews of Cirrincione 2026 (arXiv 2604.10703 and 2604.01880); curves and controls are ours",
)
def prune_curves(options: PruneCurvesOptions, seed: int, progress: Progress) -> Measurements:
    """``grown``: a classifier that grew from one head in each layer; ``fixed``: one that had its heads from the start, as many in every layer,
    so that parameters and updates are equal. Both as they stand after the last update; losses and accuracies are on the test split.

    The heads of each are put in order by their scores on validation texts before any has gone (:func:`thalweg.surgery.head_scores`:
    directional ``energy``, rise of the ``loss``, and ``random`` numbers as the control) and go one by one, the lowest first, until one in each
    layer is left. prune.loss [nats/sequence] and prune.accuracy: after every step, a row for each with the number of heads that are gone.
    prune.area: mean rise of the loss over the curve, by trapezoids, against the share of heads that are gone. prune.free: share of those that
    can go before the loss has risen by 0.01 for the first time. prune.heads: of all layers, before. A fixed model that diverged leaves NaN in
    its columns, a grown one in all: the fixed one would have its shape.
    """
    from thalweg import data
    from thalweg.data.classification import ClassificationTask
    from thalweg.growth.run import grow
    from thalweg.training import train
    from thalweg.training.config import from_table

    check_train("prune_curves", options.train, ("seed", "heads", "growth"), "seeds and options of the experiment say")
    model = {**options.train.get("model", {}), "head_size": options.head_width}
    made = from_table({**options.train, "model": model, "seed": seed, "heads": 1, "growth": options.growth})
    task = data.load(made.data, tokenizer=made.tokenizer, vocab_size=made.vocab_size)
    if not isinstance(task, ClassificationTask):
        raise InputError(f"prune_curves needs a classification such as sentiment, got {made.data!r}")
    rows = Measurements()
    with tempfile.TemporaryDirectory() as folder:
        grown = grow(made, Path(folder) / "grown", task=task)
        if not ended(grown.result.status, "the grown run of prune_curves", seed):
            raise DivergedError(f"the grown run of prune_curves diverged at seed {seed}")
        heads = grown.growth["heads"]
        if max(heads) < 2:
            raise InputError(
                f"no head of the grown model can go at seed {seed}: its layers have {heads}; lower the threshold"
            )
        shaped = {**model, "layer_heads": heads}
        fixed = train(dataclasses.replace(made, growth=None, model=shaped), Path(folder) / "fixed", task=task)
        came = ended(fixed.status, "the fixed run of prune_curves", seed)
        for name in MODELS if came else ("grown",):
            _curves(rows, name, Path(folder) / name, task, made.sequence_length, options, seed, progress)
    if not came:
        progress("the fixed run diverged")
        nothing(rows, _columns(("fixed",)))
    return rows


def _curves(
    rows: Measurements,
    name: str,
    run: Path,
    task: Any,
    length: int,
    options: PruneCurvesOptions,
    seed: int,
    progress: Progress,
) -> None:
    from thalweg.surgery import head_scores, lowest, prune_heads
    from thalweg.surgery.text import labelled
    from thalweg.training import load_model

    model, _ = load_model(run, "last")
    batches = task.eval_batches("test", length, BATCH, options.held_out or None)
    sample = labelled(model.config, task, length=length, rows=options.scored)
    start, chance = _evaluated(model, batches), task.nulls_of("test")["majority_accuracy"]
    layers = [model.config.heads_of(layer) for layer in range(model.config.depth)]
    most, n = sum(layers) - len(layers), int(start["n"])
    rows.add("prune.heads", float(sum(layers)), arm=name, unit="heads")
    rows.add("classifier.loss", start["loss"], arm=name, unit="nats/sequence", n=n)
    null = {"null": chance, "null_kind": "majority class of training", "n": n}
    rows.add("classifier.accuracy", start["accuracy"], arm=name, **null)
    learned = start["accuracy"] > chance
    why = "" if learned else "it is no better than the majority class of training"
    for order in ORDERS:
        arm = f"{name}_{order}"
        given: Mapping[str, Any] = {"mask": sample.mask, "labels": sample.labels}
        scores = head_scores(model, sample.ids, "weight" if order == "random" else order, **given)
        if order == "random":
            numbers = torch.rand(
                len(scores), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
            ).tolist()
            scores = [dataclasses.replace(score, score=number) for score, number in zip(scores, numbers, strict=True)]
        losses = [start["loss"]]
        for gone in range(1, most + 1):
            found = _evaluated(prune_heads(model, lowest(scores, gone)).model, batches)
            losses.append(found["loss"])
            where = f"{gone} of {sum(layers)} heads gone"
            rows.add("prune.loss", found["loss"], arm=arm, site=where, unit="nats/sequence", n=n)
            rows.add("prune.accuracy", found["accuracy"], arm=arm, site=where, **null)
        area, free = area_of(losses), free_of(losses)
        rows.add("prune.area", area, arm=arm, unit="nats/sequence", n=most)
        rows.add("prune.free", free, arm=arm, n=most)
        rows.add(HAS_LEARNED, float(learned), arm=arm, null_kind=why)
        progress(f"{name}, by {order}: {sum(layers)} heads, mean rise {area:.4f}, {free:.0%} free")
    rows.add(HAS_LEARNED, float(learned), arm=name, null_kind=why)


def area_of(losses: list[float]) -> float:
    """Mean rise over the first loss along a curve whose steps are equally wide."""
    rises = [loss - losses[0] for loss in losses]
    return sum((a + b) / 2 for a, b in itertools.pairwise(rises)) / (len(rises) - 1)


def free_of(losses: list[float]) -> float:
    """Share of the steps before the first whose loss is more than ``RISE`` above that at the start."""
    steps = losses[1:]
    return next((i for i, loss in enumerate(steps) if not loss - losses[0] <= RISE), len(steps)) / len(steps)


@torch.no_grad()
def _evaluated(model: Any, batches: Any) -> dict[str, float]:
    """Mean loss and accuracy over all texts of the batches."""
    nats = right = count = 0.0
    for batch in batches:
        labels = batch["labels"]
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        nats += float(model.losses(logits, labels).nats.sum())
        right += float((logits.argmax(-1) == labels).sum())
        count += len(labels)
    return {"loss": nats / count, "accuracy": right / count, "n": count}
