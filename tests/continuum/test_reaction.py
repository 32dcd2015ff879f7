"""The probe of the feed-forward sublayers: their maps found by replay, their Jacobians, ablations against a model with other weights."""

import copy

import pytest
import torch
from tiny_families import VOCAB, tiny

from thalweg import connections
from thalweg.capture import locate
from thalweg.continuum import feed_forward as ff
from thalweg.continuum import findings, reaction
from thalweg.models import Decoder, DecoderConfig

TEXTS = [torch.randint(5, VOCAB, (40,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(9)]
IDS = torch.tensor([TEXTS[0][:12]])
KINDS = {  # family -> activation, gated, of one module
    "llama": ("silu", True, False),
    "gpt2": ("gelu_tanh", False, False),
    "gemma2": ("gelu_tanh", True, False),
    "phi3": ("silu", True, True),
    "bert": ("gelu", False, False),
    "modernbert": ("gelu", True, True),
}


def found(model, **options):
    return findings(model, TEXTS, ["reaction"], length=20, options={"reaction": options})[-1]


def value(finding, measure, **where):
    (row,) = finding.rows.where(measure=measure, **where)
    return row.value


def maps_of(model):
    located = locate(model)
    with torch.no_grad():
        return located, *ff.find_maps(located, {"input_ids": IDS}, {})


@pytest.fixture(scope="module")
def llama():
    return found(tiny("llama"))


@pytest.mark.parametrize("kind", KINDS)
def test_maps_are_found_by_what_they_do(kind):
    _, maps, left = maps_of(tiny(kind))
    assert not left
    assert [(m.activation, m.gate is not None, m.halves is not None) for m in maps] == [KINDS[kind]] * 2


def test_gate_and_up_are_told_apart():
    _, maps, _ = maps_of(tiny("llama"))
    assert (maps[0].gate, maps[0].up) == ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("kind", KINDS)
def test_the_jacobian_is_that_of_the_module(kind):
    """By differences of the sublayer of the model itself; catches a bias left out, halves exchanged, a slope without its gate."""
    model = tiny(kind)
    located, maps, _ = maps_of(model)
    x = torch.randn(located.width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one = maps[1]
    j = ff.jacobian_of(one, located, one.weights(located), x)
    block = located.module(one.place.block)
    run = {"bert": lambda v: block.output.dense(block.intermediate(v))}.get(kind, located.module(one.place.sublayer))
    e = 1e-5
    for i in (0, 7):
        step = torch.zeros_like(x)
        step[i] = e
        with torch.no_grad():
            difference = (run((x + step)[None, None]) - run((x - step)[None, None]))[0, 0] / (2 * e)
        assert torch.allclose(j[:, i], difference, atol=1e-6)


def test_what_the_variants_are():
    located, (one, _), _ = maps_of(tiny("llama"))
    x = torch.randn(located.width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    up, gate, last = one.weights(located)

    def make(variant):
        return ff.variant_of(one, located, variant, torch.Generator().manual_seed(0))

    def antisymmetric(weights):
        j = ff.jacobian_of(one, located, weights, x)
        return ((j - j.T).norm() / j.norm()).item()

    assert antisymmetric(make("symmetric")) < 1e-12
    assert antisymmetric(make("random_symmetric")) < 1e-12
    assert min(antisymmetric(make(v)) for v in ("model", "tied_down", "norm_matched", "rotated")) > 0.1
    values = torch.linalg.svdvals
    for variant in ("symmetric", "rotated", "random_symmetric"):
        assert all(torch.allclose(values(w), values(up), atol=1e-8) for w in make(variant) if w is not None)
    matched = make("norm_matched")
    assert [values(w)[0].item() for w in matched] == pytest.approx([values(up)[0].item()] * 3, rel=1e-2)
    assert torch.allclose(matched[2] / matched[2].norm(), last / last.norm())
    assert torch.equal(make("tied_down")[1], gate)


def test_symmetric_weights_do_not_rotate_and_a_free_gate_does(llama):
    """Golden: imaginary part 0 in every layer; down = up^T with the gate as it is: above 0.1."""
    rows = llama.rows.where(measure="reaction.imaginary_share")
    assert all(row.value < 1e-9 for row in rows if row.branch in ("symmetric", "random_symmetric"))
    assert all(row.value > 0.1 for row in rows if row.branch in ("model", "rotated", "with its norm"))
    assert max(row.value for row in rows if row.branch == "tied_down") > 0.1


def test_growth_is_that_of_a_model_with_these_weights(llama):
    """A copy whose weights are set by hand, its states from hidden_states; catches a tied gate forgotten and a layer off by one."""
    model = copy.deepcopy(tiny("llama"))
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.data = layer.mlp.up_proj.weight.data.clone()
        layer.mlp.down_proj.weight.data = layer.mlp.up_proj.weight.data.T.clone()
    for branch, by_hand in (("model", copy.deepcopy(tiny("llama"))), ("symmetric", model)):
        total = torch.zeros(0, dtype=torch.float64)
        for text in TEXTS:
            for start in (0, 20):
                with torch.no_grad():
                    states = by_hand(
                        input_ids=torch.tensor([text[start : start + 20]]), output_hidden_states=True
                    ).hidden_states
                total = torch.cat([total, (states[1].norm(dim=-1) / states[0].norm(dim=-1)).log()[0, 1:]])
        assert value(llama, "reaction.log_amplification", branch=branch, layer=1) == pytest.approx(
            total.mean().item(), abs=1e-9
        )


def test_nothing_is_found_where_the_weights_are_a_control(monkeypatch):
    """Were the symmetric weights those of the control, the excess over it is exactly nothing."""
    own = ff.variant_of
    monkeypatch.setattr(
        reaction,
        "variant_of",
        lambda maps, located, variant, g: own(maps, located, "norm_matched" if variant == "symmetric" else variant, g),
    )
    finding = found(tiny("llama"))
    (row,) = finding.rows.where(measure="reaction.excess", branch="symmetric - norm_matched")
    assert (row.value, row.low, row.high) == (0, 0, 0)


def test_excess_is_the_difference_of_the_growths(llama):
    ends = {b: value(llama, "reaction.log_amplification", branch=b, layer=2) for b in ("symmetric", "norm_matched")}
    wanted = ends["symmetric"] - ends["norm_matched"]
    assert value(llama, "reaction.excess", branch="symmetric - norm_matched") == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("connection", connections.names())
def test_every_connection_of_ours(connection):
    model = Decoder(
        DecoderConfig(vocab_size=VOCAB, width=32, depth=2, heads=4, connection=connection),
        generator=torch.Generator().manual_seed(0),
    )
    finding = found(model, points=1, layers=1, ablate_tokens=40)
    assert not finding.failed
    assert bool(finding.not_applicable) == (connection == "sub_ln")  # a norm stands before its last map


@pytest.mark.parametrize(("kind", "words"), [("mixtral", "experts"), ("gpt_oss", "experts")])
def test_what_does_not_apply_says_why(kind, words):
    assert words in found(tiny(kind)).not_applicable


def test_layers_with_experts_are_left_and_said():
    finding = found(tiny("qwen3_moe"))
    assert finding.sketch
    assert any("left as they are" in caveat for caveat in finding.caveats)
    assert {row.layer for row in finding.rows.where(measure="reaction.imaginary_share")} == {0}


def test_weights_are_bitwise_untouched_and_hooks_gone():
    model = tiny("gpt2")
    before = {name: (x, x.clone()) for name, x in model.named_parameters()}
    found(model)
    for name, x in model.named_parameters():
        assert x is before[name][0]
        assert torch.equal(x, before[name][1])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_bad_options_are_one_line():
    with pytest.raises(Exception, match="points of reaction must be at least 1, got 0") as error:
        found(tiny("gpt2"), points=0)
    assert "\n" not in str(error.value)


def test_maps_of_zeros_have_no_norm_to_match(llama):
    """A last map that begins at zero, as in many recipes: norm_matched leaves it, and nothing grows through it."""
    model = copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
    finding = found(model)
    assert not finding.failed, finding.failed
    assert value(finding, "reaction.log_amplification", branch="norm_matched", layer=2) == pytest.approx(
        value(finding, "reaction.log_amplification", branch="model", layer=2)
    )


def test_a_model_of_zeros_is_not_applicable():
    model = copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert "its hidden vector is zero at every token" in found(model).not_applicable


def test_sixteen_bits_are_widened():
    """Would catch a Jacobian of the norm taken in bfloat16."""
    narrow = copy.deepcopy(tiny("llama")).bfloat16()
    got, exact = found(narrow, ablate=False), found(copy.deepcopy(narrow).float(), ablate=False)
    assert len(got.rows) == len(exact.rows)
    for a, b in zip(got.rows, exact.rows, strict=True):
        assert (a.measure, a.branch, a.layer) == (b.measure, b.branch, b.layer)
        assert a.value == pytest.approx(b.value, rel=1e-2, abs=2e-3)
    symmetric = got.rows.where(measure="reaction.imaginary_share", branch="symmetric")
    assert symmetric and all(row.value == 0 for row in symmetric)
