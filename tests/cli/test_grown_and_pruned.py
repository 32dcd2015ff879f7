"""``thalweg convert --grow-...`` and ``thalweg prune`` from the shell: folders and runs, what they print, what they refuse."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from thalweg import data, surgery
from thalweg.cli import main
from thalweg.cli.prune_command import parse_heads
from thalweg.errors import InputError
from thalweg.models import Encoder, EncoderConfig
from thalweg.models.hf import in_shell
from thalweg.training import load_decoder

SIZES = {
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
RUN = ["--data", "copy:vocab=8,half=4", "--sequence-length", "9", "--steps", "3", "--eval-every", "3"]
RUN += ["--eval-batches", "1", "--batch-size", "8", "--threads", "1"]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    sizes = ["--depth", "2", "--width", "16", "--heads", "2", "--connection", "mgt", "--model", "max_length=32"]
    assert main(["train", *sizes, *RUN, "-o", str(folder)]) == 0
    return folder


def call(command, *more, code=0):
    assert main([command, *map(str, more)]) == code


def error_of(capsys):
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_everything_grows_and_nothing_changes(theirs, tmp_path, capsys):
    out = tmp_path / "out"
    growth = ["--grow-heads", 2, "--grow-width", 64, "--grow-ffn", 40, "--grow-depth", 1]
    call("convert", theirs, *growth, "-o", out, "--length", 24)
    printed = capsys.readouterr().out
    assert printed.startswith("equal: largest difference of a logit") and "note: grew 2 heads in every layer" in printed
    assert "note: grew width 16 to 64, feed-forward 24 to 40" in printed and "note: grew 1 layer at 2" in printed
    grown, before = AutoModelForCausalLM.from_pretrained(out), AutoModelForCausalLM.from_pretrained(theirs)
    assert (
        grown.config.layer_heads == [6, 6, 6] and grown.config.hidden_size == 64 and grown.config.num_hidden_layers == 3
    )
    ids = torch.arange(20)[None]
    assert (grown(ids).logits - before(ids).logits).abs().max() <= 1e-6
    assert json.loads((out / "proof.json").read_text())["claim"] == "equal"


def test_growth_with_another_connection_and_in_json(theirs, tmp_path, capsys):
    call(
        "convert",
        theirs,
        "--connection",
        "mgt",
        "--grow-depth",
        2,
        "-o",
        tmp_path / "out",
        "--length",
        24,
        "--json",
        "--dtype",
        "float64",
    )
    found = json.loads(capsys.readouterr().out)
    assert found["connection"] == "mgt" and found["claim"] == "equal" and found["difference"] < 1e-12
    assert found["new_parameters"] > 0 and found["notes"][0] == "grew 2 layers at 2, 3"
    assert len(found["notes"]) == 2 and found["notes"][1].startswith("no tokenizer was there")


def test_a_run_of_another_connection_grows_as_it_is_and_trains_on(run, tmp_path, capsys):
    out = tmp_path / "out"
    call("convert", run, "--grow-heads", 1, "--grow-width", 24, "-o", out, "--length", 9)
    assert capsys.readouterr().out.startswith("equal")
    call("train", "--init-from", out, *RUN, "--lr", "1e-4", "-o", tmp_path / "second")
    stored = json.loads((tmp_path / "second" / "run.json").read_text())["config"]
    assert stored["connection"] == "mgt" and stored["width"] == 24 and stored["model"]["head_size"] == 8
    call("prune", out, "--heads", "0:2;1:0,1", "-o", tmp_path / "third", "--length", 9)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "third").config.layer_heads == [2, 1]


@pytest.mark.parametrize("asked", [["--heads", "0:1"], ["--by", "loss", "--count", 1]])
def test_a_run_on_a_synthetic_task_is_pruned_by_its_answers(run, tmp_path, capsys, asked):
    call("prune", run, *asked, "--which", "last", "-o", tmp_path / "out", "--json", "--quiet")
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == "copy:vocab=8,half=4 (validation)" and found["notes"] == ["the loss is that of the answers"]
    model, _ = load_decoder(run, "last")
    task, count = data.load("copy:vocab=8,half=4"), 256 * (1 + (asked[0] == "--by"))
    batch = task.eval_batches("valid", None, count, 1)[0]
    ids = batch["input_ids"][-256:]  # those before them chose the head
    with torch.no_grad():
        said = model(ids).logits.log_softmax(-1)
    total = sum(-said[row, place - 1, ids[row, place]].item() for row in range(256) for place in range(5, 9))
    assert found["loss_before"] == pytest.approx(total / (256 * 4), abs=1e-5)
    assert found["tokens"] == 256 * 9
    if asked[0] == "--by":
        first, losses = found["scores"][0], []
        for factor in (1.0, 0.0):
            surgery.mask_heads(model, {first["layer"]: {first["heads"][0]: factor}})
            with torch.no_grad():
                losses.append(model(batch["input_ids"][:256], labels=batch["labels"][:256]).loss.item())
        assert first["score"] == pytest.approx(losses[1] - losses[0], abs=1e-5)


@pytest.mark.parametrize("asked", [["--heads", "0:1"], ["--by", "loss", "--count", 1]])
def test_sequences_of_several_lengths_are_scored_whole(tmp_path, capsys, asked):
    name = "copy:vocab=8,half=6,min_half=2"
    shape = ["--depth", 2, "--width", 16, "--heads", 2, "--sequence-length", 13, "--batch-size", 2, "--threads", 1]
    call("train", "--data", name, "--steps", 2, *shape, "-o", tmp_path / "run", "--quiet")
    capsys.readouterr()
    call("prune", tmp_path / "run", *asked, "--which", "last", "-o", tmp_path / "out", "--json", "--quiet")
    found = json.loads(capsys.readouterr().out)
    before, _ = load_decoder(tmp_path / "run", "last")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    scored = 256 * (asked[0] == "--by")
    batch = data.load(name).eval_batches("valid", None, scored + 256, 1)[0]
    losses, changed, largest, tokens = torch.zeros(2), 0.0, 0.0, 0
    for row in batch["input_ids"][scored:]:
        half = int((row != 0).sum()) // 2
        ids = row[None, : 2 * half + 1]
        tokens += ids.numel()
        with torch.no_grad():
            said = [model(ids).logits[0].double() for model in (before, after)]
        one, two = (logits.log_softmax(-1) for logits in said)
        places = torch.arange(half + 1, 2 * half + 1)
        losses += torch.tensor([-at[places - 1, row[places]].mean() for at in (one, two)])
        changed += float((one.exp() * (one - two)).sum(-1).mean())
        largest = max(largest, float((said[0] - said[1]).abs().max()))
    assert len({int((row != 0).sum()) for row in batch["input_ids"]}) == 5
    assert [found["loss_before"], found["loss_after"]] == pytest.approx((losses / 256).tolist(), abs=1e-5)
    assert found["kl"] == pytest.approx(changed / 256, rel=1e-3, abs=1e-9)
    assert found["difference"] == pytest.approx(largest, rel=1e-3)
    assert found["tokens"] == tokens
    if asked[0] == "--by":
        first, losses = found["scores"][0], []
        for factor in (1.0, 0.0):
            surgery.mask_heads(before, {first["layer"]: {first["heads"][0]: factor}})
            with torch.no_grad():
                losses.append(before(batch["input_ids"][:256], labels=batch["labels"][:256]).loss.item())
        assert first["score"] == pytest.approx(losses[1] - losses[0], abs=1e-5)


def test_the_sequences_of_a_task_have_their_own_length(run, tmp_path, capsys):
    call("prune", run, "--heads", "0:1", "--length", 9, "-o", tmp_path / "out", code=2)
    assert "whose sequences have their own length; leave --length out" in error_of(capsys)


@pytest.mark.parametrize(
    "more, words",
    [
        ([], "say what shall change: --connection NAME, or one of --grow-heads"),
        (["--grow-heads", "-1"], "heads cannot be negative"),
        (["--grow-heads", "3"], "a whole number of heads of 2, the queries that share keys and values"),
        (["--grow-width", "8"], "width grows from 16, got 8"),
        (["--streams", "2", "--grow-depth", "1"], "streams"),
        (["--option", "form=rank1", "--grow-depth", "1"], "are options of a connection, and none is named"),
        (["--connection", "keel", "--grow-depth", "1"], "is another function with a layer more"),
    ],
)
def test_growth_that_cannot_be(theirs, tmp_path, capsys, more, words):
    call("convert", theirs, *more, "-o", tmp_path / "out", "--length", 24, code=2)
    assert words in error_of(capsys) and not (tmp_path / "out").exists()


def test_a_warm_start_that_grew(theirs, tmp_path, capsys):
    call(
        "convert",
        theirs,
        "--connection",
        "keel",
        "--grow-depth",
        1,
        "--allow-drift",
        "-o",
        tmp_path / "out",
        "--length",
        24,
    )
    assert capsys.readouterr().out.startswith("warm start, not equal")


def test_named_heads_go(theirs, tmp_path, capsys):
    out = tmp_path / "out"
    call("prune", theirs, "--heads", "0:0,1", "-o", out, "--length", 24)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 heads gone (layer 0: 0, 1)" and lines[1].startswith("parameters ") and " -> " in lines[1]
    assert lines[2].startswith("loss ") and lines[-1] == f"in {out}"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.layer_heads == [2, 4]
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False).shape == (1, 5)


@pytest.mark.parametrize("by", ["output", "weight", "energy", "loss"])
def test_the_lowest_go(by, theirs, tmp_path, capsys):
    call("prune", theirs, "--by", by, "--count", 2, "-o", tmp_path / "out", "--length", 16)
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == f"layer\theads\t{by}\t" and sum(line.endswith("\tgone") for line in lines) == 1
    scores = [float(line.split("\t")[2]) for line in lines[1:5]]
    assert scores == sorted(scores) and lines[1].endswith("\tgone") and f"the lowest by {by}" in lines[5]
    assert by == "weight" or "scored" in printed.err


def test_prune_in_json(theirs, tmp_path, capsys):
    call("prune", theirs, "--by", "weight", "--count", 2, "-o", tmp_path / "out", "--length", 16, "--json", "--quiet")
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (
        printed.err == ""
        and found["by"] == "weight"
        and len(found["scores"]) == 4
        and found["output"] == str(tmp_path / "out")
    )
    assert found == {**json.loads((tmp_path / "out" / "pruning.json").read_text()), "output": found["output"]}


@pytest.mark.parametrize(
    "more, words",
    [
        ([], "say which heads go"),
        (["--heads", "0:0", "--by", "output", "--count", "2"], "give one of them"),
        (["--heads", "0:1,0,1"], "names head 1 of layer 0 twice"),
        (["--by", "output"], "--by and --count go together"),
        (["--by", "outputs", "--count", "2"], "Did you mean 'output'"),
        (["--by", "output", "--count", "3"], "a multiple of 2"),
        (["--by", "output", "--count", "6"], "1 to 4 heads can go"),
        (["--heads", "0:0"], "heads 0 to 1 of layer 0 share keys and values"),
        (["--heads", "7:0"], "layer 7 has no heads"),
        (["--heads", "zero"], "heads are written LAYER:HEAD"),
    ],
)
def test_pruning_that_cannot_be(theirs, tmp_path, capsys, more, words):
    call("prune", theirs, *more, "-o", tmp_path / "out", "--length", 16, code=2)
    assert words.lower() in error_of(capsys).lower() and not (tmp_path / "out").exists()


def test_heads_as_text():
    assert parse_heads("0:3,1;4:2") == {0: [3, 1], 4: [2]} and parse_heads(" 0 : 1 , 2 ") == {0: [1, 2]}
    for text in ("", "0", "0:", "0:a", "0:1;0:2", "-1:0", "0:1,,2", "0:1;", "0:1,1", "0:01,2,1"):
        with pytest.raises(InputError, match=r"heads are written|names layer 0 twice|names head 1 of layer 0 twice"):
            parse_heads(text)


@pytest.mark.parametrize("json_wanted", [False, True])
def test_a_full_disk_does_not_lose_what_pruning_found(theirs, tmp_path, capsys, monkeypatch, json_wanted):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("thalweg.models.ThalwegForCausalLM.save_pretrained", full)
    asked = ["--by", "weight", "--count", 2, "--length", 24, *["--json"] * json_wanted]
    call("prune", theirs, *asked, "-o", tmp_path / "out", code=2)
    printed = capsys.readouterr()
    assert "No space left on device; nothing is left there" in printed.err.splitlines()[-1]
    if json_wanted:
        found = json.loads(printed.out)
        assert found["scores"] and found["output"] is None
    else:
        assert "gone" in printed.out and "loss" in printed.out and f"in {tmp_path}" not in printed.out


@pytest.fixture(params=["classification", "masked"])
def encoder(request):
    more = {"classes": 2} if request.param == "classification" else {"objective": "masked"}
    return Encoder(EncoderConfig(vocab_size=17, width=16, depth=1, heads=2, **more))


@pytest.mark.parametrize("command", [("convert", "--grow-heads", 1), ("prune", "--heads", "0:1")])
def test_a_saved_encoder_is_grown_and_pruned(command, encoder, tmp_path, capsys):
    in_shell(encoder).save_pretrained(tmp_path / "model")
    call(command[0], tmp_path / "model", *command[1:], "-o", tmp_path / "out", "--length", 8)
    assert ("equal" if command[0] == "convert" else "no loss, KL") in capsys.readouterr().out
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (
        made["layer_heads"] == [3 if command[0] == "convert" else 1] and made["objective"] == encoder.config.objective
    )


def test_the_operations_take_an_encoder(encoder):
    """Heads, width and layers of it grow without a change of its logits, and heads go."""
    encoder, ids = encoder.double().eval(), torch.arange(12).reshape(2, 6)
    before = encoder(ids).logits
    for grown in (
        surgery.grow_heads(encoder, {0: 1}).model,
        surgery.grow_width(encoder, width=24).model,
        surgery.grow_depth(encoder, at=[1]).model,
    ):
        assert sum(p.numel() for p in grown.parameters()) > sum(p.numel() for p in encoder.parameters())
        assert (grown(ids).logits - before).abs().max() < 1e-12
    assert surgery.prune_heads(encoder, {0: [1]}).model.config.layer_heads == (1,)


def test_generate_takes_no_saved_model(theirs, encoder, tmp_path, capsys):
    in_shell(encoder).save_pretrained(tmp_path / "model")
    call("generate", tmp_path / "model", "--prompt", "a", code=2)
    assert "is the folder of a saved encoder, which predicts no next token" in error_of(capsys)
    call("generate", theirs, "--prompt", "a", code=2)
    assert "is the folder of a saved model, and generate takes that of a run" in error_of(capsys)
    call("generate", tmp_path, "--prompt", "a", code=2)
    assert "is no run folder: it has no run.json" in error_of(capsys)


@pytest.mark.parametrize("asked", [["--heads", "0:0,1"], ["--by", "output", "--count", "2"]])
def test_heads_of_a_model_with_weights_that_are_no_numbers_are_not_pruned(theirs, tmp_path, capsys, asked):
    model = Qwen3ForCausalLM.from_pretrained(theirs)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    call("prune", tmp_path / "nan", *asked, "-o", tmp_path / "out", code=2)
    assert "model.layers.1.mlp.up_proj.weight holds 1 value" in error_of(capsys) and not (tmp_path / "out").exists()


def test_a_classifier_is_scored_on_the_data_of_its_run_by_name_too(tmp_path, capsys):
    """Its tokenizer was trained with a vocabulary size that the name of the data does not say."""
    folder = tmp_path / "run"
    sizes = ["--depth", "1", "--width", "8", "--heads", "2", "--sequence-length", "8", "--vocab-size", "300"]
    train = ["--steps", "1", "--eval-every", "1", "--eval-batches", "1", "--batch-size", "4", "--threads", "1"]
    call("train", "--data", "sentiment", *sizes, *train, "--geometry", "false", "-o", folder)
    capsys.readouterr()
    call("prune", folder, "--heads", "0:1", "--data", "sentiment", "--length", 8, "-o", tmp_path / "out", "--json")
    assert json.loads(capsys.readouterr().out)["heads"] == {"0": [1]}
