"""The table of parity: its rows are those that the tests record, its marks say what was not run, and the page's example runs."""

import importlib
import json
import re
from pathlib import Path

import agreement
import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("parity_table")


def test_every_row_with_a_number_has_a_test_that_makes_it(tool):
    rows = {row.key for row in [*tool.ROWS, *tool.MIXER_ROWS] if row.key}
    texts = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*_parity.py"))
    recorded = set(re.findall(r'record\(\s*"(\w+)"', texts)) | {
        "hyper_connections_mhc",
        "hyper_connections_mhc_v2",
    }  # by layout
    assert rows == recorded
    assert set(tool.ledger()) <= rows


def test_what_was_not_run_is_red(tool):
    kept = {
        "a": {"outputs": 1e-15, "gradients": 2e-14, "dtype": "float64", "versions": {"hyper_connections": "0.4.11"}}
    }
    assert tool.measured("a", kept, {"hyper-connections": "0.4.11"}).startswith("🟢 outputs 1e-15, gradients 2e-14")
    assert tool.measured("b", kept, {}) == "🔴 not run"
    assert tool.measured("a", kept, {"hyper-connections": "0.5"}).startswith("🔴 not run on the pinned version")
    assert tool.result(tool.Row("x", "y", other="needs a CUDA device")) == "🔴 not run: needs a CUDA device"


def test_an_empty_ledger_leaves_no_green_number(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "LEDGER", tmp_path / "none.json")
    assert {tool.result(row)[0] for row in tool.ROWS if row.key} == {"🔴"}


def test_what_ran_beside_a_failure_is_not_kept(tool, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tool, "LEDGER", tmp_path / "ledger.json")
    codes = iter([0, 1])

    def ran(command, **_):
        code = next(codes)
        kept = {**tool.ledger(), f"tier {code}": {}}
        tool.LEDGER.write_text(json.dumps(kept), encoding="utf-8")
        return type("Done", (), {"returncode": code})

    monkeypatch.setattr(tool.subprocess, "run", ran)
    tool.run()
    assert set(tool.ledger()) == {"tier 0"}
    assert "not all passed" in capsys.readouterr().out


def test_every_connection_and_mixer_has_a_row(tool):
    (_, _, first), (_, _, second), _ = tool.parts()
    for kind, text in ((tool.connections, first), (tool.mixers, second)):
        assert all(f"| `{name}` |" in text for name in tool.names(kind))


def test_errors_of_one_row_are_the_worst_of_its_tests(monkeypatch, tmp_path):
    monkeypatch.setattr(agreement, "LEDGER", tmp_path / "parity.json")
    monkeypatch.setattr(agreement, "_seen", {})
    monkeypatch.setenv("THALWEG_PARITY", "write")
    agreement.record("row", agreement.Errors(1.23e-15, 5e-14), ["torch"])
    agreement.record("row", agreement.Errors(9e-16, 7e-14), ["torch"])
    kept = json.loads((tmp_path / "parity.json").read_text())["row"]
    assert (kept["outputs"], kept["gradients"]) == (1.2e-15, 7e-14)


def test_the_example_of_the_page_runs():
    (block,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "parity.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(block, {})
    with pytest.raises(AssertionError), torch.random.fork_rng():
        torch.manual_seed(0)
        exec(
            block.replace(', "deepseek_v4")', ', "deepseek_v4")\nstream.sites[0].options.__dict__["read"] = "signed"'),
            {},
        )
