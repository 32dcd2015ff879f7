"""Encoders in the training loop: they learn, resume bit by bit, are measured, evaluated, reported, and refuse what only a decoder can do."""

import json

import numpy as np
import pytest
import torch

from thalweg.cli import main
from thalweg.data.classification import ClassificationTask, Labelled, wilson
from thalweg.data.text.tokenizer import ByteTokenizer
from thalweg.errors import InputError
from thalweg.models import Encoder
from thalweg.records import RunFolder
from thalweg.training import TrainConfig, checkpoint, evaluate_run, load_decoder, load_model, train
from thalweg.training import majority as majority_of
from thalweg.training.baselines import bag_of_embeddings
from thalweg.training.measuring import measure_run

TIMES = ("train/tokens_per_second", "train/peak_memory")
BASE = {"depth": 2, "width": 16, "heads": 2, "sequence_length": 12, "batch_size": 16, "steps": 60, "lr": 1e-2}
BASE |= {"eval_every": 20, "threads": 1, "geometry": False, "data": "sentiment"}


def texts(count, seed):
    """Rows of letters; positive where an x stands before a y, whatever else: order matters, and both letters are always there."""
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
    return TrainConfig(**(BASE | changes))


def test_it_learns_an_order_that_no_bag_of_letters_knows(letters, tmp_path):
    result = train(config(steps=200), tmp_path / "run", task=letters)
    assert result.status == "done" and result.evaluation["task/accuracy"] > 0.9
    low, high = result.evaluation["task/accuracy_low"], result.evaluation["task/accuracy_high"]
    assert (low, high) == wilson(round(result.evaluation["task/accuracy"] * 60), 60)
    folder = RunFolder.open(tmp_path / "run")
    assert folder.units()["val/loss"] == folder.units()["train/loss"] == "nats/sequence"
    assert folder.units()["task/accuracy"] == "share" and "cut" in "".join(folder.notes)
    bag = bag_of_embeddings(letters, config(steps=200, eval_every=100), rates=(5e-3, 2e-2))
    assert bag.accuracy < 0.7 and bag.low < 0.55 and bag.sequences == 60
    base = majority_of(letters, "test")
    assert base.sequences == 61 and base.accuracy == letters.nulls_of("test")["majority_accuracy"]
    assert base.low < base.accuracy < base.high


def test_the_loss_is_the_mean_over_the_whole_split_and_test_is_not_looked_at(letters, tmp_path, monkeypatch):
    seen = []
    held_out = ClassificationTask._held_out
    monkeypatch.setattr(
        ClassificationTask, "_held_out", lambda self, split, n: seen.append(split) or held_out(self, split, n)
    )
    result = train(config(steps=20, eval_batches=1), tmp_path / "run", task=letters)
    assert set(seen) == {"valid"}
    model, manifest = load_model(tmp_path / "run", "last")
    assert type(model) is Encoder and manifest["architecture"] == "encoder" and manifest["step"] == 20
    batch = letters.eval_batches("valid", 12, 60)[0]
    with torch.no_grad():
        out = model(**batch)
    assert result.evaluation["val/loss"] == pytest.approx(out.loss.item(), rel=1e-5)
    assert result.evaluation["task/accuracy"] == letters.metrics(out.logits, batch["labels"])["accuracy"]


