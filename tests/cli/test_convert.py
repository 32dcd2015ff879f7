"""``thalweg convert`` from the shell: folders, runs, what it prints, what it refuses; and a run that goes on from its result."""

import hashlib
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from thalweg.cli import main
from thalweg.errors import CheckpointError
from thalweg.models import ThalwegForCausalLM
from thalweg.surgery import target
from thalweg.training import load_decoder
from thalweg.training.initial import hashes

SIZES = {
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=40)).save_pretrained(folder)
    return folder


def convert(*more, code=0):
    assert main(["convert", *map(str, more)]) == code


def error_of(capsys):
    found = capsys.readouterr().err.strip().splitlines()
    assert len(found) == 1 or found[-1].startswith("error: "), found
    return found[-1]


def test_a_folder_becomes_a_folder(theirs, tmp_path, capsys):
    out = tmp_path / "out"
    convert(theirs, "--connection", "mhc", "--mixer", "row_stochastic", "--streams", 2, "-o", out)
    printed = capsys.readouterr()
    assert printed.out.startswith("equal: largest difference of a logit") and "mhc: +" in printed.out
    assert "llama" in printed.err
    model = AutoModelForCausalLM.from_pretrained(out)
    assert type(model) is ThalwegForCausalLM
    assert model.config.connection_options == {"streams": 2, "mixer": "row_stochastic"}


def test_json(theirs, tmp_path, capsys):
    convert(
        theirs,
        "--connection",
        "post_norm",
        "-o",
        tmp_path / "out",
        "--json",
        "--dtype",
        "float64",
        "--length",
        12,
        "--quiet",
    )
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (
        found["claim"] == "warm start"
        and found["passed"]
        and found["difference"] > 1e-3
        and found["dtype"] == "float64"
    )
    assert found["tokens"] == 24 and found["new_parameters"] == 4 * 16 and "error" not in printed.err
    assert json.loads((tmp_path / "out" / "proof.json").read_text()).items() <= found.items()


def test_a_failed_proof_writes_nothing_and_says_so(theirs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(target, "divide", lambda *_: None)
    gate = ["--option", "gate_open=false"]
    convert(theirs, "--connection", "mgt", *gate, "-o", tmp_path / "out", code=5)
    assert "the start of 'mgt' is not the function of the model; nothing was written" in error_of(capsys)
    assert not (tmp_path / "out").exists()
    convert(theirs, "--connection", "mgt", *gate, "-o", tmp_path / "out", "--allow-drift")
    assert capsys.readouterr().out.startswith("NOT equal")


def test_a_place_that_takes_no_files_is_refused_before_the_model_is_opened(
    theirs, tmp_path, capsys, monkeypatch, takes_no_files
):
    takes_no_files(tmp_path)
    monkeypatch.setattr("thalweg.surgery.open_source", lambda *_, **__: pytest.fail("the model was opened"))
    convert(theirs, "--connection", "mhc", "-o", tmp_path / "a" / "b", code=2)
    assert error_of(capsys).endswith(f"{tmp_path} takes no file (Read-only file system); choose another place")


@pytest.mark.parametrize("json_wanted", [False, True])
def test_a_full_disk_does_not_lose_the_proof(theirs, tmp_path, capsys, monkeypatch, json_wanted):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ThalwegForCausalLM, "save_pretrained", full)
    convert(theirs, "--connection", "mhc", "-o", tmp_path / "out", *["--json"] * json_wanted, code=2)
    printed = capsys.readouterr()
    assert "No space left on device; nothing is left there" in printed.err.splitlines()[-1]
    if json_wanted:
        found = json.loads(printed.out)
        assert found["passed"] and found["output"] is None
    else:
        assert printed.out.startswith("equal: largest difference of a logit")


@pytest.mark.parametrize("connection", ["mhc", "post_norm"])
def test_a_weight_that_is_no_number_is_named(theirs, tmp_path, capsys, connection):
    model = LlamaForCausalLM.from_pretrained(theirs)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, :2] = math.nan
    model.save_pretrained(tmp_path / "nan")
    convert(tmp_path / "nan", "--connection", connection, "-o", tmp_path / "out", code=2)
    assert "model.layers.1.mlp.up_proj.weight holds 2 values that are NaN or infinite" in error_of(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--connection", "mhcc"], "unknown connection or recipe 'mhcc'. Did you mean 'mhc'?"),
        (["--connection", "mhc", "--option", "streamz=3"], "Did you mean 'mhc.streams'?"),
        (["--connection", "mhc", "--mixer", "sinkhron"], "Did you mean 'sinkhorn'?"),
        (["--connection", "mhc", "--text", "none.txt"], "no such file: none.txt"),
        (["--connection", "mhc", "--length", "400"], "rows must have 4 to 40 tokens"),
        (["--connection", "mhc", "--dtype", "bfloat16"], "unknown value of --dtype 'bfloat16'. Did you mean"),
        ([], "say what shall change: --connection NAME"),
    ],
)
def test_wrong_input(theirs, tmp_path, capsys, arguments, says):
    convert(theirs, *arguments, "-o", tmp_path / "out", code=2)
    assert says in error_of(capsys)
    assert not (tmp_path / "out").exists()


