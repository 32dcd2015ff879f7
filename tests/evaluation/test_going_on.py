"""An evaluation goes on in its folder: what was scored is not scored again, and the numbers are those of one call."""

import json
import sys

import pytest
import torch
from subjects_at_hand import TEXTS, causal_tokenizer, encoder_tokenizer, llama, model

from thalweg._words import counted
from thalweg.cli import main
from thalweg.errors import InputError
from thalweg.evaluation import lm_eval
from thalweg.evaluation.keeping import Kept, reserved
from thalweg.evaluation.scores import Scores, share
from thalweg.records import Measurements, files


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    subject = llama()
    subject.config.max_position_embeddings = 1024
    subject.save_pretrained(folder / "decoder")
    with torch.no_grad():
        subject.lm_head.weight.mul_(1.5)
    subject.save_pretrained(folder / "other")
    model("bert", torch.float32).save_pretrained(folder / "masked")
    model("bert", torch.float32).bert.save_pretrained(folder / "encoder")
    for name in ("decoder", "other"):
        causal_tokenizer().save_pretrained(folder / name)
    for name in ("masked", "encoder"):
        encoder_tokenizer().save_pretrained(folder / name)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 2))
    (folder / "more.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    row = {"question": "Fire is", "choices": ["cold", "hot"], "answer": 1}
    (folder / "heat.jsonl").write_text((json.dumps(row) + "\n") * 4)
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


EDIT = ["--edit", "mlp:parallel=0"]
JOBS = {
    "text": ["decoder", "--text", "text.jsonl", *EDIT],
    "masked": ["masked", "--text", "text.jsonl", *EDIT],
    "embeddings": ["encoder", "--text", "text.jsonl", *EDIT],
    "questions": ["decoder", "--choices", "heat.jsonl", "--shots", "1", *EDIT],
    "ruler": ["decoder", "--ruler", "single,vt", "--length", "500", "--samples", "2", *EDIT],
}


def lines(folder):
    return [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("stopped", [1, 5])  # inside the unedited run; later
def test_an_interrupted_evaluation_goes_on(here, job, stopped, capsys, tmp_path, monkeypatch):
    argv, whole, cut = ["eval", *JOBS[job], "--json"], tmp_path / "whole", tmp_path / "cut"
    assert main([*argv, "-o", str(whole)]) == 0
    wanted = json.loads(capsys.readouterr().out)
    written, real = [], Kept.listener

    def listener(self, *about):
        on_row = real(self, *about)

        def stop(row):
            on_row(row)
            written.append(row)
            if len(written) == stopped:
                raise KeyboardInterrupt

        return stop

    with monkeypatch.context() as patch:
        patch.setattr(Kept, "listener", listener)
        assert main([*argv, "-o", str(cut)]) == 130
    before = lines(cut)
    assert len(before) == 1 + stopped
    said = f"{counted(stopped, 'row')} kept in {cut}; the same command goes on"
    assert capsys.readouterr().err.splitlines()[-1] == f"error: interrupted; {said}"
    assert main([*argv, "-o", str(cut)]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert f"going on with {cut}: {stopped} rows are there" in printed.err
    after = lines(cut)
    assert after[: len(before)] == before  # kept, and none of them twice
    keys = [(row["arm"], row["job"], row["item"]) for row in after[1:]]
    assert len(keys) == len(set(keys)) == len(lines(whole)) - 1
    for task, one in wanted["tasks"].items():
        for metric, row in one["metrics"].items():
            assert found["tasks"][task]["metrics"][metric]["value"] == pytest.approx(
                row["value"], rel=1e-5, nan_ok=True
            )
            assert found["tasks"][task]["metrics"][metric]["null"] == row["null"]
    for a, b in zip(found["edits"], wanted["edits"], strict=True):
        assert [d["difference"] for d in a["differences"]] == pytest.approx(
            [d["difference"] for d in b["differences"]], rel=1e-3, abs=1e-5
        )
    rows = [Measurements.load(folder / "measurements.jsonl") for folder in (whole, cut)]
    assert [(r.measure, r.arm) for r in rows[0]] == [(r.measure, r.arm) for r in rows[1]]


def test_what_is_scored_is_not_scored_again_and_an_edit_may_be_added(here, capsys, tmp_path, monkeypatch):
    perplexity = sys.modules["thalweg.evaluation.perplexity"]  # the package has a function of this name
    argv, folder = ["eval", "decoder", "--text", "text.jsonl", "--json", "-o", str(tmp_path / "o")], tmp_path / "o"
    assert main([*argv, *EDIT]) == 0
    first = json.loads(capsys.readouterr().out)
    scored, real = [], perplexity.score

    def score(subject, windows, **how):
        windows = list(windows)
        scored.append(len(windows))
        return real(subject, windows, **how)

    monkeypatch.setattr(perplexity, "score", score)
    before = (folder / "items.jsonl").read_text()
    assert main([*argv, *EDIT]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert sum(scored) == 0 and (folder / "items.jsonl").read_text() == before
    assert main([*argv, *EDIT, "--edit", "mlp:parallel=0.5"]) == 0
    assert len(json.loads(capsys.readouterr().out)["edits"]) == 2
    assert sum(scored) == 6  # one edited pass over six documents of one window: unedited and no-op are there


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["decoder", "--text", "more.jsonl"],
            "holds another evaluation: its text was 'text: 6 documents of text.jsonl",
        ),
        (["decoder", "--text", "text.jsonl", "--window", "16"], "holds another evaluation: its text was"),
        (["decoder", "--text", "text.jsonl", "--seed", "1"], "its seed was 0, now 1"),
        (["decoder", "--text", "text.jsonl", "--dtype", "bfloat16"], "its dtype was 'float32', now 'bfloat16'"),
        (["other", "--text", "text.jsonl"], "its model was 'decoder', now 'other'"),
        (["decoder", "--choices", "heat.jsonl"], "holds another evaluation"),
    ],
)
def test_a_folder_of_something_else_is_left_alone(here, argv, line, capsys, tmp_path):
    folder = tmp_path / "o"
    assert main(["eval", "decoder", "--text", "text.jsonl", "-o", str(folder), "--quiet"]) == 0
    before = (folder / "items.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["eval", *argv, "-o", str(folder), "--quiet"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said and said.endswith("choose another folder")
    assert (folder / "items.jsonl").read_bytes() == before


def test_other_weights_under_the_same_name_and_another_content_are_seen(here, tmp_path):
    about = {"model": "m", "dtype": "float32"}
    with Kept(tmp_path / "o", **about, subject={"content": "a"}, witness=1.0):
        pass
    with Kept(tmp_path / "o", **about, subject={"content": "a"}, witness=1.0 + 1e-7):
        pass
    with pytest.raises(InputError, match="other weights or on another machine"):
        Kept(tmp_path / "o", **about, subject={"content": "a"}, witness=1.01)
    with pytest.raises(InputError, match="its content was 'a', now 'b'"):
        Kept(tmp_path / "o", **about, subject={"content": "b"}, witness=1.0)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "items.jsonl").write_text('{"kind": "sweep", "schema": 1}\n')
    with pytest.raises(InputError, match="no record of an evaluation"):
        Kept(tmp_path / "p", **about)


def test_a_full_disk_loses_no_summary(here, capsys, tmp_path, monkeypatch):
    real, full = files._write_all, []

    def write(descriptor, data):
        if full and len(data) < 5000:  # all but the header, which knows the machine
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    def fill(self, *about, of=Kept.listener):
        full.append(1)
        return of(self, *about)

    monkeypatch.setattr(files, "_write_all", write)
    monkeypatch.setattr(Kept, "listener", fill)
    argv = ["eval", "decoder", "--text", "text.jsonl", *EDIT, "-o", str(tmp_path / "o")]
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert "token_perplexity" in out and "sign-flip p" in out
    assert (
        err.splitlines()[-1].startswith("error: no space left to write") and err.count("going on, what is scored") == 1
    )
    assert len(lines(tmp_path / "o")) == 1
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert main(argv) == 0  # the same call, once there is room
    assert len(lines(tmp_path / "o")) == 1 + 18


def test_rows_wait_for_room(tmp_path, monkeypatch):
    told = []
    with Kept(tmp_path / "o", model="m", dtype="float32", tell=told.append) as kept:
        on_row = kept.listener("unedited", "unedited", "text")
        on_row({"item": "a"})
        with monkeypatch.context() as patch:
            patch.setattr(files, "_write_all", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
            on_row({"item": "b"})
            on_row({"item": "c"})
        assert kept.failed is not None and len(lines(kept.folder)) == 2
        assert kept.left == f"1 row (2 more found no room) kept in {tmp_path / 'o'}"
        on_row({"item": "d"})
        assert kept.failed is None and kept.left == f"4 rows kept in {tmp_path / 'o'}"
    assert [row["item"] for row in lines(kept.folder)[1:]] == ["a", "b", "c", "d"] and len(told) == 1


def test_calls_of_one_second_share_no_folder(here, capsys, tmp_path, monkeypatch):
    from pathlib import Path

    from thalweg.cli import eval_command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(eval_command, "_default", lambda _: Path("evals") / "decoder-NOW")
    for text in ("text.jsonl", "more.jsonl", "more.jsonl"):
        assert main(["eval", str(here / "decoder"), "--text", str(here / text), "--json"]) == 0
    folders = [Path("evals") / f"decoder-NOW{end}" for end in ("", "-2", "-3")]
    assert sorted(Path("evals").iterdir()) == folders
    assert [len(lines(folder)) for folder in folders] == [1 + 6, 1 + 3, 1 + 3]
    assert f"rows: {folders[1] / 'items.jsonl'}" in capsys.readouterr().err
    argv = ["eval", str(here / "decoder"), "--text", str(here / "more.jsonl"), "-o", str(folders[2])]
    assert main(argv) == 0  # a folder that is named is gone on with
    assert "3 rows are there" in capsys.readouterr().err and len(list(Path("evals").iterdir())) == 3


def test_a_default_folder_that_cannot_be_made_is_one_line(here, capsys, tmp_path, monkeypatch):
    (tmp_path / "evals").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert main(["eval", str(here / "decoder"), "--text", str(here / "text.jsonl")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "evals is a file; choose another place" in line
    with pytest.raises(InputError, match="cannot be made: File exists; choose another place by -o"):
        reserved(tmp_path / "evals" / "x")


def test_a_model_of_ours_goes_on_too(here, capsys, tmp_path, monkeypatch):
    from thalweg.capture.opening import Opened
    from thalweg.cli import opening

    monkeypatch.setattr(
        opening, "open_any", lambda *_, **__: Opened(model("ours", torch.float32), causal_tokenizer(), "run", "decoder")
    )
    argv = ["eval", "run", "--text", "more.jsonl", "--edit", "value:parallel=0", "--json", "-o", str(tmp_path / "o")]
    assert main(argv) == 0
    first, before = json.loads(capsys.readouterr().out), (tmp_path / "o" / "items.jsonl").read_bytes()
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out) == first and (tmp_path / "o" / "items.jsonl").read_bytes() == before


def test_tasks_of_lm_eval_are_rows_and_back():
    import numpy as np

    columns = {
        "items": np.ones(3),
        "acc": np.array([1.0, 0.0, 1.0]),
        "log_likelihood": np.arange(3.0),
        "bytes": np.ones(3),
    }
    metrics = (share(("acc", "items"), "acc"), lm_eval._metric("bits_per_byte"))
    whole = Scores(
        "mine", "lm-eval, 0-shot", ("mine 0", "mine 1", "mine 2"), columns, metrics, {"shots": 0, "window": 8}
    )
    rows = {
        row["item"]: {"arm": "x", "role": "edited", "job": "lm-eval", **row}
        for row in lm_eval.kept_rows("mine", {"mine": whole})
    }
    back = lm_eval.from_rows("mine", rows)
    assert back is not None and back["mine"].values() == whole.values() and back["mine"].items == whole.items
    assert (back["mine"].rule, back["mine"].facts) == (whole.rule, whole.facts)
    assert lm_eval.from_rows("mine", {name: row for name, row in rows.items() if name != "mine 1"}) is None
    assert lm_eval.from_rows("mine", {name: row for name, row in rows.items() if name != "mine: whole"}) is None
    assert lm_eval.from_rows("other", rows) is None


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--choices", "heat.jsonl", "--shots", "4"], "heat: shots must lie in 0..3 (the other items), got 4"),
        (["--choices", "heat.jsonl", "--shots", "-1"], "--shots must be at least 0, got -1"),
        (["--shots", "1"], "give --choices or --tasks too"),
        (["--haystack", "text.jsonl"], "give --ruler too"),
        (["--choices", "heat.jsonl", "--choices", "heat.jsonl"], "would be called 'heat', which is taken"),
        (
            ["--edit", "value:parallel=0,phase=decode"],
            "--edit value:parallel=0,phase=decode would never act; give --ruler",
        ),
        (["--choices", "heat.jsonl", "--edit", "mlp:parallel=0,phase=decode"], "would never act"),
    ],
)
def test_what_no_model_could_answer_is_refused_before_one_is_opened(here, argv, line, capsys, monkeypatch):
    from thalweg.cli import opening

    opened = []
    monkeypatch.setattr(opening, "open_any", lambda *given, **_: opened.append(given))
    assert main(["eval", "decoder", *argv]) == 2
    assert line in capsys.readouterr().err.splitlines()[-1] and not opened


def test_an_edit_of_decoding_is_evaluated_where_something_is_decoded(here, capsys, tmp_path):
    argv = ["eval", "decoder", "--ruler", "single", "--length", "500", "--samples", "1", "--json", "--quiet"]
    assert main([*argv, "--edit", "mlp:parallel=0,phase=decode", "-o", str(tmp_path / "o")]) == 0
    assert json.loads(capsys.readouterr().out)["edits"]


def test_the_plan_says_how_documents_begin(here, capsys, tmp_path):
    argv = ["eval", "decoder", "--text", "more.jsonl", "--limit", "1", "-o"]
    assert main([*argv, str(tmp_path / "a")]) == 0
    assert "1 document of more.jsonl (one line, one document; the first 1 of 3), 1 window; " in (
        err := capsys.readouterr().err
    )
    assert "EOS: token 0 before every document" in err
    assert main([*argv, str(tmp_path / "b"), "--no-bos"]) == 0
    assert "no BOS put before a document" in capsys.readouterr().err


@pytest.mark.parametrize("there", [False, True])
def test_a_place_that_takes_no_files_is_refused_before_the_model_is_opened(
    here, there, capsys, tmp_path, monkeypatch, takes_no_files
):
    folder = tmp_path / "kept" if there else tmp_path / "none" / "new"
    if there:
        folder.mkdir()
        (folder / "items.jsonl").write_text("")
    closed = folder if there else tmp_path
    takes_no_files(closed)
    monkeypatch.setattr("thalweg.cli.opening.open_any", lambda *_, **__: pytest.fail("the model was opened"))
    assert main(["eval", "decoder", "--text", "text.jsonl", "-o", str(folder)]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {folder} cannot be written: {closed} takes no file (Read-only file system); choose another place\n"
    )
