"""The sentiment task: its splits, its sequences, what it says of itself, and what it refuses."""

import lzma
from importlib import resources

import numpy as np
import pytest
import torch

from thalweg import data
from thalweg.data.classification import ClassificationTask, Labelled, wilson
from thalweg.data.tasks import sentiment
from thalweg.data.text.tokenizer import ByteTokenizer
from thalweg.errors import InputError, OfflineError, UnknownNameError


@pytest.fixture(scope="module")
def task():
    return data.load("sentiment")


def test_the_shipped_file_is_whole_and_its_licence_lies_beside_it():
    corpus = resources.files("thalweg.data") / "corpus"
    notice = (corpus / "film-snippets.LICENSE.txt").read_text()
    assert "MIT License" in notice and "C.J. Hutto" in notice and "shall be included in all" in notice
    rows = lzma.decompress((corpus / sentiment.FILE).read_bytes()).decode().splitlines()
    found = sentiment.snippets()
    assert len(rows) == len(found) == 10_605
    assert [s.number for s in found] == list(range(1, 10_606))  # running numbers: they name no review
    assert all(-4 <= s.rating <= 4 and s.text.strip() for s in found)
    assert sum(s.rating > 0 for s in found) == 5242 and sum(s.rating == 0 for s in found) == 37


def test_splits_are_blocks_and_share_no_snippet_nor_a_near_twin(task):
    assert task.splits == ("train", "valid", "test") and task.watched == ("valid",)
    assert [sentiment.split_of(n) for n in (1, 800, 801, 900, 901, 1000, 1001)] == [
        *("train", "train", "valid", "valid", "test", "test", "train")
    ]
    assert sentiment.find_near_duplicates(sentiment.snippets()) == sentiment.NEAR_DUPLICATES
    texts = {split: [tuple(ids) for ids in task.tokens[split]] for split in task.splits}
    assert not set(texts["train"]) & {*texts["valid"], *texts["test"]} and not set(texts["valid"]) & set(texts["test"])
    assert {split: len(found) for split, found in texts.items()} == {"train": 8576, "valid": 989, "test": 990}


def test_near_twins_are_what_the_definition_says():
    """Against every pair of a part of the snippets, looked at one by one."""
    some = [s for s in sentiment.snippets() if s.number % 12 == 2 or s.number in (680, 3485, 3965, 4842, 939, 4124)]
    words = {s.number: set(sentiment._WORD.findall(s.text.lower())) for s in some}
    order = {"train": 0, "valid": 1, "test": 2}
    wanted = set()
    for a in some:
        for b in some:
            if order[sentiment.split_of(a.number)] > order[sentiment.split_of(b.number)]:
                both, either = words[a.number] & words[b.number], words[a.number] | words[b.number]
                if len(both) >= 0.5 * len(either):
                    wanted.add(a.number)
    assert sentiment.find_near_duplicates(some) == wanted and wanted


def test_the_tokenizer_knows_the_train_split_only(task):
    assert task.tokenizer.vocab_size == sentiment.VOCAB_SIZE and task.vocab_size == sentiment.VOCAB_SIZE + 2
    from thalweg.data.text.bpe import train_bpe

    kept = [s for s in sentiment.snippets() if sentiment.split_of(s.number) == "train" and s.rating != 0]
    assert train_bpe([s.text for s in kept], sentiment.VOCAB_SIZE).digest == task.tokenizer.digest


def test_sequences_are_started_padded_and_cut(task):
    batch = task.eval_batches("valid", 24, 50)[0]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert (ids[:, 0] == task.start).all() and ids.shape == mask.shape == (50, 24) and batch["labels"].shape == (50,)
    for row, real, tokens in zip(ids, mask, task.tokens["valid"], strict=False):
        kept = min(len(tokens), 24)
        assert row[:kept].tolist() == tokens[:kept].tolist() and (row[kept:] == task.pad).all()
        assert real.tolist() == [1] * kept + [0] * (24 - kept)
    text = next(s.text for s in sentiment.snippets() if sentiment.split_of(s.number) == "valid" and s.rating != 0)
    assert task.tokenizer.decode(task.tokens["valid"][0][1:].tolist()) == text


def test_the_tokenizer_that_is_handed_on_starts_and_pads_as_the_task_does(task, tmp_path):
    from transformers import AutoTokenizer

    task.portable_tokenizer().save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    length = 40
    batch = task.eval_batches("valid", length, 6, 1)[0]
    texts = [task.tokenizer.decode([i for i in row.tolist() if i < task.pad]) for row in batch["input_ids"]]
    whole = batch["attention_mask"][:, -1] == 0  # a text that was cut may end inside a word
    found = theirs(texts, padding="max_length", max_length=length, return_tensors="pt")
    assert whole.any()
    for name in ("input_ids", "attention_mask"):
        assert torch.equal(found[name][whole], batch[name][whole])


def test_padding_cuts_counts_and_the_majority_are_said(task):
    said = "\n".join(task.notes_at(32))
    cut = sum(len(t) > 32 for t in task.tokens["train"])
    assert f"train {cut} of 8576 cut" in said and "padding" in said
    assert "37 of 10605 snippets are left out for a mean rating of 0" in said
    assert "train: 8576 texts (4327 negative, 4249 positive); the majority class of training is 50.5%" in said
    nulls = task.nulls()
    share = 490 / 989  # negative is the majority of training, and not of the validation split
    assert nulls["majority_accuracy"] == pytest.approx(share)
    p = 4249 / 8576
    assert nulls["chance"] == pytest.approx(-(share * np.log(1 - p) + (1 - share) * np.log(p)))
    assert task.describe()["classes"]["test"] == {"negative": 505, "positive": 485}


