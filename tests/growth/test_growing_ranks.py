"""Two processes grow one model: alike, from a probe set that they share, and bitwise after a stop; sharded models are refused."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from growing_worker import config

from thalweg.growth import GrowthRecord
from thalweg.growth.run import grow
from thalweg.training import checkpoint

WORKER = Path(__file__).with_name("growing_worker.py")


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    return folder, [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def weights(folder):
    return checkpoint.read(checkpoint.find(folder / "checkpoints", "last")).weights()


def events(folder):
    return GrowthRecord.load(folder / "growth.jsonl").events


def test_both_ranks_grow_alike_and_as_one_process_does(together, tmp_path):
    folder, (first, second) = together
    clocks = ("seconds",)
    assert {k: v for k, v in first["straight"].items() if k not in clocks} == {
        k: v for k, v in second["straight"].items() if k not in clocks
    }
    alone = grow(config(), tmp_path / "alone").growth
    assert sum(first["straight"]["heads"]) > 2 and first["straight"]["heads"] == alone["heads"]
    births = [(event.step, event.layer, event.heads) for event in events(folder / "straight")]
    assert births == [(event.step, event.layer, event.heads) for event in events(tmp_path / "alone")]
    for ours, theirs in zip(events(folder / "straight"), events(tmp_path / "alone"), strict=True):
        assert ours.eigenvalues == pytest.approx(theirs.eigenvalues, rel=1e-3)


def test_a_stop_on_one_rank_goes_on_bitwise(together):
    folder, _ = together
    one, other = weights(folder / "straight"), weights(folder / "resumed")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert events(folder / "straight") == events(folder / "resumed")


def test_a_sharded_model_is_refused_at_the_start(together):
    folder, ranks = together
    assert all("a sharded model cannot grow" in rank["refused"] and "\n" not in rank["refused"] for rank in ranks)
    assert not (folder / "sharded" / "run.json").exists()


def test_surgery_of_a_sharded_model_is_refused_at_the_start(together):
    """On both ranks, before anything is computed: the shape of a sharded model, and the state of its optimiser."""
    for said in (rank["surgery"] for rank in together[1]):
        assert len(said) == 7 and all("is sharded (FSDP2)" in line and "\n" not in line for line in said.values())
        assert "hold it whole on every rank (DDP)" in said["heads"] and "state is carried whole" in said["carry"]
