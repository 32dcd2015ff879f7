"""What a run saved beside its weights, edited: keys that are missing, unknown or of another type are refused, one clear line each."""

import hashlib
import shutil

import numpy as np
import pytest
import torch

from thalweg.data.task import Task, as_batch
from thalweg.errors import CheckpointError
from thalweg.training import TrainConfig, checkpoint, train


class Counting(Task):
    name, kind, vocab_size, fingerprint = "counting", "synthetic", 11, "counting-11"

    def nulls(self):
        return {}

    def _order(self, split, length, seed):
        return lambda samples: as_batch((np.arange(samples.start, samples.stop)[:, None] + np.arange(length)) % 11)

    def _held_out(self, split, length):
        return 4, lambda chosen: as_batch((chosen[:, None] + np.arange(length)) % 11)


def go(folder, resume=False, stop=None, optimizer="adamw"):
    values = {"depth": 1, "width": 8, "heads": 2, "sequence_length": 8, "batch_size": 4, "steps": 3, "eval_every": 1}
    config = TrainConfig(**values, threads=1, geometry=False, optimizer=optimizer)
    return train(config, folder, task=Counting(), resume=resume, stop=stop)


@pytest.fixture(scope="module", params=["adamw", "muon"])
def stopped(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "run"
    go(folder, stop=lambda: True, optimizer=request.param)
    return request.param, folder


@pytest.fixture
def edited(stopped, tmp_path):
    """Copy the run, edit the state of its last checkpoint, sign it anew, and give what resuming raises."""
    kind, whole = stopped

    def resume(edit):
        folder = shutil.copytree(whole, tmp_path / "run")
        path = checkpoint.find(folder / "checkpoints")
        state = torch.load(path / checkpoint.STATE, weights_only=True)
        edit(state)
        torch.save(state, path / checkpoint.STATE)
        digest = hashlib.sha256((path / checkpoint.STATE).read_bytes()).hexdigest()
        sums = [line.split("  ") for line in (path / checkpoint.SUMS).read_text().splitlines()]
        lines = [f"{digest if name == checkpoint.STATE else old}  {name}\n" for old, name in sums]
        (path / checkpoint.SUMS).write_text("".join(lines))
        return go(folder, resume=True, optimizer=kind)

    return resume


def test_an_edit_that_changes_nothing_resumes(edited):
    assert edited(lambda state: None).status == "done"


TOP = ["optimizers", "sampler", "random", "rule", "meter", "best", "train_loss", "evaluation"]


def drop(*path):
    def edit(state):
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return edit


def put(value, *path):
    def edit(state):
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        *[(drop(name), rf"state\.pt lacks {name}; use another checkpoint") for name in TOP],
        *[(put("x", name), rf"state\.pt {name} must be .*, got str; use another") for name in TOP],
        (put(1, "more"), r"state\.pt has unknown more; use another"),
        (put(True, "train_loss"), "train_loss must be int or float or None, got bool"),
        (drop("rule", "above"), r"state\.pt: rule lacks above"),
        (put("1", "rule", "first_loss"), "rule first_loss must be int or float or None, got str"),
        (put(1.5, "rule", "above"), "rule above must be int, got float"),
        (put(0, "meter", "more"), r"meter has unknown more"),
        (put(None, "meter", "seconds"), "meter seconds must be int or float, got NoneType|meter seconds must be .*None"),
        (put([1.0], "best"), r"best lacks loss, step"),
        (put([1.0, "2"], "best"), "best step must be int or None, got str"),
        (put([], "evaluation", "val/loss"), "evaluation val/loss must be int or float, got list"),
        (put([], "random"), "random must hold one table for each rank"),
        (put([3], "random"), "random must hold one table for each rank"),
        (drop("random", 0, "cpu"), r"state\.pt lacks 'cpu'"),
        (put(torch.zeros(3), "random", 0, "cpu"), r"state\.pt cannot be used"),
        (drop("sampler", "samples"), "samples=None, which is no count"),
        (put(-1, "sampler", "samples"), "samples=-1, which is no count"),
        (drop("optimizers", "adamw"), "resume with the configuration of its run"),
        (put({}, "optimizers", "sgd"), "resume with the configuration of its run"),
        (drop("optimizers", "adamw", "state"), r"state\.pt lacks 'state'"),
        (drop("optimizers", "adamw", "param_groups"), r"state\.pt lacks 'param_groups'"),
        (put([], "optimizers", "adamw", "param_groups"), "state of other adamw groups"),
        (put([[]], "optimizers", "adamw", "param_groups"), r"state\.pt cannot be used"),
        (put({}, "optimizers", "adamw", "state", 999), "an entry for parameter 999 of"),
        (drop("optimizers", "adamw", "state", 0, "exp_avg"), "keeps exp_avg_sq, step of parameter 0 in place of exp_avg"),
        (put(0, "optimizers", "adamw", "state", 0, "more"), "keeps exp_avg, exp_avg_sq, more, step of parameter 0"),
        (put(torch.zeros(7), "optimizers", "adamw", "state", 0, "exp_avg"), r"exp_avg of parameter 0 with \(7,\) in place"),
        (put("x", "optimizers", "adamw", "state", 0, "step"), "step of parameter 0 with str in place of a tensor"),
        (put(3, "optimizers", "adamw", "state", 0), r"state\.pt cannot be used|keeps"),
    ],
)  # fmt: skip
def test_an_edited_state_is_refused_in_one_line(edited, edit, says):
    with pytest.raises(CheckpointError, match=says) as caught:
        edited(edit)
    assert "\n" not in str(caught.value)
    assert checkpoint.STATE in str(caught.value) or "sampler state" in str(caught.value)


@pytest.mark.parametrize("stopped", ["muon"], indirect=True)
def test_what_muon_keeps_is_checked_too(edited):
    with pytest.raises(CheckpointError, match="muon keeps nothing of parameter 0 in place of momentum_buffer"):
        edited(drop("optimizers", "muon", "state", 0, "momentum_buffer"))
