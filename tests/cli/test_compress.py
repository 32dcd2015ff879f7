"""``thalweg compress``: a folder that opens, its record, the plan before the run, and one line for everything that cannot be."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from thalweg.capture import open_model
from thalweg.cli import main
from thalweg.data.tasks.austen import HELD_OUT, novels, shipped_tokenizer


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with a decoder and its tokenizer, and a text."""
    where = tmp_path_factory.mktemp("small")
    inner = Tokenizer.from_str(shipped_tokenizer().library_json())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=inner.get_vocab_size(),
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=64,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    model.save_pretrained(where / "model")
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(where / "model")
    (where / "text.txt").write_text(novels()[HELD_OUT][:8000], encoding="utf-8")
    return where


def said(capsys, argv, code=0):
    assert main([str(a) for a in argv]) == code
    return capsys.readouterr()


def test_a_folder_with_its_record(small, tmp_path, capsys):
    folder = tmp_path / "out"
    argv = ["compress", small / "model", "--method", "wanda", "--sparsity", "2:4", "--text", small / "text.txt"]
    shown = said(capsys, [*argv, "--samples", "4", "--length", "32", "--skip", "0", "-o", folder, "--json"])
    record = json.loads(shown.out)
    assert record["output"] == str(folder) and record["method"] == "wanda" and record["options"] == {"sparsity": "2:4"}
    assert record["skipped"] == [0] and record["kept_blocks"] is None
    assert record["calibration"]["samples"] == 4 and record["calibration"]["tokens"] == 128
    lines = shown.err.splitlines()
    plan = next(i for i, line in enumerate(lines) if "runs of one block" in line)
    timed = next(i for i, line in enumerate(lines) if line.startswith("about ") and line.endswith(" s, from one layer"))
    assert plan < timed < next(i for i, line in enumerate(lines) if line == "  2 of 2 layers")
    assert json.loads((folder / "thalweg_compression.json").read_text()).items() <= record.items()
    opened = open_model(folder)
    assert opened.tokenizer is not None
    weight = opened.model.model.layers[1].mlp.up_proj.weight
    assert ((weight.reshape(-1, 4) == 0).sum(1) == 2).all()
    assert (opened.model.model.layers[0].mlp.up_proj.weight != 0).all()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--method", "rtn", "--bits", "3", "--group", "8"], "round_to_nearest: bits 3, group 8, symmetric False"),
        (["--method", "layer_drop", "--option", "drop=1"], "2 layers are left: 0, 2"),
        (["--method", "low_rank", "--option", "rank=2"], "low_rank: rank 2, weighting none"),
        (["--method", "random", "--option", "size=0.1"], "16.00 bits a weight"),
    ],
)
def test_methods_that_need_no_text(small, tmp_path, capsys, flags, says):
    shown = said(capsys, ["compress", small / "model", *flags, "-o", tmp_path / "out"])
    assert says in shown.out and "stored natively" in shown.out
    open_model(tmp_path / "out")


def test_a_text_with_fewer_windows_is_said(small, tmp_path, capsys):
    argv = [
        "compress",
        small / "model",
        "--method",
        "awq",
        "--group",
        "8",
        "--text",
        small / "text.txt",
        "-o",
        tmp_path / "out",
    ]
    shown = said(capsys, argv)
    assert "windows of 64 tokens (128 were asked for; the text holds no more)" in shown.err


def test_the_window_is_no_longer_than_what_the_model_takes(small, tmp_path, capsys):
    """In one line, and with a text that has no such window too: the model takes 64 tokens."""
    argv = [
        "compress",
        small / "model",
        "--method",
        "wanda",
        "--sparsity",
        "0.5",
        "-o",
        tmp_path / "out",
        "--samples",
        "1",
    ]
    (tmp_path / "short.txt").write_text("A few words.", encoding="utf-8")
    for text in (small / "text.txt", tmp_path / "short.txt"):
        shown = said(capsys, [*argv, "--text", text, "--length", "65", "--quiet"], code=2)
        assert shown.err == "error: the model takes 64 tokens at most, got a length of 65; give 64 or less\n"
    shown = said(capsys, [*argv, "--text", small / "text.txt", "--length", "0", "--quiet"], code=2)
    assert shown.err == "error: length must be a whole number from 2 on, got 0\n"
    assert not (tmp_path / "out").exists()
    record = json.loads(said(capsys, [*argv, "--text", small / "text.txt", "--json"]).out)
    assert record["calibration"]["longest"] == 64


