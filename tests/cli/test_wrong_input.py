"""Wrong inputs: each gives one line that says what was got and what is allowed, and its exit code; nothing already there is lost."""

import json
import os
from pathlib import Path

import pytest

from thalweg.cli import main
from thalweg.records import files


@pytest.fixture(scope="module")
def done_run(tmp_path_factory):
    """A tiny finished run."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert main([*TINY, "-o", str(folder), "--quiet"]) == 0
    return folder


TINY = [
    "train",
    "--depth",
    "1",
    "--width",
    "8",
    "--heads",
    "1",
    "--data",
    "copy:vocab=8,half=4",
    "--sequence-length",
    "9",
    "--steps",
    "2",
]
TINY += ["--eval-every", "2", "--eval-batches", "1", "--batch-size", "2", "--threads", "1", "--geometry", "false"]


@pytest.fixture
def place(tmp_path, done_run, monkeypatch):
    """A folder with every kind of broken thing, as the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.toml").write_text("depth = = 3")
    (tmp_path / "unknown.toml").write_text("dpth = 3")
    (tmp_path / "wrong_type.toml").write_text('depth = "three"')
    (tmp_path / "latin.toml").write_bytes(b'connection = "\xe9"')
    (tmp_path / "deep.toml").write_text("x = " + "[" * 5000)
    (tmp_path / "digits.toml").write_text("depth = " + "9" * 5000)
    (tmp_path / "nul_text.toml").write_text(r'data = "text:a\u0000b"')
    (tmp_path / "nul_tokenizer.toml").write_text(r'tokenizer = "a\u0000b"')
    (tmp_path / "list.json").write_text('["thalweg"]')
    (tmp_path / "half.json").write_text('{"thalweg": "json"}')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\n ")
    (tmp_path / "one_token.txt").write_text("a")
    (tmp_path / "short.txt").write_text("Too short a text for one sequence.")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "run.json").write_text('{"schema": 1, "name": "another program"}')
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "run.json").write_text('{"schema": 99}')
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"schema": 1, "kind":')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "plan.toml").write_text("schema = 1")
    (tmp_path / "report.html").write_text("mine")
    (tmp_path / "done").symlink_to(done_run)
    return tmp_path


SMALL = TINY[1:]

