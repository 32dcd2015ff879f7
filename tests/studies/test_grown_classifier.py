"""The experiment on a classifier that grows: which run stands behind which number, and what it refuses."""

import pytest

from thalweg.errors import InputError
from thalweg.studies.experiments import grown_classifier
from thalweg.studies.experiments.base import HAS_LEARNED, registry
from thalweg.training import train
from thalweg.training.config import from_table
from thalweg.training.measuring import evaluate_run

TRAIN = {"data": "sentiment", "depth": 1, "width": 8, "steps": 2, "sequence_length": 8, "batch_size": 4, "threads": 1}
TRAIN |= {"eval_every": 2, "geometry": False}


@pytest.fixture
def experiment():
    return registry["grown_classifier"]


def options(experiment, **changes):
    return experiment.options({"train": TRAIN, "head_width": 4, "search": [1, 3, 2], **changes})


@pytest.fixture
def made_up(monkeypatch):
    """Runs that say who they are: scores made of their heads and thresholds."""
    asked = []

    def grown(given, seed, **growth):
        asked.append(("grown", growth))
        heads = 3.4 if growth.get("birth") is None else 2.0
        about = {"heads": heads / growth["threshold"] * 0.1, "status": "converged", "flops": 7.0}
        return {**about, "loss": 0.5, "accuracy": 0.7, "valid": 0.5, "chance": 0.51, "n": 990}

    def fixed(given, seed, heads, **changes):
        asked.append(("fixed", heads, changes))
        score = {"loss": 0.6 + heads / 100, "accuracy": 0.5 + heads / 200, "valid": {1: 0.3, 2: 0.1, 3: 0.2}[heads]}
        return {**score, "flops": 9.0, "chance": 0.51, "n": 990}

    monkeypatch.setattr(grown_classifier, "_grown", grown)
    monkeypatch.setattr(grown_classifier, "_fixed", fixed)
    return asked


def value(rows, measure, arm):
    (row,) = rows.where(measure=measure, arm=arm)
    return row.value


def test_arms_are_the_runs_that_they_are_named_after(experiment, made_up):
    rows = experiment.rows("grown_classifier", options(experiment), 0, lambda _: None)
    assert value(rows, "classifier.heads", "theta_0.05") == pytest.approx(6.8)
    assert value(rows, "classifier.heads", "theta_0.1") == pytest.approx(3.4)
    assert value(rows, "classifier.heads", "fixed") == 3 and ("fixed", 3, {}) in made_up  # rounded from 3.4
    assert value(rows, "classifier.loss", "one_head") == pytest.approx(0.61)
    assert value(rows, "classifier.heads", "random") == 2
    # each of the three sizes has 2 // 3 updates, and the best on validation is taken, not on test
    assert [call for call in made_up if len(call) == 3 and call[2]] == [
        ("fixed", n, {"steps": 0, "eval_every": 0}) for n in (1, 3, 2)
    ]
    assert value(rows, "classifier.loss", "searched") == pytest.approx(0.62)
    learned = {row.arm: row.value for row in rows.where(measure=HAS_LEARNED)}
    assert learned["grown"] == 1 and learned["one_head"] == 0  # 0.505 against a majority of 0.51
    assert value(rows, "classifier.accuracy", "majority") == pytest.approx(0.51, abs=0.01)


def test_a_fixed_run_is_scored_on_the_test_split(experiment, tmp_path):
    found = grown_classifier._fixed(options(experiment), 5, 2)
    table = {**TRAIN, "seed": 5, "heads": 2, "model": {"head_size": 4}}
    train(from_table(table), tmp_path / "run")
    test, valid = (evaluate_run(tmp_path / "run", split) for split in ("test", "valid"))
    assert found["loss"] == test["metrics"]["loss"] and found["valid"] == valid["metrics"]["loss"]
    assert found["accuracy"] == test["metrics"]["accuracy"] and found["n"] == test["sequences"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train": {**TRAIN, "heads": 2}}, "heads does not belong into train"),
        ({"train": {**TRAIN, "data": "copy:vocab=8,half=4"}}, "needs a classification"),
        ({"search": []}, "search must name numbers of heads"),
    ],
)
def test_what_it_refuses(experiment, changes, says):
    with pytest.raises(InputError, match=says):
        experiment.rows("grown_classifier", options(experiment, **changes), 0, lambda _: None)
