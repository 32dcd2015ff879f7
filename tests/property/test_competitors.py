"""One writer for a run folder, also where the writer is the first of several ranks under torchrun."""

import os
import subprocess
import sys
import time

import pytest

from thalweg.errors import InputError
from thalweg.records import RunFolder
from thalweg.training import TrainConfig, train

MODEL = {"depth": 1, "width": 16, "heads": 2, "data": "copy", "sequence_length": 32, "batch_size": 4, "threads": 1}
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
TORCHRUN += ["--rdzv-endpoint", "localhost:0", "-m", "thalweg", "train", "--geometry", "false", "--quiet"]


def torchrun(folder, **changes):
    values = {**MODEL, **changes}
    flags = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return subprocess.Popen(
        [sys.executable, *TORCHRUN, *flags, "-o", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_ranks_that_come_second_fail_with_one_line_and_write_nothing(tmp_path):
    folder = tmp_path / "run"
    with RunFolder.hold(folder):
        process = torchrun(folder, steps=2)
        _, errors = process.communicate(timeout=200)
    assert process.returncode != 0
    said = [line for line in errors.splitlines() if line.startswith("error: ")]  # the rest is torchrun's own account
    assert set(said) == {f"error: {folder} is in use by another process; wait for it or choose another folder"}
    assert "thalweg/" not in errors.replace(str(folder), "")  # no frame of ours in a traceback
    assert [path.name for path in folder.iterdir()] == [".lock"]


@pytest.mark.slow
def test_a_process_that_comes_second_to_ranks_fails_with_one_line(tmp_path):
    folder = tmp_path / "run"
    process = torchrun(folder, steps=100_000)
    try:
        until = time.monotonic() + 200
        while not RunFolder.is_run(folder) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
        assert process.poll() is None, process.communicate()[1]
        for resume in (False, True):
            with pytest.raises(InputError, match="in use by another process") as caught:
                train(TrainConfig(**MODEL, steps=100_000, geometry=False), folder, resume=resume)
            assert "\n" not in str(caught.value)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    with RunFolder.hold(folder):
        assert RunFolder.open(folder).status == "interrupted"
