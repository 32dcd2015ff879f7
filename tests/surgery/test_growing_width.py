"""Wider models compute what they computed: under every connection that can, with RMSNorm and LayerNorm; the others are refused."""

import pytest
import torch
from growing_reference import VOCAB, decoder, logits_and_gradients, scatter, tokens
from tiny_models import LENGTH, tiny

from thalweg import connections
from thalweg.errors import InputError
from thalweg.models import Encoder, EncoderConfig
from thalweg.ops.norms import Norm
from thalweg.surgery import convert, grow_width
from thalweg.surgery import width as width_module

REFUSED = [("tangent_projector", "subspace")]  # its random directions are drawn by the width
SHAPES = {
    "biases, gates, dictionaries": {
        "bias": True,
        "attention_gate": "head",
        "qk_norm": True,
        "head_prototypes": True,
        "tie_embeddings": False,
    },
    "parallel, learned positions": {"layers": ("parallel",), "positions": "learned", "feed_forward": "gelu"},
    "experts": {"layers": ("attention", "moe"), "depth": 3, "dense_layers": 1},
    "prototypes": {"layers": ("attention", "prototypes"), "prototype_bypass": 0.2},
    "edits": {
        "attention_edit": {"space": "value", "parallel": 0.3},
        "mlp_edit": {"space": "residual", "parallel": "learned", "perpendicular": 0.8},
    },
    "sandwich norms": {"connection_options": {"update_norm": True}},
}
CENTRED = ["additive", "denseformer", "ln_scaling", "none", "rezero", "sub_ln"]  # LayerNorm goes along with these


def same(model, grown, tolerance=1e-12):
    return (grown(tokens()).logits - model(tokens()).logits).abs().max() < tolerance


@pytest.mark.parametrize("name", connections.names())
def test_every_connection_with_rmsnorm(name):
    for options in ({}, *connections.registry[name].variants()):
        model = decoder(connection=name, connection_options=options)
        if any((name, key) in REFUSED for key in options):
            with pytest.raises(InputError, match="sees added coordinates"):
                grow_width(model, width=26)
            continue
        assert same(model, grow_width(model, width=26)[0]), options


@pytest.mark.parametrize("name", connections.names())
def test_layernorm_goes_along_exactly_or_is_refused(name):
    for bias in (False, True):
        options = {"norm": "layernorm", "norm_bias": bias}
        model = decoder(connection=name, connection_options=options, norm="layernorm", bias=bias)
        if name in CENTRED:
            grown, _ = grow_width(model, width=26)
            assert same(model, grown)
            assert bool(grown.embedding.weight[:, 16:].any()) == (name != "rezero")  # which has no norm to please
        else:
            with pytest.raises(InputError, match="sees added coordinates"):
                grow_width(model, width=26)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_every_part(shape, norm):
    model = decoder(norm=norm, **SHAPES[shape])
    if norm == "layernorm" and shape in ("prototypes", "edits", "sandwich norms"):
        with pytest.raises(InputError, match=r"prototypes measure distances|sees added coordinates"):
            grow_width(model, width=20)
        return
    grown, change = grow_width(model, width=20, ffn_width=None if shape == "prototypes" else 72)
    assert same(model, grown) and grown.config.head_width == 4 and grown.config.width == 20
    assert (
        sum(p.numel() for p in grown.parameters()) - sum(p.numel() for p in model.parameters())
        == change.parameters_added
    )


def test_gradients_of_old_entries_are_those_of_the_old_model():
    """With every factor undone: dL/d(old) is factor times dL/d(new)."""
    model, ids = decoder(connection="mgt"), tokens()
    grown, change = grow_width(model, width=24, ffn_width=80)
    _, old = logits_and_gradients(model, ids)
    _, new = logits_and_gradients(grown, ids)
    assert any(map.factor != 1 for map in change.maps.values())
    for name, gradient in new.items():
        map = change.maps[name]
        if "gate_matrix" in name:  # its LayerNorm spreads over the rows that hold the mean
            continue
        there = map.carry(torch.ones_like(old[name]), torch.zeros_like(gradient)).bool()
        expected = map.carry(old[name], torch.zeros_like(gradient), 1 / map.factor)
        assert torch.allclose(gradient[there], expected[there], rtol=1e-9, atol=1e-11), name
    assert new["blocks.0.sublayers.0.output.weight"][16:].abs().sum() > 0  # new coordinates can learn


def test_float32_and_powers_of_four():
    model = decoder().float()
    for width, tolerance in ((20, 1e-6), (64, 1e-6)):
        assert same(model, grow_width(model, width=width)[0], tolerance)


