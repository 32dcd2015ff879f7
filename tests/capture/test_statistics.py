"""Streaming statistics equal a plain computation over all tokens kept at once, count no padding, and take the same memory for any text."""

import math

import pytest
import torch
from tiny_families import VOCAB, batch, tiny

from thalweg import geometry
from thalweg.capture import locate, watch
from thalweg.capture.histogram import ANGLE, COSINE, POSITIVE, SIGNED, Bins
from thalweg.capture.statistics import Statistics, StatisticsOptions, depths
from thalweg.capture.tables import Entry, Table, Units, add_rows
from thalweg.errors import InputError
from thalweg.geometry.heads import context_coefficient, full_coefficient, value_fraction
from thalweg.geometry.updates import parallel_fraction_null
from thalweg.ops.own_attention import own_attention
from thalweg.records import Measurements
from thalweg.statistics import bootstrap, ratio_intervals

EVERYTHING = StatisticsOptions(rank=True, cka=True, values=True)
UNITS = Units(3, "documents")


def calls(kind="llama", dtype=torch.float64):
    """Two batches, one of them padded on the right, with the unit of every row."""
    del kind, dtype
    ids = torch.randint(3, VOCAB, (3, 13), generator=torch.Generator().manual_seed(1))
    return [(batch("llama", "right"), torch.tensor([0, 1])), ({"input_ids": ids}, torch.tensor([2, 1, 2]))]


def watched(model, batches, options=EVERYTHING, own=False):
    """The statistics, and every event kept: site -> its tensors over the real tokens, rows one after the other."""
    located, kept = locate(model), {}
    statistics = Statistics(located, UNITS, options)

    def see(event):
        seen = kept.setdefault(event.place.index, [])
        for row, real in enumerate(event.real):
            o, v = (event.values.o[row, real], event.values.v[row, real]) if event.values else (None, None)
            weights = event.values.own[row][:, real] if event.values and event.values.own is not None else None
            seen.append((event.state[row, real], event.branch[row, real], event.following[row, real], o, v, weights))
        statistics(event)

    with torch.no_grad(), watch(located, see, values=True, own_weights=own):
        for call, units in batches:
            statistics.begin(units)
            model(**call)
    return statistics, kept


def stacked(kept, index, part):
    return torch.cat([row[part] for row in kept[index]])


@pytest.fixture(scope="module")
def llama():
    return watched(tiny("llama"), calls())


def value(rows, measure, **where):
    found = list(rows.where(measure=measure, **where))
    assert len(found) == 1, (measure, where, len(found))
    return found[0].value


def test_updates_equal_the_plain_computation(llama):
    statistics, kept = llama
    rows = statistics.measurements()
    for index, place in enumerate(statistics.located.sites):
        x, u, y = (stacked(kept, index, part) for part in range(3))
        assert len(x) == 11 + 7 + 39
        expected = {
            "parallel_coefficient.raw": geometry.parallel_coefficient(x, u).mean(),
            "parallel_over_perpendicular.raw": geometry.parallel_over_perpendicular(x, u).mean(),
            "parallel_fraction.raw": geometry.parallel_fraction(x, u).mean(),
            "parallel_energy.raw": geometry.parallel_energy(x, u).mean(),
            "update_angle.raw": geometry.update_angle(x, u).mean(),
            "token_relative_update.raw": geometry.token_relative_update(x, u).mean(),
            "relative_update.raw": geometry.relative_update(x, u),
            "update_rms.raw": geometry.update_rms(u),
            "state_cosine": geometry.state_cosine(x, y).mean(),
            "rms": geometry.rms(x),
            "anisotropy": geometry.anisotropy(x),
            "outlier_channels.share": geometry.outlier_channels(x),
            "outlier_channels.kurtosis": geometry.channel_kurtosis(x),
            "pooled_effective_rank": geometry.pooled_effective_rank(x),
            "pooled_effective_rank.centred": geometry.pooled_effective_rank(x, center=True),
            "pooled_effective_rank.without_first": geometry.pooled_effective_rank(
                torch.cat([r[0][1:] for r in kept[index]])
            ),
            "parallel_coefficient.raw.sd": geometry.parallel_coefficient(x, u).std(),
            "first_token.ratio": torch.stack(
                [geometry.first_token(r[0].norm(dim=-1)).ratio for r in kept[index]]
            ).mean(),
            "first_token.share": torch.stack(
                [geometry.first_token(r[0].norm(dim=-1)).share for r in kept[index]]
            ).mean(),
        }
        if index:
            expected["entered_cosine"] = geometry.state_cosine(stacked(kept, 0, 0), x).mean()
        for name, wanted in expected.items():
            assert value(rows, name, site=place.name) == pytest.approx(wanted.item(), rel=1e-9), (name, place.name)


