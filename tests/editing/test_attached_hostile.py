"""What cannot be attached, and folders that are damaged: one clear line, and the model as it was."""

import json
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_attach import ids, llama, logits, no_tap_is_left, refused, stir  # noqa: F401  # a fixture of every test
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, T5Config, T5ForConditionalGeneration, T5Model

from thalweg import editing
from thalweg.errors import CheckpointError, InputError, OfflineError, ThalwegError

NAME = "model.layers.0.thalweg_edit.value_bias.parallel"


def saved(folder, edit, **options):
    model = llama()
    stir(editing.attach(model, edit))
    model.save_pretrained(folder, **options)
    return folder


def rewritten(folder, **changes):
    """The weights of a folder with other tensors at the place of the first scale."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights |= {f"{NAME}.{part}": value for part, value in changes.items()}
    save_file(weights, file, metadata={"format": "pt"})


def unreadable(loaded, said, kind=CheckpointError, **options):
    """Refused in one line, with nothing attached and the entry still there."""
    entry = loaded.config.thalweg_edit
    with pytest.raises(kind, match=said) as caught:
        editing.attach_from(loaded, **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert loaded.config.thalweg_edit == entry and torch.equal(logits(loaded), logits(llama()))
    assert not any("thalweg" in name for name, _ in loaded.named_modules())


VALUE = {"space": "value", "parallel": 0.5}


@pytest.mark.parametrize(
    "entry, said",
    [
        ("value:full:0", "must be a table SITE -> edit, got 'value:full:0'"),
        ([1], r"must be a table SITE -> edit, got \[1\]"),
        (5, "must be a table SITE -> edit, got 5"),
        ("x" * 9000, "must be a table SITE -> edit, got 'xxx"),
        ({"value": 5}, "thalweg_edit.value of the configuration must be a text"),
        ({"value": None}, "thalweg_edit.value of the configuration must be a table, got null"),
        ({"nosuch": VALUE}, "unknown site in thalweg_edit of the configuration: 'nosuch'"),
        ({"value": {**VALUE, "parallel": None}}, "thalweg_edit.value of the configuration: parallel must be"),
        ({"value": {**VALUE, "parallel": float("inf")}}, "a finite number, got inf"),
        ({"value": {**VALUE, "layers": [99]}}, "layers are numbers from 0 to 1"),
        ({"mlp": VALUE}, "site 'mlp' is edited in the space 'residual'"),
        ({"value": VALUE, "mlp": {"space": "residual", "parallel": [0.5]}}, "lists 1 layers, the model has 2"),
    ],
)
def test_an_entry_that_names_no_edit(entry, said):
    model = llama()
    model.config.thalweg_edit = entry
    unreadable(model, said, ThalwegError)


@pytest.mark.parametrize(
    "edit, changes, said",
    [
        ("value:full:learned", {"offset": torch.zeros(7)}, r"has the shape \[7\], the edit .* needs \[1\]"),
        ("value:full:learned,per=head", {"offset": torch.zeros(1)}, r"has the shape \[1\], the edit .* needs \[4\]"),
        ("value:full:learned", {"offset": torch.tensor([float("nan")])}, r"holds \[nan\], which is no retained scale"),
        (
            "value:full:learned",
            {"offset": torch.ones(1, dtype=torch.int64)},
            "is of torch.int64, the edit needs torch.float32",
        ),
        ("value:full:1..0@4", {"updates": torch.full((1,), -3)}, r"holds \[-3\], which is no retained scale or count"),
        ("value:full:1..0@4", {"updates": torch.ones(1)}, "is of torch.float32, the edit needs torch.int64"),
    ],
)
def test_scales_that_do_not_fit(edit, changes, said, tmp_path):
    rewritten(saved(tmp_path, edit), **changes)
    unreadable(LlamaForCausalLM.from_pretrained(tmp_path), said)


def test_weights_that_are_none(tmp_path):
    loaded = LlamaForCausalLM.from_pretrained(saved(tmp_path / "good", "value:full:learned"))
    for junk in (b"junk", b"", b"\xff" * 99):
        (tmp_path / "model.safetensors").write_bytes(junk)
        unreadable(loaded, "model.safetensors cannot be read as safetensors", folder=tmp_path)


@pytest.mark.parametrize("index", [{"weight_map": 5}, {}, {"weight_map": ["a"]}, {"weight_map": {f"{NAME}.offset": 5}}])
def test_an_index_that_is_none(index, tmp_path):
    loaded = LlamaForCausalLM.from_pretrained(saved(tmp_path, "value:full:learned", max_shard_size="5KB"))
    kept = (tmp_path / "model.safetensors.index.json").read_text()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    unreadable(loaded, "its weight_map is no table NAME -> FILE")
    (tmp_path / "model.safetensors.index.json").write_text(kept.replace('": "model-', '": "../model-'))
    unreadable(loaded, "its weight_map is no table NAME -> FILE")
    (tmp_path / "model.safetensors.index.json").write_text("[")
    unreadable(loaded, "is broken")
    (tmp_path / "model.safetensors.index.json").write_text(kept)
    (one,) = editing.attach_from(loaded)
    assert one.retained()["layers.0.attention"]["parallel"] != [1.0]


def test_a_folder_that_is_not_there_is_one_quick_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    loaded = LlamaForCausalLM.from_pretrained(saved(tmp_path, "value:full:learned"))
    started = time.monotonic()
    unreadable(loaded, "nofolder is no folder here, and the hub did not give it", OfflineError, folder="nofolder")
    unreadable(loaded, "is no folder here and cannot be a name on a hub", InputError, folder="no folder")
    unreadable(loaded, "NUL", InputError, folder="a\0b")
    assert time.monotonic() - started < 5


def test_scales_are_found_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--me--edited"
    saved(repository / "snapshots" / commit, "value:full:learned")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for name in ("huggingface_hub.constants.HF_HUB_CACHE", "huggingface_hub.file_download.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(name, str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    loaded = LlamaForCausalLM.from_pretrained("me/edited", local_files_only=True)
    (one,) = editing.attach_from(loaded)
    assert one.retained()["layers.0.attention"]["parallel"] != [1.0]


def test_who_attaches_what_was_saved_is_sent_to_the_line_that_restores(tmp_path):
    loaded = LlamaForCausalLM.from_pretrained(saved(tmp_path, "value:full:0.5"))
    refused(
        loaded,
        "value:full:0.5",
        said=r"names an edit of value that it was saved with; attach that by editing.attach_from\(model\)",
    )
    del loaded.config.thalweg_edit  # as the line says
    editing.attach(loaded, "value:full:0.25")


def test_attention_dropout_is_refused_where_it_is_on():
    model = llama(attention_dropout=0.1).train()
    refused(model, "value:exclude-self:0.5", said="load the model with attention_dropout=0")
    assert not hasattr(model.config, "thalweg_edit") and not any("thalweg" in n for n, _ in model.named_modules())
    editing.attach(model, "value:full:0.5").detach()
    editing.attach(model.eval(), "value:exclude-self:0.5")  # in use there is none
    assert logits(model).isfinite().all()
    with pytest.raises(InputError, match="load the model with attention_dropout=0"):
        model.train()(input_ids=ids())
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=32))
    refused(gpt2, "value:exclude-self:0.5", said="load the model with attn_pdrop=0")
    editing.attach(gpt2.eval(), "value:exclude-self:0.5")
    with pytest.raises(InputError, match="load the model with attn_pdrop=0"):
        gpt2.train()(input_ids=ids())


def test_what_is_no_model_of_one_kind():
    config = T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    for kind in (T5ForConditionalGeneration, T5Model):
        refused(kind(config), "value:full:0", said=f"{kind.__name__} is an encoder with a decoder")
    for model in ("smollm2", None, llama):
        refused(model, "value:full:0", said="edits are attached to a model, a torch module, got")
        with pytest.raises(InputError, match="edits are attached to a model, a torch module, got"):
            editing.attach_from(model)
