"""Synthetic tasks: an oracle that reads the rule alone answers all, a reader without memory answers at chance."""

import hashlib
import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from thalweg import data
from thalweg.data import synthetic
from thalweg.data.tasks import copying, forget
from thalweg.errors import InputError, UnknownNameError


def copy_oracle(task, row, place):
    separator = row.index(copying.SEPARATOR)
    return row[place - separator - 1]


def overwrite_oracle(task, row, place):
    asked = row[place - 1]
    written = dict(zip(row[0 : 2 * task.options.pairs : 2], row[1 : 2 * task.options.pairs : 2], strict=True))
    return written[asked]


def forget_oracle(task, row, place):
    after = row[row.index(forget.RESET) + 1 : 2 * task.options.pairs + 1]
    return dict(zip(after[::2], after[1::2], strict=True)).get(row[place - 1], forget.UNKNOWN)


ORACLES = {"copy": copy_oracle, "overwrite": overwrite_oracle, "forget": forget_oracle}
SPECS = [
    "copy",
    "copy:vocab=2,half=1",
    "copy:half=6,min_half=2,longer=20",
    "overwrite",
    "overwrite:keys=1,values=2,pairs=2,queries=1",
    "overwrite:keys=6,pairs=12,queries=6",
    "forget",
    "forget:keys=2,values=2,pairs=2,queries=1",
    "forget:keys=5,pairs=8,queries=4,unknown=0.25",
    "forget:unknown=0",
    "forget:unknown=1",
]


def rows_of(task, split):
    for batch in task.eval_batches(split, None, 64):
        yield from zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)


def logits_of(task, ids, answer):
    """Logits of a solver: ``answer(row, place)`` for every place."""
    logits = torch.zeros(*ids.shape, task.vocab_size)
    for b, row in enumerate(ids.tolist()):
        for place in range(1, len(row)):
            logits[b, place - 1, answer(row, place)] = 1.0
    return logits


@pytest.mark.parametrize("spec", SPECS)
def test_an_oracle_reaches_all(spec):
    task = data.load(spec)
    solve = ORACLES[spec.partition(":")[0]]
    for split in task.splits:
        train = task.sampler(split, None, 64, seed=4).next()
        for batch in (train, task.eval_batches(split, None, 64, 1)[0]):
            scored = batch["labels"] != data.IGNORED
            answers = {(b, p): solve(task, batch["input_ids"][b].tolist(), p) for b, p in scored.nonzero().tolist()}
            logits = torch.zeros(*scored.shape, task.vocab_size)
            for (b, p), token in answers.items():
                logits[b, p - 1, token] = 1.0
            found = task.metrics(logits, batch["labels"])
            assert found.pop("exact_match") == 1.0 and set(found.values()) == {1.0}


@pytest.mark.parametrize("spec", SPECS)
def test_sequences_obey_the_vocabulary_and_the_length(spec):
    task = data.load(spec)
    for split in task.splits:
        length = task.natural_length(split)
        ids = torch.cat([b["input_ids"] for b in task.eval_batches(split, length + 3, 256)])
        labels = torch.cat([b["labels"] for b in task.eval_batches(split, length + 3, 256)])
        assert ids.shape[1] == length + 3 and int(ids[:, length:].max()) == 0  # filled with PAD at the end
        assert int(labels[:, length:].max()) == -100
        assert int(ids.min()) >= 0 and int(ids.max()) == task.vocab_size - 1
        assert bool((ids[:, :length] != 0).any(0).all())


@pytest.mark.parametrize("spec", SPECS)
def test_answers_occur_as_often_as_chance_says(spec):
    task = data.load(spec)
    nulls = task.nulls()
    answers = Counter(label for i in range(4) for label in torch.cat(
        [task.sampler("train", None, 512, seed=i).next()["labels"].flatten()]).tolist() if label != -100)  # fmt: skip
    total = sum(answers.values())
    share = np.array(list(answers.values())) / total
    noise = 4 / math.sqrt(total)
    assert share.max() == pytest.approx(nulls["chance_accuracy"], abs=noise)
    assert -(share @ np.log(share)) == pytest.approx(nulls["chance"], abs=3 * noise)
    assert nulls["uniform"] == pytest.approx(math.log(task.vocab_size))
    assert 0 < nulls["chance_exact_match"] <= nulls["chance_accuracy"] <= 1


