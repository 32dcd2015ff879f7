"""``thalweg edit`` and ``thalweg sweep`` from the shell: scores, audits, generation, pages, records, refusals."""

import json
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from thalweg.cli import main
from thalweg.records import Measurements

SIZES = {
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
TEXT = "It was the year of the flood, and the river had come up to the third step.\f" * 4


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<s>": 0, "</s>": 1, "<mask>": 2, **{c: i + 3 for i, c in enumerate(alphabet)}}
    inner = Tokenizer(models.BPE(words, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>", mask_token="<mask>"
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "tiny"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(6)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "flood.txt"
    path.write_text(TEXT)
    return path


def call(*arguments, code=0):
    assert main(list(map(str, arguments))) == code


def test_an_edit_is_scored_beside_its_no_op_and_audited(llama, text, capsys):
    call("edit", llama, "--site", "value", "--parallel", 0, "--text", text, "--audit", "--json", "--skip-first", 1)
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["edit"] == {
        "site": "value",
        "parallel": 0.0,
        "perpendicular": 1.0,
        "skip_first": 1,
        "exclude_self": True,
    }
    assert found["sites"] == ["layers.1.attention"] and found["backend"] == "sdpa" and found["route"] == "tap"
    assert found["proof"]["worst"] <= found["proof"]["tolerance"] and found["drift"] < 1e-6 and found["n"] == 4
    loss = next(one for one in found["differences"] if one["metric"] == "loss")
    assert loss["difference"] == pytest.approx(loss["edited"] - loss["baseline"]) and loss["difference"] != 0
    assert {row["measure"] for row in found["audit"]} >= {"applied.norm_ratio", "effective_diagonal.exclude_self"}
    assert "proof: the stream of llama (by family)" in printed.err and "layers: 1 of 2" in printed.err
    assert "plan: 3 runs (unedited, no-op, 1 edit), about" in printed.err
    call("edit", llama, "--text", text, "--site", "attn", "--parallel", 0.5, "--quiet")
    printed = capsys.readouterr()
    assert printed.out.startswith("metric\tno-op\tedited") and not printed.err
    assert "4 documents: p can be no smaller than 0.125" in printed.out
    call("edit", llama, "--text", text, "--site", "attn", "--parallel", 0.5, "--quiet", "--limit", 1)
    printed = capsys.readouterr()
    assert "one document: no interval; give more documents" in printed.out and "\t–\t1\n" in printed.out


def test_an_edit_that_gives_no_numbers_is_no_result(llama, text, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("thalweg.editing.options.MOST_SCALE", 1e308)
    call("edit", llama, "--site", "mlp", "--parallel", 1e38, "--text", text, "--json", code=2)
    printed = capsys.readouterr()
    assert "the edited model gives values that are not finite (loss, " in printed.err.splitlines()[-1]
    assert json.loads(printed.out)["differences"][0]["edited"] == "NaN"  # printed all the same
    call("eval", llama, "--edit", "mlp:parallel=1e38", "--edit", "mlp:parallel=0", "--text", text, "-o", tmp_path / "o")
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1 and "mlp:parallel=1e38: the edited model gives values" in warned[0]


def test_an_interrupted_edit_says_that_nothing_is_kept(llama, text, capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("thalweg.editing.sweep", stop)
    call("edit", llama, "--parallel", 0, "--text", text, code=130)
    assert capsys.readouterr().err.splitlines()[-1] == "error: interrupted; nothing is kept"


def test_an_edit_goes_on_from_a_prompt_and_a_coefficient_is_measured_first(llama, capsys):
    call("edit", llama, "--parallel", "-4", "--generate", "The river", "--tokens", 6, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["prompt"] == "The river" and found["edited"] != found["unedited"]
    call(
        "edit",
        llama,
        "--coefficient",
        "layer_mean",
        "--site",
        "mlp",
        "--generate",
        "The river",
        "--tokens",
        3,
        "--quiet",
    )
    assert capsys.readouterr().out.startswith("unedited: The river")


def test_a_model_of_ours_goes_on_from_a_prompt_too(monkeypatch, capsys):
    from thalweg.capture.opening import Opened
    from thalweg.cli import opening
    from thalweg.models import Decoder, DecoderConfig

    model = Decoder(
        DecoderConfig(vocab_size=260, width=16, depth=2, heads=2), generator=torch.Generator().manual_seed(0)
    )
    opened = Opened(model.eval(), byte_tokenizer(), "run", "decoder")
    monkeypatch.setattr(opening, "open_any", lambda *_, **__: opened)
    call("edit", "run", "--site", "block", "--parallel", "-9", "--generate", "The river", "--tokens", 4, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == "thalweg" and found["sites"] == ["layers.0", "layers.1"] and found["edited"]


def test_a_sweep_is_a_page_rows_and_a_record_that_is_gone_on_with(llama, text, tmp_path, capsys):
    page = tmp_path / "sweep.html"
    arguments = (
        "sweep",
        llama,
        "--site",
        "value,attn",
        "--parallel=-0.5,0,1.5",
        "--perpendicular",
        "0.5",
        "--text",
        text,
        "-o",
        page,
    )
    call(*arguments, "--json")
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert "plan: 11 runs (unedited, 2 no-ops, 8 edits), about" in printed.err
    assert "Pieces of one text" not in page.read_text() and "scale -0.5" in page.read_text()
    assert len(found["points"]) == 2 * (4 + 2) and found["n"] == 4
    assert (
        "Values: what heads read" in page.read_text()
        and re.search(r"unedited.{0,40}loss \d\.\d+ nats/token", page.read_text(), re.DOTALL)
        and f"thalweg sweep {llama} --site value,attn --parallel=-0.5,0,1.5" in page.read_text()
    )
    rows = Measurements.load(tmp_path / "sweep.rows.jsonl")
    assert len(rows.where(measure="difference.loss", site="attention", branch="parallel")) == 4
    record = tmp_path / "sweep.jsonl"
    before = record.read_text()
    call(*arguments)
    printed = capsys.readouterr()
    assert "going on with" in printed.err and record.read_text() == before
    assert printed.out.splitlines()[0] == "site\tpart\tscale\tword perplexity\tchange\t95 % interval"
    call(*arguments, "--overwrite", "--quiet")
    assert record.read_text() != "" and capsys.readouterr().err == ""
    record.unlink()
    call(*arguments, code=2)  # a page that no record explains is not written over
    assert "exists; choose another name or say --overwrite" in capsys.readouterr().err


def test_a_finished_sweep_takes_more_scales_and_computes_none_twice(llama, text, tmp_path, capsys):
    page, record = tmp_path / "sweep.html", tmp_path / "sweep.jsonl"
    words = ("sweep", llama, "--site", "attn", "--perpendicular", "none", "--text", text, "-o", page, "--json")
    call(*words, "--parallel=0,1.5")
    first, before = json.loads(capsys.readouterr().out), record.read_text()
    call(*words, "--parallel=-0.5,0,1.5")
    printed = capsys.readouterr()
    second, after = json.loads(printed.out), record.read_text()
    assert "plan: 2 runs (unedited, 1 edit), about" in printed.err  # what is there is not planned again
    assert f"going on with {record}: 3 points are there" in printed.err and "  4 of 4 points: " in printed.err
    assert after.startswith(before) and len(after.splitlines()) == len(before.splitlines()) + 1
    kept = {point["scale"]: point for point in second["points"]}
    assert set(kept) == {-0.5, 0.0, 1.0, 1.5}
    assert all(kept[point["scale"]]["metrics"] == point["metrics"] for point in first["points"])
    assert "scale -0.5" in page.read_text() and "scale 1.5" in page.read_text()
    call(*words, "--parallel=2")
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["points"]) == 2
    assert "the record holds 3 points beside these, which the page does not show" in printed.err


def test_a_record_of_another_text_is_named(llama, text, tmp_path, capsys):
    (tmp_path / "other.txt").write_text(TEXT.replace("flood", "frost"))
    words = ("sweep", llama, "--site", "attn", "--parallel=0", "--perpendicular", "none", "-o", tmp_path / "s.html")
    call(*words, "--text", text)
    capsys.readouterr()
    call(*words, "--text", tmp_path / "other.txt", code=2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "is the record of another sweep: its job is 'text: 4 documents of flood.txt" in line
    assert "now 'text: 4 documents of other.txt" in line and "its sha256 is" in line


def test_a_prompt_of_one_token_is_gone_on_from(llama, capsys):
    call("edit", llama, "--site", "mlp", "--parallel", "-4", "--generate", "T", "--tokens", 3, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["prompt"] == "T" and found["unedited"] and found["edited"]
    call("edit", llama, "--parallel", "0", "--generate", "", code=2)
    assert "the prompt holds no token; give text" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["edit", "sweep", "eval", "measure", "convert"])
def test_a_checkpoint_of_what_is_no_run_is_refused(llama, command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = {
        "edit": ["--parallel", 0],
        "sweep": ["--parallel=0"],
        "convert": ["--connection", "additive", "-o", "new"],
    }.get(command, [])
    for which in ("best", "last"):
        call(command, llama, *more, "--which", which, code=2)
        assert f"--which names a checkpoint of a run, and {llama} is no run" in capsys.readouterr().err


def test_the_window_has_two_names(llama, text, tmp_path, capsys):
    words = ("edit", llama, "--site", "mlp", "--parallel", 0, "--text", text, "--json", "--quiet")
    found = []
    for flag in ("--window", "--length"):
        call(*words, flag, 16)
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["rule"] == found[1]["rule"] and "windows of 16 tokens" in found[0]["rule"]
    said = []
    for flag in ("--window", "--length"):
        call("measure", llama, "--text", text, flag, 16, "--limit", 2, "-o", tmp_path / f"p{flag}.html", "--json")
        said.append(json.loads(capsys.readouterr().out))
    assert [one["length"] for one in said] == [16, 16] and [one["documents"] for one in said] == [2, 2]


def test_an_encoder_with_a_head_is_swept_by_its_masked_loss(text, tmp_path, capsys):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(tmp_path / "bert")
    byte_tokenizer().save_pretrained(tmp_path / "bert")
    page = tmp_path / "bert.html"
    call(
        "sweep",
        tmp_path / "bert",
        "--site",
        "mlp",
        "--parallel",
        "0",
        "--perpendicular",
        "none",
        "--text",
        text,
        "-o",
        page,
        "--quiet",
    )
    assert "masked loss" in page.read_text()
    assert capsys.readouterr().out.startswith("site\tpart\tscale\tmasked loss")
    call("edit", tmp_path / "bert", "--generate", "x", "--parallel", 0, code=2)
    assert "is an encoder, and does not go on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--site", "valu"], "unknown site to edit 'valu'. Did you mean 'value'"),
        ([], "nothing says what is done to value; give --parallel, --perpendicular, --control or --coefficient"),
        (["--site", "attn"], "nothing says what is done to attention; give --parallel"),
        (["--site", "value,mlp"], "an edit has one site"),
        (["--parallel", "nan"], "finite number, got nan"),
        (["--parallel", "0", "--window", "0"], "a window has at least 2 tokens, one to read and one to predict, got 0"),
        (["--parallel", "0", "--window", "1"], "a window has at least 2 tokens, one to read and one to predict, got 1"),
        (["--parallel", "1e308"], "parallel is a retained scale of at most 1e+06 either way, got 1e+308"),
        (
            ["--site", "mlp", "--perpendicular=-1e30"],
            "perpendicular is a retained scale of at most 1e+06 either way, got -1e+30",
        ),
        (["--heads", "a"], "--heads are whole numbers"),
        (["--full", "--exclude-self"], "not allowed with"),
        (["--site", "mlp", "--full"], "exclude_self belongs to edits of values"),
        (["--tokens", "0"], "tokens must be at least 1"),
        (["--parallel", "0", "--control", "diagonal"], "takes the place of the scales"),
        (["--parallel", "0", "--layers", "9"], "numbers from 0 to 1"),
    ],
)
def test_a_slip_is_one_line(llama, text, arguments, line, capsys):
    call("edit", llama, "--text", text, *arguments, code=2)
    found = capsys.readouterr().err.strip().splitlines()
    assert found[-1].startswith("error: ") and line in found[-1]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--parallel", "a,b"], "numbers joined by commas"),
        (["--parallel", "none", "--perpendicular", "none"], "at least one site and one scale"),
        (["-o", "page.txt"], "must be called .html"),
        (["--site", "blocks"], "unknown site"),
    ],
)
def test_a_slip_of_a_sweep_is_one_line(llama, arguments, line, capsys):
    call("sweep", llama, *arguments, code=2)
    assert line in capsys.readouterr().err.strip().splitlines()[-1]


def test_an_edit_of_decoding_is_not_scored_on_a_text(llama, capsys):
    """It would never act, and a difference of 0 would look like a harmless edit."""
    for words in (["edit", "--parallel", "0"], ["sweep", "-o", "page.html"]):
        assert main([words[0], str(llama), *words[1:], "--site", "value", "--phase", "decode"]) == 2
        assert "an edit of phase decode would never act; use --generate" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["edit", "sweep"])
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--layers", "5-"], "5:11 (= 5-10, layers 5 to 10)"),
        (["--heads", "-1"], "heads are whole numbers"),
        (["--site", "valu"], "unknown site"),
        (["--limit", "0"], "at least 1 document"),
        (["--text", "nothing.txt"], "no such file"),
        (["--batch-size", "0"], "batch_size must be"),
        (["--window", "0"], "at least 2 tokens"),
    ],
)
def test_what_no_model_could_answer_is_refused_before_one_is_opened(
    command, arguments, line, capsys, monkeypatch, tmp_path
):
    from thalweg.cli import opening

    opened = []
    monkeypatch.setattr(opening, "open_any", lambda *given, **_: opened.append(given))
    monkeypatch.chdir(tmp_path)
    call(command, "tiny", "--parallel=0", *arguments, code=2)
    assert line in capsys.readouterr().err.strip().splitlines()[-1] and not opened