def test_layers_and_the_end_equal_the_plain_computation(llama):
    statistics, kept = llama
    rows = statistics.measurements()
    for layer in range(2):
        x, y = stacked(kept, 2 * layer, 0), stacked(kept, 2 * layer + 1, 2)
        where = {"site": f"layers.{layer}", "branch": "layer"}
        assert value(rows, "layer_drop_cosine", **where) == pytest.approx(geometry.state_cosine(x, y).mean().item())
        small = geometry.layer_drop_cosine(x, y - x, small_angle=True).mean().item()
        assert value(rows, "layer_drop_cosine.small_angle", **where) == pytest.approx(small)
        along = geometry.parallel_coefficient(x, y - x).mean().item()
        assert value(rows, "parallel_coefficient.step", **where) == pytest.approx(along)
    end = stacked(kept, 3, 2)
    assert value(rows, "rms", site="stream.end") == pytest.approx(geometry.rms(end).item())
    rank = geometry.pooled_effective_rank(end).item()
    assert value(rows, "pooled_effective_rank", site="stream.end") == pytest.approx(rank)


def test_heads_equal_the_plain_computation(llama):
    statistics, kept = llama
    rows = statistics.measurements()
    for index, site in ((0, "layers.0.attention"), (2, "layers.1.attention")):
        o, v = (stacked(kept, index, part).unsqueeze(0) for part in (3, 4))
        for name, found in (
            ("value_coefficient.full", full_coefficient(o, v)),
            ("value_fraction", value_fraction(o, v)),
        ):
            for head in range(4):
                wanted = found[..., head].mean().item()
                assert value(rows, name, site=site, head=head) == pytest.approx(wanted)
            assert value(rows, name, site=site, head=None) == pytest.approx(found.mean().item())
    row = next(iter(rows.where(measure="value_fraction", head=0)))
    assert row.null == parallel_fraction_null(8) and row.branch == "attention"


def test_what_a_head_reads_of_itself_and_of_others():
    model = tiny("llama")
    statistics, kept = watched(model, calls(), StatisticsOptions(own_weights=True), own=True)
    rows = statistics.measurements()
    own = torch.cat([row[5].T for row in kept[0]])
    o, v = (stacked(kept, 0, part).unsqueeze(0) for part in (3, 4))
    beta = context_coefficient(o, v, own.T.unsqueeze(0))
    for head in range(4):
        where = {"site": "layers.0.attention", "head": head}
        assert value(rows, "own_weight", **where) == pytest.approx(own[:, head].mean().item(), rel=1e-5)
        assert value(rows, "value_coefficient.exclude_self", **where) == pytest.approx(
            beta[..., head].mean().item(), rel=1e-4
        )
    firsts = torch.stack([row[5][:, 0] for row in kept[0]])
    torch.testing.assert_close(firsts, torch.ones_like(firsts))  # the first token sees itself alone
    assert own_attention(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2)).flatten().tolist() == pytest.approx(
        [1, 1 / 2, 1 / 3]
    )


def test_pairs_of_layers_equal_the_plain_computation():
    ids = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(4))
    statistics, kept = watched(tiny("llama"), [({"input_ids": ids}, torch.tensor([0, 1]))])
    rows = statistics.measurements()
    states = {
        "layers.0.attention": stacked(kept, 0, 0),
        "layers.1.attention": stacked(kept, 2, 0),
        "stream.end": stacked(kept, 3, 2),
    }
    names = list(states)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            where = {"site": f"{a}:{b}"}
            assert value(rows, "linear_cka", **where) == pytest.approx(geometry.linear_cka(states[a], states[b]).item())
            cosine = geometry.state_cosine(states[a], states[b]).mean().item()
            assert value(rows, "layer_cosine", **where) == pytest.approx(cosine)
    assert len(rows.where(measure="linear_cka")) == 3


