"""``thalweg probe``: stopped, on full disks, with flags that do not fit; and what it says of a sketch."""

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from probe_subjects import VOCAB, bert, llama, texts

from thalweg.cli import main, probe_command
from thalweg.continuum import Finding, Trajectory, findings, registry
from thalweg.errors import InputError, UnknownNameError
from thalweg.records import Measurements, files
from thalweg.records.findings import Figure
from thalweg.reports.probe import told, write_probe_report


@pytest.fixture
def flags(tmp_path):
    return ["--tokens", "96", "--length", "24", "-o", str(tmp_path / "page.html")]


@pytest.fixture
def full(monkeypatch):
    """Makes a disk full for all files below a folder."""
    write = files._write_all

    def fill(folder: Path) -> None:
        def written(descriptor: int, data: bytes) -> None:
            if any(os.path.samestat(os.fstat(descriptor), one.stat()) for one in folder.rglob("*")):
                raise OSError(errno.ENOSPC, "No space left on device")
            write(descriptor, data)

        monkeypatch.setattr(files, "_write_all", written)

    return fill


def last_line(capsys) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_sigterm_keeps_what_is_done_as_ctrl_c_does(folder, tmp_path, flags, capsys, monkeypatch):
    def unheard(*_):
        pytest.fail("SIGTERM was left to the handler of before")

    def stop(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, unheard)
    try:
        monkeypatch.setattr(registry["rotary"], "run", stop)
        rows = tmp_path / "rows.jsonl"
        code = main(["probe", str(folder), "--only", "rmsnorm,rotary,bridge", *flags, "--rows", str(rows)])
        assert signal.getsignal(signal.SIGTERM) is unheard
    finally:
        signal.signal(signal.SIGTERM, before)
    out, err = capsys.readouterr()
    assert code == 130 and err.splitlines()[-1].startswith("error: interrupted; what was finished is in ")
    assert "rmsnorm" in out and rows.exists()


def test_a_signal_inside_a_finaliser_is_not_lost(folder, flags, capsys, monkeypatch):
    """Catches: an interrupt that Python drops, as it does in ``__del__``, so that all other probes still run."""

    class Finalised:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    def stop(*_):
        Finalised()
        for _ in range(300):
            time.sleep(0.01)
        pytest.fail("the signal was lost")

    monkeypatch.setattr(registry["rotary"], "run", stop)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert main(["probe", str(folder), "--only", "rmsnorm,rotary", *flags]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "rmsnorm" in capsys.readouterr().out


def test_the_page_names_those_that_were_not_run(folder, tmp_path, flags, monkeypatch):
    """Catches: a page of an interrupted call that says every probe applies."""

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(registry["rotary"], "run", stop)
    assert main(["probe", str(folder), "--only", "rmsnorm,rotary,bridge", *flags]) == 130
    page = (tmp_path / "page.html").read_text()
    assert "Every probe that was asked for applies" not in page
    assert "rotary: not run to its end: interrupted" in page and "bridge: not run to its end" in page
    assert "rmsnorm: not run" not in page
    assert main(["probe", str(folder), *flags, "--overwrite", "--option", "splitting.refine_tokens=8"]) == 130
    page = (tmp_path / "page.html").read_text()
    assert "splitting: not run to its end" in page and "vortex" not in page


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_full_disk_loses_nothing_but_its_own_file(folder, tmp_path, flags, capsys, full, as_json):
    here, there = tmp_path / "page.html", tmp_path / "full"
    there.mkdir()
    full(there)
    more = ["--json"] * as_json
    assert main(["probe", str(folder), "--only", "rmsnorm", *flags, "--rows", str(there / "r.jsonl"), *more]) == 2
    out, err = capsys.readouterr()
    assert here.exists() and "no space left to write" in err.splitlines()[-1] and "r.jsonl" in err.splitlines()[-1]
    assert json.loads(out)["report"] == str(here) if as_json else "rmsnorm" in out
    flags[-1], rows = str(there / "page.html"), tmp_path / "r.jsonl"
    assert main(["probe", str(folder), "--only", "rmsnorm", *flags, "--rows", str(rows), *more]) == 2
    out, err = capsys.readouterr()
    assert len(Measurements.load(rows)) and "page.html" in err.splitlines()[-1] and "report:" not in err
    assert json.loads(out)["report"] is None if as_json else "rmsnorm" in out


def test_what_cannot_be_printed_is_written_all_the_same(folder, tmp_path, flags, capsys, monkeypatch):
    def table(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "<stdout>")

    monkeypatch.setattr(probe_command, "table", table)
    assert main(["probe", str(folder), "--only", "rmsnorm", *flags]) == 2
    assert (tmp_path / "page.html").exists() and "<stdout>" in last_line(capsys)


def test_a_place_that_takes_no_file_is_refused_before_the_work(tmp_path, capsys, takes_no_files):
    """As /proc and mounts that are read-only, whatever the rights say."""

    closed = tmp_path / "closed"
    closed.mkdir()
    takes_no_files(closed)
    assert main(["probe", str(tmp_path / "no model"), "-o", str(closed / "x.html")]) == 2
    assert f"{closed} takes no file (Read-only file system)" in last_line(capsys)
    rows = closed / "r.jsonl"
    assert main(["probe", str(tmp_path / "no model"), "-o", str(tmp_path / "x.html"), "--rows", str(rows)]) == 2
    assert last_line(capsys).startswith(f"error: {rows} cannot be written: {closed} takes no file")
    assert [*tmp_path.rglob("*")] == [closed]


def test_options_of_a_probe_that_is_not_asked_for(tmp_path, capsys):
    with pytest.raises(InputError, match=r"the probe 'reaction', which is not among those asked for \(rmsnorm\)"):
        findings(llama(), None, ["rmsnorm"], options={"reaction": {"layers": 1}})
    with pytest.raises(UnknownNameError, match="Did you mean 'reaction'"):
        findings(llama(), None, ["rmsnorm"], options={"reactoin": {"layers": 1}})
    nowhere = [str(tmp_path / "no model"), "-o", str(tmp_path / "x.html")]
    assert main(["probe", *nowhere, "--only", "rmsnorm", "--option", "reaction.layers=1"]) == 2
    assert "ask for it too, or leave its options out" in last_line(capsys)  # before the model is looked for


def test_bos_of_a_tokenizer_that_has_none_is_said_in_words_of_the_command(folder, flags, capsys, monkeypatch):
    from thalweg.evaluation import subjects

    monkeypatch.setattr(subjects, "special", lambda *_: None)
    assert main(["probe", str(folder), "--only", "rmsnorm", *flags, "--bos"]) == 2
    said = last_line(capsys)
    assert said.endswith("leave out --bos") and "bos=" not in said


def test_flags_of_a_model_are_refused_with_a_trajectory(tmp_path, capsys):
    walk = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).cumsum(0)
    place = str(Trajectory(torch.arange(40), {"all": walk}).write(tmp_path / "t.safetensors"))
    page = tmp_path / "page.html"
    (tmp_path / "a.txt").write_text("words")
    wrong = ["--text", str(tmp_path / "a.txt"), "--dtype", "float64", "--tokens", "9", "--trust-remote-code"]
    assert main(["probe", place, "-o", str(page), *wrong]) == 2
    assert "leave out --text, --dtype, --trust-remote-code, --tokens" in last_line(capsys)
    assert not page.exists()


