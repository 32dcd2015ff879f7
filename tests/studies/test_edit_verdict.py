"""Verdicts on records of edits: over documents and over layers, every status, from plan and records alone."""

import dataclasses
import math

import numpy as np
import pytest
from edit_plans import found, plan, row
from scipy import stats

from thalweg.errors import InputError
from thalweg.studies.edits.observe import measured, trials
from thalweg.studies.judging import rule
from thalweg.studies.statistics import ranked

ALONE = [f"alone-layer{i}" for i in range(7)]


def verdicts(made, records, scale="small", void=()):
    chosen = made.at(scale)
    judged = rule(
        made, scale, chosen.kind, trials(made, scale, records), chosen.documents, sample="document", void=void
    )
    return judged, {v.hypothesis: v for v in judged.verdicts}


@pytest.mark.parametrize(
    ("costs", "status", "code"),
    [
        ({"value-perp0": 2.0, "value-par0": 0.5}, "supported", 0),
        ({"value-perp0": 0.5, "value-par0": 2.0}, "refuted", 1),
        ({"value-perp0": 0.6, "value-par0": 0.5}, "inconclusive", 3),
    ],
)
def test_rule_over_documents(costs, status, code):
    judged, by = verdicts(plan(), found(plan(), costs))
    assert (judged.status, judged.exit_code) == (status, code)
    assert by["asymmetry"].status == status and by["asymmetry"].sample == "document"
    assert by["asymmetry"].estimate == pytest.approx(costs["value-perp0"] - costs["value-par0"], abs=0.05)
    assert judged.notes[0].startswith("20 documents: smallest")


def test_the_change_is_against_the_no_op_and_by_position():
    made = plan()
    records = found(made, {"value-noop": 0.25, "value-par0": 1.0}, growth={"value-par0": 0.3})
    one = records["value-par0"]
    assert measured("loss_change", "all", one)[1] == pytest.approx(0.75 + 0.15)
    assert measured("loss", "all", one)[1] == pytest.approx(3 + 1.0 + 0.15)
    assert measured("loss_change", "growth", one)[1] == pytest.approx(0.3)
    assert measured("loss_change", "last", one)[1] - measured("loss_change", "first", one)[1] == pytest.approx(0.3)


def test_an_arm_without_record_voids():
    records = found(plan(), {"value-perp0": 2.0})
    del records["value-perp0"]
    judged, by = verdicts(plan(), records)
    assert judged.exit_code == 4
    assert (
        by["asymmetry"].reason
        == "20 of 40 documents are missing (value-perp0 document 0, value-perp0 document 1, value-perp0 document 2 ...)"
    )


def test_an_edited_plan_voids_and_a_demo_decides_nothing():
    assert verdicts(plan(), found(plan(), {"value-perp0": 2.0}), void=["the plan was edited"])[0].status == "void"
    judged, by = verdicts(plan(), found(plan(), {"value-perp0": 2.0}, 3), "smoke")
    assert (judged.status, by["asymmetry"].reason) == ("inconclusive", "demo: too small to judge")


def test_a_loss_that_is_not_finite_takes_the_value_of_its_rule():
    made = plan()
    records = found(made, {"value-perp0": 2.0})
    arm = records["value-perp0"]
    nats = [[math.inf] * 4, *arm.row.columns["nats"][1:]]
    records["value-perp0"] = dataclasses.replace(arm, row=row(made.edits["value-perp0"], nats))
    _, by = verdicts(made, records)
    assert by["asymmetry"].status == "inconclusive" and "not finite, rule: inconclusive" in by["asymmetry"].reason
    ruled = plan(hypotheses__0__diverged=10.0)
    _, by = verdicts(ruled, records)
    assert by["asymmetry"].arms["value-perp0"][0] == 10.0
    assert by["asymmetry"].substituted == ("value-perp0 document 0: not finite, takes 10",)


def with_strength(order):
    """Layers that cost 0.1, 0.2 ... and whose edit is as strong as ``order`` says."""
    costs = {name: 0.1 * (i + 1) for i, name in enumerate(ALONE)}
    layers = {
        name: {"applied": [order[i] if k == i else None for k in range(7)], "drift": [0.0] * 7}
        for i, name in enumerate(ALONE)
    }
    return found(plan(), costs | {"value-perp0": 2.0}, layers=layers)


