"""Weights that compressed-tensors packed four bits to a number: opened, and diagnosed as their unpacked twin is."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from small_models import VOCAB

from thalweg.capture.opening import open_model
from thalweg.compression import diagnose
from thalweg.errors import CheckpointError, InputError

GROUP, BITS = 32, 4
OF_WEIGHTS = ("error.weights", "protect")  # packed ones are not compared, and their bytes are known
TEXTS = [torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(3)]
SCHEME = {
    "num_bits": BITS,
    "type": "int",
    "symmetric": True,
    "group_size": GROUP,
    "strategy": "group",
    "dynamic": False,
}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": SCHEME}},
}


def pack(numbers):
    """Whole numbers of [-8, 7] as the format lays them down: eight to an int32, the first in the lowest bits, each with 8 added."""
    shifted = (numbers.long() + 8).view(len(numbers), -1, 8)
    whole = sum(shifted[..., i] << (BITS * i) for i in range(8))
    return torch.where(whole >= 2**31, whole - 2**32, whole).to(torch.int32)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """``base``, ``packed`` (rounded to 4 bits in groups of 32 and packed) and ``twin``, the same rounded weights as they are."""
    home = tmp_path_factory.mktemp("packed")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(home / "base")
    for name in ("packed", "twin"):
        shutil.copytree(home / "base", home / name)
    packed, twin = {}, {}
    for name, weight in load_file(home / "base" / "model.safetensors").items():
        twin[name] = packed[name] = weight
        if name.endswith("_proj.weight"):
            groups = weight.view(len(weight), -1, GROUP)
            scale = groups.abs().amax(-1) / 7
            numbers = (groups / scale[..., None]).round()
            twin[name] = (numbers * scale[..., None]).view_as(weight)
            stem = packed.pop(name) is not None and name.removesuffix("weight")
            packed[f"{stem}weight_packed"] = pack(numbers.view_as(weight))
            packed[f"{stem}weight_scale"], packed[f"{stem}weight_shape"] = scale, torch.tensor(weight.shape)
    save_file(packed, home / "packed" / "model.safetensors", metadata={"format": "pt"})
    save_file(twin, home / "twin" / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((home / "base" / "config.json").read_text())
    (home / "packed" / "config.json").write_text(json.dumps({**written, "quantization_config": PACKED}))
    return home


def test_packed_weights_give_the_logits_of_their_twin(places):
    packed, twin = open_model(str(places / "packed"), quantised=True).model, open_model(str(places / "twin")).model
    ids = torch.tensor([TEXTS[0]])
    with torch.no_grad():
        assert torch.equal(packed(ids).logits, twin(ids).logits)
        assert not torch.equal(twin(ids).logits, open_model(str(places / "base")).model(ids).logits)


def test_packed_weights_are_diagnosed_as_their_twin_is(places):
    packed, twin = (diagnose(places / "base", places / name, TEXTS) for name in ("packed", "twin"))
    assert any("packed" in note for note in packed.notes) and not any("packed" in note for note in twin.notes)
    numbers = [
        {
            (row.measure, row.layer, row.branch): row.value
            for row in found.rows
            if not row.measure.startswith(OF_WEIGHTS)
        }
        for found in (packed, twin)
    ]
    assert numbers[0] == numbers[1] and len(numbers[0]) > 50
    assert numbers[0]["error.total.local", None, "attention"] > 0.05


def test_where_only_dense_weights_will_do_packed_ones_are_refused(places):
    with pytest.raises(InputError, match=r"the weights are quantised \(compressed-tensors\)"):
        open_model(str(places / "packed"))


def test_a_packed_weight_that_is_missing_is_one_line(places, tmp_path):
    shutil.copytree(places / "packed", tmp_path / "broken")
    file = tmp_path / "broken" / "model.safetensors"
    weights = load_file(file)
    weights.pop(next(name for name in weights if name.endswith("weight_packed")))
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError):
        open_model(str(tmp_path / "broken"), quantised=True)
