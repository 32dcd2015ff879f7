"""A small plan of compressions, and records of it made up from what each arm is to cost and where its errors lie."""

from plan_tables import put_over

from thalweg.studies.compressed.plan import ERRORS, parse_compressions
from thalweg.studies.edits.observe import Found
from thalweg.studies.edits.store import EditRecord, EditRow

TEXT = """
schema = 1
name = "p"
kind = "compression"
title = "Which number foretells the damage?"
question = "Is it the part across?"
source = "own question"

[subject.own]
train = { data = "austen", depth = 3, width = 32, heads = 2, steps = 4, sequence_length = 32, batch_size = 4, threads = 1 }

[text]
characters = 300

[scale.small]
kind = "confirmatory"
documents = 20
tokens = 16

[scale.smoke]
kind = "demo"
documents = 4
tokens = 16
calibration = 2
kl_documents = 1

[arms.rtn]
method = "round_to_nearest"
options = { group = 8 }
vary = { bits = [8, 4, 3, 2] }

[arms.prune]
method = "magnitude"
vary = { sparsity = [0.3, 0.5] }

[arms.alone]
method = "round_to_nearest"
options = { bits = 3, group = 8 }
each_layer = 3

[arms.kept]
method = "round_to_nearest"
options = { bits = 3, group = 8 }
protect = { by = "perpendicular", of = "rtn-3", count = 1 }

[arms.kept_chance]
method = "round_to_nearest"
options = { bits = 3, group = 8 }
protect = { by = "chance", of = "rtn-3", count = 1 }

[[hypotheses]]
id = "order"
statement = "the part across orders compressions better than chance"
measure = "rank"
subject = "own"
contrast = { perpendicular = 1, chance = -1 }
direction = "greater"
margin = 0.1
expected = 0.5
sd = 0.3
sd_source = "guess"
unit = "Spearman"

[[hypotheses]]
id = "protect"
statement = "protected layers help"
measure = "loss_change"
contrast = { "own.kept" = 1, "own.kept_chance" = -1 }
direction = "less"
margin = 0.0
expected = -0.1
sd = 0.1
sd_source = "guess"
unit = "nats/token"
primary = false

[[hypotheses]]
id = "with"
statement = "the part across goes with the total error more than that of a random error does"
measure = "correlation"
arm = "own.rtn-3"
contrast = { perpendicular = 1, null = -1 }
direction = "greater"
margin = 0.0
expected = 0.1
sd = 0.1
sd_source = "guess"
primary = false

[[hypotheses]]
id = "size"
statement = "three bits turn updates more than four"
measure = "error"
part = "perpendicular"
branch = "attention"
contrast = { "own.rtn-3" = 1, "own.rtn-4" = -1 }
direction = "greater"
margin = 0.0
expected = 0.1
sd = 0.1
sd_source = "guess"
primary = false
"""
DEPTH = 7


def table(**over):
    """The plan as tables; ``over``: dotted path with __ for a dot -> value."""
    return put_over(TEXT, over)


def plan(**over):
    return parse_compressions(table(**over))


def found(made, costs, errors=None, documents=20):
    """Records in which an arm costs what ``costs`` says in nats/token, with some spread over documents.

    errors: arm -> {column: [layers]}; what is not said is the index of the arm, so that errors order arms as the file does.
    """
    unedited = EditRow("unedited", {}, "unedited", {"nats": [[48.0]] * documents, "correct": [[1.0]] * documents})
    record = EditRecord(
        "f" * 64, {"model": "m", "dtype": "float32"}, {"source": "s", "rule": "r", "sha256": "e" * 64, "documents": documents, "tokens": 16},
        {"kind": "compression"}, {"tokens": [[16]] * documents, "parameters": 90_784, "backend": "sdpa", "weights": "a" * 64, "notes": []},
        {"torch": "2"}, {"cpu": "x"}, {"unedited": unedited},
    )  # fmt: skip
    rows = {}
    for i, arm in enumerate(made.edits.values()):
        cost = costs.get(arm.name, 0.0)
        nats = [[48.0 + 16 * cost * (1 + 0.05 * (d % 3 - 1))] for d in range(documents)]
        columns = {"nats": nats, "kl": [[abs(cost)]] * documents, "correct": [[1.0 - (cost > 0)]] * documents}
        own = (errors or {}).get(arm.name, {})
        for branch in ("attention", "mlp", "block"):
            for name in (*ERRORS, "null"):
                layers = own.get(f"{branch}.{name}", [0.01 * i * (1 + k) for k in range(DEPTH)])
                columns[f"{branch}.{name}"] = [[v * (1 + 0.01 * (d % 2)) for v in layers] for d in range(documents)]
        layers = {"weights": [0.01 * i] * DEPTH, "kl": [0.001 * i] * DEPTH, "bits": [4.5] * DEPTH}
        role = "no-op" if arm.noop else "edited"
        rows[arm.name] = EditRow(arm.identity, arm.plain(), role, columns, layers, 0.0 if arm.noop else None, 2.0)
    return {name: Found(row, rows[made.noop_of(name)], unedited, record) for name, row in rows.items()}