def test_layers_are_ranked_without_the_first_and_the_last():
    _, by = verdicts(plan(), with_strength([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0]))
    assert by["strength"].sample == "layer" and by["strength"].statistics.n == 5
    assert by["strength"].estimate == pytest.approx(1.0)
    assert by["strength"].status == "supported"
    _, by = verdicts(plan(), with_strength([9.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]))
    assert by["strength"].estimate == pytest.approx(-1.0) and by["strength"].status == "refuted"


def test_layers_without_an_audit_are_no_record():
    _, by = verdicts(plan(), found(plan(), {}, layers={"none": {}}))
    assert by["strength"].status == "void" and "no document was audited" in by["strength"].reason


def test_strengths_that_are_all_equal_void_their_hypothesis_alone():
    """Catches: a verdict of nothing at all, since a column without spread cannot be ranked."""
    records = with_strength([0.25] * 7)
    _, by = verdicts(plan(), records)
    assert by["strength"].status == "void" and by["asymmetry"].status == "supported"
    assert "all layers have the same applied, 0.25" in by["strength"].reason
    assert verdicts(plan(), found(plan(), dict.fromkeys(ALONE, 0.1)))[1]["strength"].status == "void"
    assert verdicts(plan(), found(plan(), {}, 3, layers={n: {"applied": [0.2] * 7} for n in ALONE}), "smoke")[1]


def test_a_strength_that_is_not_finite_takes_the_value_of_its_rule():
    records = with_strength([9.0, 1.0, 2.0, math.nan, 4.0, 5.0, 0.0])
    _, by = verdicts(plan(), records)
    assert by["strength"].status == "inconclusive" and "applied layer 3 (not finite" in by["strength"].reason
    assert by["asymmetry"].status == "supported"
    _, by = verdicts(plan(hypotheses__1__diverged=3.0), records)
    assert by["strength"].estimate == pytest.approx(1.0) and by["strength"].substituted[0].startswith("applied layer 3")


def test_an_audit_that_does_not_measure_it_is_not_called_absent():
    _, by = verdicts(plan(), found(plan(), {}, layers={name: {"drift": [0.1] * 7} for name in ALONE}))
    assert by["strength"].status == "void" and "its audit measures none" in by["strength"].reason


def test_rank_correlation_against_scipy_and_its_margin():
    rng = np.random.default_rng(3)
    x = rng.standard_normal(28)
    y = x + rng.standard_normal(28)
    found = ranked(x.tolist(), y.tolist(), margin=0.3)
    assert found.estimate == pytest.approx(stats.spearmanr(x, y).statistic)
    # Bonett and Wright 2000 by hand
    error = math.sqrt((1 + found.estimate**2 / 2) / 25)
    assert found.low == pytest.approx(math.tanh(math.atanh(found.estimate) - 1.959964 * error), abs=1e-6)
    assert found.p_above == pytest.approx(stats.norm.sf((math.atanh(found.estimate) - math.atanh(0.3)) / error))
    assert found.sign_flip < 0.01
    mirrored = ranked(x.tolist(), (-y).tolist(), margin=-0.3)
    assert (mirrored.low, mirrored.p_below) == pytest.approx((-found.high, found.p_above))


def test_the_interval_of_a_rank_correlation_covers():
    """Coverage of a known correlation: rho_S = 6/pi asin(r/2) of a normal pair."""
    rng = np.random.default_rng(0)
    r, hits = 0.5, 0
    true = 6 / math.pi * math.asin(r / 2)
    for _ in range(200):
        x = rng.standard_normal(28)
        y = r * x + math.sqrt(1 - r * r) * rng.standard_normal(28)
        one = ranked(x.tolist(), y.tolist())
        hits += one.low <= true <= one.high
    assert 182 <= hits <= 199


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        ([1.0] * 4, [1.0, 2, 3, 4], "at least 5"),
        ([1.0] * 6, [1.0, 2, 3, 4, 5, 6], "all of a column are equal"),
        ([1, 2, 3, 4, math.nan], [1.0, 2, 3, 4, 5], "finite"),
    ],
)
def test_rank_correlation_refuses(x, y, says):
    with pytest.raises(InputError, match=says):
        ranked(x, y)
