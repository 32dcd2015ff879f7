"""``thalweg edit`` within what a model takes: audits and prompts of at most its positions, tokens that it has, flags that go together."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from thalweg.cli import main
from thalweg.errors import InputError

POSITIONS = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """GPT-2 with learned positions, where one token too many is an index out of range; and a smaller vocabulary beside it."""
    root = tmp_path_factory.mktemp("models")
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE({**letters, "<s>": 256}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<s>")
    for name, vocabulary in (("gpt2", 257), ("small", 50)):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = GPT2Config(vocab_size=vocabulary, n_embd=16, n_layer=2, n_head=2, n_positions=POSITIONS)
            GPT2LMHeadModel(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    (root / "text.txt").write_text("It was the year of the flood, and the river had come up to the third step.\n" * 3)
    return root


def edit(model, *more, code=0):
    assert main(["edit", str(model), "--site", "value", "--parallel", "0", "--quiet", *map(str, more)]) == code


def test_an_audit_reads_no_more_than_the_model_takes(folder, capsys):
    for window, tokens in ((None, POSITIONS), (8, 8)):
        more = [] if window is None else ["--window", window]
        edit(folder / "gpt2", "--text", folder / "text.txt", "--audit", "--json", *more)
        assert {row["n"] for row in json.loads(capsys.readouterr().out)["audit"]} == {tokens}


@pytest.mark.parametrize("as_json", [False, True])
def test_an_audit_that_fails_does_not_lose_the_scores(folder, capsys, monkeypatch, as_json):
    def failing(*_, **__):
        raise InputError("no audit today")

    monkeypatch.setattr("thalweg.editing.audit", failing)
    edit(folder / "gpt2", "--text", folder / "text.txt", "--audit", *["--json"] * as_json, code=2)
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == "error: no audit today"
    assert ('"differences"' if as_json else "sign-flip p") in printed.out


def test_a_prompt_goes_on_within_the_positions(folder, capsys):
    edit(folder / "gpt2", "--generate", "Emma", "--tokens", POSITIONS - 4)
    assert capsys.readouterr().out.startswith("unedited: Emma")
    edit(folder / "gpt2", "--generate", "Emma", "--tokens", POSITIONS - 3, code=2)
    assert "4 + 29 tokens are more than the 32 that this model takes" in capsys.readouterr().err


def test_a_prompt_has_tokens_that_the_model_has(folder, capsys):
    edit(folder / "small", "--generate", "Emma", "--tokens", 2, code=2)
    assert "the tokenizer gives id 76, the model has 50 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--generate", "T", "--text", "nowhere.txt"], "leave out --text"),
        (["--generate", "T", "--limit", "1", "--audit"], "leave out --limit, --audit"),
        (["--generate", "T", "--window", "4"], "leave out --window"),
        (["--tokens", "3"], "give --generate PROMPT"),
    ],
)
def test_a_prompt_and_a_text_do_not_go_together(folder, capsys, more, said):
    edit(folder / "gpt2", *more, code=2)
    assert said in capsys.readouterr().err
