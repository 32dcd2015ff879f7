"""``thalweg grow``: the plan, a run with its page, going on, and one line for what cannot be."""

import json
import signal
import subprocess
import sys
import time

import pytest

from thalweg.cli import main
from thalweg.records import RunFolder

TINY = [
    "grow",
    "--task",
    "copy:vocab=8,half=4",
    "--sequence-length",
    "9",
    "--depth",
    "2",
    "--width",
    "16",
    "--head-width",
    "4",
]
TINY += [
    "--batch-size",
    "16",
    "--steps",
    "8",
    "--eval-every",
    "4",
    "--eval-batches",
    "1",
    "--threads",
    "1",
    "--geometry",
    "false",
]
TINY += ["--check-every", "2", "--dwell", "2", "--threshold", "0.3", "--most-heads", "4"]


def out(capsys, argv, code=0):
    assert main(argv) == code
    return capsys.readouterr()


def test_dry_run_prints_the_spectrum_and_what_thresholds_would_give(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = out(capsys, [*TINY, "--dry-run"]).out
    for words in (
        "eigenvalues",
        "chance 0.707",
        "heads by threshold",
        "0.3 *",
        "FLOPs/token",
        "at most 5 looks",
        "threshold 0.0",
    ):
        assert words in text, words
    found = json.loads(out(capsys, [*TINY, "--dry-run", "--json"]).out)
    assert [p["threshold"] for p in found["predicted"]] == [0.02, 0.05, 0.1, 0.2, 0.3, 0.4]
    heads = [sum(p["heads"]) for p in found["predicted"]]
    assert heads == sorted(heads, reverse=True) and found["threshold"] == 0.3
    assert {"eigenvalues", "condition", "asymmetry"} <= found["forecast"]["layers"][0].keys()
    assert (
        "1 heads" not in text and "in each layer if every head takes 22%" in text and "at most 5 looks, about " in text
    )
    assert not list(tmp_path.iterdir())


def test_white_input_is_warned_of(capsys):
    found = json.loads(out(capsys, [*TINY, "--least-condition", "1e30", "--dry-run", "--json"]).out)
    assert any("alike in every direction" in text for text in found["forecast"]["warnings"])
    assert (
        found["predicted"][0]["heads"][1] == 1
    )  # the first layer has fewer different tokens than its width: never white


def test_a_run_its_page_and_going_on(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = out(capsys, [*TINY, "-o", "run"])
    assert "birth of head" in said.err and "growth record as a page" in said.err and "heads by threshold" in said.err
    best = RunFolder.open("run").result["best_step"]
    assert (
        f"run/model holds the weights of the last step, 8; thalweg eval reads the best checkpoint, of step {best},"
        in said.err
    )
    page = out(capsys, ["report", "run", "-o", "grown.html", "--json"])
    text = (tmp_path / json.loads(page.out)["report"]).read_text(encoding="utf-8")
    assert "Growth record" in text and "The threshold sets the count" in text
    assert "The folder model of the run holds the weights of the last step." in text
    again = json.loads(
        out(capsys, ["grow", "--resume", "run", "--json", "--quiet"]).out
    )  # it has ended: its result again
    assert again["status"] == "done" and again["growth"]["heads_start"] == [1, 1]
    config = RunFolder.open("run").config
    assert config["growth"] == {"check_every": 2, "dwell": 2, "threshold": 0.3, "most_heads": 4}
    assert config["heads"] == 1 and config["model"]["head_size"] == 4
    assert "already" in out(capsys, [*TINY, "-o", "run"], code=2).err
    out(capsys, ["train", "--init-from", "run/model", "--data", "copy:vocab=8,half=4", "--sequence-length", "9", "--steps", "2",
                 "--batch-size", "16", "--eval-every", "2", "--threads", "1", "--geometry", "false", "-o", "further", "--quiet"])  # fmt: skip
    assert RunFolder.open("further").result["cost"]["parameters"] == again["growth"]["parameters"]


def test_the_printed_configuration_repeats_the_call(capsys, tmp_path):
    text = out(capsys, [*TINY, "--birth", "random", "--growth-seed", "7", "--prune", "false", "--print-config"]).out
    assert "[growth]" in text and 'birth = "random"' in text and "seed = 7" in text and "prune = false" in text
    (tmp_path / "again.toml").write_text(text, encoding="utf-8")
    assert out(capsys, ["grow", str(tmp_path / "again.toml"), "--print-config"]).out == text


def test_a_model_with_prototypes_trains_them(capsys):
    text = out(capsys, [*TINY, "--model", "head_prototypes=true", "--print-config"]).out
    assert "dictionary_weight = 0.1" in text
    assert "dictionary_weight = 0.0" in out(capsys, [*TINY, "--print-config"]).out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([*TINY, "--data", "austen"], "two names of one flag"),
        ([*TINY, "--heads", "2", "--start-heads", "1"], "give one of them"),
        ([*TINY, "--head-width", "1"], "--head-width must be at least 2"),
        ([*TINY, "--model", "head_size=8"], "differ; give one of them"),
        ([*TINY, "--threshold", "1.5"], "threshold must be above 0 and below 1"),
        (
            [*TINY, "--start-heads", "5", "--quiet"],
            "growth.most_heads is 4, but the run starts with 5 heads in a layer",
        ),
        (
            [*TINY, "--start-heads", "5", "--dry-run"],
            "growth.most_heads is 4, but the run starts with 5 heads in a layer",
        ),
        ([*TINY, "--most-layers", "1", "--dry-run"], "growth.most_layers is 1, but the run starts with 2 layers"),
        ([*TINY, "--dictionary-weight", "0.1", "--quiet"], "or leave dictionary_weight out"),
        ([*TINY, "--dwell", "foo"], "growth.dwell must be a whole number of steps, or gap, got 'foo'"),
        ([*TINY, "--birth", "plan"], "Did you mean 'plane'"),
        ([*TINY, "--check-every", "often"], "growth.check_every must be int"),
        ([*TINY, "--model", "embedding_std=0.0", "--quiet"], "one and the same vector"),
        ([*TINY, "--model", "embedding_std=0.0", "--dry-run"], "one and the same vector"),
        ([*TINY, "--trajectory", "2", "--quiet"], "leave trajectory out"),
        (["grow", "--resume", "missing"], "no such run"),
        (["grow", "--task", "copyy"], "copyy"),
        (["grow", "--treshold", "0.1"], "Did you mean '--threshold'"),
    ],
)
def test_wrong_input_is_one_line(capsys, tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    err = out(capsys, argv, code=2).err
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and words in lines[0], err
    assert "Traceback" not in err


def test_train_and_grow_do_not_mix_up_their_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out(capsys, [*TINY, "-o", "grown", "--quiet"])
    assert "thalweg grow" in out(capsys, ["train", "--resume", "grown"], code=2).err
    fixed = ["train", *TINY[1:], "-o", "fixed", "--quiet"]
    cut = fixed.index("--head-width")
    fixed = [*fixed[:cut], *fixed[cut + 2 : fixed.index("--check-every")], "-o", "fixed", "--quiet"]
    fixed[fixed.index("--task")] = "--data"
    out(capsys, fixed)
    assert "thalweg train --resume fixed" in out(capsys, ["grow", "--resume", "fixed"], code=2).err


def test_an_interrupted_run_goes_on_to_the_same_end(tmp_path):
    """Ctrl-C saves, says how to go on, exits 130; the resumed run equals one that was never interrupted."""
    steps = TINY.index("--steps")
    argv = [sys.executable, "-m", "thalweg", *TINY[:steps], "--steps", "60", *TINY[steps + 2 :], "--quiet"]
    run = tmp_path / "run"
    process = subprocess.Popen([*argv, "-o", str(run)], stderr=subprocess.PIPE, text=True)
    while not (run / "metrics.jsonl").exists() or '"step": 10' not in (run / "metrics.jsonl").read_text():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "thalweg grow --resume" in err and "Traceback" not in err, err
    assert main(["grow", "--resume", str(run), "--quiet"]) == 0
    assert main([*argv[3:], "-o", str(tmp_path / "straight")]) == 0
    assert main(["compare-runs", str(run), str(tmp_path / "straight"), "--assert-equal"]) == 0
