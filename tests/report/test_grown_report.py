"""The page of a run that grew, from records alone: how growth ended first, a cap as a cap, the record, who decided what."""

import re

import pytest
from pages import COST, NULLS, figure_of, read

from thalweg.cli import main
from thalweg.errors import CheckpointError, InputError
from thalweg.records import Measurement, RunFolder, jsonl
from thalweg.reports.grown import write_grown_report
from thalweg.reports.growth import read as read_growth

CONFIG = {
    "connection": "additive",
    "depth": 2,
    "width": 4,
    "seed": 3,
    "data": "sentiment",
    "growth": {"threshold": 0.1},
}
HOSTILE = "</pre></style><script>alert('x')</script> & \"q\""
ABOUT = {
    "status": "converged",
    "reason": "at most 0.01 is left along any direction",
    "step": 40,
    "ended": 30,
    "threshold": 0.02,
    "heads_start": [1, 1],
    "heads": [3, 1, 1],
    "parameters_start": 1000,
    "parameters": 1600,
    "flops_start": 100.0,
    "flops": 200.0,
    "flops_spent": 2_048_000.0,
    "seconds": 3.0,
    "looks": 9,
    "options": {"threshold": 0.1, "most_heads": 3},
    "decisions": [["heads per layer", "the data, at the user's threshold", "theta"], ["depth", "the user", "no rule"]],
}


def event(kind, step, layer, heads, **fields):
    base = {"kind": kind, "step": step, "layer": layer, "heads": heads, "why": "because", "threshold": 0.02}
    base |= {"heads_after": 2, "must_fall": kind == "birth", "energy_before": 2.0, "energy_after": 1.5, "drift": 0.0}
    return {**base, **fields}


EVENTS = [
    event("birth", 0, 0, [1, 2], eigenvalues=[0.5, 0.5], next_eigenvalue=0.1, directions=[[0.6, 0.8, 0, 0], [1.0, 0, 0, 0]],
          captured=[0.5, 0.5], positive_before=1.5, positive_after=0.5, heads_after=3, parameters_after=1400),
    event("mask", 10, 0, [0], heads_after=3, energy_after=None),
    event("prune", 20, 0, [0], must_fall=True, energy_before=1.4, energy_after=1.6),
    event("birth", 25, 0, [3], eigenvalues=[0.3], heads_after=3, directions=[[0, 0, -1.0, 0]], drift=3.2e-16),
    event("layer", 30, 2, [0], heads_after=1, energy_after=3.0),
]  # fmt: skip


