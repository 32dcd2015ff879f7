"""Deeper models compute what they computed where a site of update zero hands the state on; elsewhere they are refused, or warm starts."""

import pytest
import torch
from growing_reference import VOCAB, decoder, logits_and_gradients, scatter, tokens

from thalweg import connections
from thalweg.errors import InputError
from thalweg.models import Decoder, Encoder, EncoderConfig
from thalweg.surgery import depth as depth_module
from thalweg.surgery import grow_depth, grow_heads

# Whether a layer more is exact, on top and in the middle, by connection at its defaults.
EXACT = {
    "additive": (True, True),
    "attention_residuals": (False, False),  # a source more in every softmax
    "deepnorm": (False, False),  # alpha follows the depth
    "delta": (True, True),
    "denseformer": (True, True),
    "highway": (False, False),  # the carry gate is never 1
    "hyper_connections": (True, True),
    "keel": (False, False),
    "layerscale": (True, True),
    "ln_scaling": (True, False),  # the number of the layer is a factor
    "mgt": (True, True),
    "mhc": (True, False),  # the streams' mean is kept, each of them is not
    "mhc_delta": (True, False),
    "none": (False, False),
    "orthogonal": (True, True),
    "post_norm": (False, False),
    "rezero": (True, True),
    "sub_ln": (True, True),
    "tangent_projector": (True, True),
}


@torch.no_grad()
def difference(model, grown, length=30):
    ids = tokens(length=length)
    return float((grown(ids).logits - model(ids).logits).abs().max())


def test_the_table_names_every_connection():
    assert set(EXACT) == set(connections.names())


@pytest.mark.parametrize("name", EXACT)
def test_every_connection(name):
    for at, exact in zip((None, [0, 1, 1]), EXACT[name], strict=True):
        model = decoder(connection=name)
        if not exact:
            with pytest.raises(InputError, match=r"is another function with a layer more|depend on its shape"):
                grow_depth(model, at)
            continue
        grown, change = grow_depth(model, at)
        assert difference(model, grown) < 1e-12 and change.drift == 0.0
        assert grown.config.depth == 2 + (1 if at is None else 3) == len(grown.blocks)
        assert change.parameters_added > 0


@pytest.mark.parametrize(
    "name, options",
    [
        ("mgt", {"form": "rank1", "preset": "stable", "gate": "input_independent"}),
        ("mgt", {"form": "delta_rank1", "alpha_per": "network"}),
        ("mgt", {"gate_open": True, "preset": "residual", "beta_scale_learned": True}),
        ("denseformer", {"dilation": 1, "period": 1}),
        ("delta", {"value_channels": 3}),
        ("hyper_connections", {"dynamic": False, "streams": 3}),
        ("mhc", {"mixer": "identity", "read": "signed", "write": "signed"}),
        ("rezero", {"init": 1.0, "input_norm": True, "final_norm": True}),
        ("additive", {"update_norm": True}),
    ],
)
def test_forms(name, options):
    model = decoder(connection=name, connection_options=options)
    assert difference(model, grow_depth(model, [0, 2])[0]) < 1e-12


def test_denseformer_keeps_what_every_layer_weighs():
    model = decoder(connection="denseformer", depth=3)
    grown, change = grow_depth(model, 1)
    old, new = model.stream.sites[5].weight, grown.stream.sites[7].weight
    assert torch.equal(new, torch.stack([old[0], old[1], torch.zeros(()).double(), old[2], old[3]]))
    assert change.maps["stream.sites.7.weight"].taken[0].tolist() == [0, 1, -1, 2, 3]


def test_gradients_of_old_parameters_and_life_in_the_new():
    for name in ("additive", "rezero", "mgt", "hyper_connections"):
        model, ids = decoder(connection=name), tokens()
        grown, change = grow_depth(model, 1)
        _, old = logits_and_gradients(model, ids)
        _, new = logits_and_gradients(grown, ids)
        for key, gradient in new.items():
            map = change.maps[key]
            if map is not None and map.same and old[map.old] is not None:
                assert torch.allclose(gradient, old[map.old], rtol=1e-9, atol=1e-11), (name, key)
        fresh = [key for key, map in change.maps.items() if map is None and key in new]
        assert any(new[key] is not None and new[key].abs().sum() > 0 for key in fresh), (
            name
        )  # the layer can begin to learn


