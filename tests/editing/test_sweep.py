"""Sweeps: matched no-ops, intervals over documents, records that are gone on with."""

import json

import numpy as np
import pytest
import torch
from edit_subjects import tiny, words

from thalweg.editing import PUBLISHED, EditOptions, correlation, each_layer, edit, grid, sweep
from thalweg.errors import InputError, ProofError, UnknownNameError
from thalweg.evaluation.perplexity import metrics
from thalweg.evaluation.scores import Scores

TEXTS = words(6, 12, seed=8)
FEW = {"parallel": (0.0, 1.0, 1.5), "perpendicular": (0.5, 1.0)}


def scores_of(role, model=None) -> Scores:
    """Log likelihoods of six documents under their own model, token by token."""
    with torch.no_grad():
        logits = (model or tiny("llama"))(input_ids=TEXTS).logits.double().log_softmax(-1)
    found = logits[:, :-1].gather(-1, TEXTS[:, 1:, None]).sum((1, 2)).numpy()
    count = np.full(6, 11.0)
    columns = {"log_likelihood": found, "tokens": count, "words": count, "bytes": 3 * count}
    return Scores("text", "whole documents", tuple(f"document {i}" for i in range(6)), columns, metrics(61))


def test_the_published_grid_has_eleven_and_nine_scales():
    points = grid(["value", "attention", "mlp"])
    assert len(points) == 3 * (11 + 9)
    assert len({point.name for point in points}) == len(points)
    assert sorted(PUBLISHED["parallel"]) == [-1, -0.5, 0, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3]
    assert {p.options.parallel for p in points if p.component == "perpendicular"} == {1.0}
    assert all(p.options.group == "head" for p in grid(["mlp"], group="kv"))


def test_every_point_is_the_edit_beside_its_matched_no_op(tmp_path):
    model, done = tiny("llama"), []
    found = sweep(
        model, scores_of, grid(["value", "mlp"], FEW), on_point=lambda *call: done.append(call), resamples=200
    )
    assert [(c[0], c[3] is None) for c in done[:4]] == [(0, True), (1, False), (1, True), (2, False)]
    assert len(found.results) == 10
    for result in found.results:
        options = result.point.options
        with edit(model, options):
            wanted = scores_of("edited")
        np.testing.assert_allclose(result.scores.columns["log_likelihood"], wanted.columns["log_likelihood"], rtol=1e-6)
        one = result.difference("loss")
        assert one.value == pytest.approx(wanted.value("loss") - result.baseline.value("loss"), rel=1e-5, abs=1e-9)
        assert result.drift is not None and result.drift < 1e-6
        if options.is_identity:
            assert one.value == 0 and one.interval.low == one.interval.high == 0
        else:
            assert one.interval.low < one.value < one.interval.high
    rows = found.measurements(model="tiny")
    assert len(rows.where(measure="difference.loss")) == 10
    row = next(iter(rows.where(measure="difference.loss", site="mlp", branch="parallel", arm="1.5")))
    assert (row.null, row.n, row.unit, row.model) == (0.0, 6, "nats/token", "tiny") and "bootstrap" in row.interval
    assert len(rows.where(measure="noop_drift")) == 2
    assert json.dumps(found.table())
    with pytest.raises(UnknownNameError, match="unknown metric"):
        found.results[0].difference("los")


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path):
    model, path, passes = tiny("llama"), tmp_path / "sweep.jsonl", []

    def counted(role):
        passes.append(1)
        if len(passes) == 5:
            raise KeyboardInterrupt
        return scores_of(role)

    points = grid(["attention"], FEW)
    with pytest.raises(KeyboardInterrupt):
        sweep(model, counted, points, record=path, subject={"model": "tiny"}, resamples=100)
    assert len(path.read_text().splitlines()) == 1 + 4  # header, unedited, no-op, two points
    with path.open("a") as file:
        file.write('{"name": "torn')
    found = sweep(model, counted, points, record=path, subject={"model": "tiny"}, resamples=100)
    assert len(passes) == 5 + 2  # the unedited model, to compare, and the one point that was missing
    whole = sweep(model, scores_of, points, resamples=100)
    for a, b in zip(found.table(), whole.table(), strict=True):
        assert a["metrics"] == b["metrics"]


