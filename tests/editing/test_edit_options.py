"""What no edit can be, and what an edit says of itself."""

import math

import pytest
import torch
from edit_subjects import logits, tiny, words

from thalweg.capture.layers import chosen_layers
from thalweg.cli.edit_flags import sites_of
from thalweg.cli.edit_spec import edit_of
from thalweg.editing import EditOptions, edit, grid, matched_noop
from thalweg.errors import InputError, UnknownNameError


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, (0, 1, 2, 3)),
        ("all", (0, 1, 2, 3)),
        ("last", (3,)),
        ("first", (0,)),
        ("1:", (1, 2, 3)),
        (":-1", (0, 1, 2)),
        ("::2", (0, 2)),
        ("0,3", (0, 3)),
        ("1-2", (1, 2)),
        ("0,2-3", (0, 2, 3)),
        ("1-1", (1,)),
        ("-1", (3,)),
        ([-1, 0], (0, 3)),
        (2, (2,)),
    ],
)
def test_layers_are_written_in_many_ways(given, wanted):
    assert chosen_layers(given, 4) == wanted


# Refusals.


@pytest.mark.parametrize(
    ("values", "error", "line"),
    [
        ({"site": "valu"}, UnknownNameError, "unknown site to edit 'valu'. Did you mean 'value'"),
        ({"parallel": math.nan}, InputError, "parallel is a retained scale .* finite number, got nan"),
        ({"parallel": "0.5"}, InputError, "finite number, got '0.5'"),
        ({"parallel": True}, InputError, "finite number, got True"),
        ({"perpendicular": math.inf, "site": "mlp"}, InputError, "perpendicular is a retained scale"),
        ({"group": "heads", "parallel": 0.0}, InputError, "group must be head, kv, kv:N or all, got 'heads'"),
        ({"group": "kv:3", "parallel": 0.0}, InputError, "3 divides, the model has 2"),
        ({"layers": [7]}, InputError, r"numbers from 0 to 2 .*got 7"),
        ({"layers": "x"}, InputError, "layers are numbers 0,3, a slice 1:"),
        ({"layers": "2-1"}, InputError, r"5:11 \(= 5-10, layers 5 to 10\), first, last or all, got '2-1'"),
        ({"layers": "::0"}, InputError, "layers are numbers"),
        ({"layers": "1-7"}, InputError, r"numbers from 0 to 2 .*got 3"),
        ({"layers": "1:1"}, InputError, "no layer is left"),
        ({"skip_first": 3}, InputError, "no layer is left"),
        ({"heads": [4], "parallel": 0.0}, InputError, "heads are numbers from 0 to 3"),
        ({"heads": [-1], "parallel": 0.0}, InputError, "heads are whole numbers from 0, got -1"),
        ({"site": "mlp", "heads": [1]}, InputError, "heads belongs to edits of values"),
        ({"site": "mlp", "exclude_self": False}, InputError, "exclude_self belongs to edits of values"),
        ({"site": "value", "reference": "block_input"}, InputError, "own value"),
        ({"phase": "training"}, UnknownNameError, "unknown phase"),
        ({"control": "diagonal", "parallel": 0.0}, InputError, "takes the place of the scales"),
        ({"control": "diagonal", "site": "mlp"}, InputError, "a matter of values"),
        ({"route": "hooks", "parallel": 0.0}, InputError, "hooks on the projections do not know"),
        ({"coefficient": "layer_mean"}, InputError, "measured on text first; give calibration"),
        ({"seed": -1}, InputError, "seed must be"),
        ({"paralel": 0.0}, UnknownNameError, "unknown option of an edit 'paralel'. Did you mean 'parallel'"),
        ({"parallel": {9: 0.0}}, InputError, "numbers from 0 to 2"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(values, error, line):
    with pytest.raises(error, match=line), edit(tiny("llama"), **values):
        pass


@pytest.mark.parametrize(
    ("alias", "site"),
    [
        ("attn", "attention"),
        ("ffn", "mlp"),
        ("feed_forward", "mlp"),
        ("feed-forward", "mlp"),
        ("values", "value"),
        ("v", "value"),
    ],
)
def test_a_site_has_aliases_everywhere(alias, site):
    assert EditOptions(site=alias) == EditOptions(site=site)
    assert {point.options.site for point in grid([alias, site], {"parallel": (0.0,)})} == {site}
    assert len(grid([alias, site], {"parallel": (0.0,)})) == 1
    assert edit_of(f"{alias}:parallel=0").site == site and sites_of(f"{alias}, {site}") == [site, site]
    with edit(tiny("llama"), site=alias, parallel=0.0) as facts:
        assert facts.options.site == site


def test_a_range_of_layers_names_the_layers_of_a_slice():
    assert chosen_layers("5-10", 12) == chosen_layers("5:11", 12) == (5, 6, 7, 8, 9, 10)


def test_an_encoder_has_no_phases_but_is_edited():
    model = tiny("bert")
    with (
        pytest.raises(InputError, match="an encoder neither prefills nor decodes"),
        edit(model, parallel=0.0, phase="prefill"),
    ):
        pass
    plain = logits(model, words())
    for site in ("value", "attention", "mlp", "block"):
        with edit(model, site=site, parallel=0.0):
            assert (logits(model, words()) - plain).abs().max() > 1e-2


def test_layers_that_run_without_their_model_are_refused():
    model = tiny("llama")
    layer = model.model.layers[0]
    hidden = torch.zeros(1, 2, 24)
    rotary = model.model.rotary_emb(hidden, torch.arange(2)[None])
    with (
        edit(model, site="mlp", parallel=0.0),
        pytest.raises(InputError, match="call the model that was given to edit"),
    ):
        layer(hidden, position_embeddings=rotary)


def test_a_drifting_no_op_is_refused(monkeypatch):
    from thalweg.editing import arithmetic

    monkeypatch.setattr(arithmetic.Change, "residual", lambda self, reference, update, now: 1.1 * update)
    with pytest.raises(InputError, match=r"scales 1 moves the output by .* \(allowed 1e-03\)"):
        matched_noop(tiny("llama"), {"input_ids": words()}, site="mlp")


def test_options_say_what_they_are():
    options = EditOptions(site="value", parallel=0.5, layers="1:")
    assert options.describe() == "value, parallel 0.5, perpendicular 1, layers 1:, exclude-self"
    assert options.plain() == {
        "site": "value",
        "parallel": 0.5,
        "perpendicular": 1.0,
        "layers": "1:",
        "exclude_self": True,
    }
    with edit(tiny("llama"), options) as facts:
        assert facts.lines()[0] == "edit: value, parallel 0.5, perpendicular 1, layers 1:, exclude-self"
        assert facts.lines()[1] == "layers: 1, 2 of 3"
        assert facts.plain()["sites"] == ["layers.1.attention", "layers.2.attention"]
    with pytest.raises(InputError, match="not both"), edit(tiny("llama"), options, parallel=0.2):
        pass


def test_an_empty_list_of_heads_is_refused():
    with pytest.raises(InputError, match="no head is left to edit"):
        EditOptions(site="value", heads=())
