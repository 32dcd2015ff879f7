"""A classifier that grows, end to end: its heads by threshold, and its score beside fixed ones, a search at equal compute, a bag of words."""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.errors import InputError
from thalweg.records import Measurements
from thalweg.studies.experiments.base import HAS_LEARNED, Progress, check_train, ended, nothing, register

THRESHOLDS = (0.05, 0.1, 0.2, 0.4)
CHOSEN = 0.1  # of the arm ``grown``
TRAINED = ("grown", "random", "fixed", "one_head", "searched")
DIVERGED = dict.fromkeys(("loss", "accuracy", "flops", "chance"), math.nan) | {"valid": math.inf}
HEADS = tuple(f"theta_{threshold:g}" for threshold in THRESHOLDS)


@dataclass(frozen=True)
class GrownClassifierOptions:
    """train: fields of the training of all arms, without heads; head_width: of every head; growth: further options of growth. search: heads
    of the fixed models that are searched over, each trained for its share of the steps."""

    train: dict[str, Any] = field(default_factory=dict)
    head_width: int = 16
    growth: dict[str, Any] = field(default_factory=dict)
    search: tuple[int, ...] = (1, 4, 16)


@register(
    "grown_classifier",
    options=GrownClassifierOptions,
    columns={
        "classifier.accuracy": (*TRAINED, "bag", "majority"),
        "classifier.loss": (*TRAINED, "bag"),
        "classifier.heads": (*HEADS, "random", "fixed"),
        "classifier.flops": ("grown", "fixed"),
    },
    summary="a classifier that grows, against fixed ones, a search at equal compute, a bag of embeddings and the majority class",
    source="claims reconstructed from the reviews of Cirrincione 2026 (arXiv 2604.10703 and 2604.01880); arms and controls are ours",
)
def grown_classifier(options: GrownClassifierOptions, seed: int, progress: Progress) -> Measurements:
    """Every number is on the test split, of the checkpoint with the lowest validation loss.

    classifier.accuracy and classifier.loss [nats/sequence]: ``grown`` at a threshold of 0.1; ``random``, the same with heads that are born on
    random planes; ``fixed``, as many heads as the grown one ends with, rounded to one number for all layers, from the start; ``one_head``;
    ``searched``, the best on validation of the fixed models of ``search``, all of which together have the updates of one run; the ``bag`` and
    the ``majority`` class of training. classifier.heads: mean over layers at the end, by threshold. classifier.flops: of training, looks left
    out. A run that diverged leaves NaN; so does ``fixed`` where ``grown`` diverged, which has no heads to be counted then.
    """
    from thalweg import data
    from thalweg.data.classification import ClassificationTask
    from thalweg.training.baselines import bag_of_embeddings, majority
    from thalweg.training.config import from_table

    check_train(
        "grown_classifier", options.train, ("seed", "heads", "growth"), "seeds and options of the experiment say"
    )
    if not options.search or min(options.search) < 1:
        raise InputError(f"search must name numbers of heads, at least 1, got {list(options.search)}")
    made = from_table({**options.train, "seed": seed})
    task = data.load(made.data, tokenizer=made.tokenizer, vocab_size=made.vocab_size)
    if not isinstance(task, ClassificationTask):
        raise InputError(f"grown_classifier needs a classification such as sentiment, got {made.data!r}")
    rows = Measurements()
    for threshold in THRESHOLDS:
        found = _grown(options, seed, threshold=threshold)
        rows.add("classifier.heads", found["heads"], arm=f"theta_{threshold:g}", unit="heads/layer")
        progress(
            f"threshold {threshold:g}: {found['status']}, {found['heads']:.1f} heads a layer, accuracy {found['accuracy']:.3f}"
        )
        if threshold == CHOSEN:
            _score(rows, "grown", found)
            count = 0 if math.isnan(found["heads"]) else max(1, round(found["heads"]))
            rows.add("classifier.flops", found["flops"], arm="grown", unit="FLOP")
    control = _grown(options, seed, threshold=CHOSEN, birth="random")
    _score(rows, "random", control)
    rows.add("classifier.heads", control["heads"], arm="random", unit="heads/layer")
    fixed = _fixed(options, seed, count) if count else DIVERGED
    _score(rows, "fixed", fixed)
    rows.add("classifier.heads", float(count) if count else math.nan, arm="fixed", unit="heads/layer")
    rows.add("classifier.flops", fixed["flops"], arm="fixed", unit="FLOP")
    _score(rows, "one_head", _fixed(options, seed, 1))
    steps = made.total_steps // len(options.search)
    tried = [_fixed(options, seed, heads, steps=steps, eval_every=steps) for heads in options.search]
    _score(rows, "searched", min(tried, key=lambda one: one["valid"]))
    bag, most = bag_of_embeddings(task, made, "test"), majority(task, "test")
    _score(rows, "bag", {"accuracy": bag.accuracy, "loss": bag.loss, "chance": most.accuracy, "n": bag.sequences})
    rows.add("classifier.accuracy", most.accuracy, arm="majority", n=most.sequences)
    progress(f"fixed {fixed['accuracy']:.3f}, bag {bag.accuracy:.3f}, majority {most.accuracy:.3f}")
    return rows


