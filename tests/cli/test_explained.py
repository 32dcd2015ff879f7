"""What a person is told of options, flags, plans and tasks: every one has a phrase, and all phrases come from docstrings."""

import argparse
import importlib
import json
from dataclasses import dataclass, field, fields
from typing import Literal

import pytest

from thalweg import config, connections
from thalweg.cli import COMMANDS, main, module_of
from thalweg.cli.console import Parser, grid
from thalweg.data import tasks
from thalweg.training.config import TrainConfig


@dataclass(frozen=True)
class Base:
    """A family.

    size: how large it is; it may be long: up to 9. kind, other: one
    meaning for both.
    """

    size: int = 1
    kind: Literal["a", "b"] = "a"
    other: float | None = None


@dataclass(frozen=True)
class Own(Base):
    """The member. size: ``own`` meaning, see :class:`Base`.

    Prose with the word kind: no meaning, for it follows a word.

    Raises: nothing.
    """

    bare: bool = False
    table: dict[str, int] = field(default_factory=dict)
    parts: tuple[str, ...] = ("x", "y")


def test_meanings_are_read_from_docstrings():
    assert config.meanings(Base) == {
        "size": "how large it is; it may be long: up to 9",
        "kind": "one meaning for both",
        "other": "one meaning for both",
    }
    assert config.meanings(Own)["size"] == "``own`` meaning, see :class:`Base`"
    assert config.meanings(Own)["kind"] == "one meaning for both"
    found = {d.name: (d.allowed, d.default, d.meaning) for d in config.describe(Own)}
    assert found == {
        "size": ("whole number", "1", "own meaning, see Base"),
        "kind": ("a, b", "a", "one meaning for both"),
        "other": ("number", "none", "one meaning for both"),
        "bare": ("true or false", "false", ""),
        "table": ("table", "{}", ""),
        "parts": ("list, each text", '["x", "y"]', ""),
    }


@pytest.mark.parametrize("name", connections.names())
def test_every_option_of_every_connection_has_a_meaning(name):
    described = config.describe(connections.registry[name].Options)
    assert [d.name for d in described if not d.meaning] == []
    assert [d.name for d in described] == list(connections.option_defaults(name))


@pytest.mark.parametrize("name", [n for n in tasks.registry.names() if hasattr(tasks.registry[n], "__self__")])
def test_every_parameter_of_every_synthetic_task_has_a_meaning(name):
    assert [d.name for d in config.describe(tasks.registry[name].__self__.Options) if not d.meaning] == []


def test_every_field_of_a_run_has_a_meaning():
    assert [d.name for d in config.describe(TrainConfig) if not d.meaning] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_every_command_has_a_phrase(command):
    parser = Parser(prog=command)
    importlib.import_module(module_of(command)).configure(parser)
    parser.add_common(parser)
    for action in parser._actions:
        assert action.help and action.help != argparse.SUPPRESS, action.dest
        assert not action.help.startswith("default"), action.dest


def test_help_of_train_names_every_field_with_its_phrase(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for f in config.describe(TrainConfig):
        if f.name not in ("connection_options", "model", "growth"):  # tables: --option, --model, and the command grow
            assert f"--{f.name.replace('_', '-')} VALUE {f.meaning}" in said
    assert "cosine, linear, step, constant (cosine)" in said


def shown(capsys, *argv):
    assert main(["show", *argv]) == 0
    return capsys.readouterr().out


def test_show_connection_has_a_table_of_options(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    text = shown(capsys, "connection", "mgt", "--option", "preset=stable")
    rows = {
        line.split()[0]: " ".join(line.split())
        for line in text.splitlines()
        if line.startswith("    ") and line.split()
    }
    assert rows["name"] == "name values default meaning"
    for f in fields(connections.registry["mgt"].Options):
        assert f.name in rows
    assert rows["alpha_kind"].startswith("alpha_kind free, positive, fixed free ")
    assert "paper (here stable)" in text
    (row,) = [
        r
        for r in json.loads(shown(capsys, "connection", "mgt", "--json"))["options explained"]
        if r["name"] == "preset"
    ]
    assert row["default"] == "paper"
    assert row["given"] is None


def test_show_plan_is_read_without_braces(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    text = shown(capsys, "plan", "mgt-ablation")
    assert "{" not in text
    for part in (
        "hypotheses",
        "mgt − pre_norm_parameters",
        "< -0.02",
        "soft_gate + delta −",
        "A4 (secondary)",
        "Correction over 3 primary hypotheses: Holm, alpha 0.05.",
        "gate_input_independent  control",
        "parameters of mgt, by ffn_width",
        "confirmatory",
        "0.0005, 0.001, 0.002",
        "weights start at standard deviation",
    ):
        assert part in text, part


def test_show_task(capsys):
    text = shown(capsys, "task", "copy:half=3")
    for part in ("repeat a random sequence", "length of what is copied", "7 tokens", "chance_accuracy = 0.0625"):
        assert part in text, part
    assert json.loads(shown(capsys, "task", "copy:vocab=4", "--json"))["nulls (nats/token, shares or as named)"][
        "chance_accuracy"
    ] == pytest.approx(0.25)
    assert "unigram_entropy" in shown(capsys, "task", "austen")
    assert "--load gives the numbers" in shown(capsys, "task", "hf")


def test_show_task_loads_a_text_when_asked(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("It was the best of times, it was the worst of times.\n" * 80)
    found = json.loads(shown(capsys, "task", "text:t.txt", "--load", "--json"))
    assert found["nulls (nats/token, shares or as named)"]["unigram_entropy"] > 0


def test_a_grid_is_aligned_and_wrapped(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = grid(["a", "b"], [["x", "one two three four five six seven eight nine ten eleven twelve"], ["yy", ""]])
    assert [line[:4].strip() for line in lines] == ["a", "x", "", "yy"]
    assert all(len(line) <= 56 for line in lines)
