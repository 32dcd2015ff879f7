"""Several streams in a report: curves, pictures of use, tables of windows, of replaced mixing and of what moved."""

import dataclasses

import pytest
from pages import figure_of, read, record, rows
from pages import template as plan_of

from thalweg.records.measurements import Measurement, Measurements
from thalweg.reports.depth import geometry
from thalweg.reports.figures import heat
from thalweg.reports.measures import in_own_table, place, shown
from thalweg.reports.shown import GROUPS, MIXING, STREAMS, TABLE
from thalweg.reports.streams import coefficient_table, replaced_table, usage_figures, window_table
from thalweg.reports.tables import scalar_table
from thalweg.studies.judging import StudyVerdict

CURVES = ["amax_gain.from_start.forward", "amax_gain.to_end.backward", "sigma_2", "permutation_index"]


def made(seed=0, shift=0.0):
    """What a run with two layers of two streams leaves."""
    found = rows(CURVES, 2)
    for layer in range(2):
        where = {"site": f"layers.{layer}.attention", "layer": layer, "step": 100, "n": 16}
        for stream in range(2):
            share = (0.9 if stream == layer else 0.1) + shift
            found += [Measurement(f"stream_share.{v}", share, stream=stream, **where) for v in ("read", "write")]
        for kind, distance in (("mix.bias", 3.0), ("read.alpha", 1.0 + layer)):
            at = {"layer": layer, "branch": kind, "step": 100}
            found.append(Measurement("coefficient_distance", distance, **at))
            found.append(Measurement("coefficient_gradient_norm", 4.0, **at))
            if kind == "mix.bias":
                found.append(Measurement("coefficient_distance.relative", 0.5 + layer, **at))
    for site in ("layers.0-0", "layers.1-1"):
        found += [Measurement(f"{m}.window", 0.25, site=site, step=100) for m in ("sigma_2", "permutation_index")]
        found.append(Measurement("amax_gain.window.forward", 1.5, site=site, step=100))
    for kind in ("identity", "token_mean"):
        change = {"unit": "nats/token", "low": 0.01, "high": 0.03, "n": 16, "step": 100}
        found.append(Measurement(f"mixer_replaced.{kind}", 0.02, site="all layers (0-1)", **change))
    return record(seed=seed, measures=found)


def test_figures_and_tables_are_where_they_belong():
    found = geometry({"mhc": [made()], "additive": [record(measures=rows(["rms"], 2))]})
    assert [f.title for f in found.streams] == [
        *(shown(name).title for name in sorted(CURVES, key=place)),
        "Streams that each sublayer reads, mhc",
        "Streams that each sublayer writes to, mhc",
    ]
    assert list(found.tables) == ["Replacing the mixing", "Windows of layers"] and found.coefficients is not None
    assert "Not measured: additive." in found.streams[0].caption
    drawn = [f.title for figures in (found.headline, found.diagnostics, *found.more.values()) for f in figures]
    assert not any("Share of each stream" in title or "coefficients" in title for title in drawn)
    none = geometry({"additive": [record(measures=rows(["rms"], 2))]})
    assert (none.streams, none.tables, none.coefficients) == ([], {}, None)


def test_the_cost_of_a_replaced_mixing_is_drawn_with_its_errors():
    """A change of 1e-6 is nothing where the table says that its error is larger."""
    ends = {"low": -3e-6, "high": 5e-6, "interval": "+- 2 standard errors over sequences", "n": 16, "step": 100}
    found = [Measurement("mixer_replaced.identity", 1e-6, layer=layer, **ends) for layer in (0, 1)]
    (figure,) = [f for f in geometry({"mhc": [record(measures=found)]}).streams if "identity" in f.title]
    assert 'class="band' in figure.svg and "Band: two standard errors over sequences" in figure.caption
    plain = [Measurement("mixer_replaced.identity", 1e-6, layer=layer, step=100) for layer in (0, 1)]
    (figure,) = [f for f in geometry({"mhc": [record(measures=plain)]}).streams if "identity" in f.title]
    assert 'class="band' not in figure.svg and "Band:" not in figure.caption


def test_pictures_of_use_of_many_arms_are_folded():
    found = geometry({f"arm {i}": [made()] for i in range(3)})
    assert len(found.more[MIXING]) == 6 and not any("reads" in f.title for f in found.streams)