def test_wrong_places(theirs, tmp_path, capsys):
    convert(tmp_path / "none", "--connection", "mhc", "-o", tmp_path / "out", code=2)
    assert "none does not exist; give the folder of a model" in error_of(capsys)
    convert("somebody/something", "--connection", "mhc", "-o", tmp_path / "out", code=2)
    assert "somebody/something is no folder here, and the hub did not give it" in error_of(capsys)
    convert(theirs, "--connection", "mhc", "-o", theirs, code=2)
    assert "is not an empty folder" in error_of(capsys)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "bert", "vocab_size": 3}')
    convert(broken, "--connection", "mhc", "-o", tmp_path / "out", code=2)
    assert "no family of models is called 'bert'" in error_of(capsys)
    (broken / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    convert(broken, "--connection", "mhc", "-o", tmp_path / "out", code=2)
    assert "model.safetensors" in error_of(capsys)


# a run is a source, and a result is where a run may begin

RUN = [
    "--sequence-length",
    "16",
    "--batch-size",
    "4",
    "--eval-batches",
    "1",
    "--threads",
    "1",
    "--quiet",
    "--geometry",
    "false",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(
        "\n".join(f"It is a truth universally acknowledged, that {i} is more than {i - 1}." for i in range(400))
    )
    return file


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    sizes = [
        "--depth",
        "1",
        "--width",
        "16",
        "--heads",
        "2",
        "--model",
        "qk_norm=true",
        "--steps",
        "6",
        "--eval-every",
        "6",
    ]
    data = ["--data", f"text:{text}", "--vocab-size", "300"]
    assert main(["train", *sizes, *data, *RUN, "-o", str(folder)]) == 0
    return folder


def test_a_run_is_converted_and_goes_on(run, text, tmp_path, capsys):
    made = tmp_path / "made"
    convert(run, "--connection", "closed_delta", "-o", made, "--text", text, "--length", 24)
    assert capsys.readouterr().out.startswith("equal")
    assert json.loads((made / "proof.json").read_text())["text"] == "text.txt"
    further = ["--steps", "2", "--eval-every", "1", "--lr", "1e-6"]
    second = tmp_path / "second"
    assert main(["train", "--init-from", str(made), "--data", f"text:{text}", *further, *RUN, "-o", str(second)]) == 0
    stored = json.loads((second / "run.json").read_text())["config"]
    assert stored["connection"] == "mgt" and stored["connection_options"]["form"] == "delta_rank1"
    assert stored["model"] == {"qk_norm": True} and stored["tokenizer"] == str(made / "tokenizer.json")
    assert (stored["depth"], stored["width"], stored["init_from"]) == (1, 16, str(made))
    began = json.loads((second / "run.json").read_text())["provenance"]["init_from"]
    digest = hashlib.sha256((made / "model.safetensors").read_bytes()).hexdigest()
    assert began == {"folder": str(made), "sha256": {"model.safetensors": digest}}
    losses = {}
    for folder in (run, second):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses[folder] = [row["value"] for row in rows if row["name"] == "val/loss"]
    assert losses[second][0] == pytest.approx(losses[run][-1], abs=1e-4)  # it begins where the first run ended
    model = ThalwegForCausalLM.from_pretrained(made)
    model.save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    parts = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(parts) > 1 and hashes(tmp_path / "parts") == {
        part.name: hashlib.sha256(part.read_bytes()).hexdigest() for part in parts
    }
    before = model.decoder
    after, _ = load_decoder(second, "last")
    moved = [name for name, p in after.named_parameters() if not torch.equal(p, before.get_parameter(name))]
    assert "stream.sites.0.alpha.value" in moved and math.isfinite(losses[second][-1])


@pytest.mark.parametrize("files", [5, ["a"], None, {"a": 5}, {"a": "../secret.safetensors"}])
def test_a_start_whose_index_is_broken_is_refused(run, tmp_path, files):
    convert(run, "--connection", "additive", "-o", tmp_path / "made")
    (tmp_path / "secret.safetensors").write_bytes(b"not of this model")
    (tmp_path / "made" / "model.safetensors").unlink()
    (tmp_path / "made" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(CheckpointError, match="its weight_map is no table NAME -> FILE; restore the file"):
        hashes(tmp_path / "made")


def test_a_run_that_does_not_fit_its_start_is_refused(run, text, tmp_path, capsys):
    made = tmp_path / "made"
    convert(run, "--connection", "additive", "-o", made)
    begin = ["train", "--init-from", str(made), "--data", f"text:{text}", *RUN, "-o", str(tmp_path / "second")]
    capsys.readouterr()
    assert main([*begin, "--connection", "mhc"]) == 2
    assert "has connection 'additive', this run asks for 'mhc'; leave it out" in error_of(capsys)
    assert main([*begin, "--tokenizer", "bpe", "--vocab-size", "320"]) == 2
    assert "the data has" in error_of(capsys)
    assert main(["train", "--init-from", str(tmp_path / "none"), "-o", str(tmp_path / "second")]) == 2
    assert "which is no folder" in error_of(capsys)
    (tmp_path / "a llama").mkdir()
    (tmp_path / "a llama" / "config.json").write_text('{"model_type": "llama"}')
    assert main(["train", "--init-from", str(tmp_path / "a llama"), "-o", str(tmp_path / "second")]) == 2
    line = error_of(capsys)
    assert "a model of the type 'llama'" in line
    assert line.endswith(f"thalweg convert '{tmp_path}/a llama' --connection additive -o FOLDER")
    assert not (tmp_path / "second").exists()
