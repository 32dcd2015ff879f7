"""A run killed by SIGKILL at random moments and resumed is bit by bit the uninterrupted one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thalweg.records import RunFolder
from thalweg.training import checkpoint

WORKER = Path(__file__).with_name("resume_worker.py")
TIMES = ("train/tokens_per_second", "train/peak_memory")  # what no two runs share


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    command = [sys.executable, str(WORKER), str(folder), "7"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    kills, places = map(int, done.stdout.split())
    return folder, kills, places


def equal(a, b, where=""):
    """Bitwise equality of trees of tensors and plain values."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            equal(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    else:
        assert a == b, where


def test_it_was_killed_often_and_ended(runs):
    folder, kills, _ = runs
    assert kills >= 3
    assert RunFolder.open(folder / "killed").status == "done"
    assert RunFolder.open(folder / "killed").notes == []  # nothing differed, so nothing is noted


@pytest.mark.parametrize("step", [25, 30])
def test_weights_and_optimisers_are_bitwise_equal(runs, step):
    folder, _, _ = runs
    whole, killed = (
        checkpoint.read(checkpoint.find(folder / name / "checkpoints", step)) for name in ("whole", "killed")
    )
    equal(whole.weights(), killed.weights())
    for part in ("optimizers", "sampler", "random", "rule", "best", "train_loss", "evaluation"):
        equal(whole.state()[part], killed.state()[part], part)
    assert {"adamw", "muon"} == whole.state()["optimizers"].keys()
    assert whole.manifest["best_step"] == killed.manifest["best_step"]


def test_the_record_holds_every_step_once(runs):
    folder, _, _ = runs
    whole, killed = (RunFolder.open(folder / name) for name in ("whole", "killed"))
    before, after = whole.series(), killed.series()
    assert [step for step, _ in after["train/loss"]] == list(range(1, 31))
    assert {n: s for n, s in before.items() if n not in TIMES} == {n: s for n, s in after.items() if n not in TIMES}
    assert whole.measures().to_rows() == killed.measures().to_rows()
    for key in ("final_loss", "best_loss", "best_step", "train_loss", "evaluation", "nulls", "data"):
        assert whole.result[key] == killed.result[key], key
    assert killed.result["cost"]["tokens"] == whole.result["cost"]["tokens"]


def test_a_save_killed_before_any_of_its_file_operations_leaves_a_whole_checkpoint(runs):
    _, _, places = runs
    assert places >= 12
