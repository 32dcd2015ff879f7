"""A small plan of edits, and records of it made up from what each arm is to cost."""

from plan_tables import put_over

from thalweg.studies.edits.observe import Found
from thalweg.studies.edits.plan import parse_edits
from thalweg.studies.edits.store import EditRecord, EditRow

TEXT = """
schema = 1
name = "p"
title = "Does the rest of an update cost more than its part along the stream?"
question = "By 0.1 nats/token?"
source = "own question"

[subject.own]
train = { data = "austen", depth = 2, width = 32, heads = 2, steps = 4, sequence_length = 32, batch_size = 4, threads = 1 }

[text]
characters = 500

[scale.small]
kind = "confirmatory"
documents = 20
tokens = 16

[scale.smoke]
kind = "demo"
documents = 3
tokens = 16
audit = 1

[arms.value]
edit = { site = "value" }
parallel = [0.0, 0.5]
perpendicular = [0.0]

[arms.again]
edit = { site = "value", parallel = 0.0 }
note = "the same edit in other words"

[arms.block]
edit = { site = "block", parallel = 0.0 }

[arms.alone]
edit = { site = "mlp", parallel = 0.0 }
each_layer = 7

[[hypotheses]]
id = "asymmetry"
statement = "the rest costs more"
measure = "loss_change"
contrast = { value-perp0 = 1, value-par0 = -1 }
direction = "greater"
margin = 0.1
expected = 0.5
sd = 0.2
sd_source = "guess"
unit = "nats/token"

[[hypotheses]]
id = "strength"
statement = "layers whose edit is stronger cost more"
measure = "loss_change"
against = "applied"
contrast = { alone = 1 }
direction = "greater"
margin = 0.0
expected = 0.5
sd = 1.0
sd_source = "not simulated"
primary = false
"""


def table(**over):
    """The plan as tables; ``over``: dotted path with __ for a dot -> value."""
    return put_over(TEXT, over)


def plan(**over):
    return parse_edits(table(**over))


def row(arm, nats, layers=None, drift=None):
    role = "no-op" if arm.noop else "edited"
    return EditRow(arm.identity, arm.options.plain(), role, {"nats": nats}, layers or {}, drift, seconds=2.0)


def found(made, costs, documents=20, growth=None, layers=None):
    """Records in which an arm costs what ``costs`` says in nats/token (0 where it says nothing), with some spread over documents.

    growth: arm -> how much more it costs in the last bucket than in the first. layers: arm -> its numbers by layer.
    """
    tokens = [[4, 4, 4, 4]] * documents
    unedited = EditRow(
        "unedited", {}, "unedited", {"nats": [[12.0] * 4] * documents}, {"self_share": [0.1 * i for i in range(7)]}
    )
    record = EditRecord(
        "f" * 64, {"model": "m", "dtype": "float32"}, {"source": "s", "rule": "r", "sha256": "e" * 64, "documents": documents, "tokens": 16},
        {"kind": "likelihood"}, {"tokens": tokens, "parameters": 90_784, "backend": "sdpa", "weights": "a" * 64, "notes": []},
        {"torch": "2"}, {"cpu": "x"}, {"unedited": unedited},
    )  # fmt: skip
    alone = [name for name in made.edits if made.edits[name].alone is not None]
    layers = layers or {name: {"applied": [0.1 * (i * 3 % 7)] * 7, "drift": [0.1] * 7} for i, name in enumerate(alone)}
    costs = {**{name: 0.01 * (i % 4) for i, name in enumerate(alone)}, **costs}
    every = {}
    for arm in made.edits.values():
        cost, more = costs.get(arm.name, 0.0), (growth or {}).get(arm.name, 0.0)
        nats = [
            [3 * 4 + 4 * (cost * (1 + 0.05 * (d % 3 - 1)) + more * b / 3) for b in range(4)] for d in range(documents)
        ]
        every[arm.name] = row(arm, nats, layers.get(arm.name), 0.0 if arm.noop else None)
    noops = {arm.family: every[arm.name] for arm in made.edits.values() if arm.noop}
    return {name: Found(r, noops[made.edits[name].family], unedited, record) for name, r in every.items()}
