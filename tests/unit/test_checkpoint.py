"""Checkpoints: complete or absent, verified, and clear about what is wrong with them."""

import errno
import json
import os
import resource
import shutil
import signal

import pytest
import torch

from thalweg.errors import CheckpointError
from thalweg.models.config import DecoderConfig
from thalweg.models.decoder import Decoder
from thalweg.models.sharing import named_weights
from thalweg.training import checkpoint

CONFIG = DecoderConfig(vocab_size=11, width=8, depth=2, heads=2)


def make_model(seed=0, **changes):
    return Decoder(CONFIG.replace(**changes), generator=torch.Generator().manual_seed(seed))


def save(folder, step, best, model=None):
    weights = named_weights(model or make_model(step))
    state = {"numbers": [1, 2.5, None, "x"], "tensor": torch.arange(3)}
    return checkpoint.save(folder, step, weights=weights, state=state, manifest={"best_step": best})


def one_line(error):
    return "\n" not in str(error.value)


def test_round_trip_is_bitwise_and_tied_weights_are_stored_once(tmp_path):
    model = make_model(1)
    saved = checkpoint.read(save(tmp_path, 3, 3, model))
    assert saved.step == 3
    assert "head.weight" not in saved.weights() and "embedding.weight" in saved.weights()
    other = make_model(2)
    checkpoint.load_weights(other, saved.weights(), saved.path)
    for name, p in model.named_parameters():
        assert torch.equal(p, dict(other.named_parameters())[name])
    assert other.head.weight is other.embedding.weight
    state = saved.state()
    assert state["numbers"] == [1, 2.5, None, "x"] and torch.equal(state["tensor"], torch.arange(3))


def test_the_last_two_and_the_best_are_kept(tmp_path):
    for step, best in ((0, 0), (10, 10), (20, 10), (30, 10), (40, 10)):
        save(tmp_path, step, best)
    assert checkpoint.list_steps(tmp_path) == [10, 30, 40]
    assert checkpoint.find(tmp_path, "best").name == "step-00000010"
    assert checkpoint.find(tmp_path, "last").name == "step-00000040"
    save(tmp_path, 50, 50)
    assert checkpoint.list_steps(tmp_path) == [
        10,
        40,
        50,
    ]  # 40 still names 10 as its best: deleting 50 leaves a whole history
    save(tmp_path, 60, 50)
    assert checkpoint.list_steps(tmp_path) == [50, 60]


def test_find_names_what_is_there(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint; train first"):
        checkpoint.find(tmp_path)
    save(tmp_path, 10, 10)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7.*10"):
        checkpoint.find(tmp_path, 7)
    with pytest.raises(CheckpointError, match="no checkpoint of 'newest'"):
        checkpoint.find(tmp_path, "newest")


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.STATE, checkpoint.MANIFEST, checkpoint.SUMS])
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_damage_is_found_and_named_with_a_way_out(tmp_path, name, damage):
    save(tmp_path, 10, 10)
    path = save(tmp_path, 20, 10)
    content = (path / name).read_bytes()
    if damage == "truncate":
        (path / name).write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        middle = len(content) // 2
        (path / name).write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        (path / name).unlink()
    with pytest.raises(CheckpointError, match="step-00000020") as caught:
        checkpoint.read(path)
    assert one_line(caught)
    if name != checkpoint.MANIFEST:
        assert name in str(caught.value) or damage == "flip"
        assert "delete it to go on from step 10" in str(caught.value)


