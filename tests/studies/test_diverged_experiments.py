"""Trainings that diverge inside an experiment: what rests on them is not a number, the rest stands."""

import dataclasses
import math

import pytest

from thalweg.errors import InputError
from thalweg.studies.experiments import grown_classifier, prune_curves, subjects, trained_across
from thalweg.studies.experiments.base import DivergedError, ended, registry

AT_ONCE = {"diverge_rms": 1e-9}  # every state is larger
OWN = {"data": "austen", "depth": 1, "width": 16, "heads": 2, "steps": 2, "sequence_length": 16, "batch_size": 2}
OWN |= {"eval_every": 1, "eval_batches": 1, "threads": 1, "feed_forward": "gelu"}
SENTIMENT = {"data": "sentiment", "tokenizer": "byte", "depth": 2, "width": 8, "steps": 4, "sequence_length": 16}
SENTIMENT |= {"batch_size": 8, "threads": 1, "eval_every": 4, "lr": 1e-2}
GROWTH = {"threshold": 0.02, "check_every": 1, "dwell": 1, "most_heads": 3}


def run(name, values, seed=0):
    return registry[name].rows(name, registry[name].options(values), seed, lambda line: None)


def finite(rows, name):
    """(measure, arm) of the columns that hold a number."""
    columns = ((measure, arm) for measure, arms in registry[name].columns.items() for arm in arms)
    return {at for at in columns if all(math.isfinite(row.value) for row in rows.where(measure=at[0], arm=at[1]))}


@pytest.mark.parametrize("name", ["epsilon_law", "torsion", "symmetric_reaction", "training_vortex"])
def test_an_experiment_on_one_training_leaves_nothing_finite(name):
    assert not finite(run(name, {"train": {**OWN, **AT_ONCE}}), name)


def test_a_subject_that_diverged_is_none():
    with pytest.raises(DivergedError, match=r"diverged at seed 4$"):
        subjects.subject_of(subjects.SubjectOptions(train={**OWN, **AT_ONCE}), 4)


def test_a_training_that_was_stopped_is_no_result():
    assert ended("done", "a run", 0) and not ended("diverged", "a run", 0)
    with pytest.raises(InputError, match="a run at seed 3 is interrupted"):
        ended("interrupted", "a run", 3)


def test_of_two_trainings_the_one_that_came_to_its_end_stands(monkeypatch):
    original = trained_across.subject_of

    def of(options, seed):
        if "attention_edit" in options.train:
            raise DivergedError("gone")
        return original(options, seed)

    monkeypatch.setattr(trained_across, "subject_of", of)
    rows = run("trained_across", {"train": OWN, "tokens": 64, "length": 16})
    there = finite(rows, "trained_across")
    assert there and {arm.split(".")[0] for _, arm in there} == {"base", "base_with"}
    assert len(there) * 2 == sum(map(len, registry["trained_across"].columns.values()))


def test_a_grown_model_that_diverged_takes_the_fixed_one_with_it():
    values = {"train": {**SENTIMENT, **AT_ONCE}, "head_width": 4, "growth": GROWTH, "scored": 24, "held_out": 1}
    assert not finite(run("prune_curves", values), "prune_curves")


def test_a_fixed_model_that_diverged_leaves_the_grown_one(monkeypatch):
    import thalweg.training

    original = thalweg.training.train
    monkeypatch.setattr(
        thalweg.training,
        "train",
        lambda config, *given, **more: original(dataclasses.replace(config, **AT_ONCE), *given, **more),
    )
    values = {"train": SENTIMENT, "head_width": 4, "growth": GROWTH, "scored": 24, "held_out": 1}
    there = finite(run("prune_curves", values), "prune_curves")
    assert {arm.split("_")[0] for _, arm in there} == {"grown"}
    assert len(there) * 2 == sum(map(len, prune_curves._columns(prune_curves.MODELS).values()))


def test_a_classifier_that_diverged_leaves_nothing_but_what_was_not_trained_so():
    values = {"train": {**SENTIMENT, **AT_ONCE}, "head_width": 4, "growth": GROWTH, "search": [1]}
    there = finite(run("grown_classifier", values), "grown_classifier")
    assert there == {("classifier.accuracy", "bag"), ("classifier.loss", "bag"), ("classifier.accuracy", "majority")}


def test_one_classifier_that_diverged_leaves_the_others(monkeypatch):
    score = {"loss": 0.6, "accuracy": 0.6, "valid": 0.6, "chance": 0.51, "n": 990, "flops": 9.0}

    def fixed(given, seed, heads, **changes):
        return dict(grown_classifier.DIVERGED) if heads == 1 else {**score, "loss": heads / 10}

    monkeypatch.setattr(grown_classifier, "_fixed", fixed)
    monkeypatch.setattr(grown_classifier, "_grown", lambda *a, **k: {**score, "heads": 2.0, "status": "converged"})
    rows = run("grown_classifier", {"train": SENTIMENT, "head_width": 4, "search": [1, 4]})
    columns = {(m, arm) for m, arms in registry["grown_classifier"].columns.items() for arm in arms}
    gone = {("classifier.accuracy", "one_head"), ("classifier.loss", "one_head")}
    assert finite(rows, "grown_classifier") == columns - gone
    (searched,) = rows.where(measure="classifier.loss", arm="searched")
    assert searched.value == 0.4  # not the one that diverged
    assert not len(rows.where(measure="has_learned", arm="one_head"))
