"""Runs of a study side by side: how many are started, and what an interrupt or a killed worker leaves."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from thalweg.errors import ExitCode, InputError, ThalwegError
from thalweg.studies import runner
from thalweg.training.signals import Interrupted


def pretend(config, folder):
    """Stands for a training run, in a worker: leaves a file, and dies or lasts as its configuration says."""
    Path(folder).touch()
    if config == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05 if config == "short" else 60)


@pytest.fixture
def execute(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_train", pretend)
    monkeypatch.setattr(runner, "folder_of", lambda study, job: tmp_path / job.arm)
    monkeypatch.setattr(runner, "_keep", lambda study, job: "done")

    def run(*kinds):
        batch = [SimpleNamespace(arm=f"{i}", config=kind) for i, kind in enumerate(kinds)]
        return [job.arm for job, _ in runner._execute(None, batch, 2, None)]

    return run


def started(folder):
    return sorted(path.name for path in folder.iterdir())


def test_all_jobs_run(execute, tmp_path):
    assert sorted(execute("short", "short", "short")) == started(tmp_path) == ["0", "1", "2"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupt_starts_nothing_new_and_ends_the_workers(execute, tmp_path, number):
    def kick():
        while len(started(tmp_path)) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=kick, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        execute("long", "long", "long", "long")
    assert time.monotonic() - began < 50 and started(tmp_path) == ["0", "1"]


def test_an_interrupted_run_says_how_the_study_goes_on(execute, monkeypatch):
    def interrupted(config, folder, on_event):
        raise Interrupted("interrupted after step 1 of 2; saved, go on with: thalweg train --resume here")

    monkeypatch.setattr(runner, "_train", interrupted)
    job = SimpleNamespace(arm="0", name="0 seed 1", config="short")
    with pytest.raises(ThalwegError) as caught:
        list(runner._execute(None, [job], 1, None))
    assert str(caught.value) == "interrupted in 0 seed 1; finished runs are kept, the same command goes on"
    assert caught.value.exit_code == ExitCode.INTERRUPTED


def test_a_killed_worker_is_one_line(execute):
    with pytest.raises(InputError, match=r"^a worker was killed .*the same command goes on$"):
        execute("short", "die", "long")