def test_a_layer_that_the_model_lacks_is_refused_before_the_proof(llama, text, capsys):
    call("edit", llama, "--text", text, "--parallel", 0, "--layers", "1-2", code=2)
    printed = capsys.readouterr().err
    assert "numbers from 0 to 1" in printed and "proof:" not in printed


@pytest.mark.parametrize("page", ["editing", "evaluation"])
def test_the_snippets_of_a_page_run_from_its_first_line_on(page, monkeypatch, tmp_path):
    import re
    from pathlib import Path

    from thalweg import capture, evaluation
    from thalweg.capture.opening import Opened
    from thalweg.evaluation.documents import Documents, as_documents

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES | {"max_position_embeddings": 256}, num_key_value_heads=2)).eval()
    opened = []

    def open_model(name):
        opened.append(name)
        return Opened(model, byte_tokenizer(), name, "decoder")

    def documents_of() -> Documents:
        return as_documents(
            ["The river had come up.", "It was the third step.", "A flood, and after it a year.", "End."]
        )

    monkeypatch.setattr(capture, "open_model", open_model)
    monkeypatch.setattr(evaluation, "documents_of", documents_of)
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
    snippets = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    assert snippets
    names: dict = {}
    exec(compile("\n".join(snippets), f"docs/{page}.md", "exec"), names)
    assert opened == ["smollm2"]
    assert page != "editing" or (len(names["result"].results) == 4 and len(names["drops"].results) == 2)


