"""The example notebooks run, and print what is kept in them."""

import contextlib
import io
import json
from pathlib import Path

import matplotlib
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_prints_what_it_shows(path, monkeypatch):
    matplotlib.use("Agg")
    from matplotlib import pyplot

    namespace: dict = {}
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    for cell in cells:
        printed = io.StringIO()
        monkeypatch.setattr(pyplot, "show", lambda: None)
        with contextlib.redirect_stdout(printed):
            exec("".join(cell["source"]), namespace)
        kept = [output for output in cell["outputs"] if output["output_type"] == "stream"]
        assert printed.getvalue() == "".join("".join(output["text"]) for output in kept)
        figures = sum(output["output_type"] == "display_data" for output in cell["outputs"])
        assert len(pyplot.get_fignums()) == figures
        pyplot.close("all")


def test_the_example_of_the_review_comes_out():
    """R = I + 0.3 G, two decimals: exponential and 20 iterations."""
    import torch

    import thalweg

    matrix = torch.tensor(
        [[1.01, 0.41, 0.37, -0.15], [-0.09, 0.84, 0.17, -0.02], [0.22, -0.55, 1.47, -0.03], [0.20, -0.04, -0.11, 1.14]]
    )
    printed = [[0.43, 0.26, 0.18, 0.14], [0.17, 0.47, 0.17, 0.19], [0.20, 0.10, 0.54, 0.16], [0.20, 0.17, 0.11, 0.52]]
    found = thalweg.ops.sinkhorn(matrix.double(), iterations=20)
    assert torch.equal((found * 100).round(), (torch.tensor(printed).double() * 100).round())
