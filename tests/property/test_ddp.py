"""Two processes train as one: replicated (DDP) and sharded (FSDP2), with unequal shares of scored tokens."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thalweg import connections
from thalweg.records import RunFolder
from thalweg.training import checkpoint

WORKER = Path(__file__).with_name("ddp_worker.py")
SPEC = importlib.util.spec_from_file_location("ddp_worker", WORKER)
worker = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(worker)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Every case in one pair of processes; folder and what each rank got."""
    folder = tmp_path_factory.mktemp("ddp")
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
    command = [sys.executable, str(WORKER), str(folder)]
    ranks = [
        subprocess.Popen(
            command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same cases in one process, made when asked for."""
    folder, made = tmp_path_factory.mktemp("alone"), {}

    def get(name):
        if name not in made:
            changes = {k: v for k, v in worker.CASES[name].items() if k != "parallel"}
            made[name] = worker.outcome(folder / name, **changes)
        return folder / name, made[name]

    return get


@pytest.mark.parametrize("name", worker.CASES)
def test_losses_gradients_and_weights_equal_those_of_one_process(together, alone, name):
    folder, results = together
    single, wanted = alone(name)
    tolerance = 2e-3 if "bfloat16" in name or "muon" in name else 2e-6  # Muon orthogonalises in bfloat16
    assert results[0][name]["status"] == "done"
    for series in (
        *("train/loss", "gradient/norm", "val/loss", "moved/connection", "task/token_accuracy"),
        "experts/max_over_mean",
    ):
        got, expected = RunFolder.open(folder / name).metrics(series), RunFolder.open(single).metrics(series)
        assert [step for step, _ in got] == [step for step, _ in expected], series
        torch.testing.assert_close(
            [v for _, v in got], [v for _, v in expected], rtol=10 * tolerance, atol=tolerance, msg=series
        )
    got, expected = (
        checkpoint.read(checkpoint.find(path / "checkpoints", "last")).weights() for path in (folder / name, single)
    )
    assert got.keys() == expected.keys()
    for key in got:
        assert got[key].shape == expected[key].shape
        distance = (got[key] - expected[key]).double().norm() / expected[key].double().norm().clamp(min=1e-3)
        assert distance < (0.05 if tolerance > 1e-4 else 1e-4), key
    assert wanted["final_loss"] == pytest.approx(results[0][name]["final_loss"], abs=10 * tolerance)


@pytest.mark.parametrize("name", [*connections.names(), "mhc with a head"])
def test_every_connection_can_be_replicated_and_sharded(together, name):
    """Parameters outside ``forward``, shared between sites, without axes: all of them are reduced and gathered."""
    _, results = together
    for result in results:
        losses = result["connections"][name]
        assert losses["ddp"] == pytest.approx(losses["alone"], abs=3e-6)
        assert losses["fsdp"] == pytest.approx(losses["alone"], abs=3e-6)


def test_all_ranks_get_the_same_result(together):
    _, (first, second) = together
    for name in worker.CASES:
        assert first[name]["final_loss"] == second[name]["final_loss"]
        assert first[name]["evaluation"] == second[name]["evaluation"]


def test_only_the_first_rank_writes(together):
    folder, _ = together
    steps = [step for step, _ in RunFolder.open(folder / "ddp").metrics("train/loss")]
    assert steps == list(range(1, 7))
    assert (
        RunFolder.open(folder / "ddp").measures().where(measure="stream_rms", step=6, layer=1).to_rows()[0]["value"] > 0
    )
    assert len(RunFolder.open(folder / "ddp").measures().where(measure="stream_rms", step=6)) == 2


def test_an_error_of_the_first_rank_reaches_all(together):
    _, results = together
    for result in results:
        assert result["twice"]["error"] == "InputError" and "holds a run already" in result["twice"]["text"]
        assert result["bad_batch"]["error"] == "InputError" and "cannot be shared" in result["bad_batch"]["text"]


def test_divergence_ends_all_ranks_together(together):
    _, (first, second) = together
    assert first["diverged"]["status"] == second["diverged"]["status"] == "diverged"
    assert first["diverged"]["step"] == second["diverged"]["step"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_stop_of_one_rank_stops_all_and_resuming_is_bitwise(together, kind):
    folder, results = together
    for result in results:
        assert (result[f"{kind}_stopped"]["status"], result[f"{kind}_stopped"]["step"]) == ("interrupted", 1)
        assert result[f"{kind}_resumed"]["status"] == "done"
    whole, resumed = (RunFolder.open(folder / name) for name in (kind, f"{kind}_resumed"))
    assert resumed.notes == []
    for series in ("train/loss", "gradient/norm", "val/loss"):
        assert whole.metrics(series) == resumed.metrics(series)
    a, b = (checkpoint.read(checkpoint.find(run.checkpoints, "last")) for run in (whole, resumed))
    assert all(torch.equal(x, b.weights()[name]) for name, x in a.weights().items())


@pytest.mark.parametrize("connection", ["mgt", "mhc"])
def test_sharded_parameters_are_float32_between_passes_and_in_the_sites(together, connection):
    """The islands: sites see whole float32 parameters while the blocks compute in bfloat16."""
    _, results = together
    for result in results:
        seen = result["dtypes"][connection]
        assert seen["read"] == seen["write"] == ["Parameter torch.float32"]
        assert seen["block"] == ["Parameter torch.bfloat16"]
        assert seen["coefficients"] == (["torch.float32"] if connection == "mhc" else [])
        assert seen["kept"] == ["DTensor torch.float32"] and seen["sharded"] == ["True"]


def test_routers_compute_in_float32_when_sharded(together):
    _, results = together
    assert [result["router"] for result in results] == [["torch.float32", "torch.float32"]] * 2


@pytest.mark.parametrize("name", ["ddp_experts", "fsdp_experts"])
def test_the_load_of_all_ranks_steps_the_bias(together, alone, name):
    folder, _ = together
    single, _ = alone(name)
    got, expected = (
        checkpoint.read(checkpoint.find(path / "checkpoints", "last")).weights() for path in (folder / name, single)
    )
    found = [key for key in expected if key.endswith("votes")]
    assert len(found) == 1 and expected[found[0]].any()
    assert torch.equal(got[found[0]], expected[found[0]])


def test_one_process_goes_on_where_two_left_off(together, alone):
    """Checkpoints are whole tensors: a sharded run resumes on one process, to rounding, and says so."""
    folder, _ = together
    result = worker.outcome(folder / "left", resume=True)
    assert result["status"] == "done"
    (note,) = RunFolder.open(folder / "left").notes
    assert "not bitwise because" in note and "ranks 2 -> 1" in note and "parallel fsdp -> none" in note
    assert result["final_loss"] == pytest.approx(alone("ddp")[1]["final_loss"], abs=2e-5)
