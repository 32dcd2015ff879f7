"""``thalweg measure``: the run measured again says what training said, and what its mixing is worth."""

import json
import re
import shutil

import pytest

from thalweg.cli import main
from thalweg.geometry import catalog
from thalweg.records import Measurements, RunFolder
from thalweg.training.measuring import Measured

TINY = [
    "train",
    "--depth",
    "2",
    "--width",
    "8",
    "--heads",
    "1",
    "--data",
    "copy:vocab=8,half=8",
    "--sequence-length",
    "17",
]
TINY += ["--steps", "4", "--eval-every", "2", "--eval-batches", "1", "--batch-size", "16", "--threads", "1", "--quiet"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with streams and one without."""
    folder = tmp_path_factory.mktemp("runs")
    assert main([*TINY, "--connection", "mhc", "--lr", "0.05", "-o", str(folder / "streams")]) == 0
    assert main([*TINY, "-o", str(folder / "single")]) == 0
    return folder


@pytest.fixture
def place(runs, tmp_path, monkeypatch):
    for name in ("streams", "single"):
        shutil.copytree(runs / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_with_streams(place, capsys):
    assert main(["measure", "streams", "--tokens", "400", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "22 passes" not in err and "14 passes with the mixing replaced" in err
    assert found["step"] == 4 and found["sequences"] == 32 and found["tokens"] == 32 * 17 and found["split"] == "valid"
    assert [row["site"] for row in found["sites"]][-1] == "stream.end" and len(found["sites"]) == 5
    assert {"sigma_2", "mixer_replaced.identity", "gradient_norm"} <= set(found["sites"][0])
    assert [row["site"] for row in found["replaced"]] == [
        "first third (layers 0-0)",
        "last third (layers 1-1)",
        "all layers (0-1)",
    ]
    assert len(found["windows"]) == 2
    rows, own = Measurements.load("streams/measured.jsonl"), RunFolder.open("streams").measures().where(step=4)
    assert {row.measure for row in rows} <= set(catalog.names())
    assert {row.step for row in rows} == {4} and {row.split for row in rows} == {"valid"}
    kept = {row.to_line() for row in own}
    again = [row for row in rows if not row.measure.startswith("mixer_replaced")]
    assert len(again) > 300 and all(row.to_line() in kept for row in again)  # bitwise what training measured


def test_the_page_and_the_tables(place, capsys):
    assert main(["measure", "streams", "--quiet", "--which", "best", "-o", "m.html"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.endswith("m.html\n") and "token mean" in out and "nats/token" in out
    page = (place / "m.html").read_text()
    for text in (
        "Replacing the mixing",
        "Windows of layers",
        "Coefficients of the streams",
        "Streams that each sublayer reads",
        "thalweg measure streams --tokens 4096 --which best",
    ):
        assert text in page
    assert "Second singular value of the mixing, of each site" in page and "Mixing replaced by the identity" in page
    assert main(["report", "streams", "-o", "r.html"]) == 0
    assert "Replacing the mixing" in (place / "r.html").read_text()


def test_an_earlier_result_is_replaced_only_when_asked(place, capsys):
    assert main(["measure", "streams", "--quiet"]) == 0
    kept = {name: (place / "streams" / name).read_bytes() for name in ("measured.jsonl", "measured.html")}
    capsys.readouterr()
    assert main(["measure", "streams", "--tokens", "900"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        err == "error: streams/measured.jsonl holds an earlier result; say --overwrite to replace it\n"
    )  # before a pass
    assert {name: (place / "streams" / name).read_bytes() for name in kept} == kept
    assert main(["measure", "streams", "--tokens", "900", "--quiet", "--overwrite"]) == 0
    assert all((place / "streams" / name).read_bytes() != content for name, content in kept.items())


def test_columns_are_aligned_and_every_heading_is_explained(place, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # whatever terminal the tests run in
    assert main(["measure", "streams", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "\t" not in out
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("site  "))
    column = lines[start].index("gain in")
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines[start : start + 5])
    assert f"  sigma_2       {catalog.entry('sigma_2').summary}" in lines
    assert any(line.startswith("  gradient  ") and line.endswith("[nats per stream unit]") for line in lines)
    for heading in ("gain in", "gain back", "index", "column error", "by the identity", "gain forward"):
        assert any(re.match(rf"  {heading} +\S", line) for line in lines), heading


def test_more_tokens_than_there_are(place, capsys):
    from thalweg import data

    held = len(data.load("copy:vocab=8,half=8").eval_batches("valid", 17))
    asked = str(17 * held + 1)
    assert main(["measure", "single", "--tokens", asked, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    said = f"{int(asked):,} tokens were asked for; copy:vocab=8,half=8 (valid) holds {17 * held:,}, and all of them are used"
    assert found["tokens"] == found["held"] == 17 * held and found["asked"] == int(asked)
    assert said in err.splitlines() and found["notes"] == [said]
    assert said in (place / "single" / "measured.html").read_text()
    assert main(["measure", "single", "--tokens", "400", "--json", "--overwrite"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == [] and found["held"] == 17 * held and found["tokens"] == 32 * 17


def test_fewer_tokens_than_a_spread_needs(place, capsys):
    assert main(["measure", "single", "--tokens", "64", "--json"]) == 0
    out, err = capsys.readouterr()
    said = "64 tokens were asked for; a spread needs at least 16 sequences of 17 tokens, so 272 are read"
    assert json.loads(out)["notes"] == [said] and said in err.splitlines()
    assert said in (place / "single" / "measured.html").read_text()


def test_changes_that_float32_does_not_resolve_are_said_to_be_rounding(place, capsys, monkeypatch):
    found = _measured(capsys)
    columns = ("mixer_replaced.identity", "mixer_replaced.token_mean")
    smallest = min(abs(row[name]) for row in found["sites"] + found["replaced"] for name in columns if name in row)
    monkeypatch.setattr(Measured, "rounding", smallest / 2)
    assert _measured(capsys)["notes"] == []
    monkeypatch.setattr(Measured, "rounding", smallest * 2)
    (note,) = _measured(capsys)["notes"]
    assert note.startswith("changes in loss below ") and "nats/token are rounding (float32, loss 2" in note
    monkeypatch.undo()
    assert Measured(None, 2.0, "nats/token", Measurements()).rounding == pytest.approx(2 * 2**-23)


def test_a_run_that_diverged_says_so(place, capsys):
    RunFolder.open("single").finish("diverged", {"reason": "loss above 3 times its best"})
    assert main(["measure", "single", "--quiet"]) == 0
    assert "note: training diverged: loss above 3 times its best\n" in capsys.readouterr().out
    assert "training diverged: loss above 3 times its best" in (place / "single" / "measured.html").read_text()


def _measured(capsys):
    assert main(["measure", "streams", "--tokens", "400", "--json", "--quiet", "--overwrite"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_single_stream(place, capsys):
    assert main(["measure", "single", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["replaced"] == found["windows"] == []
    assert {"site", "effective_rank", "gradient_norm"} <= set(found["sites"][0]) and "sigma_2" not in found["sites"][0]
    assert "Several streams" not in (place / "single" / "measured.html").read_text()
    assert main(["measure", "single", "--quiet", "--overwrite"]) == 0
    assert "token cosine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["missing"], "missing is no folder here"),
        (["empty"], "empty has no config.json"),
        (["bare"], "holds no checkpoint"),
        (["streams", "--tokens", "0"], "tokens must be a whole number of at least 1, got 0"),
        (["streams", "-o", "m.html"], "m.html exists"),
        (["streams", "-o", ""], "the output needs a name"),
        (["streams", "-o", "absent/m.html"], "there is no folder absent; make it or choose another place"),
        (["streams", "-o", "m.html/x.html"], "m.html/x.html cannot be written: m.html is a file"),
        (["streams", "-o", "empty", "--overwrite"], "empty is a folder; name a file in it"),
        (["streams", "--which", "bst"], "unknown value of --which 'bst'. Did you mean 'best'? Known: best, last"),
        (["changed"], "was trained on copy"),
    ],
)
def test_errors_are_one_line_and_leave_everything_as_it_was(place, capsys, args, says):
    (place / "empty").mkdir()
    shutil.copytree("streams", "bare")
    shutil.rmtree("bare/checkpoints")
    shutil.copytree("streams", "changed")
    record = json.loads((place / "changed" / "run.json").read_text())
    record["config"]["data"] = "copy:vocab=8,half=7"
    (place / "changed" / "run.json").write_text(json.dumps(record))
    (place / "m.html").write_text("mine")
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    assert main(["measure", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"error: [^\n]+\n", err) and says in err
    assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == before
