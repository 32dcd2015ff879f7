"""Edits as text and as tables, what is refused, what a model, its folder, its size and the command line make of them."""

import dataclasses
import json

import pytest
import torch

from thalweg import config
from thalweg.cli import main
from thalweg.errors import InputError, UnknownNameError
from thalweg.models import Decoder, DecoderConfig, ThalwegConfig, ThalwegForCausalLM, size_of
from thalweg.models.activations import KeptBytes
from thalweg.models.edits import Schedule, UpdateEdit, parse
from thalweg.models.retained import count_updates, edits_of
from thalweg.training.config import from_table
from thalweg.training.optim import make_groups

BASE = {"vocab_size": 19, "width": 16, "depth": 2, "heads": 4, "kv_heads": 2}


def cfg(**changes):
    return DecoderConfig(**BASE | changes)


TEXTS = {
    "value:full:0": UpdateEdit("value", 0.0),
    "value:exclude-self:0.5": UpdateEdit("value", 0.5, exclude_self=True),
    "residual:-1,perpendicular=1.5": UpdateEdit("residual", -1.0, 1.5),
    "residual:learned,layers=0+2": UpdateEdit("residual", "learned", layers="0,2"),
    "value:full:1..0.25@1000,layers=1:": UpdateEdit("value", "1..0.25@1000", layers="1:"),
    "value:full:0+0.5+1": UpdateEdit("value", (0.0, 0.5, 1.0)),
    "value:exclude-self:learned,group=kv:2,per=head": UpdateEdit(
        "value", "learned", exclude_self=True, per="head", group="kv:2"
    ),
    "value:full:0,detach": UpdateEdit("value", 0.0, detach=True),
    "residual:0,control=random_direction,seed=3": UpdateEdit("residual", 0.0, control="random_direction", seed=3),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_mean_what_they_say_and_are_read_back(text):
    found = parse(text)
    assert found == TEXTS[text] and parse(found.describe()) == found and found.describe() == text
    assert config.build(UpdateEdit, json.loads(json.dumps(config.to_plain(found)))) == found


def test_scales_of_layers_and_heads():
    edit = UpdateEdit("value", ((0.0, 1.0), (0.5, 2.0)), "learned")
    assert edit.at(1) == ((0.5, 2.0), "learned") and edit.learns and not edit.is_one
    assert isinstance(edit.plain(), dict) and config.build(UpdateEdit, edit.plain()) == edit  # no text says it
    assert parse("residual:1..0@10").at(7)[0] == Schedule(1.0, 0.0, 10)
    assert parse("value:full:1").is_one and parse("residual:1+1,perpendicular=1").is_one
    assert not parse("residual:learned").is_one and not parse("residual:1,perpendicular=0.9").is_one


WRONG = {
    "values:full:0": "unknown space of an edit 'values'",
    "value:full:1..0@999999999999999999999999": "parallel takes 1 to 1,000,000,000 updates",
    f"value:full:1..0@{'9' * 40}": "parallel takes 1 to 1,000,000,000 updates",
    "value:full:1e999..0@10": "parallel goes between finite numbers",
    f"value:full:0,seed={'1' * 40}": "seed must lie between 0 and",
    "value:full:0,seed=-1": "seed must lie between 0 and",
    f"value:full:0,group=kv:{'1' * 40}": "group must be head, kv, kv:N or all",
    "value:0": "says full or exclude-self first",
    "value:full": "says one scale",
    "value:full:0:1": "says one scale",
    "value:full:much": "parallel must be a number, 'learned', a schedule",
    "value:full:1..0@0": "parallel takes 1 to 1,000,000,000 updates",
    "residual:inf": "a finite number",
    "residual:0,group=kv": "group belongs to edits of values",
    "residual:learned,per=head": "per belongs to edits of values",
    "value:full:0,per=head": "for scales that are learned",
    "value:full:0,group=kv:0": "group must be head, kv, kv:N or all",
    "value:full:0,layers=one": "layers are numbers",
    "value:full:0,strength=2": "unknown option of an edit 'strength'",
    "value:full:0,detach=maybe": "detach needs a value",
    "value:full:0,group": "group needs a value",
    "value:full:0,seed=x": "seed must lie between 0 and",
    "value:full:0,layers=1,layers=2": "says layers twice",
    "value:full:0,control=random-direction,group=all": "leave perpendicular and group out",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_texts_are_one_line(text):
    with pytest.raises((InputError, UnknownNameError), match=WRONG[text].replace("(", r"\(")) as error:
        cfg(attention_edit=text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mlp_edit": "value:full:0"}, "mlp_edit: only attention reads values"),
        ({"attention_edit": "residual:0", "layers": ("parallel",)}, "cannot be edited apart"),
        ({"mlp_edit": "residual:0", "layers": ("attention",)}, "have no feed-forward sublayer"),
        ({"attention_edit": "value:full:0", "layers": ("feed_forward",)}, "have no attention"),
        ({"attention_edit": "value:full:0,layers=5"}, "attention_edit: layers are numbers from 0 to 1"),
        ({"attention_edit": "value:full:0+1+1"}, "lists 3 layers, the model has 2"),
        (
            {"attention_edit": {"space": "value", "parallel": [[0.0], [1.0]]}},
            "lists 1 heads in a layer, the model has 4",
        ),
        ({"attention_edit": {"space": "residual", "parallel": [[0.0], [1.0]]}}, "which has no heads"),
        ({"attention_edit": {"space": "value", "paralel": 0.0}}, "Did you mean 'parallel'"),
        ({"attention_edit": 0.5}, "attention_edit must be"),
    ],
)
def test_what_a_model_cannot_have(changes, said):
    with pytest.raises((InputError, UnknownNameError), match=said):
        cfg(**changes)


def test_parallel_layers_have_edits_of_values():
    assert edits_of(Decoder(cfg(layers=("parallel",), attention_edit="value:full:0"))).keys() == {
        f"blocks.{i}.sublayers.0.attention.edit" for i in (0, 1)
    }


def test_only_what_changes_something_is_built():
    assert not edits_of(Decoder(cfg(attention_edit="value:full:1", mlp_edit="residual:1")))
    assert edits_of(Decoder(cfg(attention_edit="value:full:0+1", mlp_edit="residual:0,layers=last"))).keys() == {
        "blocks.0.sublayers.0.edit",
        "stream.sites.3.update_norm.edit",
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_edit": "value:exclude-self:learned,per=head", "mlp_edit": "residual:1..0@7"},
        {"attention_edit": {"space": "value", "parallel": [[0.0, 1, 1, 1], [1, 0.5, 1, 1]]}},
        {"attention_edit": "residual:0,control=random-direction", "connection": "mhc"},
    ],
)
def test_a_folder_keeps_the_edit_and_what_it_learned(changes, tmp_path):
    model = ThalwegForCausalLM(ThalwegConfig.of(cfg(**changes))).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".edit." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    count_updates(model, 3)
    model.save_pretrained(tmp_path)
    loaded = ThalwegForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.to_decoder() == model.config.to_decoder() and loaded.decoder.config.edits
    x = torch.arange(9)[None]
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert not torch.equal(Decoder(cfg()).eval()(x).logits, model(x).logits)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_edit": "value:full:learned,per=head,perpendicular=learned", "mlp_edit": "residual:learned"},
        {"attention_edit": "residual:0"},
        {"attention_edit": "value:exclude-self:0.5", "connection": "mhc"},
    ],
)
def test_the_size_counts_edits(changes):
    edited = cfg(**changes)
    size, decoder, x = size_of(edited, length=8), Decoder(edited), torch.zeros(1, 8, dtype=torch.long)
    assert size.total_parameters == sum(p.numel() for p in decoder.parameters())
    assert size.parameters["edits"] == sum(p.numel() for e in edits_of(decoder).values() for p in e.parameters())
    assert size.flops["edits"] > 0 and "edits" not in size_of(cfg(), length=8).flops
    with KeptBytes(decoder) as kept:
        decoder(x, labels=x)
    assert size.activation_bytes == kept.bytes