def test_without_a_text_the_shipped_training_novels_calibrate(small, tmp_path, capsys):
    argv = ["compress", small / "model", "--method", "wanda", "--sparsity", "2:4", "--samples", "3", "-o"]
    shown = said(capsys, [*argv, tmp_path / "first", "--json"])
    seen = json.loads(shown.out)["calibration"]
    assert seen["source"] == "the training novels (shipped)" and seen["samples"] == 3 and seen["longest"] == 64
    assert "calibrated on the training novels (shipped): 3 windows of 64 tokens\n" in shown.err
    again = json.loads(said(capsys, [*argv, tmp_path / "second", "--json", "--quiet"]).out)["calibration"]
    assert again["sha256"] == seen["sha256"]


def test_weights_that_are_not_finite_are_named_with_their_folder(small, tmp_path, capsys):
    model = LlamaForCausalLM.from_pretrained(small / "model")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, :2] = torch.nan
    model.save_pretrained(tmp_path / "bad")
    argv = ["compress", tmp_path / "bad", "--method", "rtn", "--group", "8", "-o", tmp_path / "out", "--quiet"]
    line = said(capsys, argv, code=2).err
    assert line.startswith(
        f"error: {tmp_path / 'bad'}: model.layers.1.mlp.up_proj.weight holds 2 values that are NaN or infinite"
    )
    assert line.count("\n") == 1 and not (tmp_path / "out").exists()


WRONG = {
    "an unknown method": (["--method", "wnda"], "Did you mean 'wanda'"),
    "bits out of range": (["--method", "rtn", "--bits", "9"], "from 2 to 8, got 9"),
    "a group that does not divide": (["--method", "rtn", "--group", "128"], "8 divide those of all maps"),
    "a flag of another method": (["--method", "wanda", "--bits", "4"], "wanda has no option bits; it takes --sparsity"),
    "an option twice": (["--method", "rtn", "--bits", "4", "--option", "bits=3"], "name the same option"),
    "an unknown option": (["--method", "rtn", "--option", "bit=3"], "unknown key"),
    "a layer that is not there": (["--method", "magnitude", "--layers", "7"], "layers are numbers from 0 to 2"),
    "a text that is not there": (["--method", "wanda", "--text", "nowhere.txt"], "nowhere.txt"),
    "a library without its environment": (
        ["--method", "torchao:int8"],
        "lives in an environment of its own; make one: python3 -m venv",
    ),
    "an environment that is none": (
        ["--method", "torchao:int8", "--environment", "nowhere"],
        "there is no Python at nowhere",
    ),
    "an environment for ours": (["--method", "rtn", "--environment", "x"], "leave it out"),
    "an unknown library": (["--method", "torchoa:int8"], "Did you mean 'torchao'"),
    "an unknown method of a library": (["--method", "torchao:int3"], "unknown compressor of torchao"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_one_line(small, tmp_path, capsys, case):
    flags, says = WRONG[case]
    shown = said(capsys, ["compress", small / "model", *flags, "-o", tmp_path / "out", "--quiet"], code=2)
    assert shown.err.count("\n") == 1 and shown.err.startswith("error: ") and says in shown.err
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_refused_before_the_model_is_opened(small, capsys):
    shown = said(capsys, ["compress", "nowhere", "--method", "magnitude", "-o", small], code=2)
    assert "not an empty folder" in shown.err


def test_a_full_disk_does_not_lose_the_record(small, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    argv = ["compress", small / "model", "--method", "rtn", "--bits", "3", "--group", "8", "-o", tmp_path / "out"]
    shown = said(capsys, argv, code=2)
    assert "round_to_nearest: bits 3, group 8" in shown.out and "in " + str(tmp_path) not in shown.out
    assert "No space left on device; nothing is left there" in shown.err.splitlines()[-1]
    shown = said(capsys, [*argv, "--json"], code=2)
    assert json.loads(shown.out)["output"] is None


def test_show_and_list(capsys):
    rows = json.loads(said(capsys, ["list", "compressors", "--json"]).out)
    names = {row["name"] for row in rows}
    assert {"awq", "wanda", "round_to_nearest", "layer_drop", "llmcompressor:wanda", "torchao:int4"} <= names
    shown = said(capsys, ["show", "compressor", "wanda"]).out
    assert "S_ij = |W_ij| ||X_j||_2" in shown and "share of the weights of every output that go" in " ".join(
        shown.split()
    )
    assert json.loads(said(capsys, ["show", "compressor", "rtn", "--option", "bits=3", "--json"]).out)["options"] == {
        "bits": 3
    }
    assert "group_size" not in said(capsys, ["show", "compressor", "llmcompressor:awq"]).out
    assert "from 2 to 8" in said(capsys, ["show", "compressor", "awq", "--option", "bits=1"], code=2).err