@pytest.mark.parametrize(
    "full", [b'"measurements"', b"<!doctype"]
)  # of the file that finds no room: the rows, the page
def test_a_sweep_is_printed_though_the_disk_is_full(llama, text, full, tmp_path, capsys, monkeypatch):
    from thalweg.records import files

    real = files._write_all

    def write(descriptor, data):
        if full in bytes(data[:200]).lower():
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    page, record, rows = (tmp_path / f"s{end}" for end in (".html", ".jsonl", ".rows.jsonl"))
    words = ("sweep", llama, "--site", "mlp", "--parallel=0", "--perpendicular", "none", "--text", text, "-o", page)
    monkeypatch.setattr(files, "_write_all", write)
    call(*words, code=2)
    printed = capsys.readouterr()
    assert printed.out.startswith("site\tpart\tscale\t") and "mlp\tparallel\t0\t" in printed.out
    assert str(page) not in printed.out and not page.exists()
    said = printed.err.splitlines()[-1]
    assert said.startswith("error: no space left to write ")
    assert said.endswith(f"; the points are safe in {record}, the same command goes on")
    call(*words, "--json", "--overwrite", code=2)
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["report"], found["record"], len(found["points"])) == (None, str(record), 2)
    assert found["rows"] == (str(rows) if rows.exists() else None)
    assert printed.err.endswith("the same command without --overwrite goes on\n")
    monkeypatch.undo()
    call(*words)
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == str(page) and "2 points are there" in printed.err


