"""A small plan of trained arms, and studies of it whose records are planted, so that nothing is trained."""

import dataclasses

from thalweg import config, studies
from thalweg.studies import store
from thalweg.studies.resolve import fingerprint

JUDGED = """direction = "less"
margin = -0.02
expected = -0.06
sd = 0.015
sd_source = "guess"
"""
TEXT = (
    """
schema = 1
name = "p"
title = "Is it lower?"
question = "Lower by 0.02?"
source = "own question"

[train]
data = "text:novel.txt"
depth = 1
width = 32
steps = 10

[scale.small]
kind = "confirmatory"
seeds = [0, 1, 2, 3, 4]
learning_rates = [1e-3, 2e-3, 4e-3]
tuning_seed = 1000

[scale.look]
kind = "exploratory"
seeds = [0, 1, 2, 3, 4]
learning_rates = [1e-3, 2e-3, 4e-3]
tuning_seed = 1000

[arms.mgt]
connection = "mgt"
options = { preset = "residual" }

[arms.additive]
connection = "additive"

[[hypotheses]]
id = "H1"
statement = "lower"
measure = "val/loss"
contrast = { mgt = 1, additive = -1 }
"""
    + JUDGED
)
LOSSES = {"mgt": 2.9, "additive": 3.0}


def study(folder, text=TEXT, scale="small", **where):
    """The study of a plan written to ``folder``."""
    path = folder / "p.toml"
    path.write_text(text)
    return studies.study(path, scale, **where)


def locked(folder, monkeypatch, text=TEXT, scale="small"):
    """The same, locked; the model of no arm is made, since that would open the data."""
    made = study(folder, text, scale)
    monkeypatch.setattr(type(made), "require_runnable", lambda self: None)
    studies.lock(made)
    return made


def record(run, loss, *, data="a" * 64, **over):
    """What a run left. data: the fingerprint of what it was trained on."""
    made = store.RunRecord(
        fingerprint(run),
        config.to_plain(run),
        run.seed,
        "done",
        {"data": {"name": run.data, "fingerprint": data}},
        {"val/loss": [(0, 7.0), (10, loss)]},
        store.Measurements(),
        {"val/loss": "nats/token"},
    )
    return dataclasses.replace(made, **over)


def keep(made, run, found):
    store.write(made.store.path(fingerprint(run), run.connection, run.seed), found)


def plant(made, **changed):
    """Records of every run; the middle rate is the best. changed: name of a job with _ for spaces -> fields of its record."""
    while jobs := made.missing():
        for job in jobs:
            loss = LOSSES[job.arm] + 0.001 * (job.config.seed % 3) + abs(job.config.lr - 2e-3)
            keep(made, job.config, record(job.config, loss, **changed.get(job.name.replace(" ", "_"), {})))
