"""Attached edits when a model is copied, pickled, cast, given another attention or another configuration, or asked twice."""

import copy
import gc
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_attach import ids, llama, logits, no_tap_is_left, refused, stir  # noqa: F401  # a fixture of every test
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments

from thalweg import editing
from thalweg.capture import locate
from thalweg.capture.attention import attention_tap, backend_of
from thalweg.capture.watching import watch
from thalweg.errors import InputError

# None of them does the same when it is done twice as when it is done once.
EDITS = {
    "value, full": {"edit": "value:full:0.5"},
    "value, exclude-self": {"edit": "value:exclude-self:0.5"},
    "attention": {"edit": "residual:learned", "site": "attention"},
    "mlp": {"edit": "residual:0.5", "site": "mlp"},
}
both = pytest.mark.parametrize("edit", EDITS)


@both
def test_the_line_that_restores_can_run_twice(edit, tmp_path):
    model = llama()
    stir(editing.attach(model, **EDITS[edit]))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    (first,) = editing.attach_from(loaded)
    stir(first)  # learned on
    kept, before = first.retained(), logits(loaded)
    (second,) = editing.attach_from(loaded)
    assert second is first and second.retained() == kept and torch.equal(logits(loaded), before)
    second.detach()
    first.detach()
    assert torch.equal(logits(loaded), logits(llama())) and not hasattr(loaded.config, "thalweg_edit")
    refused(loaded, "value:full:0+1+1", said="lists 3 layers")


def test_what_was_saved_joins_what_is_attached(tmp_path):
    model = llama()
    editing.attach(model, "value:full:0.5")
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    mlp = editing.attach(loaded, "residual:learned", site="mlp")
    stir(mlp)
    kept = mlp.retained()
    again = {one.site: one for one in editing.attach_from(loaded)}
    assert again.keys() == {"value", "mlp"} == loaded.config.thalweg_edit.keys()
    assert again["mlp"] is mlp and mlp.retained() == kept


@both
def test_a_copy_is_restored_already_and_has_a_handle_of_its_own(edit):
    model = llama()
    attached = editing.attach(model, **EDITS[edit])
    stir(attached)
    edited, other = logits(model), copy.deepcopy(model)
    (its,) = editing.attach_from(other)
    assert torch.equal(logits(other), edited) and its is not attached and its.retained() == attached.retained()
    assert {id(p) for p in its.parameters()} <= {id(p) for p in other.parameters()}
    its.detach()
    assert torch.equal(logits(other), logits(llama())) and torch.equal(logits(model), edited)
    assert hasattr(model.config, "thalweg_edit") and not hasattr(other.config, "thalweg_edit")
    editing.attach(other, **EDITS[edit])


@both
@pytest.mark.parametrize("end", ["detached", "gone"])
def test_a_copy_outlives_its_original(edit, end):
    model = llama()
    attached = editing.attach(model, **EDITS[edit])
    stir(attached)
    edited, other = logits(model), copy.deepcopy(model)
    if end == "detached":
        attached.detach()
    del model, attached
    gc.collect()
    assert torch.equal(logits(other), edited)
    assert torch.equal(logits(copy.deepcopy(other)), edited) and backend_of(other) == "sdpa"


