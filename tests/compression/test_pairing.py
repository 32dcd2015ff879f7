"""What is no pair is refused in one line, what is told is told; the command and its page."""

import copy
import json
import re

import pytest
import tiny_gguf
import torch
from small_models import VOCAB
from tiny_families import FAMILIES, GROUPED, tiny

from thalweg.capture import locate, open_model
from thalweg.cli import main
from thalweg.compression import compare, compress, diagnose
from thalweg.compression.dense_store import store
from thalweg.compression.likeness import block_cosines, sketch
from thalweg.compression.pairing import Read, Side
from thalweg.compression.shape import check_shared, norm_of, shared
from thalweg.errors import InputError, UnknownNameError
from thalweg.models import Decoder, DecoderConfig
from thalweg.records import Measurements

ONE = [torch.randint(3, VOCAB, (12,), generator=torch.Generator().manual_seed(2)).tolist()]


def fresh(kind="llama", dtype=torch.float32):
    return copy.deepcopy(tiny(kind, dtype))


def llama(seed=0, **values):
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**GROUPED, **values})).eval()


class Words:
    """The least that a tokenizer has."""

    def __init__(self, shift=0):
        self.shift = shift

    def get_vocab(self):
        return {f"w{i}": (i + self.shift) % VOCAB for i in range(VOCAB)}

    def encode(self, text):
        return [3 + ord(letter) % 50 for letter in text]


def side(name, model, tokenizer=None):
    return Side(name, lambda: Read(model, tokenizer))


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"vocab_size": VOCAB + 3}, "they differ in vocabulary"),
        ({"hidden_size": 16, "head_dim": 8}, "they differ in width"),
        ({"num_attention_heads": 2, "head_dim": 8}, "they differ in heads"),
        ({"num_key_value_heads": 4}, "they differ in key-value heads"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "they differ in rotary settings"),
        (
            {"num_hidden_layers": 3},
            r"has 2 blocks, .* 3; give models with the same blocks, or list those that were kept",
        ),
    ],
)
def test_models_of_another_shape_are_refused(values, line):
    with pytest.raises(InputError, match=line) as error:
        compare(llama(), llama(**values), ONE, names=("base", "other"))
    assert "\n" not in str(error.value)


def of_positions(kind, **values):
    """A small decoder of transformers: positions that are learned (gpt2), turned (llama) or told by the distance (bloom)."""
    import transformers

    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **values}
    config, model = {
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "bloom": (transformers.BloomConfig, transformers.BloomForCausalLM),
    }[kind]
    if kind == "gpt2":
        sizes["n_positions"] = sizes.pop("max_position_embeddings", 48)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model(config(**sizes, bos_token_id=1, eos_token_id=2)).eval()


LEARNED, ROTARY, NEITHER = "learned", "rotary", "neither rotary nor learned"


@pytest.mark.parametrize(
    ("one", "two", "kinds"),
    [
        ("gpt2", "llama", (LEARNED, ROTARY)),
        ("llama", "gpt2", (ROTARY, LEARNED)),
        ("llama", "bloom", (ROTARY, NEITHER)),
        ("bloom", "gpt2", (NEITHER, LEARNED)),
    ],
)
def test_positions_of_another_kind_are_refused(one, two, kinds):
    with pytest.raises(InputError, match=rf"they differ in positions \({kinds[0]} and {kinds[1]}\)") as error:
        compare(of_positions(one), of_positions(two), ONE, names=("base", "other"))
    assert "\n" not in str(error.value)


def test_positions_of_ours_are_told_apart_and_are_those_of_transformers():
    make = lambda kind: Decoder(DecoderConfig(vocab_size=VOCAB, width=16, depth=2, heads=2, positions=kind))  # noqa: E731
    with pytest.raises(InputError, match=r"they differ in positions \(rotary and learned\)"):
        compare(make("rotary"), make("learned"), ONE)
    assert shared(make("learned"))["positions"] == LEARNED and shared(make("rotary"))["positions"] == ROTARY


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_positions_of_every_family_are_known(kind):
    """A copy of a model always has those of the model: they are read from its configuration and modules."""
    found = shared(fresh(kind))["positions"]
    learned = ("gpt2", "bert", "roberta", "xlm-roberta", "electra", "distilbert")
    assert found == (LEARNED if kind in learned else ROTARY)


