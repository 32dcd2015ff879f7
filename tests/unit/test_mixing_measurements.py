"""From the coefficients of a pass to rows: completeness, agreement with the measures, products of the right sites, nulls, sampling."""

import math
from types import SimpleNamespace

import pytest
import torch

from thalweg.errors import InputError
from thalweg.geometry import (
    MixingOptions,
    amax_gain,
    catalog,
    composite,
    constraint_error,
    difference_share,
    doubly_stochastic_null,
    gaussian_null,
    gradient_measurements,
    mean_map_gain,
    mixing_measurements,
    permutation_index,
    sigma_2,
    stream_shares,
)

BATCH, TOKENS, N, WIDTH, LAYERS = 3, 10, 4, 6, 3


def gaussian(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make(n=N, tokens=TOKENS, signed=True):
    """A trace of three layers of two sites, and how each mixes; signed mixes, so that gains and norms differ."""
    records, found = [], {}
    state = gaussian(BATCH, tokens, n, WIDTH)
    for index in range(2 * LAYERS):
        after = gaussian(BATCH, tokens, n, WIDTH, seed=index + 1)
        site = SimpleNamespace(layer=index // 2, kind=("attention", "feed_forward")[index % 2], index=index)
        mix = torch.eye(n) + 0.3 * gaussian(BATCH, tokens, n, n, seed=20 + index)
        found[index] = SimpleNamespace(
            read=gaussian(BATCH, tokens, n, seed=40 + index),
            write=gaussian(BATCH, tokens, n, seed=60 + index),
            mix=mix if signed else mix.abs(),
            logits=gaussian(BATCH, tokens, n * n, seed=80 + index),
        )
        records.append(SimpleNamespace(site=site, state_before=state, state_after=after))
        state = after
    return SimpleNamespace(records=records), found


def measured(trace, found, **options):
    return mixing_measurements(trace, lambda record: found[record.site.index], options=MixingOptions(**options))


def only(rows, **fields):
    found = list(rows.where(**fields))
    assert len(found) == 1, (fields, len(found))
    return found[0]


def test_every_row_is_catalogued_and_every_place_is_complete():
    rows = measured(*make())
    assert {row.measure for row in rows} <= set(catalog.names())
    at_sites = {row.measure for row in rows.where(site="layers.1.attention")}
    at_end = {row.measure for row in rows.where(site="stream.end", layer=LAYERS)}
    in_windows = {row.measure for row in rows.where(site="layers.0-0")}
    for name in catalog.names():
        takes = catalog.entry(name).function.split(".")[2]
        if takes not in ("mixing", "constraint", "streams") or name in ("amax_gain",) or name.startswith("mixer_"):
            continue
        scope = next((s for s in (".from_start", ".to_end", ".window") if s in name), "")
        of_state = takes == "streams" and name in ("stream_rank", "stream_cosine", "difference_share")
        assert (name in at_sites) == (scope != ".window"), name
        assert (name in at_end) == (scope in (".from_start", ".to_end") or of_state), name
        assert (name in in_windows) == (scope == ".window"), name
    assert all(row.null is not None and row.null_kind for row in rows)
    assert {row.stream for row in rows.where(measure="stream_share.read")} == set(range(N))


def test_rows_say_what_the_measures_say():
    trace, found = make()
    rows, here = measured(trace, found), {"site": "layers.1.attention"}
    m, record = found[2], trace.records[2]
    value = only(rows, measure="amax_gain.backward", **here)
    gains = amax_gain(m.mix).backward.mean(-1)
    assert value.value == pytest.approx(gains.mean().item()) and value.n == BATCH and value.null == 1
    assert value.high - value.value == pytest.approx(gains.std().item())
    assert value.interval == f"mean +- sd over sequences of {TOKENS} tokens" and value.dtype == "float64"
    for name, expected in {
        "mean_map_gain.forward": mean_map_gain(m.mix).forward,
        "sigma_2": sigma_2(m.mix).mean(-1),
        "permutation_index": permutation_index(m.mix).mean(-1),
        "constraint_error.columns": constraint_error(m.mix).columns.amax(-1),
        "difference_share": difference_share(record.state_before).mean(-1),
    }.items():
        assert only(rows, measure=name, **here).value == pytest.approx(expected.mean().item()), name
    share = stream_shares(m.write)[..., 2].mean()
    assert only(rows, measure="stream_share.write", stream=2, **here).value == pytest.approx(share.item())
    assert only(rows, measure="sigma_2", **here).null == doubly_stochastic_null(N, "sigma_2").value
    assert only(rows, measure="stream_rank", **here).null == gaussian_null(N, WIDTH).value
    end = only(rows, measure="difference_share", site="stream.end").value
    assert end == pytest.approx(difference_share(trace.records[-1].state_after).mean().item())


def test_products_are_of_the_sites_that_their_names_say():
    trace, found = make()
    rows = measured(trace, found, window=2)
    mixes = [m.mix for m in found.values()]
    places = [f"layers.{r.site.layer}.{r.site.kind}" for r in trace.records] + ["stream.end"]
    for i, site in enumerate(places):
        for scope, part in ((".from_start", mixes[:i]), (".to_end", mixes[i:])):
            product = composite(part) if part else torch.eye(N).expand(BATCH, TOKENS, N, N)
            row = only(rows, measure=f"amax_gain{scope}.forward", site=site)
            assert row.value == pytest.approx(amax_gain(product).forward.mean().item()), (site, scope)
            row = only(rows, measure=f"sigma_2{scope}", site=site)
            assert row.value == pytest.approx(sigma_2(product).mean().item()), (site, scope)
    windows = {row.site: row for row in rows.where(measure="amax_gain.window.backward")}
    assert list(windows) == ["layers.0-1", "layers.2-2"] and all(row.layer is None for row in windows.values())
    expected = amax_gain(composite(mixes[:4])).backward.mean().item()
    assert windows["layers.0-1"].value == pytest.approx(expected)


def test_windows_are_ten_layers_in_deep_networks_and_thirds_in_others():
    for depth, sites in (
        (21, ["layers.0-9", "layers.10-19", "layers.20-20"]),
        (5, ["layers.0-1", "layers.2-3", "layers.4-4"]),
    ):
        trace, found = make()
        for index, record in enumerate(trace.records):
            record.site.layer = round(index * (depth - 1) / 5)
        assert [row.site for row in measured(trace, found).where(measure="sigma_2.window")] == sites


def test_tokens_are_sampled_evenly_and_said():
    trace, found = make()
    row = only(measured(trace, found, tokens=4), measure="sigma_2", site="layers.0.attention")
    assert row.value == pytest.approx(sigma_2(found[0].mix[:, [0, 3, 6, 9]]).mean().item())
    assert row.interval == "mean +- sd over sequences of 4 of 10 tokens"


def test_one_stream_no_mixing_and_sites_that_mix_nothing():
    trace, found = make(n=1)
    assert not len(measured(trace, found))
    trace, found = make()
    assert not len(mixing_measurements(trace, lambda record: None))
    part = {index: m if index != 2 else None for index, m in found.items()}
    rows = measured(trace, part)
    assert not rows.where(site="layers.1.attention").to_rows()
    whole = composite([m.mix for m in part.values() if m is not None])
    assert only(rows, measure="sigma_2.from_start", site="stream.end").value == pytest.approx(
        sigma_2(whole).mean().item()
    )


def test_what_a_site_lacks_has_no_rows():
    trace, found = make()
    for m in found.values():
        m.write = m.logits = None
    measures = {row.measure for row in measured(trace, found)}
    assert not any("write" in name or name == "mix.logit_spread" for name in measures)
    assert "read.dynamic" in measures


def test_the_identity_forgets_nothing():
    trace, found = make()
    for m in found.values():
        m.mix = torch.eye(N).expand(BATCH, TOKENS, N, N)
    rows = measured(trace, found)
    horizon = only(rows, measure="horizon", site="layers.0.attention")
    assert horizon.value == math.inf and horizon.low is None
    for scope in ("", ".from_start", ".to_end"):
        assert {round(row.value, 9) for row in rows.where(measure=f"permutation_index{scope}")} == {1.0}
    assert {row.value for row in rows.where(measure="mix.dynamic")} == {0.0}


def test_refusals():
    trace, found = make()
    found[1].mix = torch.full_like(found[1].mix, math.nan)
    with pytest.raises(InputError, match="NaN"):
        measured(trace, found)
    for options in ({"tokens": 1}, {"window": 0}):
        with pytest.raises(InputError):
            MixingOptions(**options)


def test_gradients_of_several_streams_have_a_common_part():
    sites = [SimpleNamespace(layer=0, kind=kind) for kind in ("attention", "feed_forward")]
    gradients = [gaussian(2, 3, N, 5, seed=s) for s in range(2)]
    rows = gradient_measurements(sites, gradients)
    for site, g in zip(("layers.0.attention", "layers.0.feed_forward"), gradients, strict=True):
        assert only(rows, measure="gradient_norm", site=site).value == pytest.approx(g.norm().item())
        assert only(rows, measure="gradient_norm.common", site=site).value == pytest.approx(g.sum(2).norm().item())
    for shape in ((2, 3, 5), (2, 3, 1, 5)):
        assert not gradient_measurements(sites, [gaussian(*shape)] * 2).where(measure="gradient_norm.common").to_rows()