@pytest.mark.parametrize("kind", ["bert", "gpt_neox", "deepseek_v4", "gemma2"])
def test_other_kinds_of_streams(kind):
    model, located = tiny(kind), locate(tiny(kind))
    statistics, kept = watched(model, [(batch(kind), torch.tensor([0, 1]))], StatisticsOptions())
    rows = statistics.measurements()
    sites = [place.name for place in located.sites]
    for index, site in enumerate(sites):
        x, u = stacked(kept, index, 0), stacked(kept, index, 1)
        along = geometry.parallel_coefficient(x, u).mean().item()
        assert value(rows, "parallel_coefficient.raw", site=site) == pytest.approx(along)
    steps = {row.site for row in rows.where(measure="parallel_coefficient.step")}
    turned = {row.site for row in rows.where(measure="state_cosine")}
    layers = {"layers.0", "layers.1"}
    assert steps == {"bert": {*layers, *sites}, "deepseek_v4": {*layers, *sites}}.get(kind, layers)
    assert turned == {"gpt_neox": set()}.get(kind, set(sites))
    streams = {row.stream for row in rows}
    assert streams == ({"mean", "read"} if kind == "deepseek_v4" else {None})
    if kind == "bert":
        x, y = stacked(kept, 1, 0), stacked(kept, 1, 2)
        assert value(rows, "state_cosine", site=sites[1]) == pytest.approx(geometry.state_cosine(x, y).mean().item())
        step = geometry.parallel_coefficient(x, y - x).mean().item()
        assert value(rows, "parallel_coefficient.step", site=sites[1]) == pytest.approx(step)


def test_padding_is_never_counted():
    model = tiny("llama")
    alone = [({"input_ids": batch("llama")["input_ids"][:1, 4:]}, torch.tensor([0]))]
    ids, mask = (batch("llama", "left")[name][:1] for name in ("input_ids", "attention_mask"))
    padded = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    one, two = (watched(model, b)[0].measurements() for b in (alone, [(padded, torch.tensor([0]))]))
    assert len(one) == len(two) > 100
    for a, b in zip(one, two, strict=True):
        assert (a.measure, a.site, a.n) == (b.measure, b.site, b.n)
        if not a.measure.endswith(".median"):
            assert a.value == pytest.approx(b.value, rel=1e-7, abs=1e-9, nan_ok=True), a.measure


def test_a_row_of_padding_alone_is_left_out():
    model = tiny("bert")
    call = batch("bert")
    call["attention_mask"][1] = 0
    statistics, _ = watched(model, [(call, torch.tensor([0, 1]))], StatisticsOptions())
    assert statistics.tokens == 11
    assert value(statistics.measurements(), "first_token.ratio", site="stream.end") > 0


def test_memory_does_not_grow_with_tokens():
    model, sizes = tiny("llama"), []
    for count in (1, 12):
        statistics, _ = watched(model, calls() * count)
        sizes.append((statistics.bytes, statistics.tokens))
        assert statistics._entered is None and statistics._layer is None and not statistics.likeness.grams
    assert sizes[0][0] == sizes[1][0] and sizes[1][1] == 12 * sizes[0][1]
    plain = Statistics(locate(model), UNITS).bytes
    assert plain < sizes[0][0]
    moments = (
        Statistics(locate(model), UNITS).bytes
        - Statistics(locate(model), UNITS, StatisticsOptions(spectra=False)).bytes
    )
    assert moments == 5 * (2 * 32 * 32 + 32) * 8  # five states, two matrices and a mean each


