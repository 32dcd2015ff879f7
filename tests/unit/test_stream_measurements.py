"""From the states of a pass to rows: completeness, agreement with the measures, nulls, counts, streams, refusals."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from thalweg.errors import InputError, ShapeError
from thalweg.geometry import (
    StreamOptions,
    catalog,
    effective_rank,
    gaussian_null,
    gradient_measurements,
    local_tangent,
    off_tangent,
    parallel_energy,
    state_cosine,
    stream_measurements,
)

BATCH, TOKENS, WIDTH = 16, 24, 8
KINDS = ("attention", "feed_forward")


@dataclass
class Record:
    site: SimpleNamespace
    state_before: torch.Tensor
    update: torch.Tensor
    state_after: torch.Tensor
    gates: dict[str, torch.Tensor] = field(default_factory=dict)
    branches: dict[str, torch.Tensor] = field(default_factory=dict)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_trace(layers=2, streams=None, batch=BATCH, dtype=torch.float64):
    """An additive pass with a gate, a write strength that changes sign with depth, and an erase factor."""
    shape = (batch, TOKENS, WIDTH) if streams is None else (batch, TOKENS, streams, WIDTH)
    state = gaussian(*shape).to(dtype)
    records, entered = [], state
    for index in range(layers * 2):
        update = gaussian(batch, TOKENS, WIDTH, seed=index + 1).to(dtype)
        gate = torch.sigmoid(gaussian(batch, TOKENS, WIDTH, seed=50 + index)).to(dtype)
        after = state + (gate * update if streams is None else (gate * update).unsqueeze(2))
        beta = 1.0 - index + 0.5 * gaussian(batch, TOKENS, seed=80 + index)
        site = SimpleNamespace(layer=index // 2, kind=KINDS[index % 2], index=index)
        gates = {"gate": gate, "beta": beta, "erase": beta.unsqueeze(-1) * torch.ones(WIDTH)}
        records.append(Record(site, state, update, after, gates))
        state = after
    left = state if streams is None else state.mean(2)
    return SimpleNamespace(records=records, entered=entered, left=left)


def only(rows, **fields):
    found = list(rows.where(**fields))
    assert len(found) == 1, (fields, [row.to_row() for row in found])
    return found[0]


def test_every_site_has_every_measure_and_every_measure_is_catalogued():
    rows = stream_measurements(make_trace())
    known = set(catalog.names())
    assert {row.measure for row in rows} <= known
    states = {"effective_rank", "effective_rank.relative", "effective_rank.centred", "effective_rank.without_first"}
    states |= {"stable_rank", "participation_ratio", "rms", "token_cosine", "residual_to_rank_one", "entered_cosine"}
    updates = {
        f"{m}.{k}"
        for m in ("update_rms", "relative_update", "parallel_coefficient", "parallel_energy")
        for k in ("raw", "step")
    }
    updates |= {"state_cosine", "off_tangent.raw", "off_tangent.gated", "off_tangent.step"}
    gates = {name for name in known if name.split(".")[0] in ("gate", "beta", "erase")} - {
        "beta.transition",
        "beta.sharpness",
    }
    for layer in (0, 1):
        for kind in KINDS:
            here = {row.measure for row in rows.where(site=f"layers.{layer}.{kind}", layer=layer, branch=kind)}
            assert here == states | updates | gates
    assert {row.measure for row in rows.where(site="stream.end", layer=2)} == states
    assert {row.measure for row in rows.where(site="stream.left", layer=2)} == states
    assert {row.measure for row in rows.where(site="stream")} == {"beta.transition", "beta.sharpness"}


def test_rows_say_what_the_measures_say():
    trace = make_trace()
    rows = stream_measurements(trace)
    record = trace.records[2]
    place = {"site": "layers.1.attention"}
    ranks = effective_rank(record.state_before)
    row = only(rows, measure="effective_rank", **place)
    assert row.value == pytest.approx(ranks.mean().item(), rel=1e-12) and row.n == BATCH
    assert row.low == pytest.approx((ranks.mean() - ranks.std()).item()) and row.high > row.value
    assert row.interval == f"mean +- sd over sequences of {TOKENS} tokens" and row.dtype == "float64"
    assert row.null == gaussian_null(TOKENS, WIDTH).value and f"{TOKENS} x {WIDTH}" in row.null_kind
    shorter = only(rows, measure="effective_rank.without_first", **place)
    assert shorter.null == gaussian_null(TOKENS - 1, WIDTH).value
    relative = (ranks / effective_rank(trace.entered)).mean().item()
    assert only(rows, measure="effective_rank.relative", **place).value == pytest.approx(relative)
    step = record.state_after - record.state_before
    energy = only(rows, measure="parallel_energy.step", **place)
    assert energy.value == pytest.approx(parallel_energy(record.state_before, step).mean().item())
    assert energy.null == 1 / WIDTH
    entered = state_cosine(trace.entered, record.state_before).mean().item()
    assert only(rows, measure="entered_cosine", **place).value == pytest.approx(entered)
    assert only(rows, measure="beta.mean", **place).value == pytest.approx(record.gates["beta"].mean().item())
    assert only(rows, measure="gate.mean", **place).n == BATCH


def test_off_tangent_looks_at_past_tokens_only():
    trace = make_trace(layers=1)
    options = StreamOptions(window=5, rank=2, stride=3)
    rows = stream_measurements(trace, options=options)
    record = trace.records[0]
    for kind, update in {
        "raw": record.update,
        "gated": record.gates["gate"] * record.update,
        "step": record.state_after - record.state_before,
    }.items():
        shares = [
            off_tangent(update[b, t], local_tangent(record.state_before[b, t - 5 : t], 2).basis)
            for b in range(BATCH)
            for t in range(5, TOKENS, 3)
        ]
        row = only(rows, measure=f"off_tangent.{kind}", site="layers.0.attention")
        assert row.value == pytest.approx(torch.stack(shares).mean().item(), rel=1e-10)
        assert row.null == pytest.approx(1 - 2 / WIDTH) and row.n == BATCH


def test_short_sequences_and_collapsed_states_have_no_tangent_rows():
    trace = make_trace(layers=1)
    assert not stream_measurements(trace, options=StreamOptions(window=TOKENS, rank=2)).where(measure="off_tangent.raw")
    for record in trace.records:
        record.state_before = torch.ones_like(record.state_before)
    assert not stream_measurements(trace).where(measure="off_tangent.raw")


def test_sign_transition_by_depth():
    rows = stream_measurements(make_trace(layers=3))  # mean write strength of attention: 1, -1, -3
    found = only(rows, measure="beta.transition", branch="attention")
    assert found.value == pytest.approx(0.5, abs=0.05) and found.unit == "sites" and found.n == 3
    assert only(rows, measure="beta.sharpness", branch="attention").value > 4


def test_several_streams():
    trace = make_trace(layers=1, streams=3)
    mean = stream_measurements(trace)
    assert {row.stream for row in mean.where(measure="effective_rank")} == {"mean", None}  # None: what leaves
    first = only(mean, measure="effective_rank", site="layers.0.attention")
    assert first.value == pytest.approx(effective_rank(trace.records[0].state_before.mean(2)).mean().item())
    both = stream_measurements(trace, options=StreamOptions(streams="both"))
    here = {row.stream: row.value for row in both.where(measure="effective_rank", site="layers.0.attention")}
    assert set(here) == {"mean", 0, 1, 2}
    assert here[2] == pytest.approx(effective_rank(trace.records[0].state_before[:, :, 2]).mean().item())
    assert {row.stream for row in both.where(measure="parallel_energy.step")} == {"mean"}
    each = stream_measurements(trace, options=StreamOptions(streams="each"))
    assert {row.stream for row in each.where(measure="rms", site="stream.end")} == {0, 1, 2}
    left = only(mean, measure="effective_rank.relative", site="stream.left")
    ratio = effective_rank(trace.left) / effective_rank(trace.entered.mean(2))
    assert left.value == pytest.approx(ratio.mean().item())


def test_any_state_through_observe_and_gates_by_function():
    plain = make_trace(layers=1)
    wrapped = make_trace(layers=1)
    for record in wrapped.records:
        record.state_before, record.state_after = {"x": record.state_before}, {"x": record.state_after}
    wrapped.entered = {"x": wrapped.entered}
    gates = [record.gates for record in wrapped.records]
    for record in wrapped.records:
        record.gates = {}
    rows = stream_measurements(
        wrapped, observe=lambda state: state["x"].unsqueeze(2), gates=lambda record: gates[record.site.index]
    )
    assert rows == stream_measurements(plain)
    with pytest.raises(ShapeError, match=r"stream\.observe"):
        stream_measurements(wrapped)


def test_parts_of_a_composite_update_have_their_own_rows():
    trace = make_trace(layers=1)
    record = trace.records[0]
    record.branches = {"attention": record.update * 2, "feed_forward": -record.update}
    record.site.kind = "parallel"
    rows = stream_measurements(trace).where(site="layers.0.parallel", measure="update_rms.raw")
    values = {row.branch: row.value for row in rows}
    assert set(values) == {"parallel", "attention", "feed_forward"}
    assert values["attention"] == pytest.approx(2 * values["parallel"])


def test_narrow_dtypes_are_named():
    rows = stream_measurements(make_trace(layers=1, dtype=torch.bfloat16))
    assert only(rows, measure="effective_rank", site="stream.end").dtype == "bfloat16"


def test_without_spectra_there_are_none():
    measures = {row.measure for row in stream_measurements(make_trace(), options=StreamOptions(spectra=False))}
    assert "rms" in measures and not any("rank" in name for name in measures - {"residual_to_rank_one"})


def test_no_gradient_is_recorded_and_the_generator_is_left_alone():
    trace = make_trace(layers=1)
    for record in trace.records:
        record.update.requires_grad_()
    before = torch.get_rng_state()
    stream_measurements(trace)
    assert torch.equal(before, torch.get_rng_state())


def test_refusals():
    with pytest.raises(InputError, match="at least 16 sequences for a spread, got 15"):
        stream_measurements(make_trace(batch=15))
    few = stream_measurements(make_trace(batch=1), options=StreamOptions(least_sequences=1))
    assert only(few, measure="rms", site="stream.end").low is None  # one sequence has no spread
    with pytest.raises(InputError, match="no sites"):
        stream_measurements(SimpleNamespace(records=[], entered=None, left=None))
    broken = make_trace()
    broken.records[1].state_after[3, 2, 1] = math.nan
    with pytest.raises(InputError, match="NaN"):
        stream_measurements(broken)
    for options in ({"streams": "all"}, {"rank": 16}, {"stride": 0}, {"least_sequences": 0}):
        with pytest.raises(InputError):
            StreamOptions(**options)


def test_gradient_rows():
    sites = [SimpleNamespace(layer=i, kind="attention") for i in range(3)]
    rows = gradient_measurements(sites, [torch.full((4,), 2.0**i) for i in range(3)])
    assert [row.value for row in rows.where(measure="gradient_norm")] == [2, 4, 8]
    slope = only(rows, measure="gradient_norm.slope")
    assert slope.value == pytest.approx(math.log(2)) and slope.null == 0 and slope.dtype == "float32"
    assert len(gradient_measurements(sites, [None, None, torch.ones(1)])) == 3  # no slope through one point
    with pytest.raises(InputError, match="2 for 3 sites"):
        gradient_measurements(sites, [None, None])