def test_exact_match_chance_is_met_by_the_best_guess_that_reads_nothing():
    task = data.load("forget:keys=5,queries=2,unknown=0.7")
    batch = task.sampler("valid", None, 2000, seed=0).next()
    found = task.metrics(logits_of(task, batch["input_ids"], lambda row, place: forget.UNKNOWN), batch["labels"])
    assert found["token_accuracy"] == pytest.approx(0.7, abs=0.03) and found["exact_match"] == pytest.approx(
        0.49, abs=0.03
    )
    assert found["unknown_accuracy"] == 1 and found["known_accuracy"] == 0
    assert (task.nulls()["chance_accuracy"], task.nulls()["chance_exact_match"]) == pytest.approx((0.7, 0.49))


@pytest.mark.parametrize("spec", ["copy", "overwrite", "forget"])
def test_the_context_null_is_that_of_a_reader_without_bindings(spec):
    task = data.load(spec)
    rng = np.random.default_rng(0)

    def guess(row, place):
        end = {"copy": 12, "overwrite": 32, "forget": 33}[spec]
        return int(rng.choice([token for token in row[:end] if token in task.values]))

    hits = [
        guess(row, p) == label
        for row, labels in rows_of(task, "valid")
        for p, label in enumerate(labels)
        if label != -100
    ]
    assert np.mean(hits) == pytest.approx(task.nulls()["context_accuracy"], abs=4 * 0.4 / math.sqrt(len(hits)))


def test_copy_by_hand():
    task = data.load("copy:vocab=5,half=3")
    row, labels = next(rows_of(task, "valid"))
    u = row[:3]
    assert row == [*u, 1, *u] and labels == [-100] * 4 + u and all(2 <= t < 7 for t in u)
    assert task.natural_length("longer") == 13 and data.load("copy:half=3,longer=9").natural_length("longer") == 19


def test_copy_of_several_lengths():
    task = data.load("copy:half=6,min_half=2,longer=9")
    halves = Counter(row.index(1) for row, _ in rows_of(task, "valid"))
    assert set(halves) == {2, 3, 4, 5, 6} and min(halves.values()) > 120
    assert {row.index(1) for row, _ in rows_of(task, "longer")} == {9}
    for row, labels in rows_of(task, "valid"):
        half = row.index(1)
        assert row[: 2 * half + 1] == [*row[:half], 1, *row[:half]] and not any(row[2 * half + 1 :])
        assert [p for p, label in enumerate(labels) if label != -100] == list(range(half + 1, 2 * half + 1))


def test_overwrite_always_rewrites_and_changes_what_it_asks_for():
    task = data.load("overwrite")
    for row, labels in rows_of(task, "valid"):
        pairs = list(zip(row[0:32:2], row[1:32:2], strict=True))
        for place in (34, 37):
            assert row[place - 2] == synthetic.ASK and labels[place] == row[place]
            history = [value for key, value in pairs if key == row[place - 1]]
            assert len(history) >= 2 and all(a != b for a, b in pairwise(history))
        assert row[33] != row[36] and sum(label != -100 for label in labels) == 2


