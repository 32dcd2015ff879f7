"""Scores of heads against loops, the choice of the lowest, and pruning of whole models with its record."""

import json

import pytest
import torch
from growing_reference import attend_in_loops, decoder, scatter, tokens
from tiny_models import LENGTH, tiny
from transformers import AutoModelForCausalLM

from thalweg.errors import InputError, UnknownNameError
from thalweg.geometry.directional import head_energy
from thalweg.models import Encoder, EncoderConfig
from thalweg.models.hf import in_shell
from thalweg.models.look import view_of
from thalweg.surgery import (
    HeadScore,
    Source,
    grow_heads,
    head_masks,
    head_scores,
    lowest,
    prune,
    prune_heads,
    save_pruned,
)
from thalweg.surgery.scoring import SCORES


def by_head(scores, layer):
    return [score.score for score in scores if score.layer == layer]


def attention_input(model, ids, layer=0):
    seen = []
    hook = model.blocks[layer].sublayers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(ids)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_output_is_what_the_heads_write(kv_heads):
    """Against attention in loops with one group left: its output map for all other heads is zero."""
    model, ids = decoder(kv_heads=kv_heads), tokens(1)
    scores = head_scores(model, ids, "output")
    attention, x = model.blocks[0].sublayers[0], attention_input(model, ids)
    view = view_of(model.config, torch.arange(ids.shape[1])[None], torch.float64)
    whole = attend_in_loops(attention, x[0], view.cos[0], view.sin[0])
    w, group, weight = attention.head_width, model.config.head_group, attention.output.weight.detach().clone()
    for unit, found in enumerate(by_head(scores, 0)):
        with torch.no_grad():
            attention.output.weight.zero_()
            part = slice(unit * group * w, (unit + 1) * group * w)
            attention.output.weight[:, part] = weight[:, part]
            alone = attend_in_loops(attention, x[0], view.cos[0], view.sin[0])
        assert found == pytest.approx((alone.norm() / whole.norm()).item(), rel=1e-10)


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_weight_is_what_the_heads_could_write(kv_heads):
    model = decoder(kv_heads=kv_heads)
    attention, w, group = model.blocks[1].sublayers[0], 4, model.config.head_group
    products = []
    for unit in range(4 // group):
        squares = 0.0
        for head in range(unit * group, (unit + 1) * group):
            value = attention.value.weight[(head // group) * w : (head // group + 1) * w]
            squares += (attention.output.weight[:, head * w : (head + 1) * w] @ value).square().sum().item()
        products.append(squares)
    expected = [(p / sum(products)) ** 0.5 for p in products]
    assert by_head(head_scores(model, tokens(), "weight"), 1) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_energy_is_the_measure_of_the_controller(kv_heads):
    model, ids = decoder(kv_heads=kv_heads), tokens(2)
    attention, group = model.blocks[0].sublayers[0], model.config.head_group
    x = attention_input(model, ids).flatten(0, 1)
    query = attention.query.weight.T.detach()
    key = attention.key.weight.unflatten(0, (-1, 4)).repeat_interleave(group, 0).flatten(0, 1).T.detach()
    second = x.T @ x / len(x)
    scale = (torch.linalg.matrix_norm(second, 2) * torch.linalg.matrix_norm(query @ key.T)).item()
    for unit, found in enumerate(by_head(head_scores(model, ids, "energy"), 0)):
        part = slice(unit * group * 4, (unit + 1) * group * 4)
        assert found == pytest.approx(head_energy(x, query[:, part], key[:, part], scale).item(), rel=1e-9)


def test_loss_is_what_the_model_loses():
    model, ids = decoder(), tokens(5)
    whole = model(ids, labels=ids).loss.item()
    for score in head_scores(model, ids, "loss"):
        smaller, _ = prune_heads(model, {score.layer: score.heads})
        assert score.score == pytest.approx(smaller(ids, labels=ids).loss.item() - whole, abs=1e-12)
    assert head_masks(model) == {}


def test_scores_leave_the_model_as_it_is_and_tell_how_far_they_are():
    model, said = decoder().train(), []
    before = model(tokens()).logits
    for by in SCORES:
        found = head_scores(
            in_shell(model) if by == "output" else model, tokens(9), by, progress=lambda *at: said.append(at)
        )
        assert [s.heads for s in found] == [(0, 1), (2, 3)] * 2 and all(isinstance(s, HeadScore) for s in found)
    assert torch.equal(model(tokens()).logits, before) and (3, 3) in said
    assert not any(m._forward_pre_hooks for m in model.modules())
    model.eval()
    with pytest.raises(UnknownNameError, match="score"):
        head_scores(model, tokens(), "energie")
    with pytest.raises(InputError, match="have no heads to score"):
        head_scores(decoder(layers=("feed_forward",)), tokens())
    encoder = Encoder(EncoderConfig(vocab_size=17, width=16, depth=1, heads=4, classes=2)).double()
    with pytest.raises(InputError, match="needs what an encoder shall answer"):
        head_scores(encoder, tokens(), "loss")
    assert len(head_scores(encoder, tokens(), "energy")) == 4


def test_a_new_head_writes_nothing_and_goes_first():
    model, _ = grow_heads(decoder(), {1: 4})
    scores = head_scores(model, tokens(), "output")
    assert by_head(scores, 1)[2:] == [0.0, 0.0] and lowest(scores, 4) == {1: [4, 5, 6, 7]}


def test_the_lowest_leave_one_of_every_layer():
    scores = [
        HeadScore(0, (0,), 3.0),
        HeadScore(0, (1,), 1.0),
        HeadScore(0, (2,), 2.0),
        HeadScore(1, (0,), 0.1),
        HeadScore(1, (1,), 9.0),
    ]
    assert lowest(scores, 1) == {1: [0]} and lowest(scores, 2) == {0: [1], 1: [0]}
    assert lowest(scores, 3) == {0: [1, 2], 1: [0]}
    pairs = [HeadScore(0, (0, 1), 3.0), HeadScore(0, (2, 3), 1.0)]
    for given, count, words in (
        (scores, 4, "1 to 3 heads can go"),
        (scores, 0, "got 0"),
        (pairs, 1, "a multiple of 2"),
    ):
        with pytest.raises(InputError, match=words):
            lowest(given, count)


def test_a_model_of_transformers_is_pruned(tmp_path):
    made, record = prune(tiny("qwen3"), {0: [1, 0], 2: [2, 3]}, length=LENGTH)
    assert record.heads == {"0": [0, 1], "2": [2, 3]} and record.by is None and record.scores == ()
    assert record.parameters_after < record.parameters_before and record.kl > 0
    assert record.parameters_after == sum(p.numel() for p in made.parameters())
    save_pruned(type("Pruned", (), {"model": made, "record": record}), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.randint(0, 61, (1, 9))
    assert torch.equal(loaded(ids).logits, made(ids).logits) and loaded.config.layer_heads == [2, 4, 2]
    assert json.loads((tmp_path / "out" / "pruning.json").read_text())["heads"] == {"0": [0, 1], "2": [2, 3]}


def test_scores_and_comparison_have_rows_of_their_own():
    model, ids = decoder(), tokens(6)
    made, record = prune(model, by="output", count=2, tokens=ids, dtype="float64")
    assert record.scores == tuple(head_scores(model, ids[:3], "output")) and record.tokens == 3 * ids.shape[1]
    assert record.heads == {str(k): v for k, v in lowest(list(record.scores), 2).items()}
    assert record.loss_before == pytest.approx(model(ids[3:], labels=ids[3:]).loss.item())
    assert record.loss_after == pytest.approx(made(ids[3:], labels=ids[3:]).loss.item())
    assert len(record.lines()) == 4 and record.lines()[0].startswith("2 heads gone, the lowest by output (layer ")


def test_a_model_of_ours_keeps_its_connection():
    model = decoder(connection="mgt")
    scatter(model)
    made, record = prune(Source(model, "mine", "thalweg"), {1: [0, 1]}, tokens=tokens(), dtype="float64")
    assert made.config.connection == "mgt" and record.source == "mine" and model.config.layer_heads == ()


@pytest.mark.parametrize(
    "given, words",
    [
        ({}, "say which heads go"),
        ({"heads": {0: [0, 1]}, "by": "output", "count": 2}, "give one of them"),
        ({"by": "output"}, "say which heads go"),
        ({"by": "output", "count": 2, "tokens": tokens(1)}, "at least 2 rows"),
        ({"heads": {0: [0, 1]}, "tokens": tokens(), "length": 9}, "tokens are the whole sample"),
    ],
)
def test_what_cannot_be_pruned_is_refused(given, words):
    with pytest.raises(InputError, match=words):
        prune(decoder().float(), **given)
