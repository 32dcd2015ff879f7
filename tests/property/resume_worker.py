"""Helper of test_resume: trains in forked children that are killed. Usage: resume_worker.py FOLDER SEED."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from thalweg import data
from thalweg.training import TrainConfig, checkpoint, train
from thalweg.training import start as _start  # noqa: F401  imported before the forks

DATA = "copy:vocab=8,half=5"
CONFIG = TrainConfig(
    connection="mgt",
    depth=2,
    width=16,
    heads=2,
    data=DATA,
    sequence_length=11,
    batch_size=8,
    accumulation=2,
    steps=30,
    optimizer="muon",
    lr=1e-2,
    eval_every=10,
    save_every=5,
    eval_batches=1,
    threads=1,
    geometry=False,
)


def in_child(action, *, killed_at: int | None = None, killed_after: float | None = None) -> bool:
    """Run ``action`` in a forked process; whether it ended by itself. killed_at: at that many touches of files in checkpoint folders."""
    pid = os.fork()
    if pid == 0:
        if killed_at is not None:
            die_at(killed_at)
        try:
            action()
        except BaseException as error:
            print(f"child failed: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if killed_after is not None:
        time.sleep(killed_after)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return False
    assert os.WEXITSTATUS(status) == 0, "the child failed by itself"
    return True


def die_at(count: int) -> None:
    """Kill this process at its ``count``-th file operation inside a checkpoint folder: just before it happens."""
    seen = 0

    def hook(event, args):
        nonlocal seen
        if event.partition(".")[0] in ("open", "os", "shutil", "pathlib") and any(
            "checkpoints" in str(a) for a in args
        ):
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed_again_and_again(folder: Path, rng: random.Random) -> int:
    """Train to the end through kills, every second of them inside a save; the number of kills."""
    kills = 0
    while True:
        action = lambda: train(CONFIG, folder, resume=(folder / "run.json").exists())  # noqa: E731
        how = {"killed_at": rng.randrange(1, 60)} if kills % 2 else {"killed_after": rng.uniform(0.1, 0.6)}
        if in_child(action, **(how if kills < 6 else {})):
            return kills
        kills += 1


def killed_everywhere_in_a_save(folder: Path) -> int:
    """Kill a save before each of its file operations in turn; after each the newest checkpoint must read whole. How many there were."""
    folder = folder / "checkpoints"
    weights = {"w": torch.arange(6.0)}

    def save(step):
        checkpoint.save(folder, step, weights=weights, state={"step": step}, manifest={"best_step": 1})

    for step in (1, 2, 3):
        save(step)
    for count in range(1, 200):
        step = 3 + count
        finished = in_child(lambda step=step: save(step), killed_at=count)
        newest = checkpoint.read(checkpoint.find(folder))
        assert newest.step in ({step} if finished else {step - 1, step, max(checkpoint.list_steps(folder))}), (
            newest.step,
            step,
        )
        assert torch.equal(newest.weights()["w"], weights["w"]) and newest.state() == {"step": newest.step}
        checkpoint.read(checkpoint.find(folder, "best"))
        if finished:
            return count - 1
    raise AssertionError("the save never ended")


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    data.load(DATA)
    assert in_child(lambda: train(CONFIG, folder / "whole"))
    kills = killed_again_and_again(folder / "killed", random.Random(seed))
    places = killed_everywhere_in_a_save(folder / "save")
    print(kills, places)


if __name__ == "__main__":
    main()