def test_foreign_folders_and_newer_schemas_are_refused(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(CheckpointError, match="not a checkpoint of thalweg"):
        checkpoint.read(checkpoint.find(tmp_path))
    (tmp_path / "step-00000001" / checkpoint.MANIFEST).write_text(json.dumps({"kind": "other"}))
    with pytest.raises(CheckpointError, match="does not say kind"):
        checkpoint.read(checkpoint.find(tmp_path))
    (tmp_path / "step-00000001" / checkpoint.MANIFEST).write_text(json.dumps({"kind": checkpoint.KIND, "schema": 99}))
    with pytest.raises(CheckpointError, match="has schema 99"):
        checkpoint.read(checkpoint.find(tmp_path))


def test_weights_of_another_model_are_refused_in_one_line(tmp_path):
    saved = checkpoint.read(save(tmp_path, 1, 1))
    for changes, says in (
        ({"depth": 3}, r"lacks blocks\.2"),
        ({"depth": 1}, "has unknown"),
        ({"width": 16}, "has shapes embedding.weight"),
    ):
        with pytest.raises(CheckpointError, match=says) as caught:
            checkpoint.load_weights(make_model(**changes), saved.weights(), saved.path)
        assert one_line(caught) and len(str(caught.value)) < 600


def test_a_checkpoint_that_would_run_code_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    path = checkpoint.save(tmp_path, 1, weights={"a": torch.ones(1)}, state={"trap": Trap()}, manifest={"best_step": 1})
    with pytest.raises(CheckpointError, match="more than tensors"):
        checkpoint.read(path).state()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("call", ["save_file", "torch.save", "fsync", "rename"])
def test_a_full_disk_leaves_the_old_one_and_no_rubbish(tmp_path, monkeypatch, call):
    save(tmp_path, 10, 10)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    target = {
        "save_file": (checkpoint, "save_file"),
        "torch.save": (torch, "save"),
        "fsync": (os, "fsync"),
        "rename": (checkpoint.Path, "rename"),
    }[call]
    monkeypatch.setattr(*target, full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*step 10 is intact") as caught:
        save(tmp_path, 20, 20)
    assert one_line(caught)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    checkpoint.read(checkpoint.find(tmp_path))


@pytest.mark.parametrize("bytes_allowed", [100, 3000])
def test_a_write_that_the_system_cuts_short(tmp_path, bytes_allowed):
    """A real limit on the size of files stands for a full disk: the writers themselves meet the error, in the weights or in the state."""
    save(tmp_path, 10, 10)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    weights = {"a": torch.ones(bytes_allowed // 8)} if bytes_allowed > 1000 else named_weights(make_model())
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_allowed, before[1]))
    try:
        with pytest.raises(CheckpointError, match="step 10 is intact"):
            checkpoint.save(tmp_path, 20, weights=weights, state={"t": torch.ones(5000)}, manifest={"best_step": 20})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path):
    save(tmp_path, 10, 10)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / ".writing-step-00000020-1234")
    assert checkpoint.list_steps(tmp_path) == [10]
    save(tmp_path, 20, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


@pytest.mark.parametrize(("number", "advice"), [(errno.ENOSPC, "make room"), (errno.EACCES, "put that right")])
def test_only_a_full_disk_is_told_to_make_room(tmp_path, monkeypatch, number, advice):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint, "save_file", refuse)
    with pytest.raises(CheckpointError, match=f"{advice} and start again"):
        save(tmp_path, 1, 1)


def test_what_torch_says_of_a_full_disk_is_understood(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 47040 vs 46992")

    monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device; make room") as caught:
        save(tmp_path, 1, 1)
    assert "enforce" not in str(caught.value)


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.STATE])
@pytest.mark.parametrize("content", [b"", b"\x80", b"nonsense" * 20, b"PK\x03\x04"])
def test_foreign_files_are_refused_by_name(tmp_path, name, content):
    saved = checkpoint.read(save(tmp_path, 1, 1))
    (saved.path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name) as caught:
        saved.weights() if name == checkpoint.WEIGHTS else saved.state()
    assert one_line(caught)


def test_a_manifest_without_its_step_is_refused(tmp_path):
    path = save(tmp_path, 1, 1)
    for edited in ({"step": "1"}, {"best_step": [1]}):
        manifest = json.loads((path / checkpoint.MANIFEST).read_text()) | edited
        (tmp_path / "step-00000009").mkdir(exist_ok=True)
        (tmp_path / "step-00000009" / checkpoint.MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match="does not say its step"):
            checkpoint.read(tmp_path / "step-00000009")


def test_weights_that_are_no_finite_numbers_are_refused(tmp_path):
    good = {name: value.detach().clone() for name, value in named_weights(make_model()).items()}
    name = "embedding.weight"
    for broken, says in (
        (good[name].fill_(float("nan")), "not finite"),
        (good[name].new_ones(11, 8).long(), "has types"),
    ):
        weights = good | {name: broken}
        path = checkpoint.save(tmp_path / says[:3], 1, weights=weights, state={}, manifest={"best_step": 1})
        with pytest.raises(CheckpointError, match=f"{says}.*embedding"):
            checkpoint.load_weights(make_model(), checkpoint.read(path).weights(), path)
