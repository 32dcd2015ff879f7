"""The report of a study of edits: order, numbers, what is missing, hostile text."""

import re

import edit_plans
import pytest
from pages import read

from thalweg.reports.edits import EditStudyRecords, interval, write_edit_report
from thalweg.reports.text import number
from thalweg.studies.edits.observe import measured, trials
from thalweg.studies.judging import rule

HOSTILE = "</style><script>alert(1)</script> & \x00"


def records(made, found, scale="small", **more):
    chosen = made.at(scale)
    judged = rule(made, scale, chosen.kind, trials(made, scale, found), chosen.documents, sample="document")
    return EditStudyRecords(made, scale, judged, found, **more)


@pytest.fixture
def supported():
    made = edit_plans.plan()
    return records(
        made,
        edit_plans.found(made, {"value-perp0": 2.0, "value-par0": 0.5}),
        locked="2026-11-30T01:00:00+00:00",
        version="1",
    )


def test_order_and_numbers(supported, tmp_path):
    found = read(write_edit_report(supported, tmp_path / "r.html"))
    sections = [h for h in found.headings if re.match(r"\d\. ", h)]
    assert sections == [
        "1. Verdict",
        "2. What each edit costs",
        "3. Scales, positions, layers",
        "4. Deviations, choices, warnings",
        "5. How to reproduce",
        "6. Provenance",
        "7. Citations",
    ]
    assert found.said.index("supported") < found.said.index("1. Verdict")
    cost, low, high = interval(measured("loss_change", "all", supported.found["value-perp0"]))
    assert cost == pytest.approx(2.0, abs=0.01) and low < cost < high
    assert f"{number(low)} to {number(high)}" in found.said
    assert "Spearman over layers of loss_change with applied" in found.said
    for title in ("value: value, own", "Change of the loss by position", "One layer edited alone"):
        assert f"<h3>{title}</h3>" in found.text
    assert "again: the same edit in other words" in found.said
    assert "thalweg study run p.toml --scale small" in found.said


def test_the_sweep_goes_through_zero_at_the_no_op(supported, tmp_path):
    text = write_edit_report(supported, tmp_path / "r.html").read_text()
    table = text[text.index("retained scale (1: the matched no-op)</th>") :]
    rows = [re.findall(r"<t[hd][^>]*>([^<]*)<", line) for line in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)[:3]]
    assert [row[0] for row in rows] == ["0", "0.5", "1"]
    assert rows[2][1] == rows[2][3] == "0"
    assert float(rows[0][3]) == pytest.approx(2.0, abs=0.01)  # the perpendicular part removed


def test_missing_edits_are_named_and_void(tmp_path):
    made = edit_plans.plan()
    found = edit_plans.found(made, {"value-perp0": 2.0})
    for name in ("value-perp0", "alone-layer3"):
        del found[name]
    page = read(write_edit_report(records(made, found), tmp_path / "r.html"))
    assert "2 of 16 edits are missing: value-perp0, alone-layer3." in page.said
    assert "no verdict, the protocol is not fulfilled" in page.said


def test_without_records(tmp_path):
    made = edit_plans.plan()
    page = read(write_edit_report(records(made, {}), tmp_path / "r.html"))
    assert "No edit has left a record yet." in page.said


def test_hostile_text_stays_text(tmp_path):
    made = edit_plans.plan(title=HOSTILE, choices=[HOSTILE], arms__block__note=HOSTILE)
    text = write_edit_report(records(made, edit_plans.found(made, {})), tmp_path / "r.html").read_text()
    assert "<script>" not in text and "\x00" not in text
