"""Inside feed-forward sublayers: found and proved in every family, streamed as computed plainly, refused in a line where it is not there."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import transformers
from tiny_families import FAMILIES, VOCAB, batch, tiny
from torch import nn

import thalweg
from thalweg import capture
from thalweg.capture.inner import INNER_MEASURES, inner_places
from thalweg.capture.linear import linear_weight
from thalweg.capture.maps import EXPERTS
from thalweg.capture.proof import TOLERANCE
from thalweg.capture.statistics import Statistics, StatisticsOptions
from thalweg.capture.structure import by_structure
from thalweg.capture.tables import Units
from thalweg.errors import CaptureError, InputError, ProofError
from thalweg.geometry.inner import hidden_coefficient, hidden_fraction, output_coefficient, output_fraction
from thalweg.geometry.updates import parallel_fraction_null
from thalweg.models import Decoder, DecoderConfig
from thalweg.reports.model import INNER, by_part

SPARSE = {"mixtral", "gpt_oss", "deepseek_v4", "qwen3_next"}  # experts in every layer
MIXED = {"qwen3_moe", "deepseek_v3"}  # in the second only
BY_TABLE = {"bert", "roberta", "xlm-roberta", "electra"}  # the sublayer holds the last map alone
TEXTS = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 17)]


def wide(kind="llama", **more):
    """A tiny model whose hidden width is three times its width."""
    cls, config, values = FAMILIES[kind]
    name = "n_inner" if kind == "gpt2" else "intermediate_size"
    model = (
        getattr(transformers, cls)(getattr(transformers, config)(**copy.deepcopy({**values, name: 96, **more})))
        .eval()
        .double()
    )
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def feed_forward(located):
    return [place for place in located.sites if place.kind == "feed_forward"]


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_last_map_makes_what_the_sublayer_gives(kind):
    located = capture.locate(tiny(kind))
    places = feed_forward(located)
    missing = [place for place in places if place.inner is None]
    assert len(missing) == (2 if kind in SPARSE else 1 if kind in MIXED else 0)
    assert all(place.no_inner == EXPERTS for place in missing)
    assert all(place.inner is None and not place.no_inner for place in located.attention)
    errors = capture.prove_inner(located, batch(kind, "right"))
    assert set(errors) == {place.name for place in places if place.inner}
    assert all(error <= 1e-10 for error in errors.values())
    assert {place.inner.width for place in places if place.inner} <= {40}
    for place in places:
        if place.inner:
            assert linear_weight(located.module(place.inner.last)).shape == (32, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "gemma2"])
def test_other_precisions_stay_within_what_is_stated(kind, dtype):
    errors = capture.prove_inner(capture.locate(tiny(kind, dtype)), batch(kind))
    assert len(errors) == 2 and all(0 < error <= TOLERANCE[dtype] for error in errors.values())


@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - SPARSE - MIXED))
def test_structure_finds_what_the_table_says(kind):
    model = tiny(kind)
    for place, other in zip(feed_forward(capture.locate(model)), feed_forward(by_structure(model)), strict=True):
        if kind in BY_TABLE:
            assert other.inner is None and "no linear map" in other.no_inner
        else:
            assert other.inner == place.inner


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_structure_leaves_experts_out(kind):
    found = [place.no_inner for place in feed_forward(by_structure(tiny(kind)))]
    assert found == ([EXPERTS] * 2 if kind == "mixtral" else ["", EXPERTS])


def test_what_the_sublayer_is_given_is_the_normalised_stream():
    for kind, norm in (("llama", "model.layers.1.post_attention_layernorm"), ("phi", "model.layers.1.input_layernorm")):
        events, located = [], capture.locate(tiny(kind))
        with capture.watch(located, events.append, inner=True):
            located.model(**batch(kind))
        event = next(e for e in events if e.place.name == "layers.1.feed_forward")
        torch.testing.assert_close(event.inner.x, located.module(norm)(event.state).detach())
        assert not torch.allclose(event.inner.x, event.state) and event.inner.h.shape == (2, 11, 40)
        assert all(e.inner is None for e in events if e.place.kind == "attention")
    events = []
    with capture.watch(capture.locate(tiny("bert")), events.append, inner=True):
        tiny("bert")(**batch("bert"))
    assert torch.equal(events[1].inner.x, events[1].state)  # a norm after every sum: the stream itself is given
    events = []
    with capture.watch(capture.locate(tiny("llama")), events.append):
        tiny("llama")(**batch("llama"))
    assert all(e.inner is None for e in events)


def test_the_weight_of_conv1d_is_transposed_also_where_it_is_square():
    model = wide("gpt2", n_inner=32)
    place = feed_forward(capture.locate(model))[0]
    module = model.transformer.h[0].mlp.c_proj
    assert place.inner.width == 32 and torch.equal(linear_weight(module), module.weight.T)
    assert max(capture.prove_inner(capture.locate(model), batch("gpt2")).values()) <= 1e-10
    assert linear_weight(nn.Linear(3, 2)).shape == (2, 3) and linear_weight(nn.LayerNorm(3)) is None
    packed = nn.Linear(4, 2)
    packed.weight = nn.Parameter(torch.zeros(1, 8))
    assert linear_weight(packed) is None and linear_weight(nn.Embedding(3, 2)) is None


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("gemma2", lambda p: replace(p.inner, output=replace(p.inner.output, module=p.update))),  # behind the norm
        (
            "bert",
            lambda p: replace(p.inner, output=replace(p.inner.output, module=p.sublayer)),
        ),  # behind the norm over the sum
        ("llama", lambda p: replace(p.inner, last="model.layers.1.mlp.down_proj")),
    ],
)
def test_an_inside_that_is_another_one_is_refused(kind, change):
    located = capture.locate(tiny(kind))
    first = feed_forward(located)[0]
    sites = tuple(replace(p, inner=change(p)) if p == first else p for p in located.sites)
    with pytest.raises((ProofError, CaptureError), match=r"layers\.0\.feed_forward"):
        capture.prove_inner(replace(located, sites=sites), batch(kind))


def test_hooks_are_gone_after_a_failed_proof():
    model = wide()
    located = capture.locate(model)
    with pytest.raises(ProofError):
        capture.prove_inner(located, batch("llama"), tolerance=-1.0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_statistics_equal_the_plain_computation():
    model = wide("gpt2")
    located, events = capture.locate(model), []
    statistics = Statistics(located, Units(2, "documents"), StatisticsOptions(inner=True))

    def see(event):
        if event.inner is not None:
            events.append((event.place, event.state[event.real], event.inner.x[event.real], event.inner.h[event.real]))
        statistics(event)

    with torch.no_grad(), capture.watch(located, see, inner=True):
        statistics.begin(torch.tensor([0, 1]))
        model(**batch("gpt2", "right"))
    rows = statistics.measurements()
    assert len(events) == 2
    for place, stream, x, h in events:
        assert len(x) == 18  # four of the 22 are padding
        w = located.module(place.inner.last).weight.T
        expected = {
            "inner_coefficient.hidden": hidden_coefficient(x, h),
            "inner_fraction.hidden": hidden_fraction(x, h),
            "inner_coefficient.hidden_of_stream": hidden_coefficient(stream, h),
            "inner_fraction.hidden_of_stream": hidden_fraction(stream, h),
            "inner_coefficient.output": output_coefficient(h, w),
            "inner_fraction.output": output_fraction(h, w),
        }
        assert set(expected) == set(INNER_MEASURES)
        for name, wanted in expected.items():
            for block in range(3):
                (row,) = rows.where(measure=name, site=place.name, stream=block)
                assert row.value == pytest.approx(wanted[:, block].mean().item(), rel=1e-9)
                assert row.null == (parallel_fraction_null(32) if "fraction" in name else 0.0)
            (row,) = rows.where(measure=name, site=place.name, stream="mean")
            assert row.value == pytest.approx(wanted.mean().item(), rel=1e-9) and row.branch == "feed_forward"


def test_measure_takes_it_when_asked():
    model = wide()
    rows = thalweg.measure(model, TEXTS, length=16, inner=True)
    (proof,) = rows.where(measure="capture_error.inner")
    assert proof.value <= 1e-10 and proof.null == 1e-10
    found = {row.measure for row in rows}
    assert set(INNER_MEASURES) <= found
    named = thalweg.measure(model, TEXTS, length=16, measures=["inner_fraction.output"])
    assert {row.measure.removesuffix(".sd").removesuffix(".median") for row in named} == {
        "capture_error", "capture_error.inner", "inner_fraction.output",
    }  # fmt: skip
    assert {row.stream for row in named.where(measure="inner_fraction.output")} == {"mean", 0, 1, 2}
    without = thalweg.measure(model, TEXTS, length=16)
    assert not any("inner" in row.measure for row in without)
    figures = [by_part(rows, one, "stream") for one in INNER]
    assert [[row[0] for row in figure.rows] for figure in figures] == [["block 0", "block 1", "block 2"]] * 2
    assert all(by_part(without, one, "stream") is None for one in INNER)


@pytest.mark.parametrize("connection", ["additive", "post_norm", "mhc", "sub_ln"])
def test_models_of_ours(connection):
    config = DecoderConfig(vocab_size=VOCAB, width=32, depth=2, heads=4, ffn_width=64, connection=connection)
    model = Decoder(config, generator=torch.Generator().manual_seed(0)).double()
    rows = thalweg.measure(model, TEXTS, length=16, inner=True)
    (proof,) = rows.where(measure="capture_error.inner")
    assert proof.value <= 1e-10
    assert len(rows.where(measure="inner_fraction.hidden", stream=1)) == 2
    assert all(math.isfinite(row.value) for row in rows.where(measure="inner_coefficient.output"))


def test_experts_of_ours_have_no_inside():
    config = DecoderConfig(vocab_size=VOCAB, width=32, depth=1, heads=4, layers=("attention", "moe"), experts=4)
    located = capture.locate(Decoder(config))
    assert [place.no_inner for place in feed_forward(located)] == [EXPERTS]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("llama", "the hidden width 40 is not a multiple of the stream's 32"),
        ("mixtral", "experts: every token passes other maps"),
    ],
)
def test_what_has_no_inside_is_refused_in_one_line(kind, why):
    with pytest.raises(InputError, match="feed-forward sublayers cannot be measured") as error:
        thalweg.measure(tiny(kind), TEXTS, length=16, inner=True)
    assert why in str(error.value) and "\n" not in str(error.value)


def test_layers_that_are_left_out_are_said():
    model = wide("qwen3_moe")
    places, notes = inner_places(capture.locate(model))
    assert [place.name for place in places] == ["layers.0.feed_forward"]
    assert notes == (f"1 of 2 feed-forward sublayers were not measured inside (layers.1.feed_forward: {EXPERTS})",)
    plans = []
    thalweg.measure(model, TEXTS, length=16, inner=True, progress=lambda done, plan: plans.append(plan))
    assert notes[0] in plans[0].notes


def test_tokens_that_are_taken_in_parts_are_refused():
    model = copy.deepcopy(tiny("distilbert"))
    for layer in model.distilbert.transformer.layer:
        layer.ffn.chunk_size_feed_forward = 1
    with (
        pytest.raises(CaptureError, match="does not take its tokens as they come"),
        capture.watch(capture.locate(model), lambda event: None, inner=True),
    ):
        model(**batch("distilbert"))


def test_a_map_names_it():
    site = {"kind": "feed_forward", "reads": "post_attention_layernorm", "sublayer": "mlp"}
    attention = {"kind": "attention", "reads": "input_layernorm", "sublayer": "self_attn"}
    given = {"blocks": "model.layers", "final_norm": "model.norm", "head": "lm_head"}
    model = tiny("llama")
    bare = feed_forward(capture.locate(model, {**given, "sites": [attention, site]}))[0]
    assert bare.inner is None and "the map names no last linear map" in bare.no_inner
    named = capture.locate(model, {**given, "sites": [attention, {**site, "inner": {"last": "mlp.down_proj"}}]})
    assert feed_forward(named)[0].inner == feed_forward(capture.locate(model))[0].inner
    wrong = {**given, "sites": [attention, {**site, "inner": {"last": "mlp.act_fn"}}]}
    place = feed_forward(capture.locate(model, wrong))[0]
    assert place.inner is None and "does not show the weight of a linear map" in place.no_inner
