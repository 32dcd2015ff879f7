"""Heads that are added, masked and taken away: no number changes, old gradients stay, and wrong ways of doing it are seen."""

import pytest
import torch
from growing_reference import LENGTH, VOCAB, attend_in_loops, decoder, logits_and_gradients, scatter, tokens
from transformers import AutoModelForCausalLM

from thalweg.capture import locate
from thalweg.errors import InputError, ShapeError
from thalweg.models import Decoder, DecoderCache, DecoderConfig, Encoder, EncoderConfig
from thalweg.models.hf import in_shell
from thalweg.models.look import view_of
from thalweg.models.size import size_of
from thalweg.surgery import grow_heads, head_masks, mask_heads, prune_heads
from thalweg.surgery import heads as heads_module

FORMS = {
    "plain": {"kv_heads": None},
    "grouped": {},
    "one key-value head": {"kv_heads": 1},
    "biased, gated by head": {"bias": True, "attention_gate": "head"},
    "gated by element, normed": {"attention_gate": "element", "qk_norm": True},
    "dictionaries": {"head_prototypes": True, "prototype_bypass": 0.3},
    "learned edit of every head": {"attention_edit": {"space": "value", "parallel": "learned", "per": "head"}},
    "random edit": {"attention_edit": {"space": "value", "parallel": 0.4, "control": "random_direction"}},
    "listed edit": {"attention_edit": {"space": "value", "parallel": [[0.2, 0.4, 0.6, 0.8], [1.0, 0.9, 0.8, 0.7]]}},
    "parallel, wide heads": {"layers": ("parallel",), "head_size": 8},
    "layernorm, many streams": {"norm": "layernorm", "connection": "hyper_connections"},
    "experts": {"layers": ("attention", "moe")},
    "transport plans": {"attention_weights": "sinkhorn"},
}


@pytest.mark.parametrize("form", FORMS)
def test_new_heads_change_no_number_and_no_gradient_of_the_old(form):
    model, ids = decoder(**FORMS[form]), tokens()
    group = model.config.head_group
    grown, change = grow_heads(model, {1: 2 * group}, generator=torch.Generator().manual_seed(1))
    assert grown.config.layer_heads == (4, 4 + 2 * group) and change.after is grown.config
    assert change.parameters_added == sum(p.numel() for p in grown.parameters()) - sum(
        p.numel() for p in model.parameters()
    )
    before, old = logits_and_gradients(model, ids)
    after, new = logits_and_gradients(grown, ids)
    assert (after - before).abs().max() < 1e-12
    moved = 0
    for name, gradient in new.items():
        map = change.maps[name]
        kept = map.carry(torch.ones_like(old[name]), torch.zeros_like(gradient)).bool()
        expected = map.carry(old[name], torch.zeros_like(gradient))
        assert torch.allclose(gradient[kept], expected[kept], rtol=1e-10, atol=1e-12), name
        moved += gradient[~kept].abs().sum()
    assert moved > 0  # a new head can learn from its first step
    assert (Decoder(grown.config).float()(ids).logits.shape) == after.shape


def test_float32():
    model, ids = decoder().float(), tokens()
    grown, _ = grow_heads(model, {0: 2, 1: 6})
    assert (grown(ids).logits - model(ids).logits).abs().max() <= 1e-6
    assert next(grown.parameters()).dtype == torch.float32 and not any(p.grad is not None for p in grown.parameters())


