"""A made-up experiment that gives what its options say, a small plan of it, and plans with values put over."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
from plan_tables import put_over

from thalweg.errors import InputError
from thalweg.records import Measurements
from thalweg.studies.experiments.base import DivergedError, register, registry
from thalweg.studies.plan import parse

TEXT = """
schema = 1
kind = "experiment"
name = "p"
title = "Is it large?"
question = "Larger than a half?"
source = "own question"

[experiments.one]
experiment = "made_up"
options = { level = 1.0 }

[experiments.two]
experiment = "made_up"
options = { level = 0.2 }

[scale.small]
kind = "confirmatory"
seeds = [0, 1, 2, 3, 4, 5]

[scale.few]
kind = "confirmatory"
seeds = [0, 1, 2]
experiments = ["one"]
options = { one = { level = 3.0 } }

[scale.look]
kind = "exploratory"
seeds = [0, 1, 2, 3, 4, 5]

[scale.smoke]
kind = "demo"
seeds = [0, 1]

[[hypotheses]]
id = "large"
statement = "one is larger than a half"
measure = "made.value"
contrast = { "one.plain" = 1 }
direction = "greater"
margin = 0.5
expected = 1.0
sd = 0.1
sd_source = "guess"

[[hypotheses]]
id = "pair"
statement = "one is larger than two by a half"
measure = "made.value"
contrast = { "one.plain" = 1, "two.plain" = -1 }
direction = "greater"
margin = 0.5
expected = 0.8
sd = 0.1
sd_source = "guess"

[[hypotheses]]
id = "null"
statement = "the several rows of one are above their null on average"
measure = "made.many"
contrast = { "one.turned" = 1 }
at = "mean"
against = "null"
direction = "greater"
margin = 0.0
primary = false

[[hypotheses]]
id = "sure"
statement = "zero is zero"
measure = "made.zero"
contrast = { "one.plain" = 1 }
direction = "less"
margin = 1e-9
identity = true
primary = false
"""


@dataclass(frozen=True)
class MadeUpOptions:
    level: float = 0.0
    noise: float = 0.01
    fail: str = ""
    learned: bool = True
    leave_out: bool = False
    fails_at: tuple[int, ...] = ()
    diverges_at: tuple[int, ...] = ()
    train: dict[str, Any] | None = None


def made_up(options, seed, progress):
    if seed in options.diverges_at:
        raise DivergedError(f"the model diverged at seed {seed}")
    if options.fail and (not options.fails_at or seed in options.fails_at):
        raise InputError(options.fail)
    progress(f"seed {seed}")
    wobble = options.noise * math.sin(7 * seed + 1)
    rows = Measurements()
    rows.add("made.value", options.level + wobble, arm="plain", null=0.0)
    rows.add("made.zero", 0.0, arm="plain")
    for i in range(0 if options.leave_out else 3):
        rows.add("made.many", options.level + wobble + i, arm="turned", step=i, null=1.0)
    if not options.learned:
        rows.add("has_learned", 0.0, arm="plain", null_kind="loss too high")
    return rows


@pytest.fixture(scope="module", autouse=True)
def known():
    """The made-up experiment is registered while a module of tests runs."""
    registry.names()
    columns = {"made.value": ("plain",), "made.many": ("turned",), "made.zero": ("plain",)}
    register("made_up", options=MadeUpOptions, columns=columns, summary="made up", source="tests")(made_up)
    yield
    registry._entries.pop("made_up")
    registry._aliases.pop("made_up", None)


def plan(**over):
    return parse(put_over(TEXT, over))
