"""What records of compressions say: ranks by document, errors, correlations with their null; and the page made from them."""

import math

import pytest
from compression_plans import DEPTH, found, plan
from scipy import stats

from thalweg.reports.compressions import cost_table, rank_tables, write_compression_report
from thalweg.reports.edits import EditStudyRecords
from thalweg.studies.compressed.observe import correlations, predicted, ranks, trials
from thalweg.studies.judging import rule

COSTS = {
    "own.rtn-8": 0.01,
    "own.rtn-4": 0.1,
    "own.rtn-3": 0.4,
    "own.rtn-2": 3.0,
    "own.prune-0.3": 4.0,
    "own.prune-0.5": 5.0,
}
KEPT = {"own.kept": 0.2, "own.kept_chance": 0.35}


def verdict(records, made=None):
    made = made or plan()
    return {
        v.hypothesis: v
        for v in rule(made, "small", "confirmatory", trials(made, "small", records), 20, sample="document").verdicts
    }


def test_errors_that_order_the_arms_as_their_losses_are_supported():
    records = found(plan(), {**COSTS, **KEPT})
    seen = verdict(records)
    assert seen["order"].status == "supported"
    arms = plan().ranked("own", "small")
    chance = stats.spearmanr([predicted("chance", "block", a, records[a.name]) for a in arms], range(6)).statistic
    assert seen["order"].estimate == pytest.approx(1 - chance)
    assert seen["protect"].status == "supported" and seen["protect"].estimate == pytest.approx(-0.15, rel=0.01)
    assert seen["size"].estimate == pytest.approx(
        0.01 * 4 * 1.005
    )  # mean over layers of 0.01 (1 + k), over documents 1.005


def test_errors_in_the_opposite_order_are_refuted():
    costs = {name: 6.0 - cost for name, cost in COSTS.items()}
    seen = verdict(found(plan(), {**costs, **KEPT}))
    assert seen["order"].status == "refuted"


def test_ranks_of_one_document_by_hand():
    """Two arms swapped in one document alone: only its rank falls, to 1 - 6 * 2 / (6 * 35)."""
    records = found(plan(), COSTS)
    a, b = (records[f"own.rtn-{bits}"].row.columns["nats"] for bits in (8, 4))
    a[3], b[3] = b[3], a[3]
    by_document = ranks("total", "block", "loss_change", plan().ranked("own", "small"), records)
    assert by_document[3] == pytest.approx(1 - 12 / 210)
    assert by_document[:3] + by_document[4:] == pytest.approx([1.0] * 19)


def test_correlation_leaves_the_first_and_the_last_layer_out():
    total = [9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0]
    across = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0]  # with the ends the correlation would be negative
    null = [0.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    columns = {"block.total": total, "block.perpendicular": across, "block.null": null}
    records = found(plan(), COSTS, {"own.rtn-3": columns})
    assert correlations(records["own.rtn-3"].row, "block", "perpendicular") == pytest.approx([1.0] * 20)
    assert correlations(records["own.rtn-3"].row, "block", "null") == pytest.approx([-1.0] * 20)
    assert verdict(records)["with"].estimate == pytest.approx(2.0)


def test_a_missing_arm_voids_and_a_loss_that_is_not_finite_decides_nothing():
    records = found(plan(), COSTS)
    lacking = {name: f for name, f in records.items() if name != "own.rtn-2"}
    assert verdict(lacking)["order"].status == "void" and verdict(lacking)["size"].status != "void"
    records["own.rtn-2"].row.columns["nats"][5][0] = math.nan
    assert verdict(records)["order"].status == "inconclusive"
    records["own.rtn-2"].row.columns["nats"][5][0] = math.inf  # the worst of all, which a rank can hold
    assert verdict(records)["order"].status == "supported"


def test_single_layers_are_ranked_by_the_error_of_their_own_layer():
    made = plan(arms__alone__each_layer=DEPTH, hypotheses__0__measure="layer_rank", hypotheses__0__family="own.alone")
    names = [f"own.alone-layer{k}" for k in range(DEPTH)]
    errors = {n: {"block.perpendicular": [0.0] * k + [0.1 * k] + [9.0] * (DEPTH - 1 - k)} for k, n in enumerate(names)}
    records = found(made, {n: 0.01 * (k + 1) for k, n in enumerate(names)}, errors)
    arms = [made.edits[n] for n in names[1:-1]]
    assert ranks("perpendicular", "block", "loss_change", arms, records) == pytest.approx([1.0] * 20)


def test_the_report_tells_costs_predictors_and_layers(tmp_path):
    made, records = plan(), found(plan(), {**COSTS, **KEPT})
    seen = rule(made, "small", "confirmatory", trials(made, "small", records), 20, sample="document")
    page = write_compression_report(
        EditStudyRecords(made, "small", seen, records, done="compression"), tmp_path / "r.html"
    ).read_text()
    for text in ("its part across that update", "rtn-3", "a fixed random order", "own: over compressions", "supported"):
        assert text in page
    rows = {row[0]: row for row in cost_table(EditStudyRecords(made, "small", seen, records), "own").rows}
    assert rows["rtn-2"][1] == "4.5" and rows["rtn-2"][2].startswith("2.993 (") and rows["rtn-2"][4].startswith("1 (")
    assert "noop" not in rows and "alone-layer1" not in rows
    ((_, table),) = rank_tables(EditStudyRecords(made, "small", seen, records), "own")  # three layers are too few
    by_name = {row[:2]: row[2] for row in table.rows}
    assert by_name["its part across that update", "mlp"].startswith("1 (") and len(table.rows) == 5 * 3 + 3
    empty = rule(made, "small", "confirmatory", trials(made, "small", {}), 20, sample="document")
    page = write_compression_report(EditStudyRecords(made, "small", empty, {}), tmp_path / "e.html").read_text()
    assert "No compression has left a record yet" in page
