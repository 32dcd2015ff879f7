"""Anybody's model is opened, and everything that goes wrong is one line; transformers says nothing on the terminal."""

import json
import shutil
import sys

import pytest
import tiny_gguf
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from thalweg.capture import hub
from thalweg.capture.opening import Opened, open_model
from thalweg.capture.quiet import hushed
from thalweg.errors import CheckpointError, InputError, MissingExtraError, OfflineError, ThalwegError, UnknownNameError
from thalweg.models import DecoderConfig, ThalwegConfig, ThalwegForCausalLM

LLAMA = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
BERT = {**LLAMA, "type_vocab_size": 2}
IDS = torch.tensor([[3, 1, 4, 1, 5]])


def tokenizer():
    core = Tokenizer(WordLevel({"[UNK]": 0, "stream": 1, "bed": 2}, unk_token="[UNK]"))
    core.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")


def made(folder, cls, config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(config).eval()
    save(model, folder)
    return model


def save(model, folder, **options):
    with hushed():  # saving draws a bar
        model.save_pretrained(folder, **options)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    model = made(folder, LlamaForCausalLM, LlamaConfig(**LLAMA))
    tokenizer().save_pretrained(folder)
    return folder, model


@pytest.fixture
def copy(llama, tmp_path):
    """A copy of the folder to spoil."""
    return shutil.copytree(llama[0], tmp_path / "copy")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(autouse=True)
def silent(capfd):
    """Nothing is printed, by nobody."""
    yield
    seen = capfd.readouterr()
    assert (seen.out, seen.err) == ("", "")


def config_of(folder, **changes):
    path = folder / "config.json"
    table = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))
    return folder


def refused(where, error=ThalwegError, **options):
    with pytest.raises(error) as caught:
        open_model(where, **options)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 500, line
    return line


# what opens


def test_a_decoder_with_its_tokenizer(llama):
    folder, model = llama
    opened = open_model(folder)
    assert isinstance(opened, Opened) and (opened.kind, opened.name) == ("decoder", str(folder))
    assert torch.equal(opened.model(IDS).logits, model(IDS).logits) and not opened.model.training
    assert opened.require_tokenizer()("bed stream")["input_ids"] == [2, 1]
    count = sum(p.numel() for p in model.parameters())
    assert opened.notes == (f"{count:,} parameters, float32, sdpa attention, on cpu",)


def test_dtype_and_backend(llama):
    folder, _ = llama
    opened = open_model(str(folder), dtype=torch.bfloat16, backend="eager")
    assert opened.model.dtype == torch.bfloat16 and "bfloat16, eager attention" in opened.notes[0]
    wide = open_model(folder, dtype="float64")
    assert wide.model.dtype == torch.float64 and "norms and rotary angles in float32" in wide.notes[1]
    assert open_model(folder, dtype="auto").model.dtype == torch.float32
    assert "on cpu" in open_model(folder, device_map="cpu").notes[0]


@pytest.mark.parametrize(("cls", "kind"), [(BertModel, "encoder"), (BertForMaskedLM, "masked-lm")])
def test_encoders(tmp_path, cls, kind):
    model = made(tmp_path / "bert", cls, BertConfig(**BERT))
    opened = open_model(tmp_path / "bert")
    assert opened.kind == kind and type(opened.model) is cls and opened.tokenizer is None
    assert torch.equal(opened.model(IDS)[0], model(IDS)[0])
    assert opened.notes[1:] == ("no tokenizer beside the model",)
    with pytest.raises(InputError, match="has no tokenizer beside it"):
        opened.require_tokenizer()


def test_pooling_may_be_missing_and_a_head_left_over(tmp_path):
    made(tmp_path / "bert", BertModel, BertConfig(**BERT))
    file = tmp_path / "bert" / "model.safetensors"
    weights = {name: w for name, w in load_file(file).items() if not name.startswith("pooler")}
    save_file(weights | {"classifier.weight": torch.ones(2, 16)}, file, {"format": "pt"})
    opened = open_model(tmp_path / "bert")
    assert "pooling are not in the file" in opened.notes[2]
    assert opened.notes[3] == "1 weights of the file have no place in the model (classifier.weight)"


def test_a_classifier_on_tied_embeddings_is_a_decoder(tmp_path):
    made(tmp_path / "tied", LlamaForSequenceClassification, LlamaConfig(**LLAMA, tie_word_embeddings=True))
    opened = open_model(tmp_path / "tied")
    assert opened.kind == "decoder" and "(score.weight)" in opened.notes[-1]
    made(tmp_path / "untied", LlamaForSequenceClassification, LlamaConfig(**LLAMA, tie_word_embeddings=False))
    assert "1 missing keys (lm_head.weight)" in refused(tmp_path / "untied", CheckpointError)


