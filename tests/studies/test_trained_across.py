"""The experiment on what training across the stream leaves: whose numbers its columns are, and what it refuses."""

import math

import pytest

from thalweg.errors import InputError
from thalweg.evaluation.perplexity import perplexity
from thalweg.studies.experiments import subjects
from thalweg.studies.experiments.base import registry

TRAIN = {"data": "austen", "depth": 2, "width": 16, "heads": 2, "steps": 3, "sequence_length": 32, "batch_size": 4}
TRAIN |= {"threads": 1, "eval_every": 3, "eval_batches": 1, "lr": 2e-2, "model": {"initial_std": 0.3}}


@pytest.fixture(scope="module")
def experiment():
    return registry["trained_across"]


@pytest.fixture(scope="module")
def rows(experiment):
    options = experiment.options({"train": TRAIN, "tokens": 256, "length": 32, "attention_edit": "value:full:0"})
    return experiment.rows("trained_across", options, 3, lambda _: None)


def value(rows, measure, arm):
    (row,) = rows.where(measure=measure, arm=arm)
    return row.value


def test_every_column_is_there_and_finite(experiment, rows):
    for measure, arms in experiment.columns.items():
        assert all(math.isfinite(value(rows, measure, arm)) for arm in arms)
    assert {row.unit for row in rows.where(measure="across.compressed")} == {"nats/token"}


@pytest.mark.parametrize(
    ("arm", "own", "used"),
    [
        ("base", {}, {}),
        ("base_with", {}, {"attention_edit": "value:full:0"}),
        ("across", {"attention_edit": "value:full:0"}, {}),
        ("across_without", {"attention_edit": "value:full:0"}, {"attention_edit": None}),
    ],
)
def test_the_losses_are_those_of_the_two_models_with_and_without(rows, arm, own, used):
    """Catches: the switched model without its weights, or with the edit that it had."""
    subject = subjects.subject_of(subjects.SubjectOptions("own", {**TRAIN, **own}), 3)
    texts = subjects.texts_of(3, 2)
    model = subject.model.with_edits(**used) if used else subject.model
    found = perplexity(model, subject.tokenizer, texts, window=32, batch_size=8, bos=False).loss
    assert value(rows, "across.loss", arm) == pytest.approx(found, rel=1e-6)


def test_switching_and_breaking_change_something(rows):
    for one, other in (("base", "base_with"), ("across", "across_without"), ("base", "across")):
        assert abs(value(rows, "across.loss", one) - value(rows, "across.loss", other)) > 1e-5
    for arm in ("base", "across"):
        assert (
            abs(value(rows, "across.compressed", f"{arm}.rtn_3"))
            > abs(value(rows, "across.compressed", f"{arm}.rtn_4"))
            > 0
        )
        assert value(rows, "across.edited", f"{arm}.mlp_parallel") != value(
            rows, "across.edited", f"{arm}.mlp_perpendicular"
        )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"attention_edit": ""}, "attention_edit or mlp_edit, got neither"),
        ({"train": {"seed": 1}}, "seed does not belong into train"),
        ({"train": {"attention_edit": "value:full:0"}}, "attention_edit does not belong into train"),
    ],
)
def test_what_it_refuses(experiment, options, says):
    with pytest.raises(InputError, match=says):
        experiment.rows("trained_across", experiment.options(options), 0, lambda _: None)
