"""The experiment on pruning curves: whose heads go in which order, what the numbers are made of, and what it refuses."""

import dataclasses

import pytest
import torch

from thalweg.errors import InputError
from thalweg.records import Measurements
from thalweg.studies.experiments.base import registry
from thalweg.studies.experiments.prune_curves import ARMS, ORDERS, _curves, area_of, free_of
from thalweg.surgery import mask_heads
from thalweg.surgery.text import labelled
from thalweg.training import load_model, train
from thalweg.training.config import from_table
from thalweg.training.tasks import load_task

TRAIN = {"data": "sentiment", "tokenizer": "byte", "depth": 2, "width": 8, "steps": 4, "sequence_length": 16}
TRAIN |= {"batch_size": 8, "threads": 1, "eval_every": 4, "geometry": False, "lr": 1e-2}
GROWTH = {"threshold": 0.02, "check_every": 1, "dwell": 1, "most_heads": 3}


def options(**changes):
    values = {"train": TRAIN, "head_width": 4, "growth": GROWTH, "scored": 24, "held_out": 1, **changes}
    return registry["prune_curves"].options(values)


@pytest.fixture(scope="module")
def found():
    return registry["prune_curves"].rows("prune_curves", options(), 0, lambda _: None)


def column(rows, measure, arm):
    return [row.value for row in rows.where(measure=measure, arm=arm)]


def test_both_models_have_one_shape_and_every_curve_its_steps(found):
    (heads,), (others,) = (column(found, "prune.heads", name) for name in ("grown", "fixed"))
    assert heads == others > 2
    for arm in ARMS:
        assert len(column(found, "prune.loss", arm)) == len(column(found, "prune.accuracy", arm)) == heads - 2
    assert {row.n for row in found.where(measure="prune.loss")} == {128}
    ends = {
        round(column(found, "prune.loss", f"{name}_{order}")[-1], 12) for name in ("grown", "fixed") for order in ORDERS
    }
    assert len(ends) > 1  # what is left at the end depends on the order


def test_area_and_free_heads_are_those_of_the_curve(found):
    for arm in ARMS:
        losses = [column(found, "classifier.loss", arm.split("_")[0])[0], *column(found, "prune.loss", arm)]
        assert column(found, "prune.area", arm) == [area_of(losses)] and column(found, "prune.free", arm) == [
            free_of(losses)
        ]


def test_area_and_free_by_hand():
    assert area_of([1.0, 1.2, 1.6]) == pytest.approx((0.1 + 0.4) / 2) and area_of([1.0, 0.9]) == pytest.approx(-0.05)
    assert free_of([1.0, 1.009, 0.9, 1.02, 1.0]) == 0.5 and free_of([1.0, 1.02]) == 0 and free_of([1.0, 1.0]) == 1
    assert free_of([1.0, 1.0, float("nan"), 1.0]) == pytest.approx(1 / 3)  # no number is no free head


@pytest.mark.parametrize("seed", [3])
def test_the_cheapest_head_goes_first(seed, tmp_path):
    """The curve by loss, made again with masks: heads in the order of the rise on validation texts, losses on test texts."""
    config = from_table({**TRAIN, "seed": seed, "heads": 3, "model": {"head_size": 4}})
    task = load_task(config)
    train(config, tmp_path / "run", task=task)
    rows = Measurements()
    _curves(rows, "fixed", tmp_path / "run", task, 16, options(), seed, lambda _: None)
    model, _ = load_model(tmp_path / "run", "last")
    sample, batch = labelled(model.config, task, length=16, rows=24), task.eval_batches("test", 16, 128, 1)[0]

    def loss(ids, mask, labels, masked=()):
        copy, _ = load_model(tmp_path / "run", "last")
        for layer, head in masked:
            mask_heads(copy, {layer: {head: 0.0}})
        with torch.no_grad():
            return float(copy(ids, attention_mask=mask, labels=labels).loss)

    whole = loss(sample.ids, sample.mask, sample.labels)
    rises = {(i, h): loss(sample.ids, sample.mask, sample.labels, [(i, h)]) - whole for i in range(2) for h in range(3)}
    gone, expected = [], []
    for place in sorted(rises, key=rises.__getitem__):
        if sum(layer == place[0] for layer, _ in gone) < 2:  # one of a layer stays
            gone.append(place)
            expected.append(loss(batch["input_ids"], batch["attention_mask"], batch["labels"], gone))
    assert column(rows, "prune.loss", "fixed_loss") == pytest.approx(expected, abs=1e-6)
    assert max(rises.values()) - min(rises.values()) > 1e-6


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train": {**TRAIN, "heads": 2}}, "heads does not belong into train"),
        ({"train": {**TRAIN, "data": "copy:vocab=8,half=4", "tokenizer": None}}, "needs a classification"),
        ({"growth": {**GROWTH, "most_heads": 1}}, "no head of the grown model can go"),
    ],
)
def test_what_it_refuses(changes, says):
    with pytest.raises(InputError, match=says):
        registry["prune_curves"].rows("prune_curves", dataclasses.replace(options(), **changes), 0, lambda _: None)