def test_our_own_model(tmp_path):
    config = DecoderConfig(vocab_size=13, width=8, depth=2, heads=1, connection="mhc")
    model = made(tmp_path / "ours", ThalwegForCausalLM, ThalwegConfig.of(config))
    opened = open_model(tmp_path / "ours")
    assert opened.kind == "decoder" and torch.equal(opened.model(IDS).logits, model(IDS).logits)
    assert "attn_implementation must be 'sdpa'" in refused(tmp_path / "ours", InputError, backend="eager")


def test_a_gguf_file(gguf_file):
    opened = open_model(gguf_file)
    assert opened.kind == "decoder" and opened.notes[1] == "unpacked from GGUF (mostly Q8_0)"
    assert opened.tokenizer("he")["input_ids"] == [256]
    from gguf import GGUFReader
    from gguf.quants import dequantize

    read = {tensor.name: tensor for tensor in GGUFReader(gguf_file).tensors}
    for theirs, ours in (
        ("blk.1.ffn_down", "model.layers.1.mlp.down_proj"),
        ("blk.0.attn_v", "model.layers.0.self_attn.v_proj"),
    ):
        tensor = read[f"{theirs}.weight"]
        unpacked = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(opened.model.get_parameter(f"{ours}.weight"), unpacked)
    save(opened.model, gguf_file.parent / "saved")  # a plain model: nothing of it is quantised
    again = open_model(gguf_file.parent / "saved")
    assert torch.equal(again.model(IDS).logits, opened.model(IDS).logits)


def test_a_tokenizer_from_elsewhere(llama, tmp_path):
    made(tmp_path / "bare", LlamaForCausalLM, LlamaConfig(**LLAMA))
    assert open_model(tmp_path / "bare", tokenizer=llama[0]).tokenizer("bed")["input_ids"] == [2]
    own = tokenizer()
    assert open_model(tmp_path / "bare", tokenizer=own).tokenizer is own
    assert "no tokenizer in" in refused(tmp_path / "bare", InputError, tokenizer=tmp_path / "bare")


def test_a_broken_tokenizer_is_a_note(copy):
    (copy / "tokenizer.json").write_text("{")
    opened = open_model(copy)
    assert opened.tokenizer is None and opened.notes[1].startswith("the tokenizer cannot be read (")


def test_the_configuration_can_be_checked_before_any_weight_is_read(copy):
    (copy / "model.safetensors").unlink()

    def check(config):
        raise InputError(f"no {config.model_type}")

    assert refused(copy, InputError, check=check) == "no llama"


# what does not


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float31"}, "unknown dtype 'float31'. Did you mean 'float32'?"),
        ({"dtype": torch.int8}, "unknown dtype 'int8'"),
        ({"backend": "flash"}, "unknown attention backend 'flash'. Known: eager, sdpa."),
    ],
)
def test_unknown_options(llama, options, says):
    assert says in refused(llama[0], UnknownNameError, **options)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (
            "",
            "the model needs a name, got an empty one; give the folder of a model (config.json and safetensors), a GGUF",
        ),
        ("  ", "got an empty one"),
        ("/no/such/place", "/no/such/place does not exist; give the folder of a model"),
        ("a\0b", "a path cannot hold a NUL byte"),
        ("two words", "'two words' is no folder here and cannot be a name on a hub"),
    ],
)
def test_places_that_are_none(where, says):
    assert says in refused(where, InputError)


def test_the_nearest_model_at_hand_is_named():
    with pytest.raises(ThalwegError, match=r"smolm2 is no folder here.*did you mean 'smollm2'\?"):
        open_model("smolm2")
    with pytest.raises(ThalwegError) as caught:
        open_model("somebody/something")
    assert "did you mean" not in str(caught.value)


def test_offline():
    line = refused("somebody/something", OfflineError)
    assert line.startswith("somebody/something is no folder here, and the hub did not give it (HF_HUB_OFFLINE is set")
    assert "smollm2, minilm" in line


def test_on_the_hub_the_commit_is_noted(monkeypatch):
    found = type("Info", (), {"sha": "abc123"})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda self, name, timeout: found)
    place = hub.look_up("some/thing", "give a folder")
    assert place.options == {"revision": "abc123"} and place.note == "at hub commit abc123"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "here")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.look_up("some/thing", "").options == {"local_files_only": True}


def test_files_that_are_no_gguf(tmp_path, gguf_file, llama):
    (tmp_path / "text.gguf").write_text("It is a truth")
    assert "is a file, and not GGUF (it does not begin with GGUF)" in refused(tmp_path / "text.gguf", InputError)
    assert "give the folder that holds it" in refused(llama[0] / "model.safetensors", InputError)
    whole = gguf_file.read_bytes()
    for size in (4, 60, 5000, len(whole) // 2):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        assert "cut short or of a kind that transformers does not load" in refused(
            tmp_path / "cut.gguf", CheckpointError
        )
    shutil.copy(gguf_file, tmp_path / "tiny.gguf")
    assert f"give the GGUF file itself: {tmp_path / 'cut.gguf'}" in refused(tmp_path, CheckpointError)


