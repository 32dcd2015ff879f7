"""The Hugging Face shell: saving and loading, tied weights, strictness."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from thalweg.errors import CheckpointError, InputError, UnknownNameError
from thalweg.models import Decoder, DecoderConfig, ThalwegConfig, ThalwegForCausalLM
from thalweg.models.sharing import shared_parameters


def config(**changes):
    values = {
        "vocab_size": 40,
        "width": 16,
        "depth": 2,
        "heads": 4,
        "kv_heads": 2,
        "connection": "mgt",
        "norm": "layernorm",
        "norm_eps": 1e-4,
        "layers": ("attention", "feed_forward", "parallel"),
        "logit_softcap": 20.0,
    }
    return DecoderConfig(**{**values, **changes})


def model(seed=0, **changes):
    torch.manual_seed(seed)
    made = ThalwegForCausalLM(ThalwegConfig.of(config(**changes)))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def same(a, b):
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_loading_is_bitwise(tmp_path, tied, dtype):
    saved = model(tie_embeddings=tied).to(dtype)
    saved.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    assert type(loaded) is ThalwegForCausalLM and not info["missing_keys"]
    assert loaded.config.to_decoder() == saved.config.to_decoder() == config(tie_embeddings=tied)
    assert same(saved, loaded)
    assert (loaded.decoder.head.weight is loaded.decoder.embedding.weight) is tied
    assert loaded.num_parameters() == saved.num_parameters()
    x = torch.arange(12).view(2, 6)
    assert torch.equal(saved(x).logits, loaded(x).logits)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert ("decoder.head.weight" in names) is not tied


def test_what_a_connection_shares_stays_shared(tmp_path, monkeypatch):
    build = Decoder.__init__

    def sharing(self, *args, **kwargs):
        build(self, *args, **kwargs)
        first = self.stream.sites[0].input_norm
        self.stream.sites[2].input_norm.weight = first.weight

    monkeypatch.setattr(Decoder, "__init__", sharing)
    saved = model(connection="additive", tie_embeddings=False)
    shared = {"decoder.stream.sites.2.input_norm.weight": "decoder.stream.sites.0.input_norm.weight"}
    assert shared_parameters(saved) == shared
    saved.save_pretrained(tmp_path)
    assert shared.keys().isdisjoint(load_file(tmp_path / "model.safetensors"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert shared_parameters(loaded) == shared and same(saved, loaded)


def test_the_shell_is_the_decoder():
    torch.manual_seed(0)
    shell = ThalwegForCausalLM(ThalwegConfig.of(config()))
    torch.manual_seed(0)
    assert same(shell.decoder, Decoder(config()))  # the shell initialises nothing anew
    x = torch.arange(12).view(2, 6)
    ours, theirs = shell(x, labels=x), shell.decoder(x, labels=x)
    assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.loss, theirs.loss)
    loss, logits = shell(x, labels=x, return_dict=False)
    assert torch.equal(logits, theirs.logits) and torch.equal(loss, theirs.loss)


def test_the_configuration_has_both_names():
    hf = ThalwegConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=99
    )
    assert (hf.width, hf.depth, hf.heads, hf.max_position_embeddings) == (16, 3, 2, 99)
    assert hf.to_decoder() == DecoderConfig(vocab_size=40, width=16, depth=3, heads=2, max_length=99)
    assert ThalwegConfig.of(config(max_length=77)).max_position_embeddings == 77
    hf.vocab_size = 41
    assert hf.to_decoder().vocab_size == 41


def test_the_configuration_is_as_strict_as_ours():
    with pytest.raises(InputError, match="width must be a multiple of heads"):
        ThalwegConfig(vocab_size=40, width=15, depth=1, heads=2)
    with pytest.raises(UnknownNameError, match="Did you mean 'connection'"):
        ThalwegConfig(vocab_size=40, width=16, depth=1, heads=2, conection="mgt")
    with pytest.raises(InputError, match="lacks the required keys depth, heads"):
        ThalwegConfig(vocab_size=40, width=16)
    kept = ThalwegConfig.of(config(), pad_token_id=3, custom_note="kept, as Hugging Face does")
    assert kept.pad_token_id == 3 and kept.custom_note.startswith("kept")


def test_loading_is_strict(tmp_path):
    model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "decoder.blocks.0.sublayers.0.query.weight"

    def store(tensors):
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    store({key: value for key, value in weights.items() if key != name})
    with pytest.raises(CheckpointError, match=r"1 missing keys \(decoder.blocks.0.sublayers.0.query.weight\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    store({**weights, "decoder.extra": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"1 unexpected keys \(decoder.extra\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    store({**weights, name: torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=r"1 mismatched keys .*query\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="the file is broken"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_another_attention_is_refused(tmp_path):
    model().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="attn_implementation must be 'sdpa'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")


def test_the_vocabulary_can_grow():
    grown = model()
    before = grown.decoder.embedding.weight.detach().clone()
    grown.resize_token_embeddings(44, mean_resizing=False)
    assert grown.config.vocab_size == 44
    assert torch.equal(grown.decoder.embedding.weight[:40], before)
    assert grown(torch.tensor([[43, 1]])).logits.shape == (1, 2, 44)


def test_gradient_checkpointing_by_the_name_of_hugging_face():
    shell = model().train()
    x = torch.arange(12).view(2, 6)
    shell(x, labels=x).loss.backward()
    plain = [p.grad.clone() for p in shell.parameters()]
    shell.zero_grad()
    shell.activation_checkpointing_enable()
    assert shell.decoder.gradient_checkpointing
    shell(x, labels=x).loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, shell.parameters(), strict=True))


def test_config_json_is_plain(tmp_path):
    model().save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "thalweg" and stored["connection"] == "mgt" and stored["norm_eps"] == 1e-4
    assert AutoConfig.from_pretrained(tmp_path).to_decoder() == config()
