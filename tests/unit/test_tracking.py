"""Trackers show what the loop says, and nothing depends on them."""

import sys
import types

import pytest

from thalweg import tracking
from thalweg.errors import MissingExtraError, UnknownNameError
from thalweg.tracking.base import Tracker, Trackers
from thalweg.training.events import Event

STORY = [
    Event("start", 0, 2, text="hello"),
    Event("evaluation", 0, 2, {"val/loss": 3.0}),
    Event("step", 1, 2, {"train/loss": 2.5, "gradient/norm": 0.5}),
    Event("step", 2, 2, {"train/loss": 2.0}),
    Event("end", 2, 2, text="done"),
]
NUMBERS = [(0, {"val/loss": 3.0}), (1, {"train/loss": 2.5, "gradient/norm": 0.5}), (2, {"train/loss": 2.0})]


class Recorder(Tracker):
    def __init__(self):
        self.seen, self.closed = [], 0

    def log(self, step, values):
        self.seen.append((step, dict(values)))

    def close(self):
        self.closed += 1


def tell(listener):
    for event in STORY:
        listener(event)


def test_names():
    assert tracking.names() == ["tensorboard", "trackio", "wandb"]
    assert all(entry.summary and entry.source for entry in tracking.registry.entries())


def test_several_trackers_hear_the_same_and_are_closed_once():
    members = [Recorder(), Recorder()]
    with Trackers(members) as trackers:
        tell(trackers)
        trackers(Event("step", 3, 3, {"late": 1.0}))  # after the end: nobody listens any more
    for member in members:
        assert member.seen == NUMBERS and member.closed == 1


def test_tensorboard_files_hold_the_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tell(tracking.create(["tensorboard"], run=tmp_path, config={"depth": 2}))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.5), (2, 2.0)]
    assert [(e.step, e.value) for e in events.Scalars("val/loss")] == [(0, 3.0)]


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_the_others_get_the_same_calls(tmp_path, monkeypatch, name):
    """A stand-in of the module records the calls; both tools share wandb's interface."""
    calls = []
    fake = types.ModuleType(name)
    handle = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
    )
    fake.log, fake.finish = handle.log, handle.finish

    def init(**options):
        calls.append(options)
        return handle

    fake.init = init
    monkeypatch.setitem(sys.modules, name, fake)
    tell(tracking.create([name], run=tmp_path / "mgt-d2-s0", config={"depth": 2}, project="mine"))
    assert calls[0]["project"] == "mine" and calls[0]["name"] == "mgt-d2-s0" and calls[0]["config"] == {"depth": 2}
    assert calls[1:] == [*NUMBERS, "finish"]


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("tensorboard", "tensorboard", "track"), ("trackio", "trackio", "track"), ("wandb", "wandb", "wandb")],
)
def test_a_missing_package_says_how_to_install_it(tmp_path, monkeypatch, name, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"{module} is not installed; run: pip install 'thalweg\[{extra}\]'"):
        tracking.create([name], run=tmp_path, config={})


def test_an_unknown_tracker_is_named(tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'wandb'"):
        tracking.create(["wandbb"], run=tmp_path, config={})