def test_picture_of_use_says_the_mean_over_seeds():
    read_picture, _ = usage_figures({"mhc": [made(), made(1, shift=0.02)]})
    assert read_picture.columns == ("site", "stream 0", "stream 1")
    assert read_picture.rows == (("0.attention", "0.91", "0.11"), ("1.attention", "0.11", "0.91"))
    assert "1/2. 2 seeds. Darkest: 0.91." in read_picture.caption
    cells, scale = read_picture.svg.split("sublayer, from the first to the last")
    assert cells.count("<rect") == 4 and cells.count('fill-opacity="1.000"') == 2
    assert scale.count("<rect") == 6 and ">0</text>" in scale and ">0.91</text>" in scale


def test_cells_that_are_not_finite_are_blank():
    figure = heat("t", ["a", "b"], ["s"], [[float("nan"), 0.0]], x_label="x", caption="c.")
    assert figure.svg.count("<rect") == 1 and 'fill-opacity="0.000"' in figure.svg
    assert figure.rows == (("a", "NaN"), ("b", "0"))


def test_tables_by_part_of_the_network():
    table = replaced_table({"mhc": [made()]})
    assert table is not None and table.rows == [("all layers (0-1)", "+0.02 (0.01)", "+0.02 (0.01)")]
    several = replaced_table({"mhc": [made(), made(1)], "hc": [made()]})
    assert several is not None and [row[0] for row in several.rows] == ["mhc: all layers (0-1)", "hc: all layers (0-1)"]
    windows = window_table({"mhc": [made()]})
    assert windows is not None and [row[:2] for row in windows.rows] == [("0-0", "1.5"), ("1-1", "1.5")]
    assert windows.rows[0][5] == "0.25"
    assert replaced_table({"additive": [record()]}) is window_table({"additive": [record()]}) is None


def test_coefficients_of_all_layers():
    table = coefficient_table({"mhc": [made()]})
    assert table is not None
    assert table.rows == [
        ("mhc: mix bias", "4.243", "1", "5.657"),
        ("mhc: read alpha", "2.236", "–", "5.657"),
    ]


def test_what_has_a_table_of_its_own_is_no_scalar():
    assert scalar_table({"mhc": [made()]}) is None
    assert in_own_table("mixer_replaced.identity") and in_own_table("sigma_2.window") and not in_own_table("sigma_2")


@pytest.mark.parametrize("name", ["amax_gain.window.forward", "stream_share.read", "coefficient_distance"])
def test_no_curves_for_what_is_in_a_table(name):
    assert shown(name).group == TABLE


def test_every_catalogued_measure_of_streams_has_a_title_and_a_place():
    from thalweg.geometry import catalog

    for entry in catalog.entries():
        if entry.function.split(".")[2] in ("mixing", "constraint", "streams") and entry.name != "amax_gain":
            known = shown(entry.name)
            assert known.group in (*GROUPS, STREAMS, TABLE) and known.group != GROUPS[-1], entry.name


def test_study_report(tmp_path):
    from thalweg.reports import write_study_report
    from thalweg.reports.study import StudyRecords

    plan = plan_of()
    arm = next(iter(plan.arms))
    verdict = StudyVerdict(plan.name, "small", "exploratory", "h" * 64, ())
    records = StudyRecords(plan=plan, scale="small", verdict=verdict, runs={arm: {0: made(), 1: made(1)}})
    page = read(write_study_report(records, tmp_path / "s.html"))
    assert "Several streams" in page.said and "Coefficients of the streams" in page.said
    assert "Amax gain, forward, from the start to a state" in page.said
    assert 'role="img"' in figure_of(page, "Streams that each sublayer reads")


def test_the_gain_axis_is_logarithmic_where_the_values_ask_for_it():
    values = [Measurement("amax_gain.from_start.forward", 10.0**layer, layer=layer, step=100) for layer in range(4)]
    (figure,) = geometry({"hc": [dataclasses.replace(made(), measures=Measurements(values))]}).streams
    assert "log scale" in figure.svg


def test_rounding_is_not_blown_up_into_a_curve():
    values = [
        Measurement("amax_gain.from_start.forward", 1 + 1e-7 * layer, layer=layer, step=100) for layer in range(4)
    ]
    (figure,) = geometry({"mhc": [dataclasses.replace(made(), measures=Measurements(values))]}).streams
    assert ">0.5</text>" in figure.svg  # the axis begins at zero
