"""The report of a measured model, from rows alone: medians are drawn where the means are told to be decided by few tokens."""

import math
import re

import pytest

from thalweg.records import Measurements
from thalweg.reports.model import MEDIAN, STATES, UPDATES, decided, drawn, write_model_report

DEPTH = 4


def rows_of(mean: float, median: float, layer_median: float = 0.5) -> Measurements:
    """A coefficient of two sublayers and of whole layers; of attention in layer 2 the mean is ``mean``, the median ``median``."""
    rows = Measurements()
    rows.add("capture_error", 1e-8, null=1e-5, null_kind="tolerance of the replay", n=64, dtype="float32")
    for layer in range(DEPTH):
        for branch in ("attention", "feed_forward", "layer"):
            kind = "step" if branch == "layer" else "raw"
            site = f"layers.{layer}" if branch == "layer" else f"layers.{layer}.{branch}"
            here = branch == "attention" and layer == 2
            where = {"site": site, "layer": layer, "branch": branch, "null": 0.0, "null_kind": "random direction"}
            rows.add(f"parallel_coefficient.{kind}", mean if here else 0.5, low=-9.0, high=9.0, interval="x", **where)
            middle = median if here else layer_median if branch == "layer" else 0.4
            rows.add(f"parallel_coefficient.{kind}.median", middle, n=9, **where)
    return rows


def figure(rows):
    (found,) = drawn(rows, UPDATES)
    return found


@pytest.mark.parametrize(("mean", "median"), [(0.5, -0.1), (-2.0, -0.3), (1.0, 0.01)])
def test_medians_are_drawn_where_they_are_told(mean, median):
    """Fails where they stand in the rows only. Both kinds of sublayer have ``.raw``, so both are dotted; whole layers are not."""
    rows = rows_of(mean, median)
    assert decided(rows) == {"parallel_coefficient.raw": [decided(rows)["parallel_coefficient.raw"][0]]}
    found = figure(rows)
    assert found.caption.endswith(MEDIAN)
    heads = found.columns[1:]
    assert heads[:5] == ("attention", "feed-forward", "whole layer", "attention, median", "feed-forward, median")
    column = [row[4] for row in found.rows]
    assert [float(cell) for cell in column] == pytest.approx([0.4, 0.4, median, 0.4])
    assert (
        len(re.findall(r'class="median c0"', found.svg)) == 1 and len(re.findall(r'class="median c1"', found.svg)) == 1
    )
    assert not [key for key in found.legend if "median" in key.label]


def test_no_median_is_drawn_where_means_tell_the_same():
    found = figure(rows_of(0.5, 0.4))
    assert "median" not in found.svg and MEDIAN not in found.caption and "attention, median" not in found.columns


def test_a_whole_layer_has_its_own():
    found = figure(rows_of(0.5, 0.4, layer_median=-0.2))
    assert "whole layer, median" in found.columns and "attention, median" not in found.columns


def test_a_state_is_dotted_too_and_a_missing_median_is_a_gap():
    rows = Measurements()
    for layer in range(3):
        rows.add("rms", 9.0, site=f"layers.{layer}.attention", layer=layer, branch="attention")
        if layer != 1:
            rows.add("rms.median", 1.0, site=f"layers.{layer}.attention", layer=layer, branch="attention")
    (found,) = drawn(rows, STATES)
    assert found.columns[1:] == ("stream", "stream, median") and [row[2] for row in found.rows] == ["1", "NaN", "1"]
    assert math.isfinite(float(found.rows[0][1]))


def test_the_page_says_where_the_medians_are(tmp_path):
    machine = {"git": None, "cpu_count": 2}
    page = write_model_report(
        rows_of(0.5, -0.1),
        tmp_path / "p.html",
        title="t",
        facts={"model": "m"},
        provenance=machine,
    )
    text = page.read_text()
    assert "the medians are dotted in the figures" in text and "layers.2.attention (0.5, median -0.1)" in text
    order = [
        text.index(f'id="{name}"') for name in ("facts", "updates", "limits", "reproduce", "provenance", "citations")
    ]
    assert (
        order == sorted(order)
        and "6. How to reproduce" in text
        and "<dt>cpu count</dt>" in text
        and "<dt>git</dt>" not in text
    )
