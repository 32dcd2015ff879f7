"""The page of a sweep: made from rows alone, every number of its figures in the table under them."""

import math

import pytest
from pages import read

from thalweg.cli.sweep_command import notes_of
from thalweg.errors import InputError
from thalweg.records import Measurements
from thalweg.reports.sweep import cost_table, figure, write_sweep_report
from thalweg.reports.symlog import Spread, bent, spreads

FACTS = {"model": "tiny <b>llama</b>", "text": "6 documents"}


def rows(sites=("value", "mlp"), huge=3.2e6) -> Measurements:
    """A sweep as ``Sweep.measurements`` gives it: one point broken, one far out."""
    found = Measurements()
    for site in sites:
        found.add("noop_drift", 2e-7, site=site, null=0.0, null_kind="no hooks", n=6, split="text")
        for component in ("parallel", "perpendicular"):
            for scale in (-1.0, 0.0, 0.5, 1.0, 1.5, 2.0):
                change = (
                    0.0 if scale == 1 else huge if scale == -1 else math.nan if scale == 2 else 3 * (scale - 1) ** 2
                )
                where = {"site": site, "branch": component, "arm": f"{scale:g}", "n": 6, "split": "text"}
                between = (
                    {}
                    if math.isnan(change)
                    else {"low": change * 0.8, "high": change * 1.3, "interval": "95% BCa bootstrap"}
                )
                for metric, unit in (("loss", "nats/token"), ("word_perplexity", "")):
                    found.add(metric, 20 + change, unit=unit, **where)
                    found.add(
                        f"difference.{metric}", change, unit=unit, null=0.0, null_kind="no-op", **between, **where
                    )
    return found


def test_a_page_shows_every_site_with_its_no_op_and_its_data(tmp_path):
    path = write_sweep_report(
        rows(),
        tmp_path / "sweep.html",
        title="tiny",
        facts=FACTS,
        command="thalweg sweep tiny",
        provenance={"threads": 1},
    )
    page = read(path)
    assert "tiny <b>llama</b>" in page.said and "b" not in page.tags
    for text in (
        "linear to ±1, then log",
        "thalweg sweep tiny",
        "matched no-op",
        "3,200,000",
        "2 of the values not finite",
    ):
        assert text in page.said
    titles = [title for title, _, _ in page.figures()]
    assert titles == [
        "Values: what heads read",
        "Feed-forward: its update",
    ]
    assert all(verdict not in page.text.partition("</style>")[2] for verdict in ("supported", "refuted", "robust"))
    table = page.text.partition("Data of this figure")[2].partition("</table>")[0]
    assert '<th scope="row">parallel</th><td>-1</td><td>3,200,020</td>' in table and "NaN" in table


def test_the_costs_are_those_of_the_scales_that_were_given():
    table = cost_table(rows(), ["value", "mlp"], "loss")
    assert table.columns == ("site", "part", *(f"scale {scale}" for scale in ("-1", "0", "0.5", "1.5", "2")))
    assert [line[:2] for line in table.rows] == [
        (site, part) for site in ("value", "mlp") for part in ("parallel", "perpendicular")
    ]


def test_a_figure_names_the_parts_and_says_that_the_no_op_is_drawn():
    found = figure(rows(), "value", "loss")
    assert [key.label for key in found.legend] == ["parallel", "perpendicular"]
    assert "The point at scale 1 is the no-op itself" in found.caption
    without = Measurements(row for row in rows() if row.arm != "1")
    assert "no-op itself" not in figure(without, "value", "loss").caption


@pytest.mark.parametrize(
    ("sites", "cut", "begin"),
    [
        ({"mlp"}, False, ["Attention, mlp:"]),
        ({"value"}, True, ["Values:", "Pieces of one text"]),
        ({"block"}, False, ["Whole layers:"]),
    ],
)
def test_notes_are_about_what_was_swept(sites, cut, begin):
    found = notes_of(sites, cut)
    assert len(found) == len(begin) and all(map(str.startswith, found, begin))


def test_rows_of_something_else_are_refused(tmp_path):
    with pytest.raises(InputError, match="hold no sweep"):
        write_sweep_report(Measurements(), tmp_path / "x.html", title="x", facts={})
    wrong = Measurements()
    wrong.add("difference.loss", 1.0, site="value", branch="parallel", arm="half")
    with pytest.raises(InputError, match="its scale as arm, got 'half'"):
        write_sweep_report(wrong, tmp_path / "x.html", title="x", facts={})


@pytest.mark.parametrize(
    ("value", "wanted"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0), (-1.0, -1.0), (10.0, 2.0), (-1000.0, -4.0)]
)
def test_the_bent_axis_is_linear_inside_and_logarithmic_outside(value, wanted):
    assert bent(value, 1.0) == pytest.approx(wanted)
    assert bent(value * 7, 7.0) == pytest.approx(wanted)


def test_small_changes_keep_a_plain_axis():
    curve = Spread("parallel", [0, 1, 2], [0.1, 0.0, 0.2], [0.0, 0.0, 0.1], [0.2, 0.0, 0.3])
    figure = spreads("x", [curve], x_label="scale", y_label="change", caption="c", linear=1.0)
    assert "then log" not in figure.svg and figure.rows[0] == ("0", "0.1", "0 to 0.2")
    nothing = spreads(
        "x",
        [Spread("a", [0, 1], [math.nan] * 2, [math.nan] * 2, [math.nan] * 2)],
        x_label="s",
        y_label="y",
        caption="c",
        linear=1.0,
    )
    assert "2 of the values not finite" in nothing.caption
