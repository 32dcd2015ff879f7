"""Edits that stay with a model of transformers: training loops, Trainer, recomputation, folders, copies, and what is refused."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.modeling_utils import AttentionInterface

from thalweg import editing
from thalweg.editing import standing
from thalweg.errors import CheckpointError, InputError, UnknownNameError
from thalweg.models import Decoder, DecoderConfig

VOCAB = 31
EDITS = {
    "value, full": {"edit": "value:full:0"},
    "value, learned": {"edit": "value:exclude-self:learned,per=head"},
    "attention": {"edit": "residual:learned,perpendicular=learned", "site": "attention"},
    "mlp": {"edit": "residual:0.5,layers=1:", "site": "ffn"},
    "scheduled": {"edit": "value:full:1..0@4"},
}


@pytest.fixture(autouse=True)
def no_tap_is_left():
    """Other files look at what is registered; a model with an edit goes when the garbage is collected, and its tap with it."""
    yield
    if standing._standing:
        gc.collect()


def llama(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, **sizes, **changes)).eval()


def ids(rows=2, length=9, seed=0):
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model, x=None):
    with torch.no_grad():
        return model(input_ids=ids() if x is None else x).logits


def stir(attached):
    with torch.no_grad():
        for parameter in attached.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    attached.count_updates(2)


@pytest.mark.parametrize("edit", EDITS)
def test_saved_and_restored_by_one_line(edit, tmp_path):
    model = llama()
    attached = editing.attach(model, **EDITS[edit])
    stir(attached)
    assert not torch.equal(logits(model), logits(llama()))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    (again,) = editing.attach_from(loaded)
    assert torch.equal(logits(loaded), logits(model)) and again.retained() == attached.retained()
    assert (again.site, again.edit, again.places) == (attached.site, attached.edit, attached.places)
    loaded.save_pretrained(tmp_path / "second")
    assert editing.attach_from(AutoModelForCausalLM.from_pretrained(tmp_path / "second"))[0].edit == attached.edit


@pytest.mark.parametrize("edit", EDITS)
def test_generating_with_a_cache_equals_without_and_all_of_it_can_be_taken_away(edit):
    model = llama()
    names = [name for name, _ in model.named_modules()]
    attached = editing.attach(model, **EDITS[edit])
    stir(attached)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids(), **options), model.generate(ids(), use_cache=False, **options))
    attached.detach()
    assert torch.equal(logits(model), logits(llama())) and not hasattr(model.config, "thalweg_edit")
    assert [name for name, _ in model.named_modules()] == names


def test_several_sites_and_the_same_as_the_context():
    model, other = llama(), llama()
    editing.attach(model, site="value", parallel=0.0, exclude_self=True)
    editing.attach(model, site="mlp", parallel=0.5, perpendicular=0.9)
    with (
        editing.edit(other, site="value", parallel=0.0),
        editing.edit(other, site="mlp", parallel=0.5, perpendicular=0.9),
    ):
        torch.testing.assert_close(logits(model), logits(other))
    assert model.config.thalweg_edit.keys() == {"value", "mlp"}


def test_nothing_of_a_pass_is_kept():
    model = llama()
    editing.attach(model, "residual:0", site="mlp")
    model(input_ids=ids(), labels=ids()).loss.backward()
    held = [hook.__self__ for m in model.modules() for hook in m._forward_hooks.values() if hasattr(hook, "__self__")]
    assert len(held) == 2 and all(turning.seen is None for turning in held)


@pytest.mark.parametrize("edit", ["value, learned", "attention", "scheduled"])
def test_a_copy_has_scales_of_its_own(edit):
    """Learned scales start at 1, so that an edit that is not stirred shows nothing."""
    model = llama()
    attached = editing.attach(model, **EDITS[edit])
    other = copy.deepcopy(model)
    stir(attached)
    assert torch.equal(logits(other), logits(llama())) and not torch.equal(logits(model), logits(llama()))
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))


def test_an_edit_stays_when_nobody_holds_what_attach_gave_and_goes_with_its_model():
    gc.collect()
    model, other = llama(), llama()
    editing.attach(model, "value:exclude-self:0")
    attached = editing.attach(other, "value:exclude-self:0")
    gc.collect()
    assert torch.equal(logits(model), logits(other)) and not torch.equal(logits(model), logits(llama()))
    gone, before = weakref.ref(model), len(AttentionInterface._global_mapping)
    del model
    gc.collect()
    assert gone() is None
    assert len(AttentionInterface._global_mapping) == before  # one name serves all models
    attached.detach()
    gc.collect()
    assert len(AttentionInterface._global_mapping) == before - 1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("edit", ["value, full", "value, learned", "attention"])
def test_recomputed_layers_give_the_same_gradients(edit, reentrant):
    found = []
    for recompute in (False, True):
        model = llama().train()
        attached = editing.attach(model, **EDITS[edit])
        stir(attached)
        if recompute:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(input_ids=ids(), labels=ids()).loss.backward()
        found.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        row = (i + torch.arange(7)) % VOCAB
        return {"input_ids": row, "labels": row}


def test_a_trainer_trains_it_saves_it_and_goes_on(tmp_path):
    def trainer(**more):
        model = llama()
        attached = [editing.attach(model, "value:full:1..0@4"), editing.attach(model, "residual:learned", site="mlp")]
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            activation_checkpointing=True,
            activation_checkpointing_kwargs={"use_reentrant": False},
            report_to=[],
            save_steps=2,
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        made = Trainer(model, arguments, train_dataset=Rows(), callbacks=[attached[0].callback()])
        return model, attached, made.train(**more)

    model, attached, result = trainer()
    assert result.training_loss > 0
    assert attached[0].retained()["layers.0.attention"]["parallel"] == [0.0]
    moved = attached[1].retained()["layers.1.feed_forward"]["parallel"][0]
    assert moved != 1.0
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    again = {a.site: a for a in editing.attach_from(loaded)}
    assert torch.equal(logits(loaded), logits(model)) and again["mlp"].retained() == attached[1].retained()
    again["value"].callback().on_step_end(None, None, None)  # a further training goes on counting
    assert {module.parallel.updates.item() for module in again["value"].modules} == {5}
    other, resumed, _ = trainer(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(logits(other), logits(model))
    assert resumed[1].retained()["layers.1.feed_forward"]["parallel"][0] == pytest.approx(moved)


def test_scales_stay_in_float32_in_a_model_of_16_bits():
    model = llama().to(torch.bfloat16)
    attached = editing.attach(model, "residual:learned", site="mlp")
    assert {p.dtype for p in attached.parameters()} == {torch.float32}
    out = model(input_ids=ids(), labels=ids())
    out.loss.backward()
    assert out.logits.dtype == torch.bfloat16 and all(p.grad is not None for p in attached.parameters())


def refused(model, *args, said, kind=InputError, **values):
    with pytest.raises(kind, match=said):
        editing.attach(model, *args, **values)


def test_what_cannot_be_attached():
    model = llama()
    refused(model, "residual:0", said="say site='attention' or site='mlp'")
    refused(model, "value:full:0", site="mlp", said="is edited in the space 'residual'")
    refused(model, "value:full:0", parallel=0.5, said="not both")
    refused(model, site="block", said="attached to value, attention or mlp")
    refused(model, site="values!", said="unknown site", kind=UnknownNameError)
    refused(model, site="value", paralel=0.5, said="Did you mean", kind=UnknownNameError)
    refused(model, "value:full:0,layers=7", said="layers are numbers from 0 to 1")
    refused(model, "value:full:0,group=kv:3", said="that 3 divides")
    refused(llama(attn_implementation="eager").train(), "value:full:0+1+1", said="lists 3 layers")
    ours = Decoder(DecoderConfig(vocab_size=5, width=8, depth=1, heads=2))
    refused(ours, "residual:0", site="mlp", said="make it with mlp_edit='residual:0'")
    assert not hasattr(model.config, "thalweg_edit") and not any("thalweg" in n for n, _ in model.named_modules())
    editing.attach(model, "value:full:0")
    refused(model, "value:full:0.5", said="has an edit of value already")


def test_a_folder_without_the_learned_scales_is_refused(tmp_path):
    model = llama()
    with pytest.raises(InputError, match="has no thalweg_edit"):
        editing.attach_from(model)
    model.config.thalweg_edit = {"mlp": {"space": "residual", "parallel": "learned"}}
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no model.layers.0.thalweg_edit.mlp_bias.parallel.offset"):
        editing.attach_from(loaded)
    assert loaded.config.thalweg_edit and torch.equal(logits(loaded), logits(model))
    with pytest.raises(CheckpointError, match=r"no model.safetensors is there"):
        editing.attach_from(loaded, folder=str(tmp_path / "elsewhere"))
