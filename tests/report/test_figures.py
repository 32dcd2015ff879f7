"""Figures: what is drawn, what the tables say, and that nothing given can become markup."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from thalweg.reports import svg
from thalweg.reports.figures import Effect, Line, effects, lines
from thalweg.reports.measures import place, shown
from thalweg.reports.shown import DIAGNOSTIC, HEADLINE, OTHER, STATES, UPDATES
from thalweg.reports.text import big, clean, mean_sd, moment, number, spread, words

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</text></svg><script>alert('x')</script> & \"q\" \x00\x1b\u202e\ud800 </style>"


def draw(*curves, **kw):
    return lines("title", curves, x_label="layer", y_label="unit", caption="about.", **kw)


def parse(figure):
    return ElementTree.fromstring(figure.svg)


def drawn(figure, kind):
    return [e for e in parse(figure).iter(f"{SVG}path") if kind in e.get("class", "").split()]


def points(path):
    return [tuple(map(float, pair.split())) for pair in path.get("d").strip("MZ").split("L")]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (True, "yes"),
        (0, "0"),
        (-0.0, "0"),
        (3.0, "3"),
        (1234567, "1,234,567"),
        (7439.4, "7,439"),
        (0.0044481, "0.004448"),
        (1.23456e-5, "1.235e-5"),
        (-1.5e12 - 0.5, "-1.500e12"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
        ("text", "text"),
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_spread_shows_the_digits_that_the_deviation_leaves():
    assert spread(6.65891, 0.02744) == "6.659 ± 0.027"
    assert spread(0.5, None) == "0.5"
    assert spread(0.5, 0.0) == "0.5 ± 0"
    assert spread(12345.6, 321.0) == "12,346 ± 321"
    assert spread(math.nan, math.nan) == "NaN ± NaN"
    assert spread(1.0, 1e-12) == "1 ± 1.0e-12"
    assert mean_sd([1.0, 2.0, 3.0]) == "2.0 ± 1.0"
    assert mean_sd([]) == "–"


def test_small_texts():
    assert big(2_364_000) == "2.36 M"
    assert big(441e6, "B") == "441 MB"
    assert big(None) == big(None, "B") == "–"
    assert big(math.nan) == "NaN"
    assert moment("2026-11-29T18:57:33+00:00") == "2026-11-29 18:57 UTC"
    assert moment(None) == ""
    assert words({"a": [1, True], "b": None}) == "a 1, yes, b –"
    assert clean(HOSTILE).count("\ufffd") == 4


def test_places_and_order_of_curves():
    figure = draw(Line("up", [0, 1, 2], [1.0, 2.0, 3.0]), Line("down", [0, 1, 2], [3.0, 2.0, 1.0], look=1))
    up, down = (points(path) for path in drawn(figure, "arm"))
    assert [x for x, _ in up] == [x for x, _ in down]
    assert [y for _, y in up] == sorted((y for _, y in up), reverse=True)  # larger values lie higher
    assert up[1] == down[1]
    assert up[0] == (up[0][0], down[2][1])


def test_table_holds_the_numbers_of_every_curve():
    figure = draw(
        Line("a", [0, 1], [1.0, 2.0], [0.1, 0.2]),
        Line("a, step 0", [0, 1], [0.5, 0.5], kind="start"),
        Line("null: chance", [0, 2], [0.25, 0.25], kind="null"),
    )
    assert figure.columns == ("layer", "a", "a, step 0", "null: chance")
    assert figure.rows == (
        ("0", "1.00 ± 0.10", "0.5", "0.25"),
        ("1", "2.00 ± 0.20", "0.5", "–"),
        ("2", "–", "–", "0.25"),
    )
    assert [key.label for key in figure.legend] == ["a", "null: chance"]
    assert len(drawn(figure, "null")) == len(drawn(figure, "start")) == len(drawn(figure, "band")) == 1


def test_values_that_are_not_finite_leave_a_gap_and_stay_in_the_table():
    figure = draw(Line("a", range(6), [1.0, 2.0, math.nan, 4.0, 5.0, math.inf], [0.1] * 6))
    assert [len(points(path)) for path in drawn(figure, "arm")] == [2, 2]
    assert [row[1] for row in figure.rows][2] == "NaN ± 0.1"
    assert [row[1] for row in figure.rows][5] == "∞ ± 0.1"
    assert "2 of the values not finite" in figure.caption
    assert "nan" not in figure.svg.lower()
    assert "inf" not in figure.svg.lower()


@pytest.mark.parametrize("values", [[math.nan] * 3, [math.inf, -math.inf, math.nan], []])
def test_a_figure_without_a_finite_value_says_so(values):
    figure = draw(Line("a", range(len(values)), values))
    assert "no finite value" in figure.svg
    assert len(figure.rows) == len(values)
    parse(figure)


def test_a_diverged_run_does_not_set_the_scale():
    arm, lost = Line("a", [0, 1, 2], [1.0, 2.0, 3.0]), Line("b", [0, 1, 2], [1.0, 2.0, 1e9], kind="lost")
    with_it, without = draw(arm, lost), draw(arm)
    assert drawn(with_it, "arm")[0].get("d") == drawn(without, "arm")[0].get("d")
    assert points(drawn(with_it, "lost")[0])[2][1] == 24.0  # the upper edge
    assert "A curve on the edge lies beyond it." in with_it.caption
    assert "edge" not in without.caption


def test_log_axis_only_where_it_helps():
    wide, narrow = Line("a", [0, 1, 2], [0.01, 1.0, 100.0], [0.5] * 3), Line("a", [0, 1], [1.0, 2.0])
    assert "log scale" in draw(wide, log_y=True).svg
    assert "log scale" not in draw(narrow, log_y=True).svg
    assert "log scale" not in draw(Line("a", [0, 1], [0.0, 2.0]), log_y=True).svg
    ys = [y for _, y in points(drawn(draw(wide, log_y=True), "arm")[0])]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.11)
    assert all(svg_y <= 202.0 for path in drawn(draw(wide, log_y=True), "band") for _, svg_y in points(path))


def test_a_null_of_0_leaves_the_log_axis_and_is_named():
    """Catches: a null that a log axis has no place for, and that makes the axis linear."""
    falling = Line("a", [1, 2, 4], [0.4, 0.2, 0.01])
    zero, chance = (
        Line("null: nothing", [1, 2, 4], [0.0] * 3, kind="null"),
        Line("null: b", [1, 4], [0.3] * 2, kind="null"),
    )
    figure = draw(falling, zero, chance, log_y=True)
    assert "log scale" in figure.svg and len(drawn(figure, "null")) == 1
    assert [key.label for key in figure.legend] == ["a", "null: b"]
    assert figure.caption == 'about. Left out, as 0 has no place on a log scale: the null "nothing".'
    assert figure.columns[2] == "null: nothing" and figure.rows[0][2] == "0"
    plain = draw(falling, zero)
    assert len(drawn(plain, "null")) == 1 and "Left out" not in plain.caption
    assert "log scale" not in draw(Line("a", [0, 1], [0.0, 2.0]), zero, log_y=True).svg


def test_nulls_of_one_figure_are_told_apart():
    nulls = [Line(f"null: {i}", [0, 1], [i, i], kind="null") for i in range(4)]
    figure = draw(Line("a", [0, 1], [1.0, 2.0]), *nulls)
    dashes = [path.get("stroke-dasharray") for path in drawn(figure, "null")]
    assert len(set(dashes)) == 4 and dashes[0] == svg.NULL
    assert all(dash in key.svg for dash, key in zip(dashes, figure.legend[1:], strict=True))


def test_a_null_at_one_place_looks_as_in_the_legend():
    figure = draw(Line("a", [0, 1], [1.0, 2.0]), Line("null: b", [1], [1.5], kind="null"))
    (path,) = drawn(figure, "null")
    (left, y), (right, level) = points(path)
    assert y == level and 13 <= right - left <= 26 and right <= 428
    assert path.get("stroke-dasharray") == svg.NULL and svg.NULL in figure.legend[1].svg


@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [0.0, 0.0],
        [5.0, 5.0],
        [-3.0, -3.0],
        [1e-30, 2e-30],
        [1e18, 3e18],
        [-1e-7, 1e-7],
        [1e308, -1e308],
        [5e-324],
    ],
)
def test_any_range_gives_a_picture_with_ticks(values):
    figure = draw(Line("a", range(len(values)), values))
    labels = [e.text for e in parse(figure).iter(f"{SVG}text")]
    assert 2 <= len(labels) <= 20
    assert all(0 <= y <= 236 and 0 <= x <= 440 for path in drawn(figure, "arm") for x, y in points(path))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.13, 0.87), (-20, 3), (0, 7e6), (0, 3e-9), (99.5, 100.5)])
def test_ticks_are_round_inside_and_told_apart(low, high):
    axis = svg.Axis(low, high, 0, 100)
    found = svg.ticks(axis, 5)
    assert 2 <= len(found) <= 7
    room = 1e-9 * (high - low)
    assert all(low - room <= value <= high + room for value, _ in found)
    assert len({label for _, label in found}) == len(found)
    for value, label in found:
        assert float(label.replace(",", "")) == pytest.approx(value, rel=1e-3, abs=1e-12)


def test_log_ticks_are_powers():
    assert [label for _, label in svg.ticks(svg.Axis(0.02, 300, 0, 100, log=True))] == ["0.1", "1", "10", "100"]
    assert len(svg.ticks(svg.Axis(1e-12, 1e12, 0, 100, log=True))) <= 7


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (1, 10, "1 2 5 10"),
        (0.019, 0.6, "0.02 0.05 0.1 0.2 0.5"),
        (1.1, 99, "2 5 10 20 50"),
        (90, 50_000, "100 1,000 10,000"),
        (3e-7, 2e-5, "1e-6 1e-5"),
        (4e5, 6e6, "5e5 1e6 2e6 5e6"),
        (2.1, 4.9, "3 4"),  # too short for any of these: as on a linear axis
    ],
)
def test_log_ticks_are_1_2_5_or_decades(low, high, labels):
    found = svg.ticks(svg.Axis(low, high, 0, 100, log=True), 5)
    assert [label for _, label in found] == labels.split()
    for value, label in found:
        assert float(label.replace(",", "")) == pytest.approx(value)
        assert low <= value <= high


def test_the_first_21_arms_look_different():
    figure = draw(*(Line(str(i), [0, 1], [i, i + 1.0], look=i) for i in range(21)))
    looks = {(path.get("class"), path.get("stroke-dasharray")) for path in drawn(figure, "arm")}
    assert len(looks) == 21
    assert len({key.svg for key in figure.legend}) == 21


def test_an_arm_keeps_its_colour_when_others_are_missing():
    alone = draw(Line("delta", [0, 1], [1.0, 2.0], look=3))
    assert drawn(alone, "c3")
    assert not drawn(alone, "c0")


def test_no_fixed_colour_but_the_page_s():
    figure = draw(Line("a", [0, 1], [1.0, 2.0], [0.1, 0.1]), Line("n", [0, 1], [0, 0], kind="null"))
    assert not re.search(r"#[0-9a-f]{3,6}|rgb|style=|fill=|stroke=", figure.svg)


def test_hostile_text_never_becomes_markup():
    figure = lines(HOSTILE, [Line(HOSTILE, [0], [1.0])], x_label=HOSTILE, y_label=HOSTILE, caption=HOSTILE)
    effect = effects(HOSTILE, [Effect(HOSTILE, 1.0, 0.5, 1.5, 0.1, "greater", [1.0], HOSTILE, HOSTILE)], HOSTILE)
    for found in (figure, effect):
        assert {e.tag for e in parse(found).iter()} <= {f"{SVG}{tag}" for tag in ("svg", "text", "path", "rect")}
        assert "<script" not in found.svg
        found.svg.encode("utf-8")


def test_effects_show_margin_interval_and_seeds():
    row = Effect("H1", -0.03, -0.05, -0.01, -0.02, "less", [-0.02, -0.04], "nats/token", "inconclusive")
    figure = effects("effects", [row, row], "about")
    assert figure.rows[0] == ("H1", "-0.03", "-0.05", "-0.01", "-0.02", "less", "-0.02, -0.04", "nats/token")
    (interval, _), (margin, _) = drawn(figure, "interval"), drawn(figure, "margin")
    (left, _), (right, _) = points(interval)
    assert left < points(margin)[0][0] < right
    favoured = next(parse(figure).iter(f"{SVG}rect"))
    assert float(favoured.get("x")) + float(favoured.get("width")) == pytest.approx(points(margin)[0][0], abs=0.11)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_effects_without_a_finite_interval(bad):
    figure = effects("effects", [Effect("H1", bad, bad, bad, 0.1, "greater", [bad, 1.0], "", "void")], "about")
    assert not drawn(figure, "interval")
    parse(figure)


def test_where_measures_are_shown():
    assert shown("effective_rank").group == shown("token_cosine").group == HEADLINE
    assert shown("effective_rank.new_variant").group == STATES
    assert shown("relative_update.raw").group == UPDATES
    assert shown("relative_update.raw").title == "Relative size of the updates, as the sublayer returned them"
    assert shown("jacobian.skip.near_one").title == "Skip path, share of singular values near 1"
    assert shown("weight_gradient_norm").group == DIAGNOSTIC
    assert shown("never.heard_of").group == OTHER
    assert shown("never.heard_of").title == "never: heard of"
    assert sorted(["zzz", "rms", "effective_rank"], key=place) == ["effective_rank", "rms", "zzz"]