def test_what_is_listed_by_layer_moves_along():
    model = decoder(
        depth=3,
        layers=("attention", "moe"),
        dense_layers=1,
        windows=(3, 0, 4),
        window_rope_base=50.0,
        attention_edit={"space": "value", "parallel": (0.5, 1.0, 0.25), "layers": (0, 2)},
    )
    model, _ = grow_heads(model, {2: 2})
    grown, _ = grow_depth(model, [0, 1, 3])
    config = grown.config
    assert config.windows == (3, 3, 3, 0, 4, 4) and config.layer_heads == (4, 4, 4, 4, 6, 4)
    assert config.dense_layers == 2 and config.attention_edit.layers == (1, 4)
    assert config.attention_edit.parallel == (1.0, 0.5, 1.0, 1.0, 0.25, 1.0)
    assert difference(model, grown, 20) < 1e-12


def test_a_new_layer_may_have_other_heads():
    grown, _ = grow_depth(decoder(), heads=2)
    assert grown.config.layer_heads == (4, 4, 2) and grown.blocks[2].sublayers[0].heads == 2
    assert difference(decoder(), grown) < 1e-12


def test_a_warm_start_says_how_far_it_drifted():
    model = decoder(connection="post_norm")
    grown, change = grow_depth(model, allow_drift=True)
    assert 1e-3 < change.drift < 1 and grown.config.depth == 3 and difference(model, grown) > 1e-4


def test_a_dictionary_cannot_be_silent():
    with pytest.raises(InputError, match="always writes a mixture"):
        grow_depth(decoder(layers=("attention", "prototypes")))
    model = decoder(layers=("attention", "prototypes"), connection_options={"update_norm": True})
    assert difference(model, grow_depth(model)[0]) < 1e-12


@pytest.mark.parametrize("at, words", [(3, "on top"), (-1, "got -1"), ([], "names no place"), ([0, True], "got True")])
def test_places_that_are_not_there(at, words):
    with pytest.raises(InputError, match=words):
        grow_depth(decoder(), at)


def test_an_encoder_and_in_place():
    model = Encoder(EncoderConfig(vocab_size=VOCAB, width=16, depth=2, heads=4, classes=3)).double()
    scatter(model)
    grown, _ = grow_depth(model, 0)
    assert isinstance(grown, Encoder) and difference(model, grown) < 1e-12
    model = decoder()
    before, first = model(tokens()).logits, model.blocks[0].sublayers[0].query.weight
    grow_depth(model, 0, in_place=True)
    assert isinstance(model, Decoder) and model.blocks[1].sublayers[0].query.weight is first
    assert torch.allclose(model(tokens()).logits, before, atol=1e-12)


@pytest.mark.parametrize("mutant", ["updates not silent", "layers in another order", "alpha stays"])
def test_wrong_growth_is_seen(mutant, monkeypatch):
    model = decoder(connection="mgt" if mutant == "alpha stays" else "additive", depth=3)
    if mutant == "updates not silent":
        monkeypatch.setattr(depth_module, "silence", lambda *_: None)
    elif mutant == "layers in another order":
        right = depth_module.places_of
        monkeypatch.setattr(depth_module, "places_of", lambda *a: [2, 1, 0, -1] if right(*a) else [])
    else:
        right_start = depth_module.rebuild

        def rebuild(model, config, what, maps, fill, finish, **more):
            return right_start(model, config, what, maps, None, finish, **more)

        monkeypatch.setattr(depth_module, "rebuild", rebuild)
    try:
        grown, _ = grow_depth(model)
    except InputError as error:
        assert "is another function" in str(error)
    else:
        assert difference(model, grown) > 1e-6
