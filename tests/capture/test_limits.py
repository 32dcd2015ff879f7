"""What a model can take bounds what is measured: its longest row, its tokens, and how documents begin."""

import json

import pytest
import torch
from tiny_families import VOCAB, tiny
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

import thalweg
from thalweg.capture.limits import longest_of, vocabulary_of
from thalweg.capture.opening import Opened
from thalweg.capture.windows import cut
from thalweg.cli import main
from thalweg.errors import InputError
from thalweg.models import Decoder, DecoderConfig

SHORT = 24
IDS = [torch.randint(3, VOCAB, (60,), generator=torch.Generator().manual_seed(s)).tolist() for s in (0, 1)]


class Letters:
    """A tokenizer of one token a letter, with a BOS that it puts nowhere by itself."""

    bos_token_id = 1

    def __call__(self, text, add_special_tokens=True, **_):
        return {"input_ids": [3 + ord(letter) % 50 for letter in text]}

    def encode(self, text, **_):
        return self(text)["input_ids"]


@pytest.fixture(scope="module")
def ours():
    config = DecoderConfig(vocab_size=VOCAB, width=16, depth=2, heads=2, max_length=SHORT)
    return Decoder(config, generator=torch.Generator().manual_seed(0)).eval()


def plans(model, **options):
    found = []
    thalweg.measure(model, IDS, progress=lambda _, plan: found.append(plan), measures=["rms", "loss"], **options)
    return found[-1]


def test_a_window_is_what_the_model_takes(ours):
    """Fails where only ``max_position_embeddings`` is read, which a model of ours does not have."""
    assert longest_of(ours) == SHORT and vocabulary_of(ours) == VOCAB
    assert plans(ours).length == SHORT
    with pytest.raises(InputError, match=f"takes {SHORT} tokens at most, got a length of {SHORT + 1}"):
        thalweg.measure(ours, IDS, length=SHORT + 1)
    assert plans(tiny("llama")).length == min(512, longest_of(tiny("llama")))


def test_positions_that_padding_takes_are_not_counted():
    """RoBERTa counts from its padding token's position on: the row of 22 tokens is read, that of 23 is beyond the table."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = RobertaModel(RobertaConfig(**sizes, max_position_embeddings=24, pad_token_id=1)).eval()
    assert longest_of(model) == 22
    assert model(torch.full((1, 22), 5)).last_hidden_state.isfinite().all()
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        model(torch.full((1, 23), 5))
    assert longest_of(BertModel(BertConfig(**sizes, max_position_embeddings=24))) == 24


def test_a_run_is_measured_in_windows_that_it_takes(ours, monkeypatch, tmp_path, capsys):
    from thalweg.cli import opening

    monkeypatch.setattr(opening, "open_any", lambda *_, **__: Opened(ours, Letters(), "run", "decoder"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("It was the year of the flood. " * 20)
    words = ["measure", "run", "--text", "text.txt", "--tokens", "96", "--json"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["length"] == SHORT
    assert "tokens of 1 document in 4 windows of up to 24; no BOS put before a document; 1 pass in float32" in err
    assert main([*words, "--bos", "-o", "bos.html"]) == 0
    out, err = capsys.readouterr()
    assert "BOS: token 1 before every document" in err and json.loads(out)["begins"].startswith("BOS")
    assert "scored after token 1; BOS: token 1 before every document" in (tmp_path / "bos.html").read_text()
    assert "--bos" in (tmp_path / "bos.html").read_text()


def test_a_token_before_every_document_is_read_and_makes_the_first_one_scored():
    plain, begun = cut(IDS, None, 16, None), cut(IDS, None, 16, None, 1)
    assert begun.tokens == plain.tokens + len(IDS) and begun.rule.endswith(
        "first token of a document scored after token 1"
    )
    first = [window for window in begun.windows if window.ids[0] == 1]
    assert [window.targets[0] for window in first] == [ids[0] for ids in IDS]
    assert cut([[1, *ids] for ids in IDS], None, 16, None, 1).tokens == begun.tokens  # never twice
    for wrong in (-1, True, 1.0):
        with pytest.raises(InputError, match="bos is the id of a token"):
            cut(IDS, None, 16, None, wrong)


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (None, "texts are a list of documents, got NoneType; write"),
        (7, "texts are a list of documents, got int; write"),
        ([[4, -3, 5]], "document 0: a token id is a whole number from 0, got -3"),
        ([[4, 5], [4, 2.5]], "document 1: a token id is a whole number from 0, got 2.5"),
        (torch.ones(2, 3, 4, dtype=torch.long), r"document 0: a token id is a whole number from 0, got \[1, 1, 1, 1\]"),
        ([[4]], "nothing to measure in 1 document: none has 2 tokens"),
    ],
)
def test_texts_that_are_none(texts, line):
    with pytest.raises(InputError, match=line):
        thalweg.measure(tiny("llama"), texts)