def test_without_the_extra(gguf_file, monkeypatch, llama):
    from thalweg.capture import gguf, opening

    for name, module in (("gguf", gguf), ("accelerate", opening)):
        if module is gguf:
            monkeypatch.setattr("importlib.util.find_spec", lambda wanted, name=name: None if wanted == name else True)
            line = refused(gguf_file, MissingExtraError)
            monkeypatch.undo()
        else:
            monkeypatch.setattr(opening, "find_spec", lambda _: None)
            line = refused(llama[0], MissingExtraError, device_map="auto")
        assert name in line and line.endswith("run: pip install 'thalweg[gguf]'")


def test_folders_without_a_model(tmp_path):
    assert "has no config.json; give a folder that save_pretrained wrote" in refused(tmp_path, CheckpointError)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "it is an adapter: merge it" in refused(tmp_path, CheckpointError)
    (tmp_path / "run.json").write_text("{}")
    assert "is the folder of a run" in refused(tmp_path, InputError)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "config.json cannot be read (Expecting property name"),
        ("", "config.json cannot be read"),
        ("[1]", "config.json holds no table"),
        ("{}", "config.json names no model_type"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
    ],
)
def test_broken_configurations(copy, text, says):
    (copy / "config.json").write_text(text)
    assert says in refused(copy, CheckpointError)


def test_models_of_another_kind(copy, tmp_path):
    assert "transformers does not know model_type 'lama'" in refused(config_of(copy, model_type="lama"), InputError)
    config_of(copy, model_type="lama", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (copy / "evil.py").write_text("raise SystemExit('this code ran')")
    assert "needs code that comes with it, which is not run" in refused(copy, InputError)
    config_of(copy, model_type="vit", auto_map=None, architectures=["ViTModel"])
    assert "is no decoder and no encoder of text (ViTModel)" in refused(copy, InputError)
    made(
        tmp_path / "t5",
        T5ForConditionalGeneration,
        T5Config(vocab_size=13, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2),
    )
    assert "is an encoder-decoder (T5ForConditionalGeneration)" in refused(tmp_path / "t5", InputError)


def test_code_beside_a_known_model_does_not_run(copy):
    config_of(copy, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (copy / "evil.py").write_text("raise SystemExit('this code ran')")
    assert type(open_model(copy).model) is LlamaForCausalLM and "evil" not in sys.modules


def test_trusted_code_runs(copy):
    config_of(
        copy,
        model_type="sand",
        auto_map={"AutoConfig": "sand.Sand", "AutoModelForCausalLM": "sand.SandModel"},
        architectures=["SandModelForCausalLM"],
    )
    (copy / "sand.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Sand(LlamaConfig):\n    model_type = 'sand'\n"
        "class SandModel(LlamaForCausalLM):\n    config_class = Sand\n"
    )
    assert type(open_model(copy, trust_remote_code=True).model).__name__ == "SandModel"


@pytest.mark.parametrize(
    ("quantised", "method"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"load_in_4bit": True}, "method not stated"),
    ],
)
def test_quantised_weights(copy, quantised, method):
    line = refused(config_of(copy, quantization_config=quantised), InputError)
    assert f"the weights are quantised ({method})" in line and "GGUF" in line


def test_weights_that_are_not_there(copy):
    file = copy / "model.safetensors"
    weights = load_file(file)
    file.unlink()
    assert "has no weights (model.safetensors)" in refused(copy, CheckpointError)
    torch.save(weights, copy / "pytorch_model.bin")
    assert "as pickles only, which can run code when they are read" in refused(copy, InputError)


def test_weights_that_do_not_fit(copy):
    file = copy / "model.safetensors"
    whole, weights = file.read_bytes(), load_file(file)
    for size in (0, 5, 2000, len(whole) - 100):
        file.write_bytes(whole[:size])
        assert "the weights cannot be read (" in refused(copy, CheckpointError)
    save_file({k: v for k, v in weights.items() if "layers.1.mlp" not in k}, file, {"format": "pt"})
    assert "3 missing keys (model.layers.1.mlp.down_proj.weight" in refused(copy, CheckpointError)
    save_file(weights | {"model.norm.weight": torch.ones(3)}, file, {"format": "pt"})
    assert "1 mismatched keys (model.norm.weight [3] for [16])" in refused(copy, CheckpointError)


def test_a_shard_that_is_not_there(llama, tmp_path):
    _, model = llama
    save(model, tmp_path / "shards", max_shard_size="2KB")
    shards = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    assert len(shards) > 2 and open_model(tmp_path / "shards").kind == "decoder"
    shards[1].unlink()
    assert shards[1].name in refused(tmp_path / "shards", CheckpointError)