CASES = {
    "unknown command": (["trian"], "Did you mean 'train'"),
    "unknown flag": (["train", "--dpth", "3"], "Did you mean '--depth'"),
    "flag without value": (["train", "--depth"], "expected one argument"),
    "stray argument": (["doctor", "now"], "unexpected argument 'now'"),
    "unknown connection": (["train", "--connection", "mtg"], "Did you mean 'mgt'"),
    "unknown option of a connection": (
        ["train", *SMALL, "--connection", "mgt", "--option", "prest=paper"],
        "Did you mean 'mgt.preset'",
    ),
    "wrong value of an option": (
        ["train", *SMALL, "--connection", "mgt", "--option", "preset=papr"],
        "Did you mean 'paper'",
    ),
    "wrong type of an option": (["train", *SMALL, "--connection", "mgt", "--option", "alpha=much"], "must be"),
    "option without a value": (["train", "--connection", "mgt", "--option", "preset"], "NAME=VALUE"),
    "contradicting options": (
        ["train", *SMALL, "--connection", "mgt", "--option", "post_norm=true"],
        "input_norm and final_norm",
    ),
    "word for a number": (["train", "--depth", "three"], "depth must be int, got 'three'"),
    "fraction for a whole number": (["train", "--depth", "1.5"], "depth must be int"),
    "negative depth": (["train", "--depth", "-1"], "at least 1"),
    "zero batch": (["train", "--batch-size", "0"], "at least 1"),
    "learning rate not a number": (["train", "--lr", "nan"], "lr must be positive"),
    "steps and tokens": (["train", "--steps", "5", "--tokens", "5"], "not both"),
    "accumulation does not divide": (["train", "--batch-size", "3", "--accumulation", "2"], "multiple of accumulation"),
    "heads do not divide": (["train", "--width", "10", "--heads", "3", "--data", "copy"], "heads"),
    "kv heads do not divide": (
        ["train", "--width", "16", "--heads", "4", "--kv-heads", "3", "--data", "copy"],
        "heads",
    ),
    "unknown optimizer": (["train", "--optimizer", "adam"], "Did you mean 'adamw'"),
    "unknown device": (["train", "--device", "gpu"], "Did you mean"),
    "unknown decoder field": (["train", *SMALL, "--model", "qknorm=true"], "Did you mean 'model.qk_norm'"),
    "unknown tracker": (["train", *SMALL, "-o", "x", "--track", "tensorbord"], "Did you mean 'tensorboard'"),
    "no such file": (["train", "nothing.toml"], "no such file: nothing.toml"),
    "a folder for a file": (["train", "foreign"], "is a folder"),
    "broken TOML": (["train", "broken.toml"], "not valid TOML"),
    "TOML not UTF-8": (["train", "latin.toml"], "not UTF-8"),
    "unknown key in TOML": (["train", "unknown.toml"], "Did you mean 'depth'"),
    "wrong type in TOML": (["train", "wrong_type.toml"], "depth must be int"),
    "unknown data": (["train", "--data", "austin"], "Did you mean 'austen'"),
    "unknown parameter of a task": (["train", "--data", "copy:haf=3"], "Did you mean 'copy.half'"),
    "no such text": (["train", "--data", "text:nothing.txt"], "nothing.txt"),
    "empty text": (["train", "--data", "text:empty.txt"], "empty"),
    "blank text": (["train", "--data", "text:blank.txt"], "blank.txt"),
    "one-token text": (["train", "--data", "text:one_token.txt", "--tokenizer", "byte"], "one_token.txt"),
    "short text": (["train", "--data", "text:short.txt", "--tokenizer", "byte", "--depth", "1"], "short"),
    "binary text": (["train", "--data", "text:binary.txt"], "UTF-8"),
    "tokenizer missing": (["train", "--tokenizer", "nothing.json"], "nothing.json"),
    "output is not empty": (["train", *SMALL, "-o", "full"], "not empty"),
    "output is a file": (["train", *SMALL, "-o", "report.html"], "is a file"),
    "output holds a run": (["train", *SMALL, "-o", "done"], "holds a run already; go on with it by --resume done, or"),
    "resume nothing": (["train", "--resume", "nothing"], "no such run"),
    "resume a foreign folder": (["train", "--resume", "foreign"], "no run record"),
    "resume a newer run": (["train", "--resume", "newer"], "upgrade"),
    "resume a torn record": (["train", "--resume", "torn"], "broken"),
    "resume with another depth": (["train", "--resume", "done", "--steps", "9", "--depth", "2"], "depth"),
    "resume and output": (["train", "--resume", "done", "-o", "x"], "--resume takes"),
    "report of nothing": (["report", "nothing.toml", "-o", "x.html"], "no such plan"),
    "report of a folder without a run": (["report", "full", "-o", "x.html"], "no run"),
    "report over a file": (["report", "done"], "report.html exists"),
    "report into a file": (["report", "done", "-o", "report.html/x.html"], "cannot be written: report.html is a file"),
    "report into a missing place": (["report", "done", "-o", "absent/x.html"], "there is no folder absent; make it"),
    "report of nowhere": (
        ["report", "nowhere/x", "-o", "x.html"],
        "nowhere/x is neither the folder of a run nor a plan: nothing is there; give the folder of a run, the path of a .toml",
    ),
    "report of no name": (["report", "nowhere", "-o", "x.html"], "unknown run folder or plan 'nowhere'"),
    "a mixer for one stream": (
        ["train", *SMALL, "--connection", "additive", "--mixer", "sinkhorn"],
        "--mixer belongs to connections with several streams (hyper_connections, mhc, mhc_delta, orthogonal), got connection additive",
    ),
    "streams for one stream": (["train", *SMALL, "--streams", "4"], "--streams belongs to connections with several"),
    "options of a mixer for one stream": (
        ["train", *SMALL, "--connection", "delta", "--mixer-option", "iterations=3"],
        "--mixer-option belongs to connections with several streams",
    ),
    "unknown plan": (["study", "check", "demmo"], "Did you mean 'demo'"),
    "incomplete plan": (["study", "check", "plan.toml"], "lacks the required keys"),
    "unknown scale": (["study", "check", "demo", "--scale", "smke"], "Did you mean 'smoke'"),
    "new over a plan": (["study", "new", "plan.toml"], "exists"),
    "new without suffix": (["study", "new", "plan"], "ends in .toml"),
    "unknown verb": (["study", "verdct", "demo"], "unknown verb 'verdct'. Did you mean 'verdict'?"),
    "unlocked run": (["study", "run", "demo", "--records", "r"], "not locked"),
    "unknown kind": (["list", "conections"], "unknown kind 'conections'. Did you mean 'connections'?"),
    "show an unknown kind": (["show", "connction", "mhc"], "unknown kind 'connction'. Did you mean 'connection'?"),
    "show what is not there": (["show", "connection", "highwy"], "Did you mean 'highway'"),
    "show an unknown task": (["show", "task", "austin"], "Did you mean 'austen'"),
    "show a task with an unknown parameter": (["show", "task", "copy:haf=3"], "Did you mean 'copy.half'"),
    "show a text without a file": (["show", "task", "text", "--load"], "needs a file"),
    "show a task with an option": (["show", "task", "copy", "--option", "half=3"], "belongs to a connection"),
    "report of a run and a plan": (
        ["report", "done", "demo", "-o", "x.html"],
        "must all be folders of runs, got 'demo'",
    ),
    "report of one run twice": (["report", "done", "./done", "-o", "x.html"], "given twice"),
    "report of too many runs": (["report", *["done"] * 22, "-o", "x.html"], "at most 21 runs"),
    "report of several runs at a scale": (
        ["report", "done", "full", "--scale", "small", "-o", "x"],
        "belongs to a plan",
    ),
    "show an unknown measure": (["show", "measure", "effective_rnk"], "Did you mean 'effective_rank'"),
    "generate from a task": (["generate", "done", "--prompt", "x"], "has no text"),
    "generate from nothing": (["generate", "nothing", "--prompt", "x"], "no such run"),
    "generate hotter than any number": (["generate", "done", "--prompt", "x", "--temperature", "inf"], "finite number"),
    "generate at no temperature": (["generate", "done", "--prompt", "x", "--temperature", "nan"], "finite number"),
    "generate with a seed too large": (["generate", "done", "--prompt", "x", "--seed", str(2**63)], "0..2**63-1"),
    "generate with a negative seed": (["generate", "done", "--prompt", "x", "--seed", "-1"], "0..2**63-1"),
    "a prompt that is no text": (["generate", "done", "--prompt", "a\udcff"], "not UTF-8 text"),
    "TOML nested too deeply": (["train", "deep.toml"], "nested too deeply"),
    "TOML with an endless number": (["train", "digits.toml"], "not valid TOML"),
    "a value nested too deeply": (["train", "--layers", "[" * 5000], "nested too deeply"),
    "an endless number": (["train", "--depth", "9" * 5000], "cannot be read"),
    "two values in one": (["train", "--depth", "1\nwidth = 8"], "one line"),
    "a word for a switch": (["train", "--compile", "yes"], "write true or false"),
    "absurd width": (["train", "--width", str(2**40)], "width must be at most"),
    "absurd depth": (["train", "--depth", str(10**12)], "depth must be at most"),
    "absurd batch": (["train", "--batch-size", str(10**400)], "batch_size must be at most"),
    "absurd vocabulary": (["train", "--vocab-size", str(2**62)], "vocab_size must be at most"),
    "absurd number of steps": (["train", "--steps", str(10**400)], "steps must be at most"),
    "text of an unknown user": (["train", "--data", "text:~nosuchuser/x.txt"], "unknown user"),
    "data of an unknown user": (["train", "--data", "~nosuchuser"], "unknown user"),
    "dataset of an unknown user": (["train", "--data", "hf:~nosuchuser/x.txt"], "unknown user"),
    "tokenizer of an unknown user": (["train", "--tokenizer", "~nosuchuser/x.json"], "unknown user"),
    "NUL in an argument": (["study", "new", "a\0.toml"], "NUL"),
    "NUL in the path of a text": (["train", "nul_text.toml"], "NUL"),
    "NUL in the path of a tokenizer": (["train", "nul_tokenizer.toml"], "NUL"),
    "tokenizer of another kind": (["train", "--tokenizer", "list.json"], "is not JSON of a table"),
    "tokenizer without its parts": (["train", "--tokenizer", "half.json"], "no valid 'tokenizer'"),
    "report without a name": (["report", "done", "-o", ""], "the output needs a name"),
    "resume without a name": (["train", "--resume", ""], "needs the folder of a run"),
    "output without a name": (["train", *SMALL, "-o", ""], "needs the folder of a run"),
    "compare with nothing": (["compare-runs", "done", "nothing"], "no such run"),
}