def test_a_model_that_does_not_say_where_tokens_stand_is_not_refused():
    """Somebody else's class, without a trace of rotary positions in its configuration and buffers."""
    twin = llama()
    one = shared(twin)
    with torch.no_grad():
        del twin.config.rope_parameters
        twin.model.rotary_emb = torch.nn.Identity()
    twin.__class__ = type("Theirs", (type(twin),), {"__module__": "theirs"})
    two = shared(twin)
    assert two["positions"] is None and two["rotary settings"] is None
    check_shared("one and two", one, two)
    check_shared("two and one", two, one)


def test_a_gguf_file_and_the_folder_that_it_was_made_of_are_a_pair(tmp_path):
    packed = tiny_gguf.write(tmp_path / "tiny.gguf")
    opened = open_model(packed)
    opened.model.save_pretrained(tmp_path / "folder")
    opened.tokenizer.save_pretrained(tmp_path / "folder")
    for pair in ((packed, tmp_path / "folder"), (tmp_path / "folder", packed)):
        found = diagnose(*pair, ["he hears her here"], mode="global")
        assert found.base.shared["positions"] == found.compressed.shared["positions"] == ROTARY
        assert found.plan.length == 32 and not any("norm" in note for note in found.notes)


def test_another_kind_of_norm_is_told_and_not_refused():
    """A compressor may fold LayerNorm into RMSNorm."""

    def folded(model):
        model.transformer.ln_f = torch.nn.RMSNorm(32, 1e-5)

    found = diagnose(of_positions("gpt2"), folded, ONE, names=("one", "two"), mode="global")
    assert any("one has LayerNorm, two RMSNorm" in note for note in found.notes)
    assert norm_of(locate(fresh("llama"))) == "RMSNorm"


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("shorter", ["base", "other"])
def test_a_window_is_no_longer_than_either_model_takes(shorter, low):
    """Learned positions have no more vectors than that: a longer window would leave the table."""
    takes = {name: 9 if name == shorter else 40 for name in ("base", "other")}
    pair = [of_positions("gpt2", max_position_embeddings=n) for n in takes.values()]
    more = {"names": tuple(takes), "mode": "global", "low_memory": low}
    assert diagnose(*pair, [ONE[0] * 3], **more).plan.length == 9
    assert diagnose(*pair, [ONE[0] * 3], length=5, **more).plan.length == 5
    with pytest.raises(InputError, match=f"^{shorter} takes 9 tokens at most, got a length of 10") as error:
        compare(*pair, [ONE[0] * 3], length=10, **more)
    assert "\n" not in str(error.value)


def test_a_decoder_and_an_encoder_are_no_pair():
    with pytest.raises(InputError, match="no pair: a decoder and an encoder"):
        compare(llama(), fresh("bert"), ONE)


def test_other_tokenizers_are_refused_and_a_missing_one_is_told():
    base = fresh()
    with pytest.raises(InputError, match=r"their tokenizers differ in 61 of 61 tokens"):
        compare(side("a", base, Words()), side("b", fresh(), Words(1)), ["some words here"])
    rows = diagnose(side("a", base, None), side("b", fresh(), Words()), ["some words here"], mode="global")
    assert any("a has no tokenizer beside it; that of the other one is used" in note for note in rows.notes)
    with pytest.raises(InputError, match="text needs a tokenizer"):
        compare(base, fresh(), ["some words here"])


def test_blocks_in_another_order_are_refused():
    """A swapped pair of blocks; unrelated weights are told and not taken for another order."""
    base = llama(num_hidden_layers=4)
    twin = copy.deepcopy(base)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(0.002 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    compare(base, twin, ONE, mode="global")
    layers = list(twin.model.layers)
    twin.model.layers = torch.nn.ModuleList([layers[i] for i in (0, 2, 1, 3)])
    with pytest.raises(InputError, match=r"block 1 of two is block 2 of one by its weights .* in another order"):
        compare(base, twin, ONE, names=("one", "two"), mode="global")
    found = diagnose(base, llama(seed=1, num_hidden_layers=4), ONE, mode="global")
    assert any("4 of 4 blocks are not alike" in note for note in found.notes)


def test_the_likeness_of_blocks_is_that_of_their_weights():
    base = llama(num_hidden_layers=3)
    found = block_cosines(sketch(locate(base)), sketch(locate(base)))
    assert found.diagonal().tolist() == pytest.approx([1.0] * 3) and float(found[0, 1].abs()) < 0.2


def test_weights_that_are_not_finite_are_named():
    twin = fresh()
    with torch.no_grad():
        twin.model.layers[1].mlp.up_proj.weight[0, :2] = float("nan")
    with pytest.raises(
        InputError, match=r"two: model\.layers\.1\.mlp\.up_proj\.weight holds 2 values that are NaN or infinite"
    ):
        compare(fresh(), twin, ONE, names=("one", "two"))


def test_another_dtype_is_told_and_not_refused():
    found = diagnose(fresh(), fresh().to(torch.bfloat16), ONE, names=("one", "two"))
    assert any("one has weights in float32, two in bfloat16" in note for note in found.notes)
    row = next(iter(found.rows.where(measure="error.total.local", layer=0, branch="attention")))
    assert 0 < row.value < 0.1


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"mode": "locall"}, "unknown mode of a comparison 'locall'. Did you mean 'local'"),
        ({"preset": "papers"}, "Did you mean 'paper'"),
        ({"layer_kl": True, "low_memory": True}, "needs both models at once"),
        ({"layer_kl": True, "mode": "global"}, "add local to the modes"),
        ({"length": 1000}, "takes 48 tokens at most"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
    ],
)
def test_wrong_options_are_told(options, line):
    with pytest.raises((InputError, UnknownNameError), match=line):
        compare(fresh(), fresh(), ONE, **options)


