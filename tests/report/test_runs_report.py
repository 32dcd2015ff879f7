"""The report of several runs side by side, what names a run and what a plan, and the nulls of a run that was killed."""

import json
import re

import pytest
from pages import COST, NULLS, figure_of, read, rows

from thalweg.cli import main
from thalweg.cli.report_command import names_run
from thalweg.records import Measurement, jsonl
from thalweg.records.run import RunFolder
from thalweg.reports.runs import labels, write_runs_report

SECTIONS = [
    "1. Quality and cost",
    "2. What differs",
    "3. Geometry of the stream by depth",
    "4. Diagnostics: did it move?",
    "5. Notes and deviations",
    "6. How to reproduce",
    "7. Provenance",
    "8. Citations",
]
CONFIG = {"connection": "additive", "depth": 2, "width": 32, "seed": 0, "data": "austen", "sequence_length": 64}
HOSTILE = "</pre></style><script>alert('x')</script>"


def run_of(path, *, status="done", loss=4.0, layers=2, nulls=NULLS, cost=COST, **config):
    run = RunFolder.create(path, {**CONFIG, "depth": layers, **config}, seed=0)
    for step, value in ((0, 7.6), (20, loss)):
        run.log(step, "val/loss", value, "nats/token")
        run.log(step, "val/bits_per_byte", value / 2, "bits/byte")
        run.log(step, "train/loss", value, "nats/token")
    run.add_measures(rows(["effective_rank"], layers, steps=(0, 20)))
    if status != "running":
        run.finish(status, {"step": 20, "nulls": nulls, "cost": cost, "reason": "" if status == "done" else "SIGINT"})
    return run


def classifier(path, *, data, nulls, notes=(), grown=None):
    """A run that sorts texts, with what it left of growth if it grew."""
    run = RunFolder.create(path, {**CONFIG, "data": data}, seed=0)
    for name, value in (("accuracy", 0.68), ("accuracy_low", 0.65), ("accuracy_high", 0.71)):
        run.log(20, f"task/{name}", value, "share")
    run.log(20, "val/loss", 0.6, "nats/sequence")
    run.log(20, "train/loss", 0.5, "nats/sequence")
    for note in notes:
        run.note(note)
    if grown is not None:
        run.add_measures([Measurement("growth.free_energy", 2.0, step=20)])
        head = {"schema": 1, "kind": "growth", **grown}
        (path / "growth.jsonl").write_text(f"{jsonl.encode(head)}\n", encoding="utf-8")
    about = {"name": data, "fingerprint": data, "notes": list(notes)}
    run.finish("done", {"step": 20, "steps": 20, "nulls": nulls, "cost": COST, "data": about})
    return run


def page(runs, tmp_path, **kw):
    return read(write_runs_report(runs, tmp_path / "runs.html", **kw))


def test_order_and_content(tmp_path):
    a = run_of(tmp_path / "a", loss=4.0)
    b = run_of(tmp_path / "b", loss=3.5, layers=4, connection="mgt", connection_options={"preset": "residual"})
    b.note("resumed, not bitwise")
    found = page([a, b], tmp_path, citations=["@article{one}"], deviations=["mgt (b) leaves its source: x"])
    assert found.headings == ["2 runs side by side", *SECTIONS]
    for text in (
        "2 done. 2 or 4 layers",
        "a: done at step 20 4 2 90.8 k",
        "b: done at step 20 3.5 1.75 90.8 k",
        "null: unigram entropy 6",
        "connection additive mgt",
        "connection_options unset preset residual",
        "depth 2 4",
        "b: resumed, not bitwise",
        "mgt (b) leaves its source: x",
        "a.toml",
        'connection = "mgt"',
        "@article{one}",
        "One run each",
    ):
        assert text in found.said, text
    assert "width 32 32" not in found.said  # what is the same is not shown as different
    rank = figure_of(found, "Normalised effective rank")
    assert len(re.findall(r"null: Gaussian", rank.partition("<details")[0])) == 1  # one constant null at any depth
    loss = figure_of(found, "Validation loss")
    assert '<path class="arm c0"' in loss
    assert '<path class="arm c1"' in loss


def test_runs_that_did_not_end_keep_their_place(tmp_path):
    runs = [
        run_of(tmp_path / "done"),
        run_of(tmp_path / "cut", status="interrupted", loss=6.5),
        run_of(tmp_path / "lost", status="diverged", loss=9.0),
        run_of(tmp_path / "on", status="running"),
    ]
    found = page(runs, tmp_path, nulls=[{}, {}, {}, NULLS])
    for text in (
        "1 done, 1 interrupted, 1 diverged, 1 running.",
        "cut: interrupted, not learned at step 20",
        "cut is interrupted: SIGINT.",
        "lost seed 0 (diverged)",
        "on: running at step 20",
    ):
        assert text in found.said, text
    rank = figure_of(found, "Normalised effective rank")
    assert all(f"{run.path.name}</li>" in rank for run in runs)
    assert "null: unigram entropy" in figure_of(found, "Validation loss")