def test_micro_batches_change_no_gradient(letters, tmp_path):
    losses = []
    for name, accumulation in (("one", 1), ("four", 4)):
        train(config(steps=3, accumulation=accumulation), tmp_path / name, task=letters)
        losses.append([v for _, v in RunFolder.open(tmp_path / name).metrics("train/loss")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("connection", ["additive", "mhc"])
def test_it_resumes_bit_by_bit(letters, tmp_path, connection):
    wanted = config(steps=40, connection=connection)
    train(wanted, tmp_path / "whole", task=letters)
    asked = iter([False] * 22 + [True] * 99)
    assert train(wanted, tmp_path / "cut", task=letters, stop=lambda: next(asked)).status == "interrupted"
    train(wanted, tmp_path / "cut", task=letters, resume=True)
    whole, cut = (checkpoint.read(checkpoint.find(tmp_path / n / "checkpoints", 40)) for n in ("whole", "cut"))
    ours, theirs = whole.weights(), cut.weights()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    series = [
        {k: v for k, v in RunFolder.open(tmp_path / n).series().items() if k not in TIMES} for n in ("whole", "cut")
    ]
    assert series[0] == series[1]


def test_the_best_checkpoint_is_that_of_the_lowest_validation_loss(letters, tmp_path):
    result = train(config(steps=60, eval_every=10), tmp_path / "run", task=letters)
    losses = dict(RunFolder.open(tmp_path / "run").metrics("val/loss"))
    assert result.best_step == min(losses, key=losses.get) and result.best_loss == min(losses.values())
    assert load_model(tmp_path / "run", "best")[1]["step"] == result.best_step


def test_a_decoder_is_asked_for_in_vain(letters, tmp_path):
    train(config(steps=1), tmp_path / "run", task=letters)
    with pytest.raises(InputError, match="holds an encoder, which predicts no next token"):
        load_decoder(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"classes": 3}}, "model.classes follows from the data; set data at the top level"),
        ({"model": {"objective": "masked"}}, "model.objective follows from the data; set objective at the top level"),
        ({"model": {"poolin": "max"}}, "Did you mean 'model.pooling'?"),
        ({"init_from": "somewhere"}, "init_from names somewhere, which is no folder"),
    ],
)
def test_a_configuration_that_cannot_be_is_one_line(letters, tmp_path, changes, said):
    with pytest.raises(InputError) as error:
        train(config(**changes), tmp_path / "run", task=letters)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run of mhc on the shipped snippets, by the command line, with geometry."""
    folder = tmp_path_factory.mktemp("runs") / "sentiment"
    flags = {"data": "sentiment", "connection": "mhc", "depth": 1, "width": 16, "heads": 2, "sequence-length": 24}
    flags |= {"batch-size": 32, "steps": 30, "eval-every": 15, "lr": 1e-2, "threads": 1, "seed": 0}
    line = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    assert main(["train", *line, "--model", "pooling=max", "-o", str(folder), "--quiet"]) == 0
    return folder


def test_a_run_on_the_snippets_measures_reports_and_evaluates(run, capsys, tmp_path):
    folder = RunFolder.open(run)
    assert folder.status == "done" and folder.result["nulls"]["majority_accuracy"] == pytest.approx(490 / 989)
    rows = folder.measures()
    assert {row.step for row in rows.where(measure="effective_rank")} == {0, 30}
    assert rows.where(measure="gradient_norm") and rows.where(measure="jacobian.block.largest")
    assert main(["report", str(run), "-o", str(tmp_path / "run.html")]) == 0
    page = (tmp_path / "run.html").read_text()
    assert "nats/sequence" in page and "null: majority accuracy" in page and "the majority class of training is" in page
    assert "nats/token" not in page
    capsys.readouterr()
    assert main(["measure", str(run), "--tokens", "600", "--json", "-o", str(tmp_path / "m.html")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["measured"]["loss"].endswith("nats/sequence") and found["replaced"] and found["sequences"] == 25
    )  # 600 tokens
    assert main(["eval", str(run), "--split", "test", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sequences"] == 990 and found["unit"] == "nats/sequence"
    assert found["metrics"]["accuracy_low"] < found["metrics"]["accuracy"] < found["metrics"]["accuracy_high"]
    assert found["nulls"]["majority_accuracy"] == pytest.approx(505 / 990)


def test_losses_of_a_run_are_of_its_real_tokens(run):
    found = measure_run(run, tokens=24 * 64)
    assert found.unit == "nats/sequence" and {
        row.unit for row in found.rows.where(measure="mixer_replaced.identity")
    } == {"nats/sequence"}
    other = evaluate_run(run, "valid", which="last")
    assert other["metrics"]["loss"] == pytest.approx(RunFolder.open(run).result["evaluation"]["val/loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["generate", "RUN", "--prompt", "a"], "holds an encoder, which predicts no next token"),
        (["eval", "RUN", "--split", "tests"], "Did you mean 'test'?"),
        (["eval", "RUN", "--split", "test", "--ruler", "offline"], "leave --ruler out"),
        (["eval", "nothing", "--split", "test"], "--split is for the folder of a run"),
        (["train", "--data", "sentiment", "--objective", "masked"], "objective must be classification for sentiment"),
        (["train", "--data", "copy", "--objective", "masked"], "objective must be next_token for copy"),
        (["train", "--data", "austen", "--objective", "classification"], "objective must be next_token or masked"),
        (["train", "--data", "sentiment:clean=perhaps"], "sentiment.clean must be bool"),
    ],
)
def test_the_command_line_refuses_in_one_line(run, capsys, line, said):
    assert main([str(run) if part == "RUN" else part for part in line]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert said in error[-1] and error[-1].startswith("error: ")


def test_the_data_explains_itself(capsys):
    assert main(["show", "task", "sentiment"]) == 0
    assert "majority" in capsys.readouterr().out


def test_masked_tokens_of_a_text_train_an_encoder(tmp_path, capsys):
    text = tmp_path / "text.txt"
    rng = np.random.default_rng(0)
    starts = rng.integers(8, size=1500)
    text.write_text("\n".join("".join("abcdefgh"[(s + i) % 8] for i in range(30)) for s in starts))
    flags = {"data": f"text:{text}", "objective": "masked", "tokenizer": "byte", "depth": 2, "width": 32, "heads": 2}
    flags |= {"sequence-length": 34, "batch-size": 16, "steps": 150, "eval-every": 75, "lr": 1e-2, "threads": 1}
    line = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    assert main(["train", *line, "-o", str(tmp_path / "run"), "--quiet"]) == 0
    folder = RunFolder.open(tmp_path / "run")
    found = folder.result["evaluation"]
    assert folder.units()["val/loss"] == "nats/masked token" and "val/bits_per_byte" not in found
    assert found["val/loss"] < 0.7 * folder.result["nulls"]["unigram_entropy"] and found["task/masked_accuracy"] > 0.4
    model, _ = load_model(tmp_path / "run")
    assert model.config.objective == "masked" and model.head.weight is model.embedding.weight
    assert main(["measure", str(tmp_path / "run"), "--tokens", "600", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["loss"].endswith("nats/masked token")
    train(TrainConfig(**folder.config), tmp_path / "run", resume=True)  # ended: its result
    assert main(["eval", str(tmp_path / "run"), "--split", "valid", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["masked_accuracy"] > 0.4