def test_an_interrupted_sweep_says_what_is_kept(llama, text, tmp_path, capsys, monkeypatch):
    from thalweg.evaluation import jobs

    page, record, passes, real = tmp_path / "s.html", tmp_path / "s.jsonl", [], jobs.of_plan
    words = ("sweep", llama, "--site", "mlp", "--parallel=0,1.5", "--perpendicular", "none", "--text", text, "-o", page)

    def of_plan(*given, **how):
        passes.append(1)
        if len(passes) in (1, 5):
            raise KeyboardInterrupt
        return real(*given, **how)

    monkeypatch.setattr(jobs, "of_plan", of_plan)
    call(*words, code=130)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "error: interrupted; no point was finished; call it again"
    call(*words, code=130)  # after the unedited model, the no-op and one edit
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"error: interrupted; 2 of 3 points kept in {record}; the same command goes on"
    call(*words)
    assert f"going on with {record}: 2 points are there" in capsys.readouterr().err


def test_a_sweep_over_few_documents_says_so_beside_its_intervals(llama, text, tmp_path, capsys):
    clause, page = "an interval over so few has not the coverage it names", tmp_path / "s.html"
    words = ("sweep", llama, "--site", "mlp", "--parallel=0", "--perpendicular", "none", "--text", text, "-o", page)
    call(*words, "--quiet")
    assert capsys.readouterr().out.splitlines()[-2:] == [f"4 documents: {clause}", str(page)]
    assert clause in page.read_text()
    rows = Measurements.load(tmp_path / "s.rows.jsonl").where(measure="difference.loss")
    assert {row.interval for row in rows} == {f"95% BCa bootstrap, 9999 resamples of 4; {clause}"}
    call("sweep", llama, *words[2:], "--limit", 1, "--quiet", "--overwrite")
    out = capsys.readouterr().out
    assert "one document: no interval" in out and clause not in out