@pytest.mark.parametrize(("argv", "says"), CASES.values(), ids=CASES)
def test_one_line_and_code_2(place, capsys, argv, says):
    before = snapshot(place)
    code = main(argv)
    err = capsys.readouterr().err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    assert says in errors[0]
    assert "Traceback" not in err
    assert len(errors[0]) < 1200
    assert code == 2
    after = snapshot(place)
    assert {k: after.get(k) for k in before} == before


def snapshot(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}


def test_the_table_is_long_enough():
    assert len(CASES) >= 40


def test_debug_shows_the_traceback():
    with pytest.raises(Exception, match="Did you mean 'train'"):
        main(["trian", "--debug"])


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "foreign"])
def test_damaged_checkpoints(place, capsys, damage):
    run = place / "run"
    assert main([*TINY, "-o", "run", "--quiet"]) == 0
    weights = max((run / "checkpoints").glob("step-*")) / "model.safetensors"
    data = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        weights.write_bytes(data[:-4] + bytes(b ^ 255 for b in data[-4:]))
    elif damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(b"PK\x03\x04 a pickle, perhaps")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"status": "interrupted"}))
    capsys.readouterr()
    assert main(["train", "--resume", "run", "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "checkpoint" in line or "step-" in line


def test_a_full_disk_loses_nothing(place, capsys, monkeypatch):
    real = os.write

    def full(descriptor, data):
        if len(data) > 200_000:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    (place / "out.html").write_text("what was there")
    monkeypatch.setattr(
        files.os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    assert main(["report", "done", "-o", "out.html", "--overwrite"]) == 2
    assert "no space left" in capsys.readouterr().err
    assert (place / "out.html").read_text() == "what was there"


def test_nan_in_a_batch_is_a_result_not_a_crash(place, capsys, monkeypatch):
    import torch

    from thalweg.models.decoder import Decoder

    real = Decoder.unembed
    monkeypatch.setattr(Decoder, "unembed", lambda self, hidden: real(self, hidden) * torch.tensor(float("nan")))
    assert main([*TINY, "-o", "nan", "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out.replace("NaN", "null"))
    assert result["status"] == "diverged"
    assert json.loads((place / "nan" / "run.json").read_text())["status"] == "diverged"


def test_a_used_folder_is_refused_before_the_plan_is_timed(place, capsys, monkeypatch):
    from thalweg.training import plan

    monkeypatch.setattr(plan, "plan_of", lambda *a, **k: pytest.fail("the plan was made"))
    for folder, says in (("done", "holds a run already"), ("full", "is not empty"), ("report.html", "is a file")):
        assert main([*TINY, "-o", folder]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line


def test_a_folder_that_takes_no_files_is_refused_before_the_plan_is_timed(place, capsys, monkeypatch, takes_no_files):
    from thalweg.training import plan

    monkeypatch.setattr(plan, "plan_of", lambda *a, **k: pytest.fail("the plan was made"))
    takes_no_files(place)
    assert main([*TINY, "-o", str(place / "runs" / "new")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{place} takes no file (Read-only file system); choose another place")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:130] DefaultCPUAllocator: can't allocate memory: you tried 80 GB"),
    ],
)
def test_no_memory_left_is_no_bug(capsys, monkeypatch, error):
    from thalweg.cli import train_command

    def run(args):
        raise error

    monkeypatch.setattr(train_command, "run", run)
    assert main([*TINY, "--dry-run"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: out of memory (") and line.endswith("choose a smaller model, batch or length\n")
    assert line.count("\n") == 1
