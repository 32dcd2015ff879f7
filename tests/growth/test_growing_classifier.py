"""A classifier grows: padded text, bitwise resumption, a Hugging Face classifier at the end; bad data in one line."""

import dataclasses

import numpy as np
import pytest
import torch

from thalweg.data.classification import ClassificationTask, Labelled
from thalweg.data.text.tokenizer import ByteTokenizer
from thalweg.errors import InputError
from thalweg.growth import GrowthRecord, grow, plan_growth
from thalweg.growth.run import Grower, probe_set
from thalweg.records import RunFolder
from thalweg.training import TrainConfig, checkpoint, load_model
from thalweg.training.engine import Engine
from thalweg.training.parallel import Ranks

BASE = {"depth": 2, "width": 16, "heads": 1, "model": {"head_size": 4}, "data": "sentiment", "sequence_length": 12}
BASE |= {"batch_size": 16, "steps": 16, "lr": 1e-2, "eval_every": 8, "threads": 1, "geometry": False}
GROWTH = {"check_every": 2, "dwell": 4, "threshold": 0.3, "most_heads": 4}


def texts(count, seed):
    rng = np.random.default_rng(seed)
    found, labels = [], []
    for _ in range(count):
        letters = rng.choice(list("abcdefgh"), rng.integers(4, 9)).tolist()
        first, second = sorted(rng.choice(len(letters), 2, replace=False))
        label = int(rng.integers(2))
        letters[first], letters[second] = ("x", "y") if label else ("y", "x")
        found.append("".join(letters))
        labels.append(label)
    return Labelled(found, labels)


@pytest.fixture(scope="module")
def letters():
    splits = {"train": texts(400, 0), "valid": texts(60, 1), "test": texts(61, 2)}
    return ClassificationTask("letters", splits, ("after", "before"), ByteTokenizer(), "drawn")


def config(**changes):
    return TrainConfig(**{**BASE, "growth": GROWTH, **changes})


@pytest.fixture(scope="module")
def straight(letters, tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier") / "run"
    return folder, grow(config(), folder, task=letters)


def test_it_grows_and_is_a_classifier_for_hugging_face(straight, letters):
    import transformers

    import thalweg  # noqa: F401  # registers the model

    folder, found = straight
    assert sum(found.growth["heads"]) > 2 and found.result.evaluation["task/accuracy"] > 0
    model, _ = load_model(folder, "last")
    assert [model.config.heads_of(layer) for layer in range(2)] == found.growth["heads"]
    shell = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    assert shell.config.id2label == dict(enumerate(letters.class_names)) and shell.config.pad_token_id == letters.pad
    batch = letters.eval_batches("valid", 12, 8, 1)[0]
    with torch.no_grad():
        theirs = shell(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        assert torch.equal(theirs, model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits)


def test_a_classifier_of_hugging_face_trains_further(straight, letters):
    """Plain descent on what from_pretrained gives: every head moves, those that were born too."""
    import transformers

    folder, found = straight
    shell = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "model").train()
    before = {name: p.detach().clone() for name, p in shell.named_parameters()}
    descent = torch.optim.SGD(shell.parameters(), lr=0.1)
    batch = letters.eval_batches("train", 12, 16, 1)[0]
    shell(**batch).loss.backward()
    descent.step()
    name = next(n for n in before if n.endswith("blocks.0.sublayers.0.output.weight"))
    moved = (dict(shell.named_parameters())[name] - before[name]).detach().unflatten(1, (-1, 4)).abs().amax((0, 2))
    assert len(moved) == found.growth["heads"][0] and (moved > 0).all()


def test_it_goes_on_bitwise(straight, letters, tmp_path):
    folder, _ = straight
    asked = iter(range(100))
    grow(config(), tmp_path / "run", task=letters, stop=lambda: next(asked) == 6)
    grow(config(), tmp_path / "run", task=letters, resume=True)
    one, other = (
        checkpoint.read(checkpoint.find(f / "checkpoints", "last")).weights() for f in (folder, tmp_path / "run")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    events = [GrowthRecord.load(f / "growth.jsonl").events for f in (folder, tmp_path / "run")]
    assert events[0] == events[1] and len(events[0]) > 1


def test_the_probe_set_is_held_out_padded_and_large_enough(letters):
    batch = probe_set(config(), letters)
    assert (
        batch["attention_mask"].sum() >= 8 * 16
        and not batch["attention_mask"].all()
        and set(batch["labels"].tolist()) == {0, 1}
    )
    wide = probe_set(config(width=64), letters)
    assert len(wide["input_ids"]) == 60  # all that there are, though 8 x 64 tokens were asked for
    valid = {tuple(ids.tolist()) for ids in letters.eval_batches("valid", 12, 60, 1)[0]["input_ids"]}
    assert {tuple(ids.tolist()) for ids in wide["input_ids"]} == valid


def test_the_plan_of_a_classifier(letters):
    planned = plan_growth(config(), task=letters, probe=False)
    assert planned.predicted[0].heads >= planned.predicted[-1].heads and "padding" not in "".join(
        planned.forecast.warnings
    )


def test_one_class_is_one_line(letters):
    grower = Grower(config())
    grower.attach(Engine(config(), letters, torch.device("cpu"), Ranks()))
    grower.network.batch["labels"] = torch.ones_like(grower.network.batch["labels"])
    with pytest.raises(InputError, match="at least two classes, got only class 1") as caught:
        grower.begin()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("found", "labels", "words"),
    [(["ab", "cd"], [1, 1], "class"), (["ab", ""], [0, 1], "empty|no token"), (["ab", "ab"], [0, 1], "same")],
)
def test_data_that_teaches_nothing_is_one_line(found, labels, words):
    part = Labelled(found, labels)
    with pytest.raises(InputError, match=words) as caught:
        ClassificationTask(
            "mine", {"train": part, "valid": part, "test": part}, ("no", "yes"), ByteTokenizer(), "by hand"
        )
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_finite_are_one_line(letters, tmp_path):
    grower = Grower(config())
    grower.attach(Engine(config(), letters, torch.device("cpu"), Ranks()))
    with torch.no_grad():
        grower.network.model.embedding.weight[5] = float("nan")
        grower.network.model.embedding.weight.mul_(float("nan"))
    with pytest.raises(InputError, match="NaN or infinite"):
        grower.begin()


def test_masked_tokens_grow_too(tmp_path):
    wanted = dataclasses.replace(
        config(),
        data="austen",
        objective="masked",
        sequence_length=16,
        steps=4,
        eval_every=4,
        eval_batches=1,
        width=16,
        depth=1,
    )
    found = grow(wanted, tmp_path / "run")
    assert found.result.status == "done" and found.growth["heads"][0] > 1
    assert len(RunFolder.open(tmp_path / "run").measures().where(measure="growth.top")) >= 2
