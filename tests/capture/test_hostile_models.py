"""Models made to hang, to fill the memory, or for another machine: one line that says what is wrong; batches that are none."""

import json
import shutil
from copy import deepcopy

import pytest
import tiny_gguf
import torch
from tiny_families import VOCAB, tiny
from transformers import AlbertConfig, AlbertModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from thalweg.capture import locate, prove
from thalweg.capture.opening import open_model
from thalweg.capture.quiet import hushed, readable
from thalweg.capture.values import prove_values
from thalweg.errors import CheckpointError, InputError, ProofError, ThalwegError

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    with hushed(), torch.random.fork_rng():
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder / "llama")
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder / "shards", max_shard_size="2KB")
        Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(folder / "qwen")
        AlbertModel(AlbertConfig(**SIZES | {"num_hidden_layers": 12}, embedding_size=8)).save_pretrained(
            folder / "albert"
        )
    return folder


@pytest.fixture
def copy(folders, tmp_path):
    def made(kind, **changes):
        shutil.copytree(folders / kind, tmp_path / kind, dirs_exist_ok=True)
        path = tmp_path / kind / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return tmp_path / kind

    return made


@pytest.mark.parametrize(
    "kind", ["llama", "shards", "qwen"]
)  # qwen writes a list of its layers while the config is read
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_hidden_layers": 10**9}, "says num_hidden_layers 1,000,000,000, its weights are "),
        ({"text_config": {"num_hidden_layers": 10**5}}, "says num_hidden_layers 100,000"),
        ({"vocab_size": 10**12}, "says vocab_size 1,000,000,000,000, its weights have no side above "),
        ({"hidden_size": 10**7}, "says hidden_size 10,000,000"),
    ],
)
def test_sizes_from_nowhere_are_refused_before_anything_is_built(copy, kind, changes, line, monkeypatch):
    """Without the look at the headers the first of these never ends."""

    def never(*_, **__):
        raise AssertionError("a configuration was made of this")

    folder = copy(kind, **changes)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", never)
    with pytest.raises(CheckpointError, match=line) as caught:
        open_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_hidden_layers": "two"}, "says num_hidden_layers 'two', which must be a whole number of at least 1;"),
        ({"num_hidden_layers": 2.5}, "says num_hidden_layers 2.5, which must be a whole number of at least 1;"),
        ({"num_hidden_layers": -1}, "says num_hidden_layers -1, which must be a whole number of at least 1;"),
        ({"num_hidden_layers": 0}, "says num_hidden_layers 0, which must be"),
        ({"text_config": {"num_hidden_layers": 0}}, "says num_hidden_layers 0, which must be"),
        ({"hidden_size": -32}, "says hidden_size -32, which must be"),
        ({"num_attention_heads": 0}, "says num_attention_heads 0, which must be"),
        ({"intermediate_size": -1}, "says intermediate_size -1, which must be a whole number of at least 0;"),
        ({"num_hidden_layers": [2]}, "'num_hidden_layers' expected int, got list"),
        ({"hidden_size": None}, "'hidden_size' expected int, got NoneType"),
        ({"num_attention_heads": 3}, r"hidden size \(16\) is not a multiple of the number of attention heads \(3\)"),
        ({"hidden_act": "nosuch"}, "says hidden_act 'nosuch', which transformers does not know; it knows .*silu"),
        (
            {"rope_scaling": {"rope_type": "zzz"}},
            "says rope_scaling.rope_type 'zzz', .* it knows default, dynamic, linear",
        ),
    ],
)
def test_a_field_that_no_model_can_have_is_named(copy, changes, line):
    with pytest.raises(CheckpointError, match=line) as caught:
        open_model(copy("llama", **changes))
    assert "\n" not in str(caught.value) and ":;" not in str(caught.value)


def test_layers_that_share_their_tensors_open(folders):
    assert open_model(folders / "albert").model.config.num_hidden_layers == 12


def test_a_shard_that_is_missing_is_what_is_said(copy):
    folder = copy("shards")
    lost = sorted(folder.glob("model-*.safetensors"))
    for file in lost[:-1]:
        file.unlink()
    with pytest.raises(ThalwegError, match="model-0000"):
        open_model(folder)


def test_a_gguf_file_with_layers_from_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr(
        tiny_gguf.GGUFWriter, "add_block_count", lambda self, _: self.add_uint32("llama.block_count", 10**9)
    )
    path = tiny_gguf.write(tmp_path / "hostile.gguf")
    with pytest.raises(CheckpointError, match="says that it has 1,000,000,000 layers and holds 21 tensors"):
        open_model(path)


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("cuda:99", "device_map may name the devices of this machine: cpu"),
        ("nowhere", "device_map may name the devices of this machine: cpu"),
        ("meta", "holds no weights"),
    ],
)
def test_devices_that_are_not_here(folders, where, line):
    with pytest.raises(InputError, match=line) as caught:
        open_model(folders / "llama", device_map=where)
    assert "save_pretrained" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 640 bytes."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_no_memory_is_not_the_fault_of_the_folder(error, tmp_path):
    with (
        pytest.raises(InputError, match=r"there is no memory for it .*take a smaller model or dtype") as caught,
        readable(str(tmp_path)),
    ):
        raise error
    assert "save_pretrained" not in str(caught.value)
    with pytest.raises(CheckpointError, match="give a folder that save_pretrained wrote"), readable(str(tmp_path)):
        raise RuntimeError("something else")


IDS = torch.randint(3, VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("batch", "line"),
    [
        (IDS[None], r"\[b t\] with at least one token, got \[1, 2, 8\]"),
        (IDS[0], r"got \[8\]"),
        (IDS[:0], r"got \[0, 8\]"),
        ({"input_ids": IDS[:, :0]}, r"got \[2, 0\]"),
        ({"inputs_embeds": torch.zeros(2, 8)}, r"\[b t d\] with at least one token, got \[2, 8\]"),
        (IDS.tolist(), "got list"),
        (-IDS, f"are 0 to {VOCAB - 1}, got -"),
        (IDS.double(), "whole numbers, got float64"),
    ],
)
@pytest.mark.parametrize("proof", [prove, prove_values])
def test_a_proof_of_no_batch_is_one_line(batch, line, proof):
    with pytest.raises(InputError, match=line):
        proof(locate(tiny("llama")), batch)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_a_weight_that_is_no_number_is_named_by_the_proof(name):
    model = deepcopy(tiny("llama"))
    with torch.no_grad():
        model.get_parameter(name).view(-1)[:] = torch.nan
    count = model.get_parameter(name).numel()
    with pytest.raises(
        ProofError, match=f"{name} holds {count:,} values that are NaN or infinite, so nothing can be"
    ) as caught:
        prove(locate(model), IDS)
    assert "attention backend" not in str(caught.value)


def test_values_that_are_no_numbers_of_weights_that_are_are_the_model_s_own():
    model = deepcopy(tiny("llama"))
    model.model.layers[1].mlp.register_forward_hook(lambda *call: call[-1] * torch.nan)
    with pytest.raises(ProofError, match=r"itself gives values that are not finite at layers\.1\.feed_forward"):
        prove(locate(model), IDS)