def folder(path, about=None, events=EVENTS, panels=True, status="done"):
    run = RunFolder.create(path, CONFIG, seed=3)
    for step, loss in ((0, 0.70), (40, 0.60)):
        run.log(step, "val/loss", loss, "nats/sequence")
    rows = []
    for step in (0, 20, 40):
        for layer in (0, 1, *([2] if step == 40 else [])):
            rows.append(Measurement("growth.top", 0.5 - 0.01 * step - 0.05 * layer, layer=layer, step=step, null=0.0))
        rows.append(Measurement("growth.free_energy", 2.0 - 0.01 * step, step=step))
    rows += [
        Measurement("growth.forecast.eigenvalue", v, layer=0, stream=i, step=0) for i, v in enumerate((0.5, 0.3, 0.05))
    ]
    rows += [Measurement("growth.forecast.residual", 1.0, layer=layer, step=0) for layer in (0, 1)]
    rows += [Measurement("growth.forecast.start", 1, layer=layer, step=0) for layer in (0, 1)]
    if panels:
        for head, far in ((0, 1e-5), (3, 0.8)):
            rows += [
                Measurement(f"prototypes.{name}", value, layer=0, head=head, step=40)
                for name, value in (
                    ("farthest", far),
                    ("closest", far / 2),
                    ("effective", 1 + (far > 0.1)),
                    ("usage", 4.0),
                )
            ]
    run.add_measures(rows)
    head = {"schema": 1, "kind": "growth", **ABOUT, **(about or {})}
    lines = [jsonl.encode(table) for table in (head, *events)]
    (path / "growth.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if status != "running":
        run.finish(status, {"final_loss": 0.6, "step": 40, "steps": 40, "nulls": NULLS, "cost": COST})
    return run


def page(run, tmp_path, **kw):
    return read(write_grown_report(run, tmp_path / "grown.html", **kw))


def data_of(found, title):
    """First cell -> the others, of the table under a figure."""
    rows = re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', figure_of(found, title))
    return {first: re.findall(r"<td>(.*?)</td>", rest) for first, rest in rows}


def test_order_and_content(tmp_path):
    found = page(
        folder(tmp_path / "run"), tmp_path, citations=["@article{one}"], deviations=["additive leaves its source: x"]
    )
    assert [h for h in found.headings if h[:1].isdigit()] == [
        "1. Cost",
        "2. Quality",
        "3. Growth record: which direction, when, how much was left",
        "4. Who decided what",
        "5. Dictionaries of prototypes",
        "6. Training",
        "7. Geometry of the stream by depth",
        "8. Notes and deviations",
        "9. How to reproduce",
        "10. Provenance",
        "11. Citations",
    ]
    for text in (
        "converged: at most 0.01 is left along any direction",
        "Heads by layer: 1, 1 at the start, 3, 1, 1 now (3 births, 1 removed, 1 new layer).",
        "Growth ended at step 30 and training went on. At step 40 what is left is above the threshold again: 0.1 in layer 0, 0.05 in layer 1.",
        "1 k at the start, 1.6 k now",
        "50% of those of the last shape trained from the start",
        "9 looks in 3 s",
        "1 (64%)",
        "2 (100%)",
        "2 → 1.5 (fell)",
        "1.4 → 1.6 (ROSE)",
        "It must fall at 3 events and fell at 2 of them.",
        "the data, at the user's threshold",
        "1 of 2 dictionaries collapsed to one point",
        "thalweg grow grow.toml",
        "[growth]",
        "reconstructed",
        "@article{one}",
    ):
        assert text in found.said, text


def test_the_badge_of_a_cap_is_not_that_of_convergence(tmp_path):
    found = page(folder(tmp_path / "a", {"status": "capped", "reason": "the cap of 3 heads"}), tmp_path)
    assert (
        "cap reached, not converged: the cap of 3 heads" in found.said and 'class="verdict inconclusive"' in found.text
    )
    found = page(folder(tmp_path / "b", {"status": "unstable"}), tmp_path)
    assert 'class="verdict failed"' in found.text and "unstable" in found.said
    found = page(folder(tmp_path / "c"), tmp_path)
    assert 'class="verdict done"' in found.text


def test_figures_show_what_the_rows_say(tmp_path):
    found = page(folder(tmp_path / "run"), tmp_path)
    titles = [title for title, *_ in found.figures()]
    assert titles[:4] == [
        "Heads of each layer",
        "What is left along the top direction",
        "Free energy",
        "The threshold sets the count",
    ]
    table = data_of(found, "The threshold sets the count")
    assert table["0.01"][0] == "5" and table["1"][0] == "2" and table["0.1"] == ["4", "5"]
    heads = data_of(found, "Heads of each layer")
    assert heads["0"][0] == "3" and heads["20"][0] == "2" and heads["40"][:3] == ["3", "1", "1"]
    assert "threshold: 0.02" in found.said and "cap: 3" in found.said


def test_a_run_that_goes_on_and_one_without_events(tmp_path):
    found = page(
        folder(
            tmp_path / "a", {"status": "growing", "ended": None, "reason": "step 40: 1 of 2 layers"}, status="running"
        ),
        tmp_path,
    )
    assert "has not ended: step 40" in found.said and 'class="verdict running"' in found.text
    found = page(folder(tmp_path / "b", {"heads": [1, 1]}, events=[], panels=False), tmp_path)
    assert "nothing was added or removed" in found.said and "This model has no dictionaries." in found.said
    assert "There was no event at which it must fall." in found.said


def test_a_run_that_failed_says_so_first(tmp_path):
    about = {"status": "growing", "ended": None, "reason": "step 12: 1 of 2 layers not calm yet"}
    run = folder(tmp_path / "a", about, status="running")
    run.finish("failed", {"step": 14, "reason": "the disk is full"})
    found = page(run, tmp_path)
    assert 'class="verdict failed"><span class="badge failed">failed</span>: the disk is full (step 14).' in found.text
    assert "Growth until then: not ended: step 12: 1 of 2 layers not calm yet" in found.said
    run = folder(tmp_path / "b", status="running")
    run.finish("interrupted", {"step": 40, "steps": 60, "reason": "SIGINT"})
    found = page(run, tmp_path)
    assert 'class="verdict interrupted"' in found.text and "SIGINT (step 40 of 60)." in found.said
    assert "Growth until then: converged: at most 0.01" in found.said


def test_only_what_was_below_the_threshold_is_above_it_again(tmp_path):
    found = page(folder(tmp_path / "run", {"status": "unstable"}), tmp_path)
    assert "At step 40 what is left is above the threshold: 0.1 in layer 0, 0.05 in layer 1." in found.said
    assert "above the threshold again" not in found.said


def test_heads_are_counted_in_whole_numbers(tmp_path):
    found = page(folder(tmp_path / "run", {"heads": [2, 1]}, events=[]), tmp_path)
    for title in ("Heads of each layer", "The threshold sets the count"):
        marks = re.findall(r'text-anchor="end">([^<]*)</text>', figure_of(found, title))
        assert marks and all("." not in mark for mark in marks)


def test_a_curve_that_ends_with_growth_says_so(tmp_path):
    run = folder(tmp_path / "run", status="running")
    assert "checks of growth" not in figure_of(page(run, tmp_path), "Free energy")
    lines = (run.path / "growth.jsonl").read_text().replace('"step": 40', '"step": 60', 1)
    (run.path / "growth.jsonl").write_text(lines)
    assert "Taken at the checks of growth, the last at step 40." in figure_of(page(run, tmp_path), "Free energy")


def test_an_interval_is_no_figure_and_nulls_are_explained(tmp_path):
    run = folder(tmp_path / "run", status="running")
    for step, value in ((0, 0.5), (40, 0.8)):
        for name, off in (("accuracy", 0.0), ("accuracy_low", -0.1), ("accuracy_high", 0.1)):
            run.log(step, f"task/{name}", value + off, "share")
    nulls = {"uniform": 0.69, "chance": 0.68, "majority_accuracy": 0.55}
    run.finish("done", {"final_loss": 0.6, "step": 40, "steps": 40, "nulls": nulls, "cost": COST})
    found = page(run, tmp_path)
    titles = [title for title, *_ in found.figures()]
    assert "Accuracy (task)" in titles and not [title for title in titles if "low" in title or "high" in title]
    assert "task/accuracy_low" in found.said and "95 % Wilson interval of the accuracy" in found.said
    assert "Null uniform: the loss" in found.said and "Null chance: the loss" in found.said
    assert "Null unigram" not in found.said


def test_names_beside_values_leave_room_on_a_narrow_window(tmp_path):
    """A long name in the column of names wraps at a share of the width and does not push the values out."""
    style = page(folder(tmp_path / "run"), tmp_path).text
    columns = re.search(r"\bdl \{[^}]*grid-template-columns: ([^;]+);", style)
    names = re.search(r"\bdt \{([^}]*)\}", style)
    assert columns and "40%" in columns[1] and "max-content" not in columns[1]
    assert names and "overflow-wrap: anywhere" in names[1]


@pytest.mark.parametrize(
    "panels, config, shown",
    [
        (False, {}, False),
        (True, {}, True),
        (False, {"model": {"head_prototypes": True}}, True),
        (False, {"layers": ["attention", "prototypes"]}, True),
    ],
)
def test_the_size_of_a_dictionary_stands_where_there_is_one(panels, config, shown, tmp_path, monkeypatch):
    for key, value in config.items():
        monkeypatch.setitem(CONFIG, key, value)
    decisions = [["depth", "the user", "no rule"], ["dictionary size", "the user", "prototypes per head do not grow"]]
    found = page(folder(tmp_path / "run", {"decisions": decisions}, panels=panels), tmp_path)
    assert ("dictionary size" in found.said) is shown and "no rule" in found.said


def test_hostile_records_never_become_markup(tmp_path):
    run = folder(
        tmp_path / "run",
        {
            "reason": HOSTILE,
            "status": HOSTILE,
            "decisions": [[HOSTILE, HOSTILE, HOSTILE]],
            "options": {"threshold": 0.1},
        },
        events=[event(HOSTILE, 1, 0, [1])],
    )
    found = page(run, tmp_path)
    assert found.said.count("alert(") >= 4


def test_foreign_and_broken_records_are_one_line(tmp_path):
    run = folder(tmp_path / "run")
    (run.path / "growth.jsonl").write_text('{"schema": 1, "kind": "measurements"}\n', encoding="utf-8")
    with pytest.raises(InputError, match="growth record"):
        read_growth(run)
    (run.path / "growth.jsonl").write_text('{"schema": 1, "kind": "growth"}\nno json\n{}\n', encoding="utf-8")
    with pytest.raises(CheckpointError, match="is broken"):
        read_growth(run)


def test_the_command_finds_the_page_of_growth(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "run")
    assert main(["report", "run", "-o", "page.html"]) == 0
    assert "Growth record" in (tmp_path / "page.html").read_text(encoding="utf-8")
    capsys.readouterr()
