"""The run folder: its layout, its life, and what it survives."""

import errno
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from thalweg.errors import CheckpointError, InputError, MissingExtraError, UnknownNameError
from thalweg.records import Measurement, RunFolder
from thalweg.records.provenance import bitwise_differences, collect


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", {"width": 8}, plan_hash="sha256:ab", arm="mgt", seed=3)


def test_layout_and_first_record(run):
    assert {p.name for p in run.path.iterdir()} == {"run.json", "checkpoints"}
    record = json.loads((run.path / "run.json").read_text())
    assert list(record) == [
        *("schema", "kind", "status", "arm", "seed", "plan_hash", "config"),
        *("versions", "provenance", "started", "ended", "result", "notes"),
    ]
    assert record["status"] == "running" and record["schema"] == 1 and record["kind"] == "train"
    again = RunFolder.open(run.path)
    assert (again.config, again.plan_hash, again.arm, again.seed) == ({"width": 8}, "sha256:ab", "mgt", 3)
    assert bitwise_differences(again.provenance, collect()) == []
    assert again.versions["torch"] and RunFolder.is_run(run.path) and not RunFolder.is_run(run.checkpoints)


def test_a_life(run):
    run.log(0, "train/loss", 5.5, "nats/token")
    run.log(1, "train/loss", math.nan, "nats/token")
    run.log(1, "train/lr", 0.5)
    run.add_measures([Measurement("rms", 1.0, step=1)])
    run.add_measures([Measurement("rms", 2.0, step=2)])
    run.note("resumed, not bitwise: threads 1 -> 2")
    run.finish("diverged", {"final_loss": math.inf, "nested": [math.nan, 1]})

    again = RunFolder.open(run.path)
    assert again.status == "diverged" and again.record["ended"] >= again.record["started"]
    assert again.result["final_loss"] == math.inf and math.isnan(again.result["nested"][0])
    assert again.notes == ["resumed, not bitwise: threads 1 -> 2"]
    assert again.metrics("train/lr") == [(1, 0.5)] and len(again.metrics()) == 3
    (first, second) = again.metrics("train/loss")
    assert first == (0, 5.5) and second[0] == 1 and math.isnan(second[1])
    assert list(again.series()) == ["train/loss", "train/lr"]
    assert again.units() == {"train/loss": "nats/token", "train/lr": ""}
    assert [row.value for row in again.measures()] == [1.0, 2.0]
    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        assert set(json.loads(line)) == {"step", "name", "value", "unit"}


def test_restart_after_an_interruption(run):
    run.finish("interrupted", {"step": 7})
    run.restart()
    again = RunFolder.open(run.path)
    assert again.status == "running" and again.record["ended"] is None


def test_truncate_for_exact_resume(run):
    for step in range(6):
        run.log(step, "loss", step)
        run.add_measures([Measurement("rms", step, step=step)])
    run.add_measures([Measurement("parameters", 10)])
    run.truncate_after(3)
    run.log(4, "loss", 40.0)
    assert run.metrics("loss") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert [row.step for row in run.measures()] == [0, 1, 2, 3, None]


def test_truncate_of_an_empty_run(run):
    run.truncate_after(0)
    assert run.metrics() == [] and len(run.measures()) == 0


def test_only_the_documented_ends(run):
    with pytest.raises(UnknownNameError, match="Did you mean 'done'"):
        run.finish("don")
    assert RunFolder.open(run.path).status == "running"


