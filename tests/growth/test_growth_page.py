"""The page on growth is true: its Python runs from top to bottom."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "growth.md"


def test_the_python_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    exec("\n".join(blocks), {})
    assert "converged" in capsys.readouterr().out or (tmp_path / "runs" / "grown-python" / "growth.jsonl").exists()
    assert (tmp_path / "runs" / "grown-python" / "model" / "config.json").exists()