def test_order_is_a_function_of_the_seed_and_every_epoch_sees_every_text(task):
    one, other, third = (task.sampler("train", 16, 64, seed=s) for s in (1, 1, 2))
    first, same, different = one.next(), other.next(), third.next()
    assert all(torch.equal(first[k], same[k]) for k in first) and not torch.equal(first["labels"], different["labels"])
    resumed = task.sampler("train", 16, 64, seed=1)
    resumed.load_state_dict(one.state_dict())
    assert torch.equal(resumed.next()["input_ids"], one.next()["input_ids"])
    small = ClassificationTask(
        "small",
        {"train": Labelled(list("abcdef"), [0, 1] * 3), "valid": Labelled(["g"], [1])},
        ("n", "y"),
        ByteTokenizer(),
        "",
    )
    order = small.sampler("train", 2, 6, seed=0)
    epochs = [order.next()["input_ids"][:, 1].tolist() for _ in range(3)]
    assert all(sorted(epoch) == list(range(97, 103)) for epoch in epochs) and epochs[0] != epochs[1]
    part = small.sampler("train", 2, 4, seed=0).next()["input_ids"][:, 1].tolist()
    assert part == epochs[0][:4]


def test_clean_leaves_out_what_people_do_not_agree_on(task):
    clean = data.load("sentiment:clean=true")
    assert sum(map(len, clean.tokens.values())) < 9173 and clean.fingerprint != task.fingerprint
    kept = {s.text for s in sentiment.snippets() if abs(s.rating) >= 1}
    assert clean.tokenizer.decode(clean.tokens["test"][5][1:].tolist()) in kept


def test_for_the_geometry_nothing_is_padded(task):
    batch = task.unpadded("valid", 64, 16)
    assert set(batch) == {"input_ids", "labels"} and batch["input_ids"].shape == (16, 34)
    assert not (batch["input_ids"] == task.pad).any()
    assert task.unpadded("valid", 8, 16)["input_ids"].shape == (16, 8)


def test_accuracy_and_its_interval(task):
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 1.0], [0.0, 5.0]])
    assert task.metrics(logits, torch.tensor([0, 1, 1, 1])) == {"accuracy": 0.75}
    z, n, p = 1.959963984540054, 989, 700 / 989
    centre, half = (
        (p + z * z / (2 * n)) / (1 + z * z / n),
        z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5,
    )
    assert wilson(700, 989) == pytest.approx((centre - half, centre + half), abs=1e-12)
    found = task.summary({"accuracy": p}, n)
    assert (found["accuracy_low"], found["accuracy_high"]) == wilson(700, 989)


def of(train, valid=None, classes=("negative", "positive")):
    texts = {"train": Labelled(*train), "valid": Labelled(*(valid or (["a good one"], [1])))}
    return ClassificationTask("mine", texts, classes, ByteTokenizer(), "by hand")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: data.load("sentiment:clena=true"), "Did you mean 'sentiment.clean'?"),
        (lambda: data.load("sentiment:clean=3"), "sentiment.clean must be bool"),
        (lambda: data.load("sentiments"), "Did you mean 'sentiment'?"),
        (lambda: data.load("sentiment", max_tokens=5), "takes no max_tokens"),
        (lambda: data.load("sentiment", vocab_size=10), "vocab_size of at least 257"),
        (
            lambda: data.load("sentiment", objective="masked"),
            "objective must be classification for sentiment, got 'masked'",
        ),
        (lambda: data.load("copy", objective="masked"), "objective must be next_token for copy, got 'masked'"),
        (lambda: of((["a", "b"], [1, 1])), "holds one class only (positive); there is nothing to tell apart"),
        (lambda: of((["a", " \n"], [0, 1])), "text 1 of the train split is empty; leave it out"),
        (lambda: of((["a", None], [0, 1])), "text 1 of the train split is missing"),
        (lambda: of((["a", "a"], [0, 1])), "all 2 texts of the train split are the same"),
        (lambda: of((["a", "b"], [0, 2])), "has label 2, allowed are 0..1"),
        (lambda: of((["a", "b"], [0])), "has 2 texts and 1 labels"),
        (lambda: of(([], [])), "the train split holds no text"),
        (lambda: of((["a", "b"], [0, 1]), (["c"], [2]), ("a", "b", "c")), "lacks class 'c' of the valid split"),
    ],
)
def test_what_cannot_be_is_one_line(make, said):
    with pytest.raises((InputError, UnknownNameError)) as error:
        make()
    assert said in str(error.value) and "\n" not in str(error.value)


def test_sst2_comes_from_files_of_that_form(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "".join(f"film {i} is fine\t{i % 2}\n" for i in range(9)))
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nfilm nine is not\t0\nfilm ten is\t1\n")
    task = data.load(f"sst2:{tmp_path}", tokenizer="byte")
    assert task.splits == ("train", "valid") and task.counts("train") == {"negative": 5, "positive": 4}
    assert task.nulls()["majority_accuracy"] == 0.5 and task.watched == ("valid",)
    (tmp_path / "dev.tsv").write_text("text\tlabel\nfilm nine is not\t0\n")
    with pytest.raises(InputError, match="has no column 'sentence'"):
        data.load(f"sst2:{tmp_path}", tokenizer="byte")
    with pytest.raises(InputError, match="nothing is no dataset file"):
        data.load(f"sst2:{tmp_path / 'nothing'}")


def test_sst2_without_a_network_is_one_line(monkeypatch):
    pytest.importorskip("datasets")
    from datasets import config as settings

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(settings, "HF_HUB_OFFLINE", True)
    with pytest.raises(OfflineError) as error:
        data.load("sst2")
    assert "sst2 needs the Hugging Face hub" in str(error.value) and "'sentiment'" in str(error.value)
    assert "\n" not in str(error.value)