def test_a_pickle_runs_in_another_process(tmp_path):
    found = []
    for i, edit in enumerate(EDITS):
        model = llama()
        stir(editing.attach(model, **EDITS[edit]))
        torch.save(model, tmp_path / f"{i}.pt")
        found.append(logits(model))
    torch.save((ids(), found), tmp_path / "expected.pt")
    program = """if True:
        import gc, torch
        x, expected = torch.load("expected.pt")
        for i, one in enumerate(expected):
            model = torch.load(f"{i}.pt", weights_only=False)
            with torch.no_grad():
                assert torch.equal(model(input_ids=x).logits, one), i
        from thalweg import editing
        editing.attach_from(model)[0].detach()
        assert not hasattr(model.config, "thalweg_edit")"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_an_edit_goes_along_when_another_attention_is_chosen():
    model = llama()
    attached = editing.attach(model, "value:exclude-self:0.5")
    edited, other = logits(model), copy.deepcopy(model)
    for one in (model, model.model, other):
        one.set_attn_implementation("eager")
    assert backend_of(model) == backend_of(other) == "eager"
    with attention_tap(other, lambda call: None):  # before any other pass
        torch.testing.assert_close(logits(other), edited)
    torch.testing.assert_close(logits(model), edited)
    with pytest.raises(InputError, match=r"needs 'sdpa' or 'eager'; call model.set_attn_implementation"):
        model.set_attn_implementation("flex_attention")
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model), edited)
    attached.detach()
    assert torch.equal(logits(model), logits(llama())) and type(model.config._attn_implementation) is str
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


def test_an_edit_that_was_lost_is_refused():
    model = llama()
    editing.attach(model, "value:exclude-self:0.5")
    model.config._attn_implementation = "eager"
    with pytest.raises(InputError, match=r"layers.0.attention ran without its edit"):
        logits(model)


def test_a_configuration_made_from_that_of_an_edited_model_needs_nothing_of_it():
    model = llama()
    attached = editing.attach(model, "value:exclude-self:0.5")
    other = LlamaForCausalLM(copy.deepcopy(model.config))
    attached.detach()
    assert logits(other).isfinite().all()


@both
def test_models_made_from_one_configuration_are_two(edit, tmp_path):
    model = llama()
    other = LlamaForCausalLM(model.config)
    before, saving = copy.deepcopy(model.config.to_dict()), {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    attached = editing.attach(model, **EDITS[edit])
    assert model.config is model.model.config is model.model.layers[0].self_attn.config is not other.config
    assert other.config.to_dict() == before and other.config._attn_implementation == "sdpa"
    other.save_pretrained(tmp_path / "other")
    model.save_pretrained(tmp_path / "model")
    assert not hasattr(LlamaForCausalLM.from_pretrained(tmp_path / "other").config, "thalweg_edit")
    assert LlamaForCausalLM.from_pretrained(tmp_path / "model").config.thalweg_edit.keys() == {attached.site}
    second = editing.attach(other, **EDITS[edit])
    attached.detach()
    assert model.config.to_dict() == {**before, **saving}
    assert other.config.thalweg_edit.keys() == {second.site}


def test_a_part_or_a_wrapper_is_not_edited_twice(tmp_path):
    model = llama()
    attached = editing.attach(model.model, "value:full:0.5")
    refused(model, "value:full:0.5", said="has an edit of value already")
    assert editing.attach_from(model) == [attached]
    attached.detach()
    wrapper = nn.ModuleDict({"model": model})
    editing.attach(wrapper, "value:full:0.5")
    refused(model, "value:full:0.5", said="has an edit of value already")
    refused(model.model, "value:full:0.5", said="has an edit of value already")
    model.save_pretrained(tmp_path)
    assert LlamaForCausalLM.from_pretrained(tmp_path).config.thalweg_edit.keys() == {"value"}


@pytest.mark.parametrize("edit", EDITS)
def test_nothing_is_attached_inside_of_a_block(edit):
    model = llama()
    with attention_tap(model, lambda call: None):
        refused(model, **EDITS[edit], said="attach edits outside of it")
    editing.attach(model, **EDITS[edit])
    assert not torch.equal(logits(model), logits(llama())) or "learned" in EDITS[edit]["edit"]


def test_scales_stay_wide_when_the_model_is_cast_later():
    model = llama()
    attached = editing.attach(model, "residual:learned", site="mlp")
    stir(attached)
    kept = attached.retained()
    model.bfloat16()
    assert {p.dtype for p in attached.parameters()} == {torch.float32} and attached.retained() == kept
    assert model.lm_head.weight.dtype == torch.bfloat16 == logits(model).dtype
    model.half().double()
    assert {p.dtype for p in attached.parameters()} == {torch.float64}


def test_a_trainer_takes_no_weight_decay_from_learned_scales(tmp_path):
    model = llama()
    for text, site in (("value:full:learned,per=head", "value"), ("residual:learned,perpendicular=learned", "mlp")):
        editing.attach(model, text, site=site)
    arguments = TrainingArguments(output_dir=str(tmp_path), weight_decay=0.1, report_to=[], use_cpu=True)
    decayed = Trainer(model, arguments).get_decay_parameter_names(model)
    assert decayed and not any("thalweg" in name for name in decayed)


def test_scales_saved_under_their_earlier_names_are_found(tmp_path):
    model = llama()
    attached = editing.attach(model, "residual:learned", site="mlp")
    stir(attached)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name.replace("mlp_bias", "mlp"): weight for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    assert any(name.endswith("thalweg_edit.mlp.parallel.offset") for name in weights)
    (again,) = editing.attach_from(LlamaForCausalLM.from_pretrained(tmp_path))
    assert again.retained() == attached.retained()


def test_who_watches_an_attached_model_sees_the_update_after_the_edit():
    """As the documentation says; with our own decoders the branch is seen before it."""
    model = llama()
    editing.attach(model, "residual:0", site="mlp")
    along = []

    def look(event):
        if event.place.kind == "feed_forward":
            along.append((event.branch * event.state).sum(-1).abs().max().item())

    with watch(locate(model), look):
        logits(model)
    assert len(along) == 2 and max(along) < 1e-5
