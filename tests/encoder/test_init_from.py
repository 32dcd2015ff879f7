"""Runs that begin at an encoder of ours: the weights are taken, the mask and the classes mean the same, and what does not fit is one line."""

import json

import pytest
import torch

from thalweg.cli import main
from thalweg.errors import InputError
from thalweg.models.hf_encoder import ThalwegForMaskedLM, ThalwegForSequenceClassification
from thalweg.records import RunFolder
from thalweg.surgery import Growth, convert, save
from thalweg.surgery.source import Source
from thalweg.surgery.text import labelled
from thalweg.training import TrainConfig, load_model, train
from thalweg.training.determinism import derive_seed
from thalweg.training.initial import table_of
from thalweg.training.tasks import load_task

BASE = {"depth": 1, "width": 16, "heads": 2, "sequence_length": 12, "batch_size": 8, "steps": 2, "eval_every": 2}
BASE |= {"eval_batches": 1, "threads": 1, "geometry": False, "vocab_size": 300}
SIZES = ("depth", "width", "heads", "vocab_size")


def films(folder):
    """A classification in files, shaped as SST-2."""
    rows = [f"film {i} is {'a fine' if i % 2 else 'no good'} one\t{i % 2}\n" for i in range(60)]
    (folder / "train.tsv").write_text("sentence\tlabel\n" + "".join(rows[:40]))
    (folder / "dev.tsv").write_text("sentence\tlabel\n" + "".join(rows[40:]))
    return f"sst2:{folder}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text("\n".join(f"line {i} of a text that says {i * i} things about the number {i}" for i in range(300)))
    return {"classification": {"data": films(folder)}, "masked": {"data": f"text:{text}", "objective": "masked"}}


@pytest.fixture(scope="module")
def grown(data, tmp_path_factory):
    """By objective the folder of an encoder that a run trained and that has grown, with its tokenizer, and the task."""
    found = {}
    for objective, where in data.items():
        folder = tmp_path_factory.mktemp(objective)
        config = TrainConfig(**BASE, **where)
        train(config, folder / "run")
        model, task = load_model(folder / "run", "last")[0], load_task(config)
        source = Source(model, "run", "thalweg", task.portable_tokenizer(), task.portable_settings())
        tokens = labelled(model.config, task, rows=4) if objective == "classification" else None
        made = convert(source, None, growth=Growth(heads=1, depth=1), tokens=tokens, length=None if tokens else 12)
        found[objective] = (save(made, folder / "model", tokenizer=source.tokenizer), task)
    return found


def continued(folder, where, **changes):
    """The configuration that the command line makes of ``--init-from``."""
    free = {name: value for name, value in BASE.items() if name not in SIZES}
    return TrainConfig(**{**table_of(folder), **free, **where, "init_from": str(folder), **changes})


@pytest.mark.parametrize("objective", ["classification", "masked"])
def test_a_run_goes_on_where_the_encoder_stands(objective, grown, data, tmp_path):
    """The first loss is that of the stored model on the first batch: weights, mask, start, padding and classes all fit."""
    folder, first = grown[objective]
    config = continued(folder, data[objective], lr=1e-4)
    train(config, tmp_path / "run")
    task = load_task(config)
    special = ("pad", "start") if objective == "classification" else ("mask",)
    assert task.vocab_size == first.vocab_size and all(getattr(task, n) == getattr(first, n) for n in special)
    kind = ThalwegForSequenceClassification if objective == "classification" else ThalwegForMaskedLM
    stored = kind.from_pretrained(folder).transformer
    batch = task.sampler("train", 12, 8, seed=derive_seed(0, 1)).next()
    with torch.no_grad():
        expected = stored(**batch).loss.item()
    recorded = RunFolder.open(tmp_path / "run")
    assert recorded.metrics("train/loss")[0][1] == pytest.approx(expected, rel=1e-5)
    assert recorded.config["init_from"] == str(folder) and "sha256" in (tmp_path / "run" / "run.json").read_text()
    model, _ = load_model(tmp_path / "run", "last")
    assert model.config.heads_of(1) == 3 and not torch.equal(model.embedding.weight, stored.embedding.weight)


