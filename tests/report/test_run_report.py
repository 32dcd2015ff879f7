"""The report of one run, in every state a run can be in, and the command that writes it."""

import json
import math
import re

import pytest
from pages import COST, NULLS, figure_of, read, rows

from thalweg.cli import main
from thalweg.records.measurements import Measurement
from thalweg.records.run import RunFolder
from thalweg.reports import write_run_report
from thalweg.reports.runs import write_runs_report
from thalweg.training.evaluation import unit_of

SECTIONS = [
    "1. Quality",
    "2. Cost",
    "3. Geometry of the stream by depth",
    "4. Diagnostics: did it move?",
    "5. Notes and deviations",
    "6. How to reproduce",
    "7. Provenance",
    "8. Citations",
]
CONFIG = {
    "connection": "mgt",
    "depth": 2,
    "width": 32,
    "seed": 3,
    "data": "austen",
    "connection_options": {"preset": "residual"},
}
HOSTILE = "</pre></style><script>alert('x')</script> & \"q\""


def folder(path, *, config=None, measures=True):
    run = RunFolder.create(path, {**CONFIG, **(config or {})}, seed=3)
    for step, loss in ((0, 7.6), (10, 6.9), (20, 6.5)):
        run.log(step, "val/loss", loss, "nats/token")
        run.log(step, "train/loss", loss + 0.1, "nats/token")
        run.log(step, "moved/connection", 0.01 * step)
    if measures:
        run.add_measures(rows(["effective_rank", "gate.open"], 2, steps=(0, 20)))
        run.add_measures([Measurement("stability.spikes", 0.125, step=20, n=16)])
    return run


def finished(path, status="done", **kw):
    run = folder(path, **kw)
    result = {"final_loss": 6.5 if status == "done" else None, "step": 20, "steps": 40, "nulls": NULLS, "cost": COST}
    run.finish(status, {**result, "reason": "" if status == "done" else "loss is NaN"})
    return run


def page(run, tmp_path, **kw):
    return read(write_run_report(run, tmp_path / "run.html", **kw))


def test_order_and_content(tmp_path):
    run = finished(tmp_path / "run")
    run.note("resumed, not bitwise")
    found = page(run, tmp_path, citations=["@article{one}"], deviations=["mgt leaves its source: x"])
    assert [h for h in found.headings if h[:1].isdigit()] == SECTIONS
    assert found.headings[0] == "mgt, 2 layers, seed 3"
    for text in (
        "done: validation loss 6.5 nats/token after 20 steps. Has not learned: loss 6.500 is not below the unigram entropy",
        "null: unigram entropy 6 nats/token",
        "null: xz 2.4 bits/byte",
        "90.8 k",
        "441 MB",
        "resumed, not bitwise",
        "mgt leaves its source: x",
        'connection = "mgt"',
        "@article{one}",
        "0.125",
        "At step 20; 1 seed; n = 16 sequences each (valid). Dotted: step 0.",
    ):
        assert text in found.said, text
    assert [title for title, *_ in found.figures()] == [
        "Validation loss",
        "Training loss",
        "Normalised effective rank",
        "Gates that are open",
    ]


def test_what_no_heading_explains_is_explained(tmp_path):
    said = page(finished(tmp_path / "run"), tmp_path).said
    assert "spikes: share of steps whose training loss is above" in said.replace("Spikes", "spikes")
    assert "peak memory (on a CPU of the whole process with its libraries, on a GPU of tensors)" in said
    assert "xz: what this general compressor needs for the same text" in said
    assert "One run each: no spread over seeds is known" in said and "standard deviation over seeds" not in said


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("diverged", "loss is NaN (step 20 of 40)."),
        ("interrupted", "loss is NaN (step 20 of 40)."),
        ("failed", "loss is NaN"),
    ],
)
def test_other_ends(tmp_path, status, says):
    found = page(finished(tmp_path / "run", status), tmp_path)
    assert f"{status}: {says}" in found.said
    assert f'class="verdict {status}"' in found.text
    assert "Normalised effective rank" in found.said  # a diverged run shows what it measured


def test_a_run_that_goes_on_and_one_that_has_nothing(tmp_path):
    assert "running: it has not ended; the last step logged is 20." in page(folder(tmp_path / "a"), tmp_path).said
    found = page(RunFolder.create(tmp_path / "b", {}), tmp_path)
    assert "running: it has not ended." in found.said
    assert "No geometry was measured." in found.said
    assert not found.figures()


def test_values_that_are_not_finite(tmp_path):
    run = folder(tmp_path / "run", measures=False)
    for step, value in ((30, math.nan), (40, math.inf)):
        run.log(step, "val/loss", value, "nats/token")
    run.finish("diverged", {"step": 40, "steps": 50, "nulls": {"uniform": math.nan}, "cost": {"parameters": math.inf}})
    found = page(run, tmp_path)
    assert "2 of the values not finite" in found.said
    assert "no reason recorded (step 40 of 50)" in found.said


def test_hostile_content_never_becomes_markup(tmp_path):
    run = folder(tmp_path / "run", config={"connection": HOSTILE, "depth": HOSTILE})
    run.log(20, f"val/{HOSTILE}", 1.0, HOSTILE)
    run.log(20, f"moved/{HOSTILE}", 1.0, HOSTILE)
    run.add_measures([Measurement(HOSTILE, 1.0, layer=0, unit=HOSTILE, null=0.0, null_kind=HOSTILE, step=20)])
    run.note(HOSTILE)
    run.finish(
        "failed",
        {
            "reason": HOSTILE,
            "cost": {HOSTILE: 1.0},
            "nulls": {HOSTILE: 1.0},
            "data": {"name": HOSTILE, "notes": [HOSTILE]},
        },
    )
    found = page(run, tmp_path, citations=[HOSTILE])
    assert found.said.count("alert(") > 10


