"""Layers that are taken out: the model is then the one that passes them by, in memory and from its folder."""

import pytest
import torch
from small_models import SAMPLES, fresh, logits, ours

from thalweg import compression
from thalweg.capture import open_model
from thalweg.errors import InputError

IDS = [list(row) for row in SAMPLES]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_a_model_without_a_layer(kind, tmp_path):
    model, whole = fresh(kind), fresh(kind)
    blocks = whole.transformer.h if kind == "gpt2" else whole.model.layers
    blocks[1].register_forward_hook(lambda m, args, output: args[0])
    made = compression.compress(model, "layer_drop", drop=(1,))
    assert made.record.kept_blocks == (0, 2)
    assert made.record.bytes < made.record.bytes_dense
    expected = logits(whole, [IDS[0]])
    torch.testing.assert_close(logits(model, [IDS[0]]), expected, rtol=1e-5, atol=1e-5)
    opened = open_model(made.save(tmp_path / "dropped"), backend="eager" if kind in ("gemma2", "gpt_oss") else None)
    torch.testing.assert_close(logits(opened.model, [IDS[0]]), expected, rtol=1e-5, atol=1e-5)
    assert compression.read_record(tmp_path / "dropped").kept_blocks == (0, 2)


def test_with_a_cache_the_layers_count_anew():
    model = fresh()
    compression.compress(model, "layer_drop", drop="0")
    whole = logits(model, [IDS[0]])
    with torch.no_grad():
        first = model(torch.tensor([IDS[0][:6]]), use_cache=True)
        rest = model(torch.tensor([IDS[0][6:]]), cache=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("connection", ["additive", "mhc", "highway"])
def test_a_decoder_of_ours_without_a_layer(connection, tmp_path):
    model, whole = ours(connection), ours(connection)
    sites = list(whole.stream.sites)
    made = compression.compress(model, "layer_drop", drop="1")

    def skip(block, args, output):
        (state, *_), _, following, tokens = args[:4]
        return (state, *following.read(state, tokens))

    whole.blocks[1].register_forward_hook(skip)
    assert len(model.stream.sites) == len(sites) - 2
    torch.testing.assert_close(logits(model, [IDS[0]]), logits(whole, [IDS[0]]))
    opened = open_model(made.save(tmp_path / "dropped"))
    torch.testing.assert_close(logits(opened.model, [IDS[0]]), logits(whole, [IDS[0]]))


@pytest.mark.parametrize("connection", ["denseformer", "ln_scaling"])
def test_layers_that_depend_on_their_number_stay(connection):
    model = ours(connection)
    before = logits(model, [IDS[0]])
    with pytest.raises(InputError, match="depend on the"):
        compression.compress(model, "layer_drop", drop="1")
    assert torch.equal(logits(model, [IDS[0]]), before)


def test_a_configuration_that_cannot_say_it_is_refused_and_nothing_changes():
    model = fresh()
    model.model.layers[2].self_attn.scaling = 0.9  # of the last layer alone, which no configuration says
    before = logits(model, [IDS[0]])
    with pytest.raises(InputError, match="its layers differ by their number"):
        compression.compress(model, "layer_drop", drop="0")
    assert torch.equal(logits(model, [IDS[0]]), before)
    assert model.config.num_hidden_layers == len(model.model.layers) == 3


def test_the_layers_that_turn_the_stream_least_go():
    model = fresh()
    with torch.no_grad():  # the middle layer writes next to nothing
        for name, p in model.model.layers[1].named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.mul_(1e-3)
    made = compression.compress(model, "layer_drop", count=1, calibration=IDS)
    assert made.record.kept_blocks == (0, 2)
    assert "1 (1.0000)" in made.record.notes[0]
    assert made.record.calibration["tokens"] == sum(map(len, IDS))