def test_a_sketch_is_stamped_wherever_its_numbers_are_printed(folder, tmp_path, flags, capsys):
    assert main(["probe", str(folder), "--only", "rmsnorm,rotary", *flags]) == 0
    _, rmsnorm, rotary = capsys.readouterr().out.splitlines()
    assert rmsnorm.startswith("rmsnorm\tsketch: ") and rotary.startswith("rotary\t") and "sketch" not in rotary
    assert "<dt>rmsnorm</dt><dd>sketch: " in (tmp_path / "page.html").read_text()
    assert told(Finding("zz", summary="a: b", sketch=True)) == "sketch: a: b"
    assert told(Finding("zz", failed="a: b", sketch=True)) == "failed: a: b"


def test_the_shared_pass_is_announced_for_those_that_take_part(capsys):
    """Catches: probes that do not apply named among those that read the text."""
    said: list[str] = []
    wanted = ["depth_flow", "horizon", "rmsnorm", "splitting"]
    options = {"splitting": {"refine_tokens": 8}}
    for model in (bert(), llama()):
        found = findings(model, texts(), wanted, options=options, length=16, listen=lambda name, _: said.append(name))
        applies = [one.probe for one in found[1:] if not one.not_applicable]
        named = [name for name in said if name.startswith("one pass")]
        assert named == ([f"one pass over the text for {', '.join(applies)}"] if len(applies) > 1 else [])
        said.clear()
    assert len(applies) == 4


def test_the_heat_map_of_heads_says_what_its_shades_are(tmp_path):
    """More heads than a figure has room for curves; the axis is that of the heads, the scale that of the measure."""
    model = llama(num_attention_heads=8, num_key_value_heads=8, vocab_size=VOCAB)
    found = findings(model, texts(), ["bridge"], length=16)
    page = write_probe_report(found, tmp_path / "page.html", title="t", facts={}).read_text()
    assert ">head</text>" in page and "(0: head 0)" not in page and "head; " not in page
    assert ">total variation of rows: 0</text>" in page and '<th scope="col">head</th>' in page


def test_a_null_that_lies_under_a_curve_is_told(tmp_path):
    rows = Measurements()
    for layer in (0, 1):
        rows.add("zz.a", layer + 2.0, layer=layer, null=layer + 1.0, null_kind="others")
        rows.add("zz.others", layer + 1.0, layer=layer)
    one = Finding("zz", "Title", "found", "", rows, figures=(Figure("A", ("zz.a", "zz.others")),))
    page = write_probe_report([one], tmp_path / "page.html", title="t", facts={}).read_text()
    assert "null: others lies on others: they have the same values." in page