@pytest.mark.parametrize("kind", ["swiglu", "gelu", "geglu_tanh"])
def test_new_units_write_nothing(kind):
    model = decoder(feed_forward=kind, bias=True)
    grown, _ = grow_width(model, ffn_width=100)
    assert torch.equal(
        grown.blocks[0].sublayers[1].down.weight[:, model.config.feed_forward_width :].abs().sum(),
        torch.tensor(0.0).double(),
    )
    assert same(model, grown) and grown.config.width == 16 and grown.config.ffn_width == 100
    assert same(model, grow_width(model.float().double(), ffn_width=100)[0])


def test_experts_grow_with_the_shared_ones():
    model = decoder(layers=("attention", "moe"))
    grown, _ = grow_width(model, expert_width=24)
    assert same(model, grown) and grown.blocks[0].sublayers[1].shared.up.out_features == 24
    assert grown.blocks[0].sublayers[1].down.weight.shape[-1] == 24


@pytest.mark.parametrize(
    "changes, sizes, words",
    [
        ({}, {}, "nothing grows"),
        ({}, {"width": 16}, "width grows from 16, got 16"),
        ({}, {"ffn_width": 8}, "ffn_width grows from 48, got 8"),
        ({}, {"expert_width": 80}, "have no experts"),
        ({"layers": ("attention", "moe")}, {"ffn_width": 80}, "no feed-forward sublayer"),
        ({"connection": "sub_ln"}, {"ffn_width": 80}, "norms all units of a sublayer together"),
        (
            {"layers": ("attention", "prototypes"), "prototype_temperature": 0.001},
            {"width": 64},
            "would leave its range",
        ),
    ],
)
def test_what_cannot_grow_is_refused(changes, sizes, words):
    with pytest.raises(InputError, match=words):
        grow_width(decoder(**changes), **sizes)


def test_a_norm_with_an_eps_of_its_own_is_refused():
    model = decoder()
    model.stream.sites[1].input_norm.eps = 1e-3
    with pytest.raises(InputError, match=r"stream.sites.1.input_norm has an eps of its own"):
        grow_width(model, width=20)


def test_an_encoder():
    for pooling in ("mean", "first", "max"):
        config = EncoderConfig(vocab_size=VOCAB, width=16, depth=2, heads=4, classes=3, pooling=pooling)
        model = Encoder(config).double()
        scatter(model)
        assert same(model, grow_width(model, width=24, ffn_width=60)[0])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gemma3"])
def test_models_of_transformers_are_converted_and_grown(kind):
    from thalweg.surgery import Growth

    growth = Growth(heads=2, width=32, ffn_width=64, depth=2)
    for dtype, tolerance in (("float32", 2e-5), ("float64", 1e-12)):
        made, proof = convert(tiny(kind), None, growth=growth, length=LENGTH, dtype=dtype)
        assert (proof.claim, proof.passed) == ("equal", True) and proof.difference < tolerance, (kind, dtype)
    config = made.decoder.config
    assert (config.depth, config.width, config.heads_of(4), config.feed_forward_width) == (5, 32, 6, 64)
    plain = convert(tiny(kind), length=LENGTH).model
    grown = convert(plain, None, growth=growth, length=LENGTH)
    ids = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(0))
    assert (grown.model(ids).logits - plain(ids).logits).abs().max() <= 1e-5 * max(1, plain(ids).logits.abs().max())


# Mutants: the exact recipe with one thing wrong.


MUTANTS = ["scale of the norms", "eps of the norms", "writers are random", "mean left out", "coordinates in front"]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_growth_is_seen(mutant, monkeypatch):
    model = decoder(norm="layernorm" if mutant == "mean left out" else "rmsnorm", norm_eps=1e-2)
    if mutant == "scale of the norms":
        monkeypatch.setattr(width_module.math, "sqrt", lambda x: x)
    elif mutant == "eps of the norms":
        monkeypatch.setattr(width_module, "check_eps", lambda *_: None)
        right = width_module.wider
        monkeypatch.setattr(
            width_module, "wider", lambda *a: right(*a).replace(connection_options=model.config.connection_options)
        )
    elif mutant == "writers are random":
        monkeypatch.setattr(width_module, "fill_axis", lambda *_: None)
    elif mutant == "mean left out":
        monkeypatch.setattr(width_module, "uses_layernorm", lambda *_: False)
    else:
        right_axis = width_module.appended
        monkeypatch.setattr(
            width_module,
            "appended",
            lambda *a: right_axis(*a).roll(a[1] - a[0]) if "embedding" in a[4] else right_axis(*a),
        )
    try:
        grown, _ = grow_width(model, width=26)
    except InputError as error:
        assert "sees added coordinates" in str(error)
    else:
        assert not same(model, grown, 1e-6)


def test_the_replay_alone_sees_a_stream_that_is_another(monkeypatch):
    monkeypatch.setattr(width_module, "check_eps", lambda *_: None)
    model = decoder()
    model.stream.sites[0].input_norm.eps = 0.5
    with pytest.raises(InputError, match="Additive sees added coordinates"):
        grow_width(model, width=20)
    assert isinstance(model.stream.final_norm, Norm)