def test_a_ragged_layer_is_attention_head_by_head():
    """Outputs and all gradients against loops, with heads that were grown and then moved away from zero."""
    grown, _ = grow_heads(decoder(), {0: 4})
    scatter(grown, seed=3)
    attention, config = grown.blocks[0].sublayers[0], grown.config
    x = torch.randn(
        1, LENGTH, config.width, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    ).requires_grad_()
    view = view_of(config, torch.arange(LENGTH)[None], torch.float64)
    cotangent = torch.randn(1, LENGTH, config.width, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    inputs = [x, *attention.parameters()]
    found = attention(x, view)
    expected = attend_in_loops(attention, x[0], view.cos[0], view.sin[0])[None]
    assert attention.heads == 8 and attention.kv_heads == 4
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    for one, two in zip(
        torch.autograd.grad((found * cotangent).sum(), inputs),
        torch.autograd.grad((expected * cotangent).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(one, two, rtol=1e-10, atol=1e-12)


def test_births_are_the_factors_of_the_scores():
    model = decoder(kv_heads=None)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(16, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    with pytest.raises(ShapeError, match=r"query factors must be \[16, 4\]"):
        grow_heads(model, {0: [(query.T, key.T)]})
    grown, _ = grow_heads(model, {1: [(query, key)]})
    attention = grown.blocks[1].sublayers[0]
    assert torch.equal(attention.query.weight[-4:].T, query) and torch.equal(attention.key.weight[-4:].T, key)
    assert attention.query.weight.shape == (20, 16) and not attention.output.weight[:, -4:].any()
    assert attention.value.weight[-4:].abs().sum() > 0 and model.config.layer_heads == ()


def test_a_birth_of_grouped_heads_is_a_group():
    generator = torch.Generator().manual_seed(0)
    wide, narrow, key = (torch.randn(16, n, generator=generator, dtype=torch.float64) for n in (8, 4, 4))
    model = decoder()
    grown, _ = grow_heads(model, {0: [(wide, key), (narrow, key)]})
    attention = grown.blocks[0].sublayers[0]
    assert (attention.heads, attention.kv_heads) == (8, 4)
    assert torch.equal(attention.query.weight[16:24].T, wide)
    assert torch.equal(attention.query.weight[24:28], attention.query.weight[28:32])
    assert torch.equal(attention.key.weight[8:12], attention.key.weight[12:16])
    assert (grown(tokens()).logits - model(tokens()).logits).abs().max() < 1e-12


@pytest.mark.parametrize(
    "changes, births, words",
    [
        ({}, {0: 3}, "a whole number of heads of 2, the queries that share keys and values"),
        ({}, {0: 0}, "from 1, got 0"),
        ({}, {5: 2}, "layer 5 has no heads; layers with heads: 0 to 1"),
        ({}, {}, "name at least one layer"),
        ({}, {0: ["x"]}, "a birth has query and key factors"),
        ({"layers": ("feed_forward",)}, {0: 2}, "layers with heads: none"),
        ({"connection": "sub_ln"}, {0: 2}, "norms all heads of a layer together"),
        (
            {"attention_edit": {"space": "value", "parallel": 0.5, "group": "all"}},
            {0: 2},
            "group 'all' projects heads together",
        ),
    ],
)
def test_what_cannot_grow_is_refused(changes, births, words):
    with pytest.raises(InputError, match=words):
        grow_heads(decoder(**changes), births)
    with pytest.raises(InputError, match="only a model of thalweg can be grown"):
        grow_heads(torch.nn.Linear(2, 2), births)


def test_the_configuration_of_ragged_heads():
    values = {"vocab_size": 9, "width": 16, "depth": 2, "heads": 4, "kv_heads": 2}
    config = DecoderConfig(**values, layer_heads=(2, 6))
    assert [config.heads_of(i) for i in (0, 1)] == [2, 6] and [config.key_value_heads_of(i) for i in (0, 1)] == [1, 3]
    assert config.head_width == 4 and config.head_group == 2
    assert DecoderConfig(**values, layer_heads=(4, 4)) == DecoderConfig(**values)  # one spelling for one model
    for heads, words in (((2,), "one number of heads"), ((0, 2), "at least 1"), ((3, 4), "multiples of 2")):
        with pytest.raises(InputError, match=words):
            DecoderConfig(**values, layer_heads=heads)
    with pytest.raises(InputError, match="have no heads"):
        DecoderConfig(**values, layers=("feed_forward",), layer_heads=(2, 2))
    with pytest.raises(InputError, match="lists 4 heads in a layer, the model has 6 in layer 1"):
        lists = {"space": "value", "parallel": [[0.5] * 2, [0.5] * 4]}
        DecoderConfig(**values, layer_heads=(2, 6), attention_edit=lists)


@pytest.mark.parametrize(
    "form", ["grouped", "biased, gated by head", "dictionaries", "learned edit of every head", "experts"]
)
def test_the_size_of_ragged_heads(form):
    model, _ = grow_heads(decoder(**FORMS[form]), {1: 4})
    size = size_of(model.config, length=6)
    assert size.total_parameters == sum(p.numel() for p in model.parameters())
    uniform = size_of(decoder(**FORMS[form]).config, length=6)
    assert size.forward_flops > uniform.forward_flops and size.activation_bytes > uniform.activation_bytes
    half = size_of(model.config.replace(layer_heads=(8, 4)), length=6)
    assert half.flops == size.flops and half.activation_bytes == size.activation_bytes


def test_the_activations_of_ragged_heads_are_those_that_autograd_keeps():
    from thalweg.models.activations import measure

    config = decoder(depth=3).config.replace(layer_heads=(2, 6, 4))
    exact = measure(config, 8, torch.float32)[0]
    assert size_of(config, length=8).activation_bytes == exact


def test_saved_loaded_generated_and_cached(tmp_path):
    model, _ = grow_heads(in_shell(decoder().float()), {1: 2})
    scatter(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokens()
    assert loaded.decoder.config == model.decoder.config and loaded.config.layer_heads == [4, 6]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    made = model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=True)
    assert torch.equal(made, model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False))
    cache = DecoderCache()
    parts = [model.decoder(ids[:, a:b], cache=cache).logits for a, b in ((0, 3), (3, 4), (4, LENGTH))]
    assert torch.allclose(torch.cat(parts, 1), model(ids).logits, atol=1e-5)


def test_a_configuration_without_the_field_loads_as_before(tmp_path):
    import json

    model = in_shell(decoder().float())
    model.save_pretrained(tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    assert table.pop("layer_heads") == []
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens()).logits, model(tokens()).logits)


def test_ragged_heads_are_located():
    model, _ = grow_heads(decoder(), {1: 2})
    counts = [(place.heads.query, place.heads.key_value) for place in locate(model).sites if place.heads is not None]
    assert counts == [(4, 2), (6, 3)]


def test_layers_are_dropped_with_their_heads():
    from thalweg.compression import compress

    model, _ = grow_heads(decoder(depth=3), {1: 2})
    smaller = compress(in_shell(model.float()), "layer_drop", drop="0").model
    assert smaller.decoder.config.layer_heads == (6, 4) and smaller(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("form", [f for f in FORMS if f not in ("experts", "one key-value head")])
def test_a_masked_head_that_is_taken_away_changes_no_number(form):
    model, ids = decoder(**FORMS[form]), tokens()
    group = model.config.head_group
    gone = list(range(group))
    whole = model(ids).logits.detach()
    mask_heads(model, {1: dict.fromkeys(gone, 0.0)})
    masked, gradients = logits_and_gradients(model, ids)
    assert (masked - whole).abs().max() > 1e-4
    smaller, change = prune_heads(model, {1: gone})
    after, rest = logits_and_gradients(smaller, ids)
    assert (after - masked).abs().max() < 1e-12 and head_masks(smaller) == {}
    assert smaller.config.heads_of(1) == 4 - group and change.parameters_added < 0
    for name, gradient in rest.items():
        expected = change.maps[name].carry(gradients[name], torch.zeros_like(gradient))
        assert torch.allclose(gradient, expected, rtol=1e-10, atol=1e-12), name
    mask_heads(model, {1: dict.fromkeys(gone, 1.0)})
    assert torch.equal(model(ids).logits, whole) and head_masks(model) == {}


def test_masks_are_shares_and_travel():
    model, ids = decoder(), tokens()
    mask_heads(model, {0: {3: 0.25}})
    mask_heads(model, {0: {2: 0.5}})
    assert head_masks(model) == {0: [1.0, 1.0, 0.5, 0.25]}
    folded = decoder()
    with torch.no_grad():
        weight = folded.blocks[0].sublayers[0].output.weight
        weight[:, 8:12] *= 0.5
        weight[:, 12:] *= 0.25
    assert torch.allclose(model(ids).logits, folded(ids).logits, atol=1e-12)
    grown, _ = grow_heads(model, {0: 2})
    assert head_masks(grown) == {0: [1.0, 1.0, 0.5, 0.25, 1.0, 1.0]}
    assert torch.allclose(grown(ids).logits, model(ids).logits, atol=1e-12)
    smaller, _ = prune_heads(grown, {0: [0, 1]})
    assert head_masks(smaller) == {0: [0.5, 0.25, 1.0, 1.0]}
    shown = [place.heads is not None for place in locate(model).sites if place.kind == "attention"]
    assert shown == [False, True]  # a masked head passes more than its output map


def test_a_masked_model_is_not_saved(tmp_path):
    model = in_shell(decoder())
    mask_heads(model, {0: {0: 0.5}})
    with pytest.raises(InputError, match="has masked heads, which are not saved"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    "heads, words",
    [
        ({0: [0]}, "heads 0 to 1 of layer 0 share keys and values and go together"),
        ({0: [0, 1, 2, 3]}, "layer 0 has 4 heads, and at least 2 must stay"),
        ({0: [4, 5]}, "layer 0 has heads 0 to 3, got 4"),
        ({0: [-1]}, "layer 0 has heads 0 to 3, got -1"),
        ({0: []}, "name at least one head of layer 0"),
        ({2: [0]}, "layer 2 has no heads"),
    ],
)
def test_what_cannot_go_is_refused(heads, words):
    with pytest.raises(InputError, match=words):
        prune_heads(decoder(), heads)


def test_masks_outside_their_range_are_refused():
    with pytest.raises(InputError, match=r"must lie in \[0, 1\], got 1.5"):
        mask_heads(decoder(), {0: {0: 1.5}})


def test_in_place_keeps_what_did_not_change():
    model, ids = decoder(), tokens()
    before, embedding = model(ids).logits.detach(), model.embedding.weight
    grown, change = grow_heads(model, {1: 2}, in_place=True)
    assert grown is model and model.embedding.weight is embedding and model.head.weight is embedding
    assert change.new["embedding.weight"] is embedding
    assert (model(ids).logits - before).abs().max() < 1e-12
    shell = in_shell(decoder().float())
    grown, _ = prune_heads(shell, {0: [2, 3]}, in_place=True)
    assert grown is shell and shell.decoder.config.layer_heads == (2, 4) == tuple(shell.config.layer_heads)


def test_the_given_model_is_not_changed_and_modes_travel():
    model = decoder(gradient_checkpointing=True)
    model.embedding.weight.requires_grad_(False)
    model.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grown, _ = grow_heads(model, {0: 2})
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not grown.training and grown.gradient_checkpointing and not grown.embedding.weight.requires_grad
    with torch.no_grad():
        grown.head.weight.zero_()
    assert model.head.weight.abs().sum() > 0


def test_an_encoder():
    config = EncoderConfig(vocab_size=VOCAB, width=16, depth=2, heads=4, kv_heads=2, classes=3)
    model, ids = Encoder(config).double(), tokens()
    scatter(model)
    grown, _ = grow_heads(model, {1: 2})
    assert isinstance(grown, Encoder) and (grown(ids).logits - model(ids).logits).abs().max() < 1e-12
    mask_heads(grown, {0: {0: 0.0, 1: 0.0}})
    smaller, _ = prune_heads(in_shell(grown), {0: [0, 1]})
    assert torch.allclose(smaller(ids).logits, grown(ids).logits, atol=1e-12)


# Wrong ways of growing and pruning, each of which the comparison above must see.


def in_front(kept, size):
    """New heads before the old ones in one of the maps only."""
    taken = heads_module.NEW * torch.ones(len(kept) * size, dtype=torch.long)
    old = [k for k in kept if k >= 0]
    taken[-len(old) * size :] = torch.arange(len(old) * size)
    return taken


MUTANTS = [
    "output map not zero",
    "old columns behind the new",
    "keys between the old ones",
    "mean over heads",
    "mask on queries",
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_growth_is_seen(mutant, monkeypatch):
    ids, right, axes = tokens(), heads_module.blocks_of, heads_module.axes_of
    model = decoder(kv_heads=None if mutant == "mean over heads" else 2)

    if mutant == "output map not zero":
        monkeypatch.setattr(heads_module, "begin", lambda *_: None)
    elif mutant == "old columns behind the new":
        monkeypatch.setattr(
            heads_module, "axes_of", lambda *a: {n: v for n, v in axes(*a).items() if "output" not in n}
        )

        def front(name, map, old, new):
            if name.endswith("output.weight") and old.shape != new.shape:
                map.__dict__["taken"] = {1: in_front([*range(4), -1, -1], 4)}

        monkeypatch.setattr("thalweg.surgery.change.check_shape", front)
    elif mutant == "keys between the old ones":

        def interleaved(kept, size):
            if len(kept) == 3:  # key-value heads: the new one second
                kept = [kept[0], kept[2], kept[1]]
            return right(kept, size)

        monkeypatch.setattr(heads_module, "blocks_of", interleaved)
    grown, _ = grow_heads(model, {1: 2})
    if mutant == "mean over heads":
        with torch.no_grad():
            grown.blocks[1].sublayers[0].output.weight *= 4 / 6
    elif mutant == "mask on queries":
        with torch.no_grad():
            grown.blocks[1].sublayers[0].query.weight[:4] = 0
    assert (grown(ids).logits - model(ids).logits).abs().max() > 1e-4
