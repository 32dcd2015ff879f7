"""The order of training samples: exact, resumable, shared between ranks, independent of global random state."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from thalweg import data
from thalweg.errors import CheckpointError, InputError, UnknownNameError


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampler")
    rng = np.random.default_rng(0)
    (folder / "a.txt").write_text("".join(chr(c) for c in rng.integers(33, 120, size=3000)))
    return data.load(f"text:{folder / 'a.txt'},valid=0.2", tokenizer="byte", cache_dir=folder)


@pytest.fixture(scope="module", params=["text", "copy:min_half=3", "overwrite", "forget"])
def task(request, text):
    return text if request.param == "text" else data.load(request.param)


def length_of(task, split="train"):
    return task.natural_length(split) or 24


def equal(a, b):
    return all(torch.equal(a[key], b[key]) for key in ("input_ids", "labels"))


def test_batches_are_int64_with_aligned_labels(task):
    batch = task.sampler("train", length_of(task), 5, seed=3).next()
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["input_ids"].shape == batch["labels"].shape == (5, length_of(task))
    scored = batch["labels"] != data.IGNORED
    assert torch.equal(batch["labels"][scored], batch["input_ids"][scored])
    assert int(batch["input_ids"].min()) >= 0 and int(batch["input_ids"].max()) < task.vocab_size
    assert data.scored_tokens(batch["labels"]) == int(scored[:, 1:].sum()) > 0


def test_order_depends_on_the_seed_alone(task):
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002 the global generator is what must not matter
    first = [task.sampler("train", length_of(task), 6, seed=7).next() for _ in range(2)]
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002 as above
    before = torch.get_rng_state()
    again = task.sampler("train", length_of(task), 6, seed=7)
    assert equal(first[0], again.next()) and equal(first[0], first[1])
    assert torch.equal(before, torch.get_rng_state())
    assert not equal(first[0], task.sampler("train", length_of(task), 6, seed=8).next())
    assert not torch.equal(first[0]["input_ids"], again.next()["input_ids"])


def test_order_does_not_depend_on_the_batch_size(task):
    large = task.sampler("train", length_of(task), 24, seed=1)
    small = task.sampler("train", length_of(task), 4, seed=1)
    for _ in range(8):  # 192 samples: several epochs of the text, several chunks of the synthetic tasks
        joined = torch.cat([small.next()["input_ids"] for _ in range(6)])
        assert torch.equal(large.next()["input_ids"], joined)


def test_ranks_together_are_one_process(task):
    one = task.sampler("train", length_of(task), 12, seed=5)
    ranks = [task.sampler("train", length_of(task), 12, seed=5, rank=r, world=3) for r in range(3)]
    for _ in range(12):
        parts = [rank.next() for rank in ranks]
        assert all(part["input_ids"].shape[0] == 4 for part in parts)
        whole = one.next()
        assert all(torch.equal(whole[key], torch.cat([part[key] for part in parts])) for key in whole)


def test_resume_is_exact_through_json_and_on_another_number_of_ranks(task):
    straight = task.sampler("train", length_of(task), 8, seed=2)
    for _ in range(9):
        straight.next()
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = task.sampler("train", length_of(task), 8, seed=2)
    halves = [task.sampler("train", length_of(task), 8, seed=2, rank=r, world=2) for r in range(2)]
    for sampler in (resumed, *halves):
        sampler.load_state_dict(state)
    for _ in range(9):
        want = straight.next()
        assert equal(want, resumed.next())
        assert torch.equal(want["input_ids"], torch.cat([h.next()["input_ids"] for h in halves]))
    assert resumed.state_dict() == straight.state_dict() == halves[0].state_dict()


@pytest.mark.parametrize("change", [{"seed": 3}, {"length": 60}, {"split": "valid"}])
def test_a_state_of_another_order_is_refused(task, change):
    base = {"split": "train", "length": length_of(task), "batch": 4, "seed": 2}
    state = task.sampler(**base).state_dict()
    with pytest.raises(CheckpointError, match=next(iter(change))):
        task.sampler(**(base | change)).load_state_dict(state)


def test_foreign_and_broken_states_are_refused(text):
    sampler = text.sampler("train", 24, 4)
    good = sampler.state_dict()
    for bad, word in (
        ({}, "task"),
        (good | {"samples": -1}, "samples"),
        (good | {"samples": "3"}, "samples"),
        (good | {"task": "x"}, "task"),
    ):
        with pytest.raises(CheckpointError, match=word):
            sampler.load_state_dict(bad)


def test_an_epoch_shows_every_window_once(text):
    length = 24
    tokens = text.cache.tokens["train"]
    per_epoch = len(tokens) // length - 1
    sampler = text.sampler("train", length, 1, seed=0)
    place = {tokens[i : i + length].tobytes(): i for i in range(len(tokens) - length + 1)}
    assert len(place) == len(tokens) - length + 1  # a window shows where it is from
    seen_by_epoch = []
    for _ in range(150):
        starts = [
            place[sampler.next()["input_ids"][0].numpy().astype(tokens.dtype).tobytes()] for _ in range(per_epoch)
        ]
        assert len({s % length for s in starts}) == 1 and len(set(starts)) == per_epoch
        seen_by_epoch.append(starts)
    assert seen_by_epoch[0] != seen_by_epoch[1]
    covered = Counter(p for starts in seen_by_epoch for s in starts for p in range(s, s + length))
    assert len(covered) == len(tokens)  # no token is out of reach, the first and the last included


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_evaluation_predicts_every_token_once(text, batch):
    tokens = text.cache.tokens["valid"]
    length = 24
    rows = torch.cat([b["input_ids"] for b in text.eval_batches("valid", length, batch)]).numpy()
    predicted = rows[:, 1:].reshape(-1)
    assert np.array_equal(predicted, tokens[1 : len(predicted) + 1])
    assert len(tokens) - 1 - len(predicted) < length - 1


def test_evaluation_batches_are_fixed_and_spread(task):
    batches = task.eval_batches("valid", length_of(task, "valid"), 4, 3)
    again = task.eval_batches("valid", length_of(task, "valid"), 4, 3)
    assert len(batches) == 3 and all(b["input_ids"].shape[0] == 4 for b in batches)
    assert all(equal(a, b) for a, b in zip(batches, again, strict=True))
    assert equal(batches[-1], batches[2]) and len(batches[::2]) == 2
    with pytest.raises(IndexError):
        batches[3]
    rows = torch.cat([b["input_ids"] for b in batches])
    assert len({tuple(r.tolist()) for r in rows}) == 12
    everything = torch.cat([b["input_ids"] for b in task.eval_batches("valid", length_of(task, "valid"), 7)])
    place = [next(i for i, e in enumerate(everything) if torch.equal(e, row)) for row in rows]
    assert place == sorted(place) and place[-1] >= len(everything) * 11 // 12 - 1


def test_evaluation_takes_full_batches_only_where_a_number_is_asked_for(text):
    count = (len(text.cache.tokens["valid"]) - 1) // 23
    assert len(text.eval_batches("valid", 24, count - 1, 5)) == 1
    assert (
        text.eval_batches("valid", 24, count + 5, 5)[0]["input_ids"].shape[0] == count
    )  # one small batch rather than none
    sizes = [b["input_ids"].shape[0] for b in text.eval_batches("valid", 24, 10)]
    assert sum(sizes) == count and set(sizes[:-1]) == {10}


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"batch": 0}, "batch must"),
        ({"batch": 2.0}, "batch must"),
        ({"batch": 3, "world": 2}, "multiple of 2"),
        ({"rank": 2, "world": 2, "batch": 2}, "rank must be below"),
        ({"rank": -1}, "rank must"),
        ({"world": 0}, "world must"),
        ({"seed": -1}, "seed must"),
        ({"seed": True}, "seed must"),
        ({"length": 1}, "length must"),
        ({"length": None}, "give length"),
        ({"length": 5000}, "less than one sequence of 5000"),
        ({"split": "test"}, "unknown split 'test'"),
    ],
)
def test_wrong_requests_are_one_clear_line(text, kwargs, words):
    with pytest.raises(InputError, match=words) as caught:
        text.sampler(**({"length": 24} | kwargs))
    assert "\n" not in str(caught.value)


def test_wrong_evaluation_requests(text):
    with pytest.raises(InputError, match="max_batches"):
        text.eval_batches("valid", 24, 4, 0)
    with pytest.raises(UnknownNameError):
        text.eval_batches("longer", 24, 4)
    with pytest.raises(InputError, match="valid split holds"):
        text.eval_batches("valid", 2000, 4)


def test_a_text_of_one_window_still_trains(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij klmnopqrst")
    task = data.load(f"text:{tmp_path / 'a.txt'},valid=0.5", tokenizer="byte", cache_dir=tmp_path)
    sampler = task.sampler("train", 8, 3)
    rows = {tuple(r.tolist()) for _ in range(20) for r in sampler.next()["input_ids"]}
    assert len(rows) == len(task.cache.tokens["train"]) - 8 + 1  # every offset is met
