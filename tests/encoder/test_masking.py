"""Masked tokens: how many, which, shown as what; a function of seed and sample alone."""

import math

import numpy as np
import pytest
import torch

from thalweg import data
from thalweg.data.masking import MaskedTask

LENGTH = 60


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    words = ["river", "stone", "deep", "water", "line", "of", "the", "a"]
    (folder / "text.txt").write_text("\n".join(" ".join(rng.choice(words, 12)) for _ in range(800)))
    return lambda objective=None: data.load(
        f"text:{folder / 'text.txt'}", tokenizer="byte", cache_dir=folder / "cache", objective=objective
    )


def test_a_text_is_masked_on_demand(text):
    plain, masked = text(), text("masked")
    assert isinstance(masked, MaskedTask) and masked.objective == "masked" and plain.objective == "next_token"
    assert masked.vocab_size == plain.vocab_size + 1 == masked.mask + 1
    assert masked.fingerprint != plain.fingerprint and text("next_token").fingerprint == plain.fingerprint
    assert masked.nulls() == {k: plain.nulls()[k] for k in ("uniform", "unigram_entropy")}
    assert masked.bytes_per_token() is None and masked.describe()["objective"] == "masked"


def test_fifteen_percent_are_chosen_and_four_fifths_of_them_hidden(text):
    plain, masked = (task.sampler("train", LENGTH, 400, seed=5).next() for task in (text(), text("masked")))
    ids, shown, labels = plain["input_ids"], masked["input_ids"], masked["labels"]
    chosen = labels != -100
    assert (chosen.sum(1) == 9).all()  # 15 % of 60
    assert torch.equal(labels[chosen], ids[chosen]) and torch.equal(shown[~chosen], ids[~chosen])
    count = int(chosen.sum())
    hidden = (shown == 257)[chosen].double().mean().item()
    kept = (shown == ids)[chosen].double().mean().item()
    assert abs(hidden - 0.8) < 4 * math.sqrt(0.16 / count) and abs(kept - 0.1) < 4 * math.sqrt(0.09 / count)
    assert shown.min() >= 0 and shown.max() == 257
    assert chosen.double().mean(0).std() < 0.03  # no place is preferred


def test_it_is_a_function_of_seed_and_sample(text):
    masked = text("masked")
    whole = masked.sampler("train", LENGTH, 8, seed=3).next()
    halves = [masked.sampler("train", LENGTH, 8, seed=3, rank=r, world=2).next() for r in range(2)]
    for key in whole:
        assert torch.equal(torch.cat([half[key] for half in halves]), whole[key])
    other = masked.sampler("train", LENGTH, 8, seed=4).next()
    assert not torch.equal(other["labels"], whole["labels"])
    second = masked.sampler("train", LENGTH, 8, seed=3)
    second.next()
    assert not torch.equal(second.next()["labels"] == -100, whole["labels"] == -100)  # another sample, another choice


def test_held_out_gaps_are_fixed_and_all_of_them_scored(text):
    masked = text("masked")
    one, many = masked.eval_batches("valid", LENGTH, 1), masked.eval_batches("valid", LENGTH, 5)
    assert torch.equal(torch.cat([b["labels"] for b in one][:5]), many[0]["labels"])
    assert masked.scored(many[0]) == 5 * 9
    first = masked.eval_batches("valid", 3, 1)[0]
    assert masked.scored(first) == 1  # 15 % of three, at least one


def test_accuracy_counts_the_chosen_tokens_only(text):
    masked = text("masked")
    labels = torch.full((1, 4), -100)
    labels[0, 0], labels[0, 2] = 3, 5
    logits = torch.zeros(1, 4, masked.vocab_size)
    logits[0, 0, 3] = logits[0, 1, 7] = logits[0, 2, 6] = 1
    assert masked.metrics(logits, labels) == {"masked_accuracy": 0.5}


def test_the_tokenizer_of_the_task_has_the_mask_and_a_portable_twin(text):
    task = data.load("austen", objective="masked")
    assert task.tokenizer.mask == task.mask == task.vocab_size - 1
    assert data.load("austen").tokenizer.mask is None and text("masked").portable_tokenizer() is None  # bytes
    portable = task.portable_tokenizer()
    assert portable.mask_token_id == task.mask and len(portable) == task.vocab_size
    line = "It was [MASK] late"  # a text may name the mask: only the task puts it in
    assert task.mask not in task.tokenizer.encode(line)
    assert portable.encode("It was late", add_special_tokens=False) == task.tokenizer.encode("It was late")