def test_texts_that_are_none():
    with pytest.raises(InputError, match="none has 2 tokens"):
        compare(fresh(), fresh(), [[4]])
    with pytest.raises(InputError, match="texts are a list of documents"):
        compare(fresh(), fresh(), "one text", tokenizer=Words())
    with pytest.raises(InputError, match="a transform stands in the second place"):
        compare(3, fresh(), ONE)
    with pytest.raises(InputError, match="got int"):
        compare(fresh(), 3, ONE)
    with pytest.raises(InputError, match="a transform gives a model"):
        compare(fresh(), lambda model: 3, ONE)


def test_a_full_disk_is_told_before_anything_is_written():
    with (
        pytest.raises(InputError, match=r"the dense inputs take .* MiB are free; make room, read fewer tokens"),
        store(2**60),
    ):
        raise AssertionError("entered")


def test_our_decoders_of_another_connection_are_no_pair():
    make = lambda name: Decoder(DecoderConfig(vocab_size=VOCAB, width=16, depth=2, heads=2, connection=name))  # noqa: E731
    with pytest.raises(InputError, match=r"they differ in connection \(additive and rezero\)"):
        compare(make("additive"), make("rezero"), ONE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models on the disk with a tokenizer, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("pair")
    words = {
        "[UNK]": 0,
        **{w: i for i, w in enumerate(["the", "river", "runs", "deep", "and", "slow", "to", "sea"], 1)},
    }
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    base = llama(num_hidden_layers=5)
    twin = copy.deepcopy(base)
    with torch.no_grad():
        for layer in twin.model.layers:
            layer.mlp.down_proj.weight.mul_(0.9)
    for name, model in (("base", base), ("twin", twin)):
        model.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    lines = [{"text": f"the river runs deep and slow to the sea {'and the river ' * i}"} for i in range(9)]
    (place / "book.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return place


def test_the_command_writes_rows_and_a_page(folders, capsys, monkeypatch):
    monkeypatch.chdir(folders)
    argv = [
        "compare",
        "base",
        "twin",
        "--text",
        "book.jsonl",
        "--layer-kl",
        "--rows",
        "rows.jsonl",
        "-o",
        "page.html",
        "--json",
    ]
    assert main(argv) == 0
    out, said = capsys.readouterr()
    found = json.loads(out)
    assert "MiB of weights at once" in said and "layer-wise KL: 5 more passes" in said
    rows = Measurements.load("rows.jsonl")
    signed = [r.value for r in rows.where(measure="error.signed.local", branch="feed_forward") if r.layer is not None]
    assert signed == pytest.approx([-0.1] * 5, abs=1e-5)
    assert found["modes"] == ["local", "global"] and found["protect"][0]["costs"] == "unknown"
    assert any("an error in a random direction" in line for line in found["verdict"])
    page = (folders / "page.html").read_text()
    for words in (
        "Protect these layers",
        "Does a cheaper number say the same?",
        "SHA-256",
        "KL of one layer alone",
        "isotropic",
        "none stated",
    ):
        assert words in page, words
    assert not re.search(r"https?://(?!www\.w3\.org)", page.partition("<pre>")[0])


def test_the_command_compresses_on_the_fly_and_in_low_memory(folders, capsys, monkeypatch):
    monkeypatch.chdir(folders)
    argv = [
        "compare",
        "base",
        "--method",
        "wanda",
        "--sparsity",
        "2:4",
        "--calibration",
        "book.jsonl",
        "--text",
        "book.jsonl",
    ]
    monkeypatch.setattr("thalweg.cli.compare_command.SAMPLES", 4)
    monkeypatch.setattr("thalweg.cli.calibrating.LENGTH", 9)
    assert main([*argv, "--low-memory", "--mode", "local", "-o", "w.html", "--quiet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["compressed"] == "base, wanda sparsity 2:4"
        and "kB" in found["protect"][0]["costs"]
        and "16 bits" in found["bytes_rule"]
    )


def test_the_command_calibrates_on_no_more_than_the_model_takes(folders, capsys, monkeypatch):
    """The base takes 48 tokens: neither samples of the calibration nor windows are longer."""
    monkeypatch.chdir(folders)
    (folders / "long.txt").write_text("the river runs deep " * 40)
    seen = []

    def spied(model, method, *, calibration, **more):
        seen.append(calibration)
        return compress(model, method, calibration=calibration, **more)

    monkeypatch.setattr("thalweg.compression.compress", spied)
    argv = [
        "compare",
        "base",
        "--method",
        "wanda",
        "--mode",
        "local",
        "--text",
        "book.jsonl",
        "-o",
        "s.html",
        "--quiet",
    ]
    assert main([*argv, "--calibration", "long.txt"]) == 0
    assert [len(row) for row in seen[0].samples] == [48] * 3
    assert main([*argv, "--calibration", "long.txt", "--length", "49", "--overwrite"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.startswith("error: base takes 48 tokens at most, got a length of 49")


def test_the_command_compares_with_a_compressed_cache(folders, capsys, monkeypatch):
    """Attention alone errs, in value space too, and a window that holds every token is no compression."""
    monkeypatch.chdir(folders)
    argv = [
        "compare",
        "base",
        "--method",
        "cache",
        "--text",
        "book.jsonl",
        "--mode",
        "isolated",
        "--quiet",
        "--json",
        "--overwrite",
    ]
    assert main([*argv, "--bits", "2", "--group", "2", "--rows", "cache.jsonl", "-o", "c.html"]) == 0
    assert json.loads(capsys.readouterr().out)["compressed"] == "base, cache bits 2 group 2"
    rows = Measurements.load("cache.jsonl")

    def errors(measure, branch):
        return [r.value for r in rows.where(measure=measure, branch=branch) if r.layer is not None]

    assert min(errors("error.total.isolated", "attention")) > 1e-3
    assert max(errors("error.total.isolated", "feed_forward")) == 0
    assert [r for r in rows if r.measure.startswith("error.value") or r.head is not None]
    assert main([*argv, "--option", "window=500", "--rows", "all.jsonl", "-o", "w.html"]) == 0
    kept = Measurements.load("all.jsonl")
    assert max(r.value for r in kept.where(measure="error.total.isolated", branch="attention")) < 1e-6


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["base"], "give the compressed model, or --method"),
        (["base", "--method", "cache"], "nothing says what becomes of the cache"),
        (["base", "--method", "cache", "--sparsity", "0.5"], "sparsity"),
        (["base", "--method", "cache", "--bits", "4", "--calibration", "book.jsonl"], "leave --calibration out"),
        (["base", "twin", "--method", "wanda"], "and not both"),
        (["base", "twin", "--bits", "4"], "belong to --method"),
        (["base", "--method", "wandas"], "Did you mean 'wanda'"),
        (["base", "twin", "--tokens", "0"], "--tokens must be at least 1"),
        (["base", "nowhere/at-all"], "nowhere/at-all"),
        (["base", "twin", "--text", "missing.txt"], "missing.txt"),
    ],
)
def test_the_command_refuses_in_one_line(argv, line, folders, capsys, monkeypatch):
    monkeypatch.chdir(folders)
    text = [] if "--text" in argv else ["--text", "book.jsonl"]
    assert main(["compare", *argv, *text, "-o", "no.html", "--overwrite"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and line in last


@pytest.mark.parametrize(
    ("method", "package"),
    [("compressed-tensors", "compressed-tensors"), ("torchao", "torchao"), ("awq", "gptqmodel"), ("gptq", "gptqmodel")],
)
def test_packed_weights_name_the_package_that_reads_them(folders, tmp_path, monkeypatch, method, package):
    monkeypatch.setattr("thalweg.capture.opening.find_spec", lambda name: None)
    for file in (folders / "base").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    with pytest.raises(
        InputError, match=rf"reads by {package}, and {package} is not installed; run: pip install {package}"
    ):
        compare(folders / "base", tmp_path, ["the river runs"])
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(InputError, match="quantised by hqq; those of compressed-tensors, torchao"):
        compare(folders / "base", tmp_path, ["the river runs"])
