"""Multiple choice: likelihoods by loop, the three ways to normalise, shots, broken files."""

import json

import pytest
import torch
from subjects_at_hand import causal_tokenizer, encoder_tokenizer, model

from thalweg.errors import InputError
from thalweg.evaluation import choices, read_choices
from thalweg.evaluation.choices import Item, _shots, split

ITEMS = [
    Item("The sun rises in the", ("east", "very far and distant west", "ä"), 0),
    Item("Fire is", ("cold", "hot"), 1),
    Item("She went to the ", ("house", "of"), 0),
    Item("Two and two make", ("four", "five", "seven"), 0),
]


@torch.no_grad()
def test_accuracies_equal_a_loop():
    subject, tokenizer = model("llama"), causal_tokenizer()
    found = choices(subject, tokenizer, ITEMS, batch_size=2)
    for i, item in enumerate(ITEMS):
        by = {"acc": [], "acc_norm": [], "acc_bytes": []}
        for choice in item.choices:
            context = item.question.rstrip()
            text = context + " " + choice
            ids, start = tokenizer.encode(text), len(tokenizer.encode(context))
            logs = torch.log_softmax(subject(torch.tensor([ids])).logits[0], -1)
            ll = sum(logs[place - 1, ids[place]].item() for place in range(start, len(ids)))
            by["acc"].append(ll)
            by["acc_norm"].append(ll / len(choice))
            by["acc_bytes"].append(ll / len(choice.encode()))
        for name, values in by.items():
            assert found.columns[name][i] == (values.index(max(values)) == item.answer), (i, name)
    assert found.metric("acc").null == pytest.approx((1 / 3 + 1 / 2 + 1 / 2 + 1 / 3) / 4)


def test_the_three_accuracies_can_differ():
    """One model and one question on which normalising decides."""

    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(257, 1)

        def forward(self, input_ids):
            logits = torch.zeros(*input_ids.shape, 257)
            return type("Out", (), {"logits": logits})()

    from thalweg.data.text.tokenizer import ByteTokenizer

    # Every byte costs the same: the sum prefers the shortest in bytes, the mean by bytes the space's smallest share (the longest).
    items = [Item("q", ("ab", "ééé"), 0), Item("q", ("abcdefgh", "ab"), 0)]
    found = choices(Fixed(), ByteTokenizer(), items)
    assert found.columns["acc"].tolist() == [1, 0]
    assert found.columns["acc_norm"].tolist() == [1, 1]  # 3 / 2 a character against 7 / 3; 9 / 8 against 3 / 2
    assert found.columns["acc_bytes"].tolist() == [0, 1]  # 3 / 2 a byte against 7 / 6


def test_white_space_at_the_end_of_a_question_goes_to_the_choice():
    tokenizer = causal_tokenizer()
    first, rest = split(tokenizer, "a  ", " b")
    assert tokenizer.decode(first) == "a"
    assert tokenizer.decode(rest) == "   b"


def test_shots_are_other_items_and_seeded():
    text = _shots(ITEMS, 1, 3, 0)
    assert text == _shots(ITEMS, 1, 3, 0)
    assert len({_shots(ITEMS, 1, 3, seed) for seed in range(8)}) > 1
    assert "Fire is" not in text
    assert "Two and two make four\n\n" in text
    assert text.count("\n\n") == 3
    subject, tokenizer = model("llama"), causal_tokenizer()
    assert choices(subject, tokenizer, ITEMS, shots=1).rule.startswith("1-shot")


def test_rows_and_progress():
    rows, steps = [], []
    found = choices(
        model("gpt2"), causal_tokenizer(), ITEMS, name="n", on_row=rows.append, on_item=lambda *s: steps.append(s)
    )
    assert [row["item"] for row in rows] == list(found.items) == [f"n {i}" for i in range(4)]
    assert steps[-1] == (4, 4)


def test_files(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question": "q", "choices": ["a", "b"], "answer": 1, "more": 0}) + "\n\n")
    assert read_choices(path) == [Item("q", ("a", "b"), 1)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[]", "must be a table"),
        ("x", "not JSON"),
        ('{"question": "q", "choices": ["a"], "answer": 0}', "at least two"),
        ('{"question": "q", "choices": ["a", "b"], "answer": 2}', "0 to 1"),
        ('{"question": "q", "choices": ["a", "b"], "answer": true}', "number of a choice"),
        ('{"question": " ", "choices": ["a", "b"], "answer": 0}', "must be a text"),
        ("", "no question"),
    ],
)
def test_broken_files_are_one_line(tmp_path, line, says):
    (tmp_path / "q.jsonl").write_text(line)
    with pytest.raises(InputError, match=says) as error:
        read_choices(tmp_path / "q.jsonl")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "call", "says"),
    [
        ("bert", {}, "is an encoder"),
        ("llama", {"shots": 4}, "other items"),
        (
            "llama",
            {"items": [Item("word " * 90, ("a", "b"), 0)] * 2},
            "the model takes 64; shorten the question, or leave it out of the file",
        ),
        (
            "llama",
            {"items": [Item("word " * 40, ("a", "b"), 0)] * 2, "shots": 1},
            "the model takes 64; give fewer shots",
        ),
    ],
)
def test_refuses(kind, call, says):
    tokenizer = encoder_tokenizer() if kind == "bert" else causal_tokenizer()
    with pytest.raises(InputError, match=says):
        choices(model(kind), tokenizer, call.pop("items", ITEMS), **call)