@pytest.mark.parametrize("objective", ["classification", "masked"])
def test_the_tokens_are_those_of_the_run_before(objective, grown, data):
    folder, first = grown[objective]
    again = load_task(continued(folder, data[objective]))
    ours, theirs = (task.eval_batches("valid", 12, 8, 1)[0] for task in (again, first))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_masks_do_not_drift_through_many_runs(grown, data, tmp_path):
    """A tokenizer that was handed on twice has one mask still."""
    folder, first = grown["masked"]
    task = load_task(continued(folder, data["masked"]))
    task.portable_tokenizer().save_pretrained(tmp_path)
    again = load_task(continued(folder, data["masked"], tokenizer=str(tmp_path / "tokenizer.json")))
    assert again.mask == first.mask and again.tokenizer.mask == first.mask
    batch = again.eval_batches("valid", 12, 64, 1)[0]
    assert (batch["input_ids"] == again.mask).any() and batch["labels"].max() < again.mask


def test_an_encoder_grows_on(grown, data, tmp_path):
    from thalweg.growth import grow

    folder, _ = grown["masked"]
    config = continued(folder, data["masked"], growth={"check_every": 1, "dwell": 1, "threshold": 0.01})
    assert sum(grow(config, tmp_path / "run").growth["heads"]) > 6


def wrong(case, grown, data, tmp_path):
    """A configuration that does not fit, and the words that say so."""
    classifier, masked = grown["classification"][0], grown["masked"][0]
    if case == "other objective":
        return continued(
            masked, data["classification"], objective=None
        ), "learned masked tokens, and the data of this run 2 classes"
    if case == "a decoder's data":
        return continued(
            classifier, data["masked"], objective=None
        ), "learned 2 classes, and the data of this run the next token"
    if case == "tokenizer of another size":
        return continued(classifier, data["classification"], tokenizer="byte"), "the data has 259 tokens"
    if case == "another tokenizer":
        return continued(
            masked, data["masked"], tokenizer=other_tokenizer(masked, tmp_path)
        ), "is not that of the model"
    table = json.loads((classifier / "config.json").read_text())
    names = {"bad": 0, "good": 1}
    table |= (
        {"id2label": {str(i): n for n, i in names.items()}, "label2id": names}
        if case == "classes"
        else {"pad_token_id": 5}
    )
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in classifier.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "config.json").write_text(json.dumps(table))
    said = "the names of classes of the model" if case == "classes" else "the padding of the model"
    return continued(copy, data["classification"]), said


def other_tokenizer(folder, tmp_path):
    """Of the same size, two entries swapped."""
    table = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = table["model"]["vocab"]
    one, two = [name for name, number in vocabulary.items() if number in (40, 41)]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    return str(tmp_path / "tokenizer.json")


CASES = ["other objective", "a decoder's data", "tokenizer of another size", "another tokenizer", "classes", "padding"]


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_one_line(case, grown, data, tmp_path):
    config, words = wrong(case, grown, data, tmp_path)
    with pytest.raises(InputError) as error:
        train(config, tmp_path / "run")
    assert words in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_the_command_line(grown, data, tmp_path, capsys):
    line = [
        "--sequence-length",
        "12",
        "--steps",
        "1",
        "--eval-every",
        "1",
        "--eval-batches",
        "1",
        "--batch-size",
        "4",
        "--quiet",
    ]
    line += ["--threads", "1", "--geometry", "false", "--init-from", str(grown["masked"][0])]
    text = data["masked"]["data"]
    assert main(["train", *line, "--data", text, "-o", str(tmp_path / "run")]) == 0
    assert load_model(tmp_path / "run")[0].config.objective == "masked" and "Loading" not in capsys.readouterr().err
    assert main(["train", *line, "--data", text, "--objective", "next_token", "-o", str(tmp_path / "other")]) == 2
    assert "learned masked tokens, and the data of this run the next token" in capsys.readouterr().err
