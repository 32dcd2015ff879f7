"""``thalweg measure MODEL``: a folder of transformers from the command line to the page."""

import json
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from thalweg.capture.quiet import hushed
from thalweg.cli import main
from thalweg.data.tasks.austen import HELD_OUT, novels, shipped_tokenizer
from thalweg.errors import InputError
from thalweg.records import Measurements

VOCAB = 2048
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A decoder and an encoder, with a tokenizer, and the decoder without."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(shipped_tokenizer().library_json()))
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(0)
        LlamaForCausalLM(LLAMA).save_pretrained(folder / "llama")
        LlamaForCausalLM(LLAMA).save_pretrained(folder / "bare")
        BertModel(BertConfig(**SIZES | {"pad_token_id": 0})).save_pretrained(folder / "bert")
    for name in ("llama", "bert"):
        tokenizer.save_pretrained(folder / name)
    (folder / "text.txt").write_text(novels()[HELD_OUT][:40_000], encoding="utf-8")
    return folder


@pytest.fixture
def place(models, tmp_path, monkeypatch):
    for path in models.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words):
    return main(["measure", *words])


def test_a_decoder(place, capsys):
    flags = ["--values", "--own-weights", "--inner", "--cka", "--rank", "--rows", "rows.jsonl"]
    assert (
        call("llama", "--text", "text.txt", "--tokens", "256", "--length", "32", "-o", "page.html", "--json", *flags)
        == 0
    )
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "capture proved on 64 tokens" in err and "float32" in err and "MiB for statistics, whatever the text" in err
    assert found["tokens"] == 256 and found["length"] == 32 and found["report"] == "page.html"
    assert found["proof"]["worst"] <= found["proof"]["tolerance"] == 1e-5
    assert 6 < found["loss"]["value"] < 10 and found["loss"]["low"] < found["loss"]["value"] < found["loss"]["high"]
    names = [entry["site"] for entry in found["sites"]]
    assert names[:3] == ["layers.0.attention", "layers.0.feed_forward", "layers.0"] and len(names) == 9
    assert {"along", "|cos|", "angle", "size"} < found["sites"][0].keys() and "turn" in found["sites"][2]
    rows = Measurements.load("rows.jsonl")
    values = {row.site: row.value for row in rows if row.measure == "parallel_coefficient.raw"}
    assert values["layers.1.attention"] == found["sites"][3]["along"]
    assert {row.head for row in rows if row.measure == "own_weight"} == {None, 0, 1, 2, 3}
    page = (place / "page.html").read_text(encoding="utf-8")
    for text in (
        "The capture is proved",
        "Update along the stream",
        "What heads read, along",
        "Attention to oneself",
        "Inside feed-forward sublayers",
        "What each block writes, along the block",
        "linear CKA",
        "thalweg measure llama --text text.txt --length 32 --values --own-weights --inner --rank --cka --rows rows.jsonl --tokens 256",
        "null: random direction",
    ):
        assert text in page


def test_for_people(place, capsys):
    assert call("llama", "--text", "text.txt", "--tokens", "192") == 0
    out, _ = capsys.readouterr()
    assert out.rstrip().endswith("measure-llama.html") and "loss: " in out and "nats/token (" in out
    (line,) = [line for line in out.splitlines() if line.startswith("layers.2.attention")]
    assert len(line.split()) == 5
    assert "coefficient of the update along the stream before it" in out
    assert "--values adds them" in (place / "measure-llama.html").read_text(encoding="utf-8")


def test_an_encoder_has_no_loss(place, capsys):
    assert call("bert", "--text", "text.txt", "--tokens", "64", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert "loss" not in found and found["sites"] and found["proof"]["worst"] <= 1e-5


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere/model"], "nowhere/model"),
        (["bare", "--text", "text.txt"], "bare has no tokenizer beside it"),
        (["llama", "--text", "absent.txt"], "absent.txt"),
        (["llama", "--text", "text.txt", "--length", "65"], "the model takes 64 tokens at most, got a length of 65"),
        (["llama", "--text", "text.txt", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["llama", "--rows", "rows.txt"], "rows.txt must end in .jsonl, .parquet, .csv"),
        (["llama", "--dtype", "float31"], "float31"),
        (["llama", "-o", "absent/page.html"], "there is no folder absent"),
        (["llama", "-o", "text.txt"], "text.txt exists; choose another name or say --overwrite"),
    ],
)
def test_wrong_input_is_one_line(place, capsys, words, line):
    assert call(*words) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert not out and last.startswith("error: ") and line in last


def test_a_wrong_map_fails_the_proof_and_is_stamped_if_allowed(place, capsys):
    (place / "map.toml").write_text(
        """
family = "wrong"
blocks = "model.layers"
final_norm = "model.norm"
head = "lm_head"
base = "model"

[[sites]]
kind = "attention"
sublayer = "self_attn"
reads = "input_layernorm"

[[sites]]
kind = "feed_forward"
sublayer = "mlp"
reads = "post_attention_layernorm"
multiplier = 0.5
""",
        encoding="utf-8",
    )
    words = ["llama", "--text", "text.txt", "--tokens", "64", "--map", "map.toml", "-o", "page.html"]
    assert call(*words) == 5
    assert "layers.0.feed_forward" in capsys.readouterr().err.splitlines()[-1]
    assert not (place / "page.html").exists()
    assert call(*words, "--allow-unverified") == 0
    assert "NOT VERIFIED" in (place / "page.html").read_text(encoding="utf-8")


def test_a_full_disk_loses_nothing_that_was_measured(place, capsys, monkeypatch):
    def full(*_, **__):
        raise InputError("page.html cannot be written: no space left on the device")

    monkeypatch.setattr("thalweg.reports.model.write_model_report", full)
    assert call("llama", "--text", "text.txt", "--tokens", "192", "-o", "page.html") == 2
    out, err = capsys.readouterr()
    assert "layers.2.attention" in out and err.splitlines()[-1].endswith("no space left on the device")


def test_an_interrupted_pass_says_that_nothing_is_kept(place, capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("thalweg.capture.measure.measure", stop)
    assert call("llama", "--text", "text.txt", "--tokens", "192", "-o", "page.html") == 130
    assert capsys.readouterr().err.splitlines()[-1] == "error: interrupted; nothing is kept"
    assert not (place / "page.html").exists()


def test_links_are_followed_and_devices_are_left_alone(place, capsys):
    (place / "target.html").write_text("old", encoding="utf-8")
    (place / "link.html").symlink_to(place / "target.html")
    os.mkfifo(place / "pipe.html")
    words = ["llama", "--text", "text.txt", "--tokens", "192", "--overwrite"]
    assert call(*words, "-o", "link.html") == 0
    assert (place / "link.html").is_symlink() and "The capture is proved" in (place / "target.html").read_text("utf-8")
    capsys.readouterr()
    for name in ("pipe.html", "/dev/null"):
        assert call(*words, "-o", name) == 2
        assert "is no file" in capsys.readouterr().err
    assert (place / "pipe.html").is_fifo() and not Path("/dev/null").is_file()