def test_the_headline_does_not_give_one_run_the_tokens_of_another(tmp_path):
    costs = [{**COST, "tokens": tokens} for tokens in (12_800, 51_200, 51_200)]
    runs = [run_of(tmp_path / str(i), cost=cost) for i, cost in enumerate(costs)]
    assert "12.8 k or 51.2 k training tokens of austen, 3 runs" in page(runs, tmp_path).said
    many = [run_of(tmp_path / f"m{i}", cost={**COST, "tokens": 1000 * i}) for i in (4, 1, 3, 2)]
    assert "1 k to 4 k training tokens" in page(many, tmp_path).said


def test_other_data_is_pointed_out(tmp_path):
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b", data="copy", nulls={"unigram_entropy": 3.0})
    found = page([a, b], tmp_path)
    assert "not trained on the same data" in found.said
    assert "null: unigram entropy (b)" in figure_of(found, "Validation loss")
    assert "not trained on the same data" not in page([a], tmp_path).said


def test_labels_take_as_many_folders_as_they_need(tmp_path):
    runs = [run_of(tmp_path / x / "run") for x in ("one", "two")]
    assert labels(runs) == ["one/run", "two/run"]
    assert labels([runs[0], run_of(tmp_path / "z")]) == ["run", "z"]


def test_hostile_content_never_becomes_markup(tmp_path):
    run = run_of(tmp_path / "x<script>&", connection=HOSTILE, data=HOSTILE)
    run.note(HOSTILE)
    page([run, run_of(tmp_path / "b")], tmp_path, citations=[HOSTILE], deviations=[HOSTILE])


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "a")
    run_of(tmp_path / "b", connection="mgt", connection_options={"gate_open": True})
    assert main(["report", "a", "b", "-o", "r.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] == "r.html"
    found = read(tmp_path / "r.html")
    assert "mgt leaves its source: gate_open divides the gate" in found.said
    assert "@article{su2026geometric" in found.said


# classifiers, runs on several data, runs that grew


def test_a_loss_stands_under_its_own_unit(tmp_path):
    one = classifier(tmp_path / "one", data="sst2:own", nulls={"chance": 0.7, "majority_accuracy": 0.42})
    found = page([one, run_of(tmp_path / "two")], tmp_path)
    assert "last loss [nats/sequence] last loss [nats/token] bits/byte accuracy parameters" in found.said
    assert "one: done at step 20 0.6 – – 0.68 (0.65 to 0.71) 90.8 k" in found.said
    assert "two: done at step 20 – 4 2 – 90.8 k" in found.said
    assert "null: chance (sst2:own) 0.7 – – –" in found.said
    assert "null: unigram entropy (austen) – 6 – –" in found.said
    assert "95 % Wilson interval" in found.said
    titles = [title for title, *_ in found.figures()]
    assert {"Validation loss [nats/sequence]", "Validation loss [nats/token]"} < set(titles)
    assert "two</li>" not in figure_of(found, "Validation loss [nats/sequence]")
    alone = page([one], tmp_path)
    assert "last loss [nats/sequence] accuracy parameters" in alone.said  # no column that nobody fills
    assert "nats/token" not in alone.said


def test_nulls_belong_to_their_data(tmp_path):
    notes = ["train: 200 texts"]
    runs = [
        classifier(tmp_path / "a", data="sst2:own", nulls={"chance": 0.7}, notes=notes),
        classifier(tmp_path / "b", data="sst2:own", nulls={"chance": 0.7}, notes=notes),
        classifier(tmp_path / "c", data="sentiment", nulls={"chance": 0.69}, notes=["train: 9 texts"]),
    ]
    found = page(runs, tmp_path)
    assert found.said.count("null: chance (sst2:own) 0.7") == found.said.count("null: chance (sentiment) 0.69") == 1
    assert found.said.count("train: 200 texts") == 1
    assert "Data (sst2:own): train: 200 texts Data (sentiment): train: 9 texts" in found.said
    assert "null: chance 0.7" in page(runs[:2], tmp_path).said
    other = run_of(tmp_path / "d", nulls={"unigram_entropy": 3.0}, tokenizer="byte")  # one name, other tokens
    said = page([other, run_of(tmp_path / "e"), run_of(tmp_path / "f")], tmp_path).said
    assert "null: unigram entropy (austen of d) 3" in said and "null: unigram entropy (austen of e, f) 6" in said


def test_a_run_that_was_killed_has_the_nulls_of_its_data_and_no_second_set(tmp_path):
    ended = classifier(tmp_path / "a", data="sst2:own", nulls={"chance": 0.7})
    killed = run_of(tmp_path / "b", status="running", data="sst2:own")
    assert "null: chance 0.7" in page([ended, killed], tmp_path, nulls=[{}, {"chance": 0.7}]).said


def test_which_runs_grew_and_how_it_ended(tmp_path):
    grown = {"status": "capped", "ended": 12, "step": 20, "heads_start": [1, 1], "heads": [3, 2, 1]}
    on = {"status": "growing", "ended": None, "step": 20, "heads_start": [1], "heads": [2]}
    runs = [
        classifier(tmp_path / "a", data="sst2:own", nulls={}, grown=grown),
        classifier(tmp_path / "b", data="sst2:own", nulls={}, grown=on),
        classifier(tmp_path / "c", data="sst2:own", nulls={}),
    ]
    found = page(runs, tmp_path)
    row = "how growth ended cap reached, not converged (step 12) growth has not ended did not grow"
    assert row in found.said
    assert "heads by layer 1, 1 → 3, 2, 1 1 → 2 –" in found.said
    assert "thalweg grow FILE -o RUN for those that grew (a.toml, b.toml)" in found.said
    assert "growth free energy" not in found.said  # the page of that run shows it
    plain = page(runs[2:], tmp_path).said
    assert "growth" not in plain and "thalweg grow" not in plain


def test_tables_of_many_columns_fit_the_page(tmp_path):
    runs = [classifier(tmp_path / "a", data="sst2:own", nulls={"chance": 0.7}), run_of(tmp_path / "b")]
    assert page(runs, tmp_path).said.count("a: done at step 20") == 1
    for name in ("exact_match", "token_accuracy"):
        runs[1].log(20, f"task/{name}", 0.5, "share")
    found = page(runs, tmp_path)
    assert "a: done at step 20 0.6 – – 0.68 (0.65 to 0.71) – – b:" in found.said
    assert "run parameters of the connection" in found.said and "a: done at step 20 90.8 k" in found.said
    style, body = found.text.split("</style>")
    assert re.search(r"table\.wrapped td \{[^}]*white-space: normal", style)
    assert body.count('<table class="wrapped') >= 3  # quality, cost, what differs


# what is a path


def test_a_folder_does_not_hide_a_shipped_plan_but_a_run_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert not names_run("demo")
    (tmp_path / "demo").mkdir()
    assert not names_run("demo")
    assert names_run("./demo")
    assert main(["report", "demo", "-o", "plan.html"]) == 0
    assert "Five ways to write to the residual stream" in read(tmp_path / "plan.html").said
    assert main(["report", "./demo", "-o", "x.html"]) == 2
    assert "is no run folder" in capsys.readouterr().err
    assert main(["study", "check", "demo", "--json"]) == 0
    (tmp_path / "demo").rmdir()
    run_of(tmp_path / "demo")
    assert names_run("demo")
    (tmp_path / "notes").mkdir()
    assert names_run("notes")  # and is refused as a folder without a run
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    assert "./demo is the folder, demo the plan" in capsys.readouterr().out


# the nulls of a run whose record has none


def test_a_killed_run_shows_the_null_of_its_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("It was the best of times, it was the worst of times.\n" * 80)
    argv = ["train", "--data", "text:t.txt", "--tokenizer", "byte", "--depth", "1", "--width", "16", "--heads", "1"]
    argv += ["--sequence-length", "32", "--steps", "2", "--eval-every", "2", "--eval-batches", "1", "--batch-size", "2"]
    assert main([*argv, "--threads", "1", "--geometry", "false", "-o", "run", "--quiet"]) == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["result"]["nulls"]["unigram_entropy"] > 0
    (tmp_path / "run" / "run.json").write_text(json.dumps({**record, "status": "running", "result": {}}))
    legend = "null: unigram entropy</li>"
    assert main(["report", "run", "-o", "killed.html"]) == 0
    assert legend in figure_of(read(tmp_path / "killed.html"), "Validation loss")
    (tmp_path / "t.txt").write_text("Another text.\n" * 300)
    assert main(["report", "run", "-o", "changed.html"]) == 0
    assert legend not in (tmp_path / "changed.html").read_text()
    (tmp_path / "t.txt").unlink()
    assert main(["report", "run", "-o", "gone.html"]) == 0


def test_what_is_left_out_and_what_is_said_are_no_difference(tmp_path, capsys):
    short = {"connection": "additive", "depth": 2, "data": "austen", "seed": 0}
    a = RunFolder.create(tmp_path / "a", short, seed=0)
    b = RunFolder.create(tmp_path / "b", {**short, "width": 64, "heads": 2, "lr": 2e-3, "seed": 1}, seed=1)
    for run in (a, b):
        run.log(0, "train/loss", 7.0, "nats/token")
    output = tmp_path / "out.html"
    assert main(["report", str(a.path), str(b.path), "-o", str(output)]) == 0
    found = read(output)
    assert "unset" not in found.said and "seed 0 1" in found.said
    capsys.readouterr()
    assert main(["compare-runs", str(a.path), str(b.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"] == {"seed": [0, 1]}


def test_a_long_name_of_a_run_does_not_push_the_last_column_off_the_page(tmp_path):
    """Nine columns beside an unwrapped name are wider than the page."""
    page([run_of(tmp_path / "a"), run_of(tmp_path / "b")], tmp_path)
    style = (tmp_path / "runs.html").read_text()
    assert re.search(r"tbody th \{[^}]*white-space: normal", style)
