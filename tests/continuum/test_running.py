"""Several probes over one model: isolation, stamps, the model left as it was, the page, the command line."""

import json
import math

import probe_subjects as subjects
import pytest
import torch

import thalweg
from thalweg.cli import main
from thalweg.continuum import Finding, Probe, findings, registry
from thalweg.errors import InputError, UnknownNameError
from thalweg.records import Measurements
from thalweg.records.findings import Figure
from thalweg.reports.probe import write_probe_report

MINE = ["bridge", "horizon", "rmsnorm", "rotary"]


@pytest.fixture
def broken():
    """Two probes that raise, registered for one test."""

    @registry.register("zz_broken", summary="raises", source="a test")
    class Broken(Probe):
        text = False

        def run(self, subject, text, options):
            raise ValueError("two\nlines")

    yield
    del registry._entries["zz_broken"]


def test_one_that_fails_or_does_not_apply_leaves_the_others(broken):
    found = findings(subjects.bert(), subjects.texts(), ["rotary", "zz_broken", "bridge"], length=16)
    assert [one.probe for one in found] == ["capture", "rotary", "zz_broken", "bridge"]
    assert found[1].not_applicable and found[2].failed == "ValueError: two" and len(found[3].rows)
    rows = thalweg.continuum.probe(subjects.bert(), subjects.texts(), ["rotary", "zz_broken"], length=16)
    (row,) = rows.where(measure="rotary.not_applicable")
    assert math.isnan(row.value) and "no rotary" in row.null_kind
    assert len(rows.where(measure="zz_broken.failed")) == 1


@pytest.mark.parametrize(
    "make", [subjects.llama, subjects.bert, subjects.gpt2, subjects.ours, lambda: subjects.ours("delta")]
)
def test_the_model_is_left_as_it_was(make):
    model = make().train()
    model.requires_grad_(True)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    backend = getattr(model.config, "_attn_implementation", None)
    for one in findings(model, subjects.texts(6), MINE, length=16):
        assert not one.failed, one.failed
    after = model.state_dict()
    assert before.keys() == after.keys() and all(x.equal(after[name]) for name, x in before.items())
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks and not any(hooks)
    assert all(m.training for m in model.modules()) and all(p.grad is None for p in model.parameters())
    assert getattr(model.config, "_attn_implementation", None) == backend


def test_few_tokens_are_a_sketch_and_enough_are_none():
    (_, few) = findings(subjects.llama(), subjects.texts(4), ["rmsnorm"], length=16)
    assert few.sketch and all(row.split.startswith("sketch: 1") for row in few.rows)
    (_, enough) = findings(subjects.llama(), subjects.texts(180, 48), ["rmsnorm"], length=48)
    assert not enough.sketch and not any(row.split for row in enough.rows)


def test_without_a_text_those_that_read_one_say_so():
    found = findings(subjects.llama(), None, ["rmsnorm", "rotary"])
    assert found[0].not_applicable == "it reads a text, and none was given" and len(found[1].rows)


def test_bad_input_is_one_line():
    with pytest.raises(UnknownNameError, match="Did you mean 'rotary'"):
        findings(subjects.llama(), None, ["rotari"])
    with pytest.raises(UnknownNameError, match="lagss"):
        findings(subjects.llama(), None, ["rotary"], options={"rotary": {"lagss": 3}})
    with pytest.raises(InputError, match="list of names"):
        findings(subjects.llama(), None, "rotary")
    with pytest.raises(InputError, match="or a Trajectory, got int"):
        findings(3)
    with pytest.raises(InputError, match="samples"):
        findings(subjects.llama(), None, ["horizon"], options={"horizon": {"samples": 1}})


def test_a_finding_is_stored_and_read_back():
    (one,) = findings(subjects.llama(), None, ["rotary"], options={"rotary": {"lags": 64}})
    again = Finding.from_plain(json.loads(json.dumps(one.to_plain())))
    assert again == one
    with pytest.raises(UnknownNameError, match="axis of a figure"):
        Figure("x", ("a",), x="tokens")


def test_lines_have_names_sources_are_cited_and_a_hidden_line_is_told(tmp_path):
    rows = Measurements()
    for step in (1, 2, 3):
        for measure, value in (("zz.peak.window", step), ("zz.peak.long", step), ("zz.low_end", -step)):
            rows.add(measure, float(value), step=step)
    plan = Figure("Peaks", ("zz.peak.window", "zz.peak.long"), "step", names=("in the window", "in all"), note="Look.")
    other = Figure("Raw", ("zz.peak.window", "zz.low_end"), "step")
    one = Finding("zz", "Title", "found", "Somebody (1999), eq. 3", rows, figures=(plan, other))
    page = write_probe_report([one], tmp_path / "page.html", title="t", facts={}).read_text()
    assert "<pre><code>Somebody (1999), eq. 3</code></pre>" in page and "None given" not in page
    assert "in the window</li>" in page and "in all</li>" in page and "low end</li>" in page
    assert "Look. in all lies on in the window: they have the same values." in page
    assert page.count("lies on") == 1 and "peak.window</li>" not in page
    again = Finding.from_plain(json.loads(json.dumps(one.to_plain())))
    assert again == one
    with pytest.raises(InputError, match="one for each of 2 measures, got 1"):
        Figure("x", ("a", "b"), names=("c",))


