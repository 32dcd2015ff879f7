"""lm-eval: its windows and its sums are ours, tasks of local files, presets, and one line without the extra."""

import importlib
import json
from importlib.util import find_spec

import numpy as np
import pytest
from subjects_at_hand import LENGTH, TEXTS, causal_tokenizer, encoder_tokenizer, model

from thalweg.errors import InputError, MissingExtraError, UnknownNameError
from thalweg.evaluation import choices, lm_eval, perplexity
from thalweg.evaluation.choices import Item
from thalweg.evaluation.windows import Windows

ITEMS = [
    Item("The sun rises in the", ("east", "very far and distant west"), 0),
    Item("Fire is", ("cold", "hot"), 1),
    Item("She went to the", ("house", "of"), 0),
]
ROLLING = """
task: local_text
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""
CHOICES = """
task: local_choices
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
  - metric: acc_bytes
"""


def test_presets_are_the_published_shots_and_none():
    assert lm_eval.preset("paper") == {
        "openbookqa": 0,
        "piqa": 0,
        "winogrande": 5,
        "arc_challenge": 25,
        "hellaswag": 10,
        "boolq": 0,
        "rte": 0,
    }
    assert set(lm_eval.preset("zero-shot").values()) == {0}
    assert [*lm_eval.preset("zero-shot")] == [*lm_eval.preset("paper")]
    with pytest.raises(UnknownNameError, match="Did you mean 'paper'"):
        lm_eval.preset("papr")


def test_without_the_extra_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "lm_eval" else find_spec(name, *rest)
    )
    monkeypatch.setitem(lm_eval.evaluate.__globals__, "find_spec", importlib.util.find_spec)
    with pytest.raises(MissingExtraError, match=r"pip install 'thalweg\[eval\]'") as error:
        lm_eval.evaluate(model("llama"), causal_tokenizer(), ["wikitext"])
    assert "\n" not in str(error.value)


@pytest.fixture
def folder(tmp_path):
    """Two tasks with their data beside them: nothing is fetched."""
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text.strip()}) + "\n" for text in TEXTS))
    rows = [{"question": i.question, "choices": list(i.choices), "answer": i.answer} for i in ITEMS]
    (tmp_path / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "text.yaml").write_text(ROLLING.format(file=tmp_path / "text.jsonl"))
    (tmp_path / "choices.yaml").write_text(CHOICES.format(file=tmp_path / "choices.jsonl"))
    return tmp_path


@pytest.mark.parity
@pytest.mark.parametrize("count", [1, 5, 8, 9, 40])
@pytest.mark.parametrize("stride", [None, 1, 3, 8])
def test_windows_are_those_of_lm_eval(count, stride):
    utils = importlib.import_module("lm_eval.utils")
    ids, length = list(range(count)), 8
    context = 1 if stride is None else length - stride + 1
    theirs = [*utils.get_rolling_token_windows(ids, 99, length, context)]
    if stride is None:
        theirs = [(context + targets[:-1], targets) for context, targets in map(utils.make_disjoint_window, theirs)]
    assert [tuple(window) for window in Windows(length, stride, 99).cut(ids)] == theirs


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["llama", "gpt2", "shell"])
def test_rolling_perplexity_is_that_of_lm_eval(kind, folder):
    subject, tokenizer = model(kind), causal_tokenizer()
    found = lm_eval.evaluate(subject, tokenizer, ["local_text"], include_path=folder, max_length=32)["local_text"]
    ours = perplexity(subject, tokenizer, [text.strip() for text in TEXTS], window=32)
    for column in ("log_likelihood", "words", "bytes"):
        np.testing.assert_allclose(found.columns[column], ours.columns[column], rtol=1e-6, err_msg=column)
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert found.value(name) == pytest.approx(ours.value(name), rel=1e-6)
    assert found.rule == "lm-eval, 0-shot, windows of 32 tokens"


@pytest.mark.parity
def test_choices_are_those_of_lm_eval(folder):
    subject, tokenizer = model("llama"), causal_tokenizer()
    found = lm_eval.evaluate(subject, tokenizer, {"local_choices": 0}, include_path=folder)["local_choices"]
    ours = choices(subject, tokenizer, ITEMS)
    for name in ("acc", "acc_norm", "acc_bytes"):
        assert found.columns[name].tolist() == ours.columns[name].tolist(), name
    assert lm_eval.evaluate(subject, tokenizer, ["local_choices"], include_path=folder, limit=2)[
        "local_choices"
    ].items == ("local_choices 0", "local_choices 1")


@pytest.mark.parity
def test_what_lm_eval_cannot_do_is_one_line(folder):
    subject, tokenizer = model("llama"), causal_tokenizer()
    cases = [
        ((subject, tokenizer, ["local_txt"]), {"include_path": folder}, "unknown lm-eval task 'local_txt'"),
        ((subject, tokenizer, ["local_text"]), {"include_path": folder / "x"}, "is no folder of task files"),
        ((subject, None, ["local_text"]), {"include_path": folder}, "no tokenizer"),
        ((model("bert"), encoder_tokenizer(), ["local_text"]), {"include_path": folder}, "is an encoder"),
        ((model("ours"), tokenizer, ["local_text"]), {"include_path": folder}, "wrap a decoder of ours"),
        ((subject, tokenizer, ["local_text"]), {"include_path": folder, "limit": 0}, "limit"),
    ]
    for call, options, says in cases:
        with pytest.raises(InputError, match=says) as error:
            lm_eval.evaluate(*call, **options)
        assert "\n" not in str(error.value)
    (folder / "text.jsonl").unlink()
    with pytest.raises((InputError, Exception), match="local_text") as error:
        lm_eval.evaluate(subject, tokenizer, ["local_text"], include_path=folder)
    assert "\n" not in str(error.value)
    assert LENGTH == 64