def test_half_precision_is_summed_in_float32():
    exact, half = (
        watched(tiny("llama", dtype), calls(), StatisticsOptions())[0].measurements()
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert {row.dtype for row in half} == {"bfloat16"}
    for site in ("layers.0.attention", "stream.end"):
        for name in ("rms", "anisotropy", "outlier_channels.share"):
            assert value(half, name, site=site) == pytest.approx(value(exact, name, site=site), rel=0.05, abs=0.01)


def test_a_state_that_is_not_finite_is_refused():
    model = tiny("llama", torch.float32)
    statistics, _ = watched(model, calls(), StatisticsOptions())
    statistics.states[1].sums["energy"][3] = math.inf
    with pytest.raises(InputError, match=r"layers\.0\.feed_forward are not all finite in float32"):
        statistics.measurements()


def test_every_row_is_catalogued_and_says_what_it_stands_on(llama):
    from thalweg.geometry import catalog

    rows = llama[0].measurements(model="tiny")
    names = {row.measure.removesuffix(".sd").removesuffix(".median") for row in rows}
    assert names <= set(catalog.names())
    for row in rows:
        assert row.n and row.dtype == "float64" and row.model == "tiny" and row.site
        entry = catalog.entry(row.measure.removesuffix(".sd").removesuffix(".median"))
        assert row.unit == entry.unit
        if not row.measure.endswith(".sd"):
            assert (row.null is None) == (entry.null in ("none",)) or entry.name.startswith("value_coefficient"), (
                row.measure
            )
        if row.low is not None:
            assert row.low <= row.high and row.interval
    intervals = {row.interval for row in rows.where(measure="rms", site="stream.end")}
    assert intervals == {"95% percentile bootstrap over 3 documents of 57 tokens"}


@pytest.mark.parametrize(
    ("bins", "draw", "within"),
    [
        (COSINE, lambda x: torch.tanh(x), 1e-3),
        (ANGLE, lambda x: 90 + 30 * torch.tanh(x), 0.1),
        (POSITIVE, lambda x: torch.exp(2 * x), 0.03),
        (SIGNED, lambda x: x**3, 0.03),
    ],
)
def test_streamed_quantiles_are_near_the_exact_ones(bins, draw, within):
    x = draw(torch.randn(20_000, generator=torch.Generator().manual_seed(0)))
    histogram = sum(torch.bincount(bins.place(part), minlength=bins.count) for part in x.split(999))
    for q in (0.1, 0.5, 0.9):
        exact = x.quantile(q).item()
        size = max(abs(exact), 0.02) if bins.wide else 1
        assert abs(bins.quantile(histogram, q) - exact) <= within * size


def test_quantiles_at_the_edges():
    bins = Bins(0.0, 1.0, count=4)
    assert bins.place(torch.tensor([-1.0, 0.0, 0.99, 1.0, 7.0, math.inf])).tolist() == [0, 0, 3, 3, 3, 3]
    assert bins.quantile(torch.tensor([0, 10, 0, 0]), 0.5) == pytest.approx(0.375)
    assert math.isnan(bins.quantile(torch.zeros(4, dtype=torch.int64), 0.5))
    assert POSITIVE.place(torch.tensor([math.nan])).item() == POSITIVE.count // 2


def test_intervals_are_those_of_the_plain_bootstrap():
    generator = torch.Generator().manual_seed(2)
    weights = 1 + torch.randint(1, 9, (40,), generator=generator).double()
    sums = weights * (3 + torch.randn(40, generator=generator).double())
    expected = bootstrap([sums.numpy(), weights.numpy()], lambda a, b: a / b, method="percentile")
    low, high = ratio_intervals(sums[:, None].numpy(), weights[:, None].numpy())
    assert low[0] == pytest.approx(expected.low, rel=0.02) and high[0] == pytest.approx(expected.high, rel=0.02)
    two = torch.stack([sums, sums], 1)
    some = torch.stack([weights, weights * (torch.arange(40) < 2)], 1)
    low, high = ratio_intervals(two.numpy(), some.numpy())
    assert math.isnan(low[1]) and math.isnan(high[1]) and low[0] < high[0]


def test_a_table_adds_up_by_unit():
    table = Table({"a": None, "b": COSINE}, Units(3, "documents"))
    table.add(torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.5, -0.5]]), torch.tensor([0, 2, 2]))
    table.add(torch.tensor([[4.0], [0.25]]), torch.tensor([2]))
    assert table.total("a").tolist() == [1, 0, 9] and table.tokens == 4
    rows = Measurements()
    add_rows(rows, table, [Entry("x", "a"), Entry("y", "b", unit="u", root=False, divisor=2.0)], {"site": "s"})
    by = {row.measure: row for row in rows}
    assert by["x"].value == 2.5 and by["y"].value == pytest.approx(0.75 / 8) and by["y"].n == 2
    assert set(by) == {"x", "y", "y.sd", "y.median"} and by["y.sd"].value == pytest.approx(
        torch.tensor([0.5, 0.5, -0.5, 0.25]).std().item()
    )


def test_depths_begin_and_end():
    assert depths(60) == {0, 8, 15, 22, 30, 38, 45, 52, 60} and depths(2) == {0, 1, 2} and depths(0) == {0}