@pytest.mark.parametrize("name", registry.names())
def test_no_line_of_a_shipped_figure_is_called_by_its_key(name):
    import sys

    for plan in getattr(sys.modules[registry[name].__module__], "FIGURES", ()):
        assert len(plan.measures) == 1 or all("." not in one and "_" not in one for one in plan.names)


def test_the_page_draws_rows_alone(tmp_path):
    found = findings(subjects.llama(), subjects.texts(), [*MINE], length=16)
    bert = findings(subjects.bert(), None, ["rotary"])
    path = write_probe_report([*found, *bert], tmp_path / "page.html", title="a <b> title", facts={"model": "tiny"})
    page = path.read_text()
    assert "a &lt;b&gt; title" in page and "<b> title" not in page
    for one in found[1:]:
        assert one.title in page and f"{one.probe}" in page
        for caveat in one.caveats:
            assert caveat.split("'")[0][:40].replace("<", "&lt;").replace(">", "&gt;") in page
    assert page.count("<figure>") >= 9 and "not applicable: it has no rotary positions" in page and "Sketch" in page
    with pytest.raises(InputError, match="no finding"):
        write_probe_report([], tmp_path / "none.html", title="", facts={})


def test_an_interrupted_command_keeps_the_probes_that_are_done(folder, tmp_path, capsys, monkeypatch):
    page, rows = tmp_path / "page.html", tmp_path / "rows.jsonl"
    flags = ["--tokens", "96", "--length", "24", "-o", str(page), "--rows", str(rows)]

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(registry["rotary"], "run", stop)
    assert main(["probe", str(folder), "--only", "rmsnorm,rotary,bridge", *flags]) == 130
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == f"error: interrupted; what was finished is in {page} and {rows}"
    assert "rmsnorm" in out and "bridge" not in out
    text = page.read_text(encoding="utf-8")
    assert "interrupted after 1 probe; the others were not run" in text
    measured = {row.measure.partition(".")[0] for row in Measurements.load(rows)}
    assert "capture_error" in measured and len(measured) > 1
    page.unlink()
    assert main(["probe", str(folder), "--only", "rotary", *flags, "--overwrite"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "error: interrupted; nothing is kept"
    assert not page.exists()


def test_reasons_are_given_once_where_no_probe_gives_a_number(folder, tmp_path, capsys, monkeypatch):
    page = tmp_path / "page.html"
    monkeypatch.setattr(registry["rotary"], "applies", lambda self, subject: "there is nothing to look at")
    assert main(["probe", str(folder), "--only", "rotary", "--tokens", "96", "-o", str(page)]) == 2
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == f"error: no probe gave a number; why stands above and in {page}"
    assert out.count("there is nothing to look at") == 1 and "there is nothing to look at" in page.read_text()


def test_the_command(folder, tmp_path, capsys):
    page, rows = tmp_path / "page.html", tmp_path / "rows.jsonl"
    flags = ["--only", "rotary,rmsnorm", "--tokens", "96", "--length", "24", "-o", str(page), "--rows", str(rows)]
    assert main(["probe", str(folder), *flags, "--option", "rotary.lags=64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["probe"] for one in found["findings"]] == ["capture", "rotary", "rmsnorm"]
    assert page.exists() and len(Measurements.load(rows)) == sum(len(one["rows"]) for one in found["findings"])
    for bad, said in (
        (["--only", "rotari"], "Did you mean 'rotary'"),
        (["--option", "rotary"], "PROBE.NAME=VALUE"),
        (["--tokens", "1"], "at least 2"),
        ([], "exists; choose another name"),
    ):
        assert main(["probe", str(folder), "-o", str(page), *(["--overwrite"] if bad else []), *bad]) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert said in error[-1] and error[-1].startswith("error:")


def test_the_list_of_probes(capsys):
    assert main(["list", "probes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(MINE) <= {one["name"] for one in found}
    assert all(one["summary"] and one["source"] for one in found)
    assert all("derived by us" in one["source"] for one in found if one["name"] in MINE)


def test_trajectories_are_told_from_models(tmp_path, capsys):
    """Catches: a run's trajectory taken for a model where only vortex is asked for, and the other way round."""
    from thalweg.cli.probe_command import trajectory_of
    from thalweg.continuum import Trajectory
    from thalweg.continuum.trajectory import NAME

    walk = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).cumsum(0)
    one = Trajectory(torch.arange(40), {"all": walk})
    place = one.write(tmp_path / NAME)
    assert trajectory_of(str(place), None) is not None and trajectory_of(str(tmp_path), None) is not None
    (tmp_path / "config.json").write_text("{}")
    assert trajectory_of(str(tmp_path), None) is None and trajectory_of(str(tmp_path), ["vortex"]) is not None
    (found,) = findings(one, None, ["rotary"])
    assert found.not_applicable == "it looks at a model, and this is a trajectory of weights"
    with pytest.raises(InputError, match="without a text"):
        findings(one, ["a"])
    assert main(["probe", str(tmp_path / "none"), "--only", "vortex", "-o", str(tmp_path / "p.html")]) == 2
    assert "is missing" in capsys.readouterr().err