def test_a_record_of_something_else_is_refused(tmp_path):
    model, path = tiny("llama"), tmp_path / "sweep.jsonl"
    points = grid(["mlp"], {"parallel": (0.0,)})
    sweep(model, scores_of, points, record=path, subject={"model": "tiny"}, resamples=100)
    with pytest.raises(InputError, match="its model is 'tiny', now 'other'"):
        sweep(model, scores_of, points, record=path, subject={"model": "other"}, resamples=100)
    with pytest.raises(InputError, match="another model, text or machine: its log_likelihood"):
        sweep(
            tiny("mistral"),
            lambda role: scores_of(role, tiny("mistral")),
            points,
            record=path,
            subject={"model": "tiny"},
            resamples=100,
        )
    path.write_text('{"kind": "other"}\n')
    with pytest.raises(InputError, match="no record of a sweep"):
        sweep(model, scores_of, points, record=path, resamples=100)


def test_a_no_op_that_drifts_stops_the_sweep(monkeypatch):
    from thalweg.editing import arithmetic

    monkeypatch.setattr(arithmetic.Change, "residual", lambda self, reference, update, now: 1.1 * update)
    with pytest.raises(ProofError, match="at scales 1 moves the log likelihood"):
        sweep(tiny("llama"), scores_of, grid(["mlp"], {"parallel": (0.0,)}), resamples=100)


def test_broken_models_are_results_too(tmp_path, monkeypatch):
    """A scale that overflows gives no finite loss; the row says so, and the record reads back."""
    monkeypatch.setattr("thalweg.editing.options.MOST_SCALE", 1e30)
    model, path = tiny("llama", dtype=torch.float16), tmp_path / "sweep.jsonl"
    points = grid(["mlp"], {"parallel": (1e30,)})
    for _ in range(2):
        found = sweep(model, lambda role: scores_of(role, model), points, record=path, resamples=100)
        assert not np.isfinite(found.results[0].difference("loss").value)
    assert len(found.measurements().where(measure="difference.loss")) == 1


def test_each_layer_alone_and_its_correlation():
    points = each_layer(3)
    assert [p.options.layers for p in points] == [(0,), (1,), (2,)] and points[0].options.drops
    assert each_layer(2, EditOptions(parallel=0.0))[1].options == EditOptions(site="value", parallel=0.0, layers=(1,))
    found = sweep(tiny("llama"), scores_of, points, resamples=100)
    costs = {int(r.point.scale): r.difference("loss").value for r in found.results}
    assert len(set(costs.values())) == 3
    rows = correlation(
        {0: 9.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 4.5, 5: -9.0}, {0: 0.0, 1: 2.0, 2: 4.0, 3: 6.0, 4: 7.0, 5: 0.0, 6: 1.0}
    )
    assert next(iter(rows.where(measure="correlation.spearman"))).value == pytest.approx(1.0)
    assert next(iter(rows.where(measure="correlation.pearson"))).n == 4
    for geometry, change in (
        ({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}),
        (dict.fromkeys(range(7), 1.0), {i: float(i) for i in range(7)}),
    ):
        with pytest.raises(InputError, match="a correlation over layers needs"):
            correlation(geometry, change)


@pytest.mark.parametrize(
    ("sites", "scales", "line"),
    [
        (["valu"], FEW, "unknown site"),
        (["mlp"], {"across": (1.0,)}, "unknown component"),
        ([], FEW, "at least one site"),
    ],
)
def test_what_no_grid_can_be(sites, scales, line):
    with pytest.raises(InputError, match=line):
        grid(sites, scales)
