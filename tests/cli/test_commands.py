"""Every command does its job, prints JSON when asked, and explains itself."""

import importlib
import json
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch

from thalweg.cli import COMMANDS, main, module_of
from thalweg.errors import ExitCode
from thalweg.studies import library
from thalweg.training import load_decoder

TINY = [
    "train",
    "--depth",
    "1",
    "--width",
    "16",
    "--heads",
    "1",
    "--data",
    "copy:vocab=8,half=4",
    "--sequence-length",
    "9",
    "--steps",
    "4",
]
TINY += ["--eval-every", "2", "--eval-batches", "1", "--batch-size", "16", "--threads", "1"]


def out(capsys, argv, code=0):
    assert main(argv) == code
    return capsys.readouterr().out


def test_the_list_of_commands():
    assert list(COMMANDS) == [
        "demo",
        "list",
        "show",
        "train",
        "generate",
        "measure",
        "study",
        "report",
        "compare-runs",
        "eval",
        "edit",
        "sweep",
        "compress",
        "compare",
        "convert",
        "grow",
        "prune",
        "probe",
        "models",
        "doctor",
    ]


def test_exit_codes():
    assert {e.name: e.value for e in ExitCode} == {
        "OK": 0,
        "REFUTED": 1,
        "INPUT": 2,
        "INCONCLUSIVE": 3,
        "VOID": 4,
        "CAPTURE": 5,
        "INTERNAL": 70,
        "INTERRUPTED": 130,
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_two_examples(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert text.count(f"  thalweg {command}") >= 2
    assert importlib.import_module(module_of(command)).EXAMPLES.startswith("examples:")


def test_help_loads_no_torch():
    code = "import sys, thalweg.cli; thalweg.cli.main([]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version(capsys):
    from thalweg import __version__

    assert out(capsys, ["--version"]).strip() == f"thalweg {__version__}"


@pytest.mark.parametrize(
    ("kind", "one"),
    [
        ("connections", "mgt"),
        ("compressors", "wanda"),
        ("experiments", "separation"),
        ("measures", "effective_rank"),
        ("plans", "demo"),
        ("tasks", "austen"),
    ],
)
def test_list(capsys, kind, one):
    rows = json.loads(out(capsys, ["list", kind, "--json"]))
    assert {"name", "summary", "source"} <= set(rows[0])
    assert one in [row["name"] for row in rows]
    assert one in out(capsys, ["list", kind])


def test_show_connection(capsys):
    found = json.loads(
        out(
            capsys,
            ["show", "connection", "mgt", "--width", "64", "--depth", "2", "--option", "preset=residual", "--json"],
        )
    )
    assert "2601.01014" in found["source"]
    assert found["options"]["preset"] == "residual"
    cost = found["cost at width 64, depth 2"]
    assert cost["parameters"] >= 4 * (
        2 * 64**2 + 64 + 2 * 64 + 1
    )  # the note's count for each of four sublayers, norms not counted
    text = out(capsys, ["show", "connection", "mgt"])
    assert "soft gate" in text


@pytest.mark.parametrize("plan", sorted(library.shipped()))
def test_every_shipped_plan_is_shown(capsys, plan):
    found = json.loads(out(capsys, ["show", "plan", plan, "--json"]))
    text = out(capsys, ["show", "plan", plan])
    assert found["hash"] in text and all(h["id"] in text for h in found["hypotheses"])
    arms = found.get("arms") or found["experiments"]
    assert all(f"{name} " in text for name in (*arms, *found["scale"]))


@pytest.mark.parametrize("mixer", ["kromhc", "transport_recursive", "sinkhorn", "orthogonal"])
def test_show_mixer_says_what_it_claims_in_words(capsys, mixer):
    text = out(capsys, ["show", "mixer", mixer])
    found = json.loads(out(capsys, ["show", "mixer", mixer, "--json"]))
    claims = found["claims, which the battery tests"]
    assert "every logit has a derivative at the start" in claims and "exact" not in claims.values()
    assert not {"moves", "reaches"} & set(claims) and "research note" not in text
    rounded = found["measured at 4 streams"]["in float32, logits of sd 1: largest |row sum - 1|, |column sum - 1|"]
    assert len(rounded.split(", ")) == 2
    if mixer == "transport_recursive":
        assert claims["sums of rows"] == "one, to rounding" and 0 < float(rounded.split(", ")[0]) < 1e-6


def test_the_summary_of_list_names_every_kind():
    from thalweg.cli.list_command import KINDS

    assert all(kind in COMMANDS["list"] for kind in KINDS)


def test_show_probe(capsys):
    found = json.loads(out(capsys, ["show", "probe", "bridge", "--option", "window=32", "--json"]))
    assert found["options"]["window"] == 32 and found["looks at"] == "a model" and found["reads a text"]
    text = out(capsys, ["show", "probe", "vortex"])
    assert "a trajectory of weights" in text and "random walks that are put through" in " ".join(text.split())
    for argv, says in (
        (["bridge", "--option", "window=2"], "at least 4, got 2"),
        (["rotray"], "Did you mean 'rotary'"),
    ):
        assert main(["show", "probe", *argv]) == ExitCode.INPUT
        assert says in capsys.readouterr().err


def test_show_measure_and_plan(capsys):
    assert "singular values" in out(capsys, ["show", "measure", "effective_rank"])
    assert len(json.loads(out(capsys, ["show", "plan", "demo", "--json"]))["hash"]) == 64


def test_train_report_compare(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = json.loads(out(capsys, [*TINY, "-o", "a", "--json", "--quiet"]))
    assert result["status"] == "done"
    assert result["cost"]["flops_per_token"] > 0
    out(capsys, [*TINY, "-o", "b", "--quiet"])
    out(capsys, [*TINY, "-o", "c", "--quiet", "--seed", "1"])
    assert "bitwise equal" in out(capsys, ["compare-runs", "a", "b", "--assert-equal"])
    apart = out(capsys, ["compare-runs", "a", "c", "--assert-equal"], code=1)
    assert "differ from step" in apart and "train/loss [nats/token]" in apart and "train/peak_memory [bytes]" in apart
    path = out(capsys, ["report", "a", "-o", "r.html"]).strip()
    assert "<svg" in (tmp_path / path).read_text()


def test_print_config_repeats_the_call(capsys, tmp_path):
    text = out(
        capsys, [*TINY, "--connection", "mgt", "--option", "preset=stable", "--model", "qk_norm=true", "--print-config"]
    )
    (tmp_path / "again.toml").write_text(text)
    assert out(capsys, ["train", str(tmp_path / "again.toml"), "--print-config"]) == text


def test_dry_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned = json.loads(out(capsys, [*TINY, "--dry-run", "--json"]))
    assert planned["parameters"] > 0
    assert not list(tmp_path.iterdir())


def test_generate(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("It was the best of times, it was the worst of times. " * 60)
    argv = [
        "train",
        "--data",
        "text:t.txt",
        "--tokenizer",
        "byte",
        "--depth",
        "1",
        "--width",
        "32",
        "--sequence-length",
        "32",
        "--steps",
        "3",
    ]
    out(
        capsys,
        [
            *argv,
            "--eval-every",
            "3",
            "--batch-size",
            "4",
            "--eval-batches",
            "1",
            "--threads",
            "1",
            "-o",
            "run",
            "--quiet",
        ],
    )
    first = json.loads(out(capsys, ["generate", "run", "--prompt", "It was", "--tokens", "8", "--json"]))["text"]
    assert (
        first == json.loads(out(capsys, ["generate", "run", "--prompt", "It was", "--tokens", "8", "--json"]))["text"]
    )
    assert main(["generate", "run", "--prompt", "", "--tokens", "8"]) == 2
    assert main(["generate", "run", "--prompt", "x", "--tokens", "100000"]) == 2
    capsys.readouterr()

    def diverged(*arguments):
        model, about = load_decoder(*arguments)
        torch.nn.init.constant_(model.embedding.weight, torch.nan)
        return model, about

    monkeypatch.setattr("thalweg.training.load_decoder", diverged)
    assert main(["generate", "run", "--prompt", "It was", "--tokens", "8"]) == 2
    assert "the logits at token 6 are not numbers" in capsys.readouterr().err


def test_doctor(capsys):
    found = json.loads(out(capsys, ["doctor", "--json"]))
    assert found["ok"]
    assert {"python", "torch", "numerics"} <= {row["check"] for row in found["checks"]}


def test_interrupted_train_resumes(tmp_path):
    """Ctrl-C saves, says how to go on, exits 130; the resumed run equals one that was never interrupted."""
    steps = ["--steps", "120", "--eval-every", "60", "--geometry", "false"]
    argv = [
        sys.executable,
        "-m",
        "thalweg",
        *TINY[:-8],
        "--eval-batches",
        "1",
        "--batch-size",
        "4",
        "--threads",
        "1",
        *steps,
    ]
    run = tmp_path / "run"
    process = subprocess.Popen([*argv, "-o", str(run)], stderr=subprocess.PIPE, text=True)
    while not (run / "metrics.jsonl").exists() or '"step": 20' not in (run / "metrics.jsonl").read_text():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    assert main([*argv[3:], "-o", str(tmp_path / "straight"), "--quiet"]) == 0
    assert main(["compare-runs", str(run), str(tmp_path / "straight"), "--assert-equal"]) == 0


@pytest.mark.parametrize(
    "argv",
    [
        ["compare", "a b/base", "c/d", "--text", "my text.txt", "--layer-kl", "--seed", "3", "--mode", "local"],
        ["compare", "base", "--method", "rtn", "--bits", "3", "--option", "group=8", "--option", "symmetric=true"],
        [
            "measure",
            "/x/it's",
            "--text",
            "t/a b.txt",
            "--bos",
            "--rows",
            "$HOME/r.csv",
            "--tokens",
            "64",
            "--which",
            "best",
        ],
        [
            "probe",
            "../m",
            "--only",
            "rotary,rmsnorm",
            "--option",
            "rotary.target=9",
            "--tokens",
            "64",
            "--which",
            "best",
        ],
        ["sweep", "m/n", "--parallel=-0.5,0", "--layers", "1:", "--full", "--text", "a;b.txt", "--seed", "2"],
    ],
    ids=lambda argv: argv[0],
)
def test_the_command_on_a_page_is_the_call_again(argv):
    """Through a shell: places as they were given, quoted where they must be."""
    from thalweg.cli import measure_model
    from thalweg.cli.console import Parser

    command = importlib.import_module(module_of(argv[0]))
    parser = Parser(prog="thalweg")
    command.configure(parser)
    parser.add_common(parser)
    args = parser.parse_args(argv[1:])
    line = (measure_model if argv[0] == "measure" else command)._command(args)
    program, name, *again = shlex.split(line)
    assert (program, name) == ("thalweg", argv[0]) and parser.parse_args(again) == args