def test_forget_makes_the_stale_answer_wrong():
    task = data.load("forget")
    places, unknown = Counter(), 0
    for row, labels in rows_of(task, "valid"):
        reset = row.index(forget.RESET)
        places[reset // 2] += 1
        assert row.count(forget.RESET) == 1
        before = list(zip(row[0:reset:2], row[1:reset:2], strict=True))
        after = list(zip(row[reset + 1 : 33 : 2], row[reset + 2 : 33 : 2], strict=True))
        for place in (35, 38):
            stale = [value for key, value in before if key == row[place - 1]]
            assert stale and labels[place] == row[place] != stale[-1]
            assert (row[place] == forget.UNKNOWN) == (row[place - 1] not in dict(after))
            unknown += row[place] == forget.UNKNOWN
    assert set(places) == set(range(2, 15))
    assert unknown / 2048 == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("spec", ["copy", "overwrite", "forget"])
def test_splits_and_purposes_have_their_own_numbers(spec):
    task = data.load(spec)
    sets = {split: {tuple(r) for i in range(4) for r in task.sampler(split, None, 256, seed=i).next()["input_ids"].tolist()}
            for split in task.splits}  # fmt: skip
    sets["eval"] = {tuple(row) for row, _ in rows_of(task, "valid")}
    assert all(len(rows) == 1024 for rows in sets.values())
    names = list(sets)
    assert not any(sets[a] & sets[b] for i, a in enumerate(names) for b in names[:i])


def test_fingerprints_follow_the_options_and_not_their_spelling():
    prints = {spec: data.load(spec).fingerprint for spec in SPECS}
    assert len(set(prints.values())) == len(SPECS)
    assert data.load("copy:half=12, vocab=16").fingerprint == prints["copy"]
    assert data.load("copy").bytes_per_token() is None and data.load("copy").tokenizer is None
    assert data.load("overwrite:keys=9").describe()["options"]["keys"] == 9


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("copy:vocab=1", "vocab must be at least 2, got 1"),
        ("copy:half=0", "half must be at least 1"),
        ("copy:half=3,min_half=4", "min_half must be from 1 to half=3"),
        ("copy:longer=0", "longer must be at least 1"),
        ("copy:half=2.5", "copy.half must be int"),
        ("copy:half=many", "copy.half must be int"),
        ("copy:half", "NAME=VALUE"),
        ("overwrite:queries=9", "more distinct keys"),
        ("overwrite:queries=4,pairs=7", "pairs of at least 8"),
        ("overwrite:values=1", "values must be at least 2"),
        ("forget:queries=8", "queries must be below keys=8"),
        ("forget:queries=4,pairs=7", "pairs of at least 8"),
        ("forget:unknown=1.5", "unknown must be from 0 to 1"),
        ("forget:unknown=nan", "unknown must be from 0 to 1"),
    ],
)
def test_wrong_parameters_are_one_clear_line(spec, words):
    with pytest.raises(InputError, match=words) as caught:
        data.load(spec)
    assert "\n" not in str(caught.value)


def test_unknown_parameters_suggest_the_nearest():
    with pytest.raises(UnknownNameError, match=r"Did you mean 'copy\.vocab'"):
        data.load("copy:vocb=4")


def test_a_sequence_needs_its_room():
    with pytest.raises(InputError, match="needs sequences of 25 tokens in split 'train', got length=24"):
        data.load("copy").sampler("train", 24, 2)
    with pytest.raises(UnknownNameError, match="longer"):
        data.load("overwrite").natural_length("longer")


def test_padding_is_said():
    task = data.load("overwrite:keys=4,values=8,pairs=8")
    said = (
        "sequences of 22 tokens are filled up to 128: 83% of what is computed is padding, and a length of 22 is enough"
    )
    assert task.notes_at(128) == (said,) and task.notes_at(22) == ()


@pytest.mark.parametrize("length", [None, 128])
@pytest.mark.parametrize("spec", SPECS)
def test_the_geometry_is_measured_without_padding(spec, length):
    task = data.load(spec)
    for split in task.splits:
        batch = task.unpadded(split, length or task.natural_length(split), 16)
        ids, labels = batch["input_ids"], batch["labels"]
        assert ids.shape == labels.shape and len(ids) == 16 and not (ids == synthetic.PAD).any()
        assert ids.shape[1] == (5 if "min_half" in spec and split != "longer" else task.natural_length(split))
        whole = task.eval_batches(split, task.natural_length(split), 16, 1)[0]
        assert torch.equal(ids, whole["input_ids"][:, : ids.shape[1]]) and (labels[:, 1:] != -100).any()


SAMPLES = {
    "overwrite": "a6460724a497965d",
    "overwrite:keys=3,values=5,pairs=9,queries=3": "625ab8894063d281",
    "overwrite:keys=1,values=2,pairs=2,queries=1": "7f1e58ff97ebdc29",
    "forget": "79686f15f0bf2340",
    "forget:keys=5,values=4,pairs=12,queries=3,unknown=0.3": "ca2c667757c26403",
    "forget:keys=2,values=2,pairs=2,queries=1,unknown=1": "fcd67690f0885f39",
}


@pytest.mark.parametrize("spec", SAMPLES)
def test_the_same_seed_gives_the_same_samples_as_ever(spec):
    """Hashes taken before the drawing was shared; other samples need another ``SCHEMA``, since records of old runs hold its fingerprint."""
    task, digest = data.load(spec), hashlib.sha256()
    for split in ("train", "valid"):
        length = task.natural_length(split)
        samplers = [task.sampler(split, length + 1, 8, seed=seed) for seed in (0, 7)]
        batches = [sampler.next() for sampler in samplers for _ in range(9)]
        for batch in (*batches, *task.eval_batches(split, length, 16, 3)):
            digest.update(batch["input_ids"].numpy().tobytes() + batch["labels"].numpy().tobytes())
    assert digest.hexdigest()[:16] == SAMPLES[spec]