def test_a_killed_writer_leaves_a_readable_run(tmp_path):
    code = """
import sys
from thalweg.records import Measurement, RunFolder
run = RunFolder.create(sys.argv[1], {})
print("ready", flush=True)
for step in range(10**9):
    run.log(step, "loss", step)
    run.add_measures([Measurement("rms", step, step=step)])
    run.note(str(step))
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    while process.poll() is None and not (tmp_path / "run" / "measures.jsonl").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()

    run = RunFolder.open(tmp_path / "run")
    steps = [step for step, _ in run.metrics("loss")]
    assert run.status == "running" and steps == list(range(len(steps))) and steps
    assert [row.step for row in run.measures()] == steps[: len(run.measures())]
    run.log(len(steps), "loss", 0.5)
    assert run.metrics("loss")[-1] == (len(steps), 0.5)


def test_a_torn_header_of_measures_is_repaired(run):
    (run.path / "measures.jsonl").write_text('{"schema": 1, "ki')
    assert len(run.measures()) == 0
    run.truncate_after(0)
    run.add_measures([Measurement("rms", 1.0)])
    assert [row.value for row in run.measures()] == [1.0]


def test_a_torn_metric_is_passed_over_and_cut_off(run):
    run.log(0, "loss", 1.0)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "name": "loss", "va')
    assert run.metrics("loss") == [(0, 1.0)]
    run.log(1, "loss", 2.0)
    assert run.metrics("loss") == [(0, 1.0), (1, 2.0)]


def test_full_disk_keeps_the_record(run, monkeypatch):
    run.log(0, "loss", 1.0)

    def full(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for action in (
        lambda: run.finish("done", {"x": 1}),
        lambda: run.note("text"),
        lambda: run.log(1, "loss", 2.0),
        lambda: run.add_measures([Measurement("rms", 1.0)]),
        lambda: run.truncate_after(0),
    ):
        with pytest.raises(InputError, match="no space left"):
            action()
        if run.measures() or run.notes:
            raise AssertionError("a refused write was kept in memory or on the disk")
    monkeypatch.undo()
    assert run.status == "running" and run.metrics() == [(0, 1.0)]
    again = RunFolder.open(run.path)
    assert again.status == "running" and again.notes == []


def test_create_refuses_what_is_in_use(run, tmp_path):
    with pytest.raises(InputError, match="holds a run already"):
        RunFolder.create(run.path, {})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(InputError, match="not empty"):
        RunFolder.create(tmp_path / "full", {})
    with pytest.raises(InputError, match="is a file"):
        RunFolder.create(tmp_path / "full" / "thesis.tex", {})
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty", {}).status == "running"


def test_create_refuses_a_config_that_json_cannot_hold(tmp_path):
    for config in ({"x": object()}, {("a", "b"): 1}, [1]):
        with pytest.raises(InputError):
            RunFolder.create(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()


def test_open_names_what_is_missing(tmp_path):
    with pytest.raises(InputError, match="missing"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(InputError, match=r"no run\.json"):
        RunFolder.open(tmp_path)


def edited(run, **changes):
    record = json.loads((run.path / "run.json").read_text()) | changes
    (run.path / "run.json").write_text(json.dumps({k: v for k, v in record.items() if v != "REMOVED"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "upgrade thalweg"),
        ({"schema": "REMOVED"}, "no schema number"),
        ({"schema": True}, "no schema number"),
        ({"status": "finished"}, "unknown status"),
        ({"status": ["running"]}, "'status' is a list"),
        ({"config": "width=3"}, "'config' is a str"),
        (
            {"config": {"depth": "two"}},
            "'depth' of its config is 'two', which must be a whole number; restore the file",
        ),
        ({"config": {"width": 2.5}}, "'width' of its config is 2.5"),
        ({"notes": "REMOVED"}, "lacks 'notes'"),
        ({"result": None}, "'result' is a NoneType"),
    ],
)
def test_foreign_records_are_refused_in_one_line(run, changes, message):
    edited(run, **changes)
    with pytest.raises(InputError, match=message) as caught:
        RunFolder.open(run.path)
    assert "\n" not in str(caught.value) and "run.json" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b'{"schema": 1, "ki', CheckpointError),
        (b"\x89PNG\r\n\x1a\n", CheckpointError),
        (b"", CheckpointError),
        (b"[]", InputError),
        (b'"text"', InputError),
    ],
)
def test_broken_records_are_refused_in_one_line(run, content, error):
    (run.path / "run.json").write_bytes(content)
    with pytest.raises(error) as caught:
        RunFolder.open(run.path)
    assert "\n" not in str(caught.value) and "run.json" in str(caught.value)


@pytest.mark.parametrize(
    "line",
    ["{}", '{"step": 1}', '{"step": "1", "name": "a", "value": 1}', '{"step": null, "name": "a", "value": 1}', "x"],
)
def test_foreign_metrics_are_refused_by_line_number(run, line):
    run.log(0, "loss", 1.0)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2 .*: restore the file, or remove that line$") as caught:
        run.metrics()
    assert "'step'" not in str(caught.value)  # the text of a KeyError


def test_one_process_at_a_time(tmp_path):
    path = tmp_path / "run"
    with RunFolder.hold(path):
        RunFolder.create(path, {})  # a folder with nothing but the lock is empty
        with pytest.raises(InputError, match=r"in use by another process; wait for it") as caught, RunFolder.hold(path):
            pytest.fail("held twice")
        assert "\n" not in str(caught.value)
    with RunFolder.hold(path):
        assert RunFolder.is_run(path)


def test_the_lock_goes_with_a_killed_process(tmp_path):
    code = "import sys, time; from thalweg.records import RunFolder\nwith RunFolder.hold(sys.argv[1]): print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "run"], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(InputError, match="in use"), RunFolder.hold(tmp_path / "run"):
            pytest.fail("held twice")
        other.kill()
        other.wait()
        with RunFolder.hold(tmp_path / "run"):
            pass


@pytest.mark.parametrize(
    "error", [UnknownNameError("arm", "mgtt", ["mgt"], more="See list."), MissingExtraError("pandas", "data")]
)
def test_errors_survive_the_way_from_a_worker(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
