"""Folders that the Hugging Face shell cannot load: one clear line each, from close by; and code in a folder never runs."""

import json
import os
import shutil
import traceback

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from thalweg.errors import CheckpointError, InputError, ThalwegError, UnknownNameError
from thalweg.models import DecoderConfig, ThalwegConfig, ThalwegForCausalLM

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    config = DecoderConfig(vocab_size=40, width=16, depth=2, heads=2, connection="mgt")
    ThalwegForCausalLM(ThalwegConfig.of(config)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def remove(name):
    return lambda folder: (folder / name).unlink()


def change(**changes):
    def apply(folder):
        table = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(table))

    return apply


def refused(load, kind):
    """The error, which is one line, names the folder's file, hides no other error and is raised close by."""
    with pytest.raises(kind) as caught:
        load()
    error = caught.value
    assert isinstance(error, ThalwegError) and "\n" not in str(error)
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    assert len(traceback.extract_tb(error.__traceback__)) < 10
    return str(error)


@pytest.mark.parametrize(
    ("damage", "kind", "says"),
    [
        (remove(WEIGHTS), CheckpointError, "no file named model.safetensors"),
        (cut(WEIGHTS, 5), CheckpointError, "the weights cannot be read"),
        (cut(WEIGHTS, 3000), CheckpointError, "the weights cannot be read"),
        (cut(WEIGHTS, -100), CheckpointError, "the weights cannot be read"),
        (write(WEIGHTS, b""), CheckpointError, "the weights cannot be read"),
        (write(WEIGHTS, b"no weights at all " * 50), CheckpointError, "the weights cannot be read"),
        (change(width=32), CheckpointError, "mismatched keys (decoder.blocks.0.sublayers.0.key.weight [16, 16] for [32, 32]"),
        (change(depth=3), CheckpointError, "missing keys (decoder.blocks.2."),
        (change(connection="additive"), CheckpointError, "unexpected keys (decoder.stream.sites.0.alpha.value"),
        (change(connection="mgtt"), InputError, "config.json: unknown connection 'mgtt'. Did you mean 'mgt'?"),
        (change(connection_options={"presett": "paper"}), InputError, "Did you mean 'mgt.preset'?"),
        (change(connection_options={"preset": "papr"}), InputError, "Did you mean 'paper'?"),
        (change(connection_options=[1]), InputError, "config.json: config.connection_options"),
        (change(width="wide"), InputError, "config.json: config.width must be int, got 'wide'"),
        (change(widht=3), InputError, "unknown key 'widht'. Did you mean 'width'?"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("loader", [AutoModelForCausalLM, ThalwegForCausalLM])
def test_a_folder_that_does_not_load_says_why_in_one_line(folder, damage, kind, says, loader):
    damage(folder)
    message = refused(lambda: loader.from_pretrained(folder), kind)
    assert says in message and message.startswith(str(folder))


@pytest.mark.parametrize(
    ("damage", "kind", "says"),
    [
        (remove("config.json"), CheckpointError, "there is no config.json"),
        (write("config.json", b'{"model_type": "thal'), CheckpointError, "config.json cannot be read"),
        (write("config.json", b"\xff\xfe\x00"), CheckpointError, "config.json cannot be read"),
        (write("config.json", b"[1]"), CheckpointError, "config.json holds no table"),
        (write("config.json", b"7"), CheckpointError, "config.json"),
        (change(model_type="llama"), InputError, "must say model_type 'thalweg', got 'llama'"),
        (shutil.rmtree, CheckpointError, "there is no such folder"),
    ],
)
@pytest.mark.parametrize("loader", [ThalwegForCausalLM, ThalwegConfig])
def test_a_broken_configuration_is_one_line_of_ours(folder, damage, kind, says, loader):
    """The Auto classes read config.json before they know whose it is, so there the line is that of Hugging Face."""
    damage(folder)
    message = refused(lambda: loader.from_pretrained(folder), kind)
    assert says in message and message.startswith(str(folder))


@pytest.mark.parametrize("loader", [AutoModelForCausalLM, ThalwegForCausalLM])
def test_unknown_options_of_the_call_are_refused(folder, loader):
    with pytest.raises(UnknownNameError, match=r"unknown option of a model 'widht'\. Did you mean 'width'"):
        loader.from_pretrained(folder, widht=3)
    with pytest.raises(InputError, match="weights are read from safetensors files only"):
        loader.from_pretrained(folder, use_safetensors=False)


@pytest.mark.parametrize("trust", [None, False, True])
@pytest.mark.parametrize("loader", [AutoConfig, AutoModelForCausalLM, ThalwegForCausalLM])
def test_code_in_a_folder_never_runs(folder, tmp_path, loader, trust):
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')\nclass C: pass\nclass M: pass\ndef generate(*a, **k): pass\n"
    (folder / "evil.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    change(auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})(folder)
    loaded = loader.from_pretrained(folder, **({} if trust is None else {"trust_remote_code": trust}))
    assert type(loaded) in (ThalwegConfig, ThalwegForCausalLM)
    if loader is not AutoConfig:
        prompt = torch.tensor([[1, 2]])
        assert loaded.generate(prompt, max_new_tokens=1, pad_token_id=0).shape == (1, 3)
        with pytest.raises(InputError, match="runs no code from a model folder"):
            loaded.generate(prompt, max_new_tokens=1, custom_generate=str(folder), trust_remote_code=True)
    assert not ran.exists()


@pytest.mark.parametrize("options", [{}, {"weights_only": False}, {"weights_only": False, "trust_remote_code": True}])
def test_a_pickle_is_not_read(folder, tmp_path, options):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (folder / WEIGHTS).unlink()
    torch.save({"decoder.head.weight": Trap()}, folder / "pytorch_model.bin")
    assert "no file named model.safetensors" in refused(
        lambda: AutoModelForCausalLM.from_pretrained(folder, **options), CheckpointError
    )
    assert not (tmp_path / "ran").exists()


def test_loaded_weights_lie_where_torch_would_put_them(folder):
    """A mapped file holds tensors at any address, and kernels sum in another order there."""
    loaded = ThalwegForCausalLM.from_pretrained(folder)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (*loaded.parameters(), *loaded.buffers()))
    assert loaded.decoder.head.weight is loaded.decoder.embedding.weight
