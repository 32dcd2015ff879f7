"""``thalweg eval``: every kind of evaluation with and without edits, rows that survive an interrupt, one line for every slip."""

import json

import numpy as np
import pytest
import torch
from subjects_at_hand import TEXTS, causal_tokenizer, encoder_tokenizer, llama, model

from thalweg.cli import main
from thalweg.cli.edit_flags import few_line, p_value
from thalweg.cli.edit_spec import edit_of
from thalweg.cli.eval_words import cost_line
from thalweg.errors import InputError
from thalweg.evaluation import perplexity
from thalweg.evaluation.jobs import Cost
from thalweg.evaluation.scores import few_words
from thalweg.records import Measurements
from thalweg.statistics import sign_flip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A decoder that takes 1,024 tokens, an encoder with and without its head, a text, and questions."""
    folder = tmp_path_factory.mktemp("models")
    subject = llama()
    subject.config.max_position_embeddings = 1024
    subject.save_pretrained(folder / "decoder")
    causal_tokenizer().save_pretrained(folder / "decoder")
    subject.save_pretrained(folder / "bare")
    headed = model("bert", torch.float32)
    headed.save_pretrained(folder / "masked")
    headed.bert.save_pretrained(folder / "encoder")
    for name in ("masked", "encoder"):
        encoder_tokenizer().save_pretrained(folder / name)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 2))
    row = {"question": "Fire is", "choices": ["cold", "hot"], "answer": 1}
    (folder / "heat.jsonl").write_text((json.dumps(row) + "\n") * 4)
    (folder / "full").mkdir()
    (folder / "full" / "file").write_text("mine")
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def found(capsys, argv):
    assert main(["eval", *argv, "--json", "--quiet"]) == 0
    return json.loads(capsys.readouterr().out)


def test_text_with_edits_beside_their_no_ops(here, capsys, tmp_path):
    out = tmp_path / "out"
    edits = ["value:parallel=0.5", "mlp:perpendicular=0,layers=1", "mlp:parallel=0,layers=1"]
    flags = [flag for edit in edits for flag in ("--edit", edit)]
    result = found(capsys, ["decoder", "--text", "text.jsonl", *flags, "--interval", "percentile", "-o", str(out)])
    assert [edit["edit"] for edit in result["edits"]] == edits
    assert all(edit["drift"] <= 1e-6 for edit in result["edits"])
    assert result["edits"][1]["options"] == {"site": "mlp", "parallel": 1.0, "perpendicular": 0.0, "layers": "1"}
    plain = result["tasks"]["text"]["metrics"]["loss"]
    moved = result["edits"][1]["differences"][0]
    assert moved["baseline"] == pytest.approx(plain["value"], rel=1e-6)
    assert moved["difference"] == pytest.approx(moved["edited"] - moved["baseline"])
    assert moved["low"] <= moved["difference"] <= moved["high"]
    header, *rows = map(json.loads, (out / "items.jsonl").read_text().splitlines())
    assert header["kind"] == "evaluation"
    assert [row["role"] for row in rows] == ["unedited"] * 6 + ["no-op"] * 6 + ["edited"] * 6 + ["no-op"] * 6 + [
        "edited"
    ] * 12  # two edits share the no-op of mlp in layer 1
    kept = Measurements.load(out / "measurements.jsonl")
    assert {row.arm for row in kept.where(measure="difference.loss")} == set(edits)
    assert {row.model for row in kept} == {"decoder"}


def test_a_run_on_masked_tokens_is_evaluated_by_its_own_mask(tmp_path, capsys):
    data = ["--data", "austen", "--tokenizer", "byte", "--objective", "masked", "--sequence-length", "32"]
    sizes = ["--depth", "1", "--width", "16", "--heads", "2", "--steps", "2", "--batch-size", "2", "--threads", "1"]
    looks = ["--eval-batches", "1", "--eval-every", "2"]
    assert main(["train", *data, *sizes, *looks, "-o", str(tmp_path / "run"), "--quiet"]) == 0
    (tmp_path / "text.txt").write_text(" ".join(TEXTS))
    capsys.readouterr()
    asked = ["--text", str(tmp_path / "text.txt"), "--window", "32", "-o", str(tmp_path / "o")]
    result = found(capsys, [str(tmp_path / "run"), *asked])
    loss = result["tasks"]["masked"]["metrics"]["masked_loss"]
    assert 4 < loss["value"] < 7  # ln 258 = 5.55, hardly trained
    assert loss["unit"] == "nats/masked token"


def test_the_number_is_that_of_the_function(here, capsys, tmp_path):
    from transformers import AutoModelForCausalLM

    result = found(capsys, ["decoder", "--text", "text.jsonl", "--window", "16", "-o", str(tmp_path / "o")])
    subject = AutoModelForCausalLM.from_pretrained("decoder")
    wanted = perplexity(subject, causal_tokenizer(), [text.strip() for text in TEXTS * 2], window=16)
    for name, value in wanted.values().items():
        assert result["tasks"]["text"]["metrics"][name]["value"] == pytest.approx(value, rel=1e-6)
    assert result["tasks"]["text"]["facts"]["window"] == 16
    assert result["edits"] == []


def test_long_contexts_and_questions(here, capsys, tmp_path):
    argv = ["decoder", "--ruler", "single,vt", "--length", "500", "--samples", "2", "--choices", "heat.jsonl"]
    result = found(capsys, [*argv, "--shots", "1", "--edit", "attention:parallel=0", "-o", str(tmp_path / "o")])
    assert set(result["tasks"]) == {"single", "vt", "ruler", "heat"}
    assert set(result["tasks"]["ruler"]["metrics"]) == {"mean_of_tasks", "family_macro"}
    assert result["tasks"]["heat"]["metrics"]["acc"]["null"] == 0.5
    assert result["tasks"]["heat"]["rule"] == "1-shot, by log likelihood"
    rows = [json.loads(line) for line in (tmp_path / "o" / "items.jsonl").read_text().splitlines()[1:]]
    assert {"output", "answers", "recall"} <= next(row for row in rows if row["job"] == "ruler").keys()
    assert {edit["task"] for edit in result["edits"]} == {"single", "vt", "ruler", "heat"}


def test_encoders(here, capsys, tmp_path):
    flags = ["--text", "text.jsonl", "--edit", "attention:parallel=0"]
    result = found(capsys, ["masked", *flags, "-o", str(tmp_path / "a")])
    assert set(result["tasks"]["masked"]["metrics"]) == {"masked_loss", "masked_perplexity"}
    assert result["edits"][0]["drift"] < 1e-6
    result = found(capsys, ["encoder", *flags, "-o", str(tmp_path / "b")])
    (edit,) = result["edits"]
    assert edit["differences"][0]["baseline"] == pytest.approx(1)
    assert edit["differences"][0]["edited"] < 1 - 1e-6
    assert edit["facts"]["pair_similarity_spearman"]["value"] <= 1


def test_what_a_person_sees(here, capsys, tmp_path):
    argv = ["eval", "decoder", "--text", "text.jsonl", "--limit", "3", "--edit", "block:parallel=0.5"]
    assert main([*argv, "-o", str(tmp_path / "o")]) == 0
    out, err = capsys.readouterr()
    assert "3 documents of text.jsonl (one line, one document; the first 3 of 6)" in err
    assert "plan: 3 runs (unedited, no-op, 1 edit), about" in err
    assert f"rows: {tmp_path / 'o' / 'items.jsonl'}" in err
    assert "token_perplexity" in out
    assert "sign-flip p" in out
    assert "uniform over 2051 tokens" in out


@pytest.mark.parametrize(
    ("noops", "edits", "says"),
    [
        (0, 0, "plan: 1 run, about 2 s"),
        (1, 0, "plan: 2 runs (unedited, no-op), "),
        (1, 3, "plan: 5 runs (unedited, no-op, 3 edits), "),
        (2, 1, "plan: 4 runs (unedited, 2 no-ops, 1 edit), "),
    ],
)
def test_the_runs_of_a_plan_add_up(noops, edits, says):
    assert cost_line(Cost(2.0, 2**30), noops, edits).startswith(says)


@pytest.mark.parametrize(
    ("n", "says"),
    [
        (1, "one document: no interval; give more documents"),
        (2, "2 documents: no interval (it needs 3), and p can be no smaller than 0.5; give more documents"),
        (5, "5 documents: p can be no smaller than 0.0625; an interval over so few has not the coverage it names"),
        (6, ""),
    ],
)
def test_what_few_documents_cannot_say(n, says):
    assert few_line(n) == says
    smallest = sign_flip(np.ones(n))
    assert p_value(smallest, n) == ("–" if n == 1 else f"{smallest:g}")
    assert n == 1 or not says or says.partition("than ")[2].partition(";")[0] == f"{smallest:g}"


def test_few_documents_have_intervals_that_cover_less_than_they_name(here, capsys, tmp_path):
    clause = "an interval over so few has not the coverage it names"
    assert [few_words(n) for n in (2, 3, 5, 6)] == ["", clause, clause, ""]
    argv = ["eval", "decoder", "--text", "text.jsonl", "--quiet", "--limit"]
    assert main([*argv, "3", "-o", str(tmp_path / "a")]) == 0
    assert f"\ntext: 3 documents: {clause}\n" in capsys.readouterr().out
    assert main([*argv, "6", "-o", str(tmp_path / "b")]) == 0
    assert clause not in capsys.readouterr().out
    argv += ["4", "--edit", "block:parallel=0.5", "-o", str(tmp_path / "c")]
    assert main(argv) == 0
    assert capsys.readouterr().out.count(f"text: 4 documents: p can be no smaller than 0.125; {clause}\n") == 1
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = [*result["tasks"]["text"]["metrics"].values(), *result["edits"][0]["differences"]]
    rows += [{"interval": row.interval} for row in Measurements.load(tmp_path / "c" / "measurements.jsonl")]
    assert {row["interval"] for row in rows} == {f"95% BCa bootstrap, 9999 resamples of 4; {clause}"}


def test_one_document_and_few_paragraphs_are_told(here, capsys, tmp_path):
    argv = ["eval", "decoder", "--text", "text.jsonl", "--limit", "1", "--edit", "block:parallel=0.5", "--quiet"]
    assert main([*argv, "-o", str(tmp_path / "o")]) == 0
    out = capsys.readouterr().out
    assert out.count("text: one document: no interval; give more documents") == 1
    assert "\t–\t1\n" in out
    (tmp_path / "three.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:3]))
    argv = ["eval", "encoder", "--text", str(tmp_path / "three.jsonl"), "--edit", "attention:parallel=0", "--quiet"]
    assert main([*argv, "-o", str(tmp_path / "p")]) == 0
    out = capsys.readouterr().out
    assert "(an interval needs 5 texts, got 3)" in out and "pair_similarity_spearman" in out


def test_an_interrupt_keeps_the_rows(here, capsys, tmp_path, monkeypatch):
    from thalweg.evaluation import jobs

    real, calls = jobs.of_plan, []

    def interrupted(model, plan, *, on_document, **options):
        calls.append(1)

        def stop(row):
            on_document(row)
            if len(calls) == 2 and row["item"].endswith("2/6"):
                raise KeyboardInterrupt

        return real(model, plan, on_document=stop, **options)

    monkeypatch.setattr(jobs, "of_plan", interrupted)
    argv = ["decoder", "--text", "text.jsonl", "--edit", "mlp:parallel=0", "-o", str(tmp_path / "o")]
    assert main(["eval", *argv, "--quiet"]) == 130
    place = tmp_path / "o"
    assert capsys.readouterr().err == f"error: interrupted; 8 rows kept in {place}; the same command goes on\n"
    assert len((tmp_path / "o" / "items.jsonl").read_text().splitlines()) == 1 + 6 + 2
    kept = Measurements.load(tmp_path / "o" / "measurements.jsonl")
    assert {row.arm for row in kept} == {"unedited"}


def test_an_interrupt_says_where_the_default_folder_is_and_what_keeps_nothing(here, capsys, tmp_path, monkeypatch):
    from pathlib import Path

    from thalweg.cli import eval_command

    def stop(*_, **__):
        raise KeyboardInterrupt

    folder, argv = Path("evals") / "decoder-NOW", ["eval", str(here / "decoder"), "--text", str(here / "text.jsonl")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(eval_command, "_default", lambda _: folder)
    with monkeypatch.context() as patch:
        patch.setattr("thalweg.cli.opening.open_any", stop)
        assert main([*argv, "--quiet"]) == 130
    assert capsys.readouterr().err == "error: interrupted; nothing was scored in this call; call it again\n"
    assert not folder.exists()
    monkeypatch.setattr("thalweg.evaluation.jobs.of_plan", stop)
    assert main([*argv, "--quiet"]) == 130
    said = f"0 rows kept in {folder}; the same command with -o {folder} goes on"
    assert capsys.readouterr().err == f"error: interrupted; {said}\n"
    monkeypatch.setattr("thalweg.training.evaluate_run", stop)
    monkeypatch.setattr("thalweg.records.run.RunFolder.is_run", lambda _: True)
    assert main(["eval", "run", "--split", "test"]) == 130
    assert capsys.readouterr().err == "error: interrupted; nothing is kept\n"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ("value:parallel=0,layers=99", "layers are numbers from 0 to 1"),
        ("mlp:parallel=0,skip-first=2", "skip_first"),
        ("value:parallel=0,heads=4", "head"),
    ],
)
def test_what_the_model_cannot_have_is_refused_before_anything_is_scored(
    here, edit, says, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("thalweg.evaluation.jobs.of_plan", lambda *_, **__: pytest.fail("the text was scored"))
    monkeypatch.chdir(tmp_path)
    argv = ["eval", str(here / "decoder"), "--text", str(here / "text.jsonl"), "--edit", "mlp:parallel=0"]
    assert main([*argv, "--edit", edit]) == 2
    printed = capsys.readouterr()
    assert says in printed.err.splitlines()[-1] and "plan:" not in printed.err
    assert not (tmp_path / "evals").exists()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("value:parallel=0.5", {"site": "value", "parallel": 0.5}),
        ("value:parallel=0,exclude-self,layers=1:", {"parallel": 0.0, "exclude_self": True, "layers": "1:"}),
        ("value:full-aggregate,perpendicular=2", {"exclude_self": False, "perpendicular": 2.0}),
        ("value:parallel=0,heads=0+2,layers=0+3,group=kv:2", {"heads": (0, 2), "layers": "0,3", "group": "kv:2"}),
        ("mlp:parallel=0,skip-first=1,phase=prefill", {"skip_first": 1, "phase": "prefill"}),
        ("mlp:parallel=0,layers=0+2-3", {"layers": "0,2-3"}),
        ("attention:parallel=1", {"site": "attention", "parallel": 1.0}),
        ("attn:parallel=0", {"site": "attention"}),
    ],
)
def test_an_edit_as_one_word(text, wanted):
    made = edit_of(text)
    assert {name: getattr(made, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("valu:parallel=0", "Did you mean 'value'"),
        ("value:paralel=0", "Did you mean 'parallel'"),
        ("value:parallel=none", "needs a number"),
        ("value:skip-first=0.5", "whole number"),
        ("value:parallel=0,parallel=1", "twice"),
        ("value:exclude-self,full-aggregate", "twice"),
        ("attention:parallel=0,layers=5,6", r"got '6' after 'layers=5'; join numbers by \+: layers=5\+6"),
        ("value:parallel=0,heads=0,2", r"join numbers by \+: heads=0\+2"),
        ("value:parallel=0,5", "unknown option of an edit '5'"),
        ("value:parallel=0,layers=a", "layers are numbers"),
        ("mlp:exclude-self", "belongs to edits of values"),
        ("value:layers=0,skip-first=1", "nothing says what the edit"),
        ("value:parallel=2e6", r"a retained scale of at most 1e\+06 either way, got 2e\+06"),
    ],
)
def test_edits_that_cannot_be(text, says):
    with pytest.raises(InputError, match=says):
        edit_of(text)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["decoder", "--edit", "valu:parallel=0"], "Did you mean 'value'"),
        (["decoder", "--edit", "mlp:parallel=0", "--edit", "mlp:parallel=0"], "given twice"),
        (
            ["decoder", "--edit", "value"],
            "nothing says what the edit 'value' does to value; give parallel, perpendicular, control or",
        ),
        (["decoder", "--ruler", "singel"], "Did you mean 'single'"),
        (["decoder", "--ruler", "single", "--length", "2000"], "1024 tokens at most"),
        (["decoder", "--ruler", "single", "--length", "50"], "needs at least"),
        (["decoder", "--ruler", "single", "--samples", "0"], "at least 1"),
        (["decoder", "--preset", "papr"], "Did you mean 'paper'"),
        (["decoder", "--text", "nothing.txt"], "no such file"),
        (["decoder", "--window", "4000"], "1024 tokens at most"),
        (["decoder", "--stride", "0"], "stride"),
        (["decoder", "--limit", "0"], "at least 1 document"),
        (["decoder", "--batch-size", "0"], "batch_size"),
        (["decoder", "--include-path", "."], "give --tasks too"),
        (["decoder", "--choices", "text.jsonl"], "must be a table"),
        (["decoder", "-o", "full"], "not an empty folder"),
        (["decoder", "--text", "text.jsonl", "--edit", "value:parallel=0,layers=7"], "layers are numbers from 0 to 1"),
        (["bare"], "no tokenizer"),
        (["encoder"], "give --edit"),
        (["masked", "--ruler", "single"], "for decoders"),
        (["nothing"], "nothing"),
        ([""], "needs a name"),
    ],
)
def test_slips_are_one_line(here, capsys, tmp_path, argv, says):
    output = [] if "-o" in argv else ["-o", str(tmp_path / "o")]
    assert main(["eval", *argv, *output, "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