def test_the_same_run_gives_the_same_bytes(tmp_path):
    run = finished(tmp_path / "run")
    first = write_run_report(run, tmp_path / "a.html").read_bytes()
    assert write_run_report(RunFolder.open(run.path), tmp_path / "b.html").read_bytes() == first


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    finished(tmp_path / "run")
    assert main(["report", "run", "-o", "r.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": "r.html", "bytes": (tmp_path / "r.html").stat().st_size}
    assert "@article{su2026geometric" in read(tmp_path / "r.html").said
    assert main(["report", "run", "-o", "r.html", "--overwrite"]) == 0
    assert capsys.readouterr().out == "r.html\n"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["missing.toml"], "no such plan: missing.toml"),
        (["missing"], "unknown run folder or plan"),
        (["empty"], "is no run folder: it has no run.json"),
        (["foreign"], "is no run record of thalweg"),
        (["broken"], "broken/run.json"),
        (["notes.txt"], "notes.txt"),
        (["run"], "report.html exists; choose another name or say --overwrite"),
        (["run", "-o", "notes.txt/x.html"], "cannot be written"),
        (["run", "-o", "empty", "--overwrite"], "empty is a folder; name a file in it"),
        (["run", "-o", "x.html", "--scale", "small"], "--scale belongs to a plan, but run is a folder"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, capsys, args, says):
    monkeypatch.chdir(tmp_path)
    finished(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    for name, text in (("foreign", '{"schema": 1, "name": "x"}'), ("broken", '{"schema": 1, "na')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    (tmp_path / "notes.txt").write_text("these are = no [plan")
    if args == ["run"]:
        (tmp_path / "report.html").write_text("mine")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert main(["report", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: [^\n]+\n", err)
    assert says in err
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_sizes_of_the_stream_say_which_state_and_which_unit(tmp_path):
    run = folder(tmp_path / "run", measures=False)
    for layer, site in enumerate(("layers.0.attention", "layers.1.attention", "stream.end")):
        run.add_measures([Measurement("rms", 1.0 + layer, unit="stream units", layer=layer, site=site, step=20)])
    run.add_measures([Measurement("stream_rms", 2.0 + layer, layer=layer, step=20) for layer in range(2)])
    run.add_measures([Measurement("gate.open", 0.5, layer=0, site=s, step=20) for s in ("l.0.attention", "l.0.mlp")])
    found = page(run, tmp_path)
    enters, leaves = figure_of(found, "Size of the stream"), figure_of(found, "Size of the stream in training")
    assert "layer that the state enters, from 0 (last place: after the last layer)</text>" in enters
    assert "layer that the state leaves, from 0</text>" in leaves
    assert "one place further right" in leaves
    assert "stream units</text>" in enters
    assert "stream units</text>" in leaves
    assert "layer, from 0 (mean over its sublayers)</text>" in figure_of(found, "Gates that are open")


def test_a_share_is_no_loss(tmp_path):
    """Nulls of a synthetic task stand in their own unit, beside the metric that they are the null of."""
    nulls = {
        "uniform": 2.0,
        "chance": 1.5,
        "chance_accuracy": 0.25,
        "chance_exact_match": 0.0625,
        "context_accuracy": 0.3,
    }
    run = folder(tmp_path / "run")
    for name, value in (("task/token_accuracy", 0.5), ("task/exact_match", 0.125)):
        run.log(20, name, value, unit_of(name))
    run.finish("done", {"final_loss": 6.5, "step": 20, "steps": 20, "nulls": nulls, "cost": COST})
    said = page(run, tmp_path).said
    for line in (
        "task/exact_match 0.125 share 20",
        "task/token_accuracy 0.5 share 20",
        "null: chance 1.5 nats/token",
        "null: chance accuracy 0.25 share",
        "null: chance exact match 0.0625 share",
        "null: context accuracy 0.3 share",
    ):
        assert line in said
    both = read(write_runs_report([run, finished(tmp_path / "other")], tmp_path / "runs.html")).said
    assert "null: chance accuracy – – 0.25 –" in both  # under no loss, under the accuracy of tokens
    assert "null: chance 1.5 – – –" in both


def test_what_the_data_said_stands_once(tmp_path):
    run = folder(tmp_path / "run")
    for note in ("train: 200 texts", "sequences of 16 tokens"):
        run.note(note)
    data = {"name": "sst2:own", "fingerprint": "ab", "notes": ["train: 200 texts"]}
    run.finish("done", {"final_loss": 6.5, "step": 20, "steps": 20, "nulls": {}, "cost": COST, "data": data})
    found = page(run, tmp_path)
    assert found.said.count("train: 200 texts") == 1
    assert "sequences of 16 tokens Data: train: 200 texts" in found.said


def test_a_run_that_failed_names_the_steps_it_was_to_take(tmp_path):
    for name, config, says in (("a", {}, "step 14"), ("b", {"steps": 30}, "step 14 of 30")):
        run = folder(tmp_path / name, config=config, measures=False)
        run.finish("failed", {"step": 14, "reason": "the disk is full"})
        assert f"the disk is full ({says})." in page(run, tmp_path).said