def _score(rows: Measurements, arm: str, found: Mapping[str, Any]) -> None:
    if math.isnan(found["loss"]):
        nothing(rows, dict.fromkeys(("classifier.accuracy", "classifier.loss"), (arm,)))
        return
    chance = {"null": found["chance"], "null_kind": "majority class of training", "n": found["n"]}
    rows.add("classifier.accuracy", found["accuracy"], arm=arm, **chance)
    rows.add("classifier.loss", found["loss"], arm=arm, unit="nats/sequence", n=found["n"])
    learned = found["accuracy"] > found["chance"]
    rows.add(
        HAS_LEARNED,
        float(learned),
        arm=arm,
        null_kind="" if learned else "it is no better than the majority class of training",
    )


def _table(options: GrownClassifierOptions, seed: int, heads: int, **changes: Any) -> dict[str, Any]:
    model = {**options.train.get("model", {}), "head_size": options.head_width}
    return {**options.train, "model": model, "seed": seed, "heads": heads, **changes}


def _grown(options: GrownClassifierOptions, seed: int, **growth: Any) -> dict[str, Any]:
    """A run that grows from one head in each layer."""
    from thalweg.growth.run import grow
    from thalweg.training.config import from_table

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        made = grow(from_table(_table(options, seed, 1, growth={**options.growth, **growth})), run)
        about = made.growth
        if not ended(made.result.status, "the growing run of grown_classifier", seed):
            return {**DIVERGED, "heads": math.nan, "status": "diverged"}
        heads = sum(about["heads"]) / len(about["heads"])
        return {**_evaluated(run), "heads": heads, "status": about["status"], "flops": about["flops_spent"]}


def _fixed(options: GrownClassifierOptions, seed: int, heads: int, **changes: Any) -> dict[str, Any]:
    """A run whose heads are there from the start."""
    from thalweg.training import train
    from thalweg.training.config import from_table
    from thalweg.training.cost import train_flops
    from thalweg.training.engine import load_model

    with tempfile.TemporaryDirectory() as folder:
        run, config = Path(folder) / "run", from_table(_table(options, seed, heads, **changes))
        result = train(config, run)
        if not ended(result.status, f"the run of grown_classifier with {heads} heads", seed):
            return dict(DIVERGED)
        model, _ = load_model(run, "last")
        each = train_flops(model.config, config.sequence_length)
        return {**_evaluated(run), "flops": each * config.tokens_per_step * config.total_steps}


def _evaluated(run: Path) -> dict[str, Any]:
    """Of the best checkpoint: loss and accuracy on the test split, loss on the validation split."""
    from thalweg.training.measuring import evaluate_run

    test, valid = evaluate_run(run, "test"), evaluate_run(run, "valid")
    metrics = test["metrics"]
    return {
        "loss": metrics["loss"],
        "accuracy": metrics["accuracy"],
        "valid": valid["metrics"]["loss"],
        "chance": test["nulls"]["majority_accuracy"],
        "n": test["sequences"],
    }