def test_flops_of_an_edit_are_those_of_its_equation():
    """Two products and their sums (|v|^2 once a value head), one multiple of the value added; A_tt: the scores once more."""
    whole = lambda **c: size_of(cfg(**c), length=8).flops["edits"] / 2  # noqa: E731  # of one of two layers
    assert whole(attention_edit="value:full:0") == 2 * 16 + 2 * 8 + 2 * 16
    assert whole(attention_edit="residual:0", mlp_edit="residual:0") == 2 * (2 + 2 + 2) * 16
    assert whole(attention_edit="value:exclude-self:0") - whole(attention_edit="value:full:0") == 2 * 8 * 16


def test_learned_scales_have_a_group_without_decay():
    decoder = Decoder(cfg(attention_edit="value:full:learned,per=head", mlp_edit="residual:learned", connection="mhc"))
    for optimizer in ("adamw", "muon"):
        groups = make_groups(
            decoder.named_parameters(), decoder.stream.group_hints(), optimizer=optimizer, weight_decay=0.1
        )
        (own,) = [group for group in groups if any(".edit." in name for name in group.names)]
        assert (own.optimizer, own.lr_mul, own.weight_decay, len(own.names)) == ("adamw", 1.0, 0.0, 4)
        assert all(".edit." in name for name in own.names)


def test_flags_and_files(capsys):
    asked = [
        "--attention-edit",
        "value:exclude-self:0.5,layers=1:",
        "--mlp-edit",
        "residual:0",
        "--depth",
        "2",
        "--data",
        "copy",
    ]
    assert main(["train", *asked, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert 'attention_edit = "value:exclude-self:0.5,layers=1:"' in printed
    wanted = from_table(
        {"depth": 2, "attention_edit": {"space": "value", "parallel": 0.5, "exclude_self": True, "layers": "1:"}}
    )
    assert wanted.decoder(9).attention_edit == parse(asked[1])
    assert main(["train", *asked, "--dry-run", "--steps", "9", "--batch-size", "2"]) == 0
    said = capsys.readouterr().out
    assert "edits       attention value:exclude-self:0.5,layers=1:; mlp residual:0: 0 parameters" in said
    assert main(["train", *asked, "--dry-run", "--json", "--steps", "9", "--batch-size", "2"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (
        planned["edits"] == {"attention_edit": asked[1], "mlp_edit": asked[3]} and planned["edit_flops_per_token"] > 0
    )
    assert main(["train", "--attention-edit", "value:0", "--dry-run"]) == 2
    assert "attention_edit: an edit of values says full or exclude-self first" in capsys.readouterr().err


def test_an_edit_changes_no_draw():
    """Arms that differ in their edit alone begin with the same weights."""
    plain, edited = (
        Decoder(cfg(**changes), generator=torch.Generator().manual_seed(5))
        for changes in ({}, {"attention_edit": "value:full:learned", "mlp_edit": "residual:0,control=random-direction"})
    )
    other = edited.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in plain.state_dict().items())


def test_every_option_is_explained():
    known = config.meanings(UpdateEdit)
    assert {f.name for f in dataclasses.fields(UpdateEdit)} <= known.keys()
