"""Plan files of experiments: what they hold, what they refuse, whether they can decide."""

import tomllib

import pytest
from experiment_plans import TEXT, known, plan  # noqa: F401  # a fixture

from thalweg.errors import InputError, UnknownNameError
from thalweg.studies.check import check
from thalweg.studies.experiments.plan import ExperimentPlan
from thalweg.studies.plan import parse


def test_a_plan_says_what_runs_where():
    made = plan()
    assert isinstance(made, ExperimentPlan)
    assert made.experiments_at("small") == ["one", "two"] and made.experiments_at("few") == ["one"]
    assert made.options("one", "small").level == 1.0 and made.options("one", "few").level == 3.0
    assert [h.id for h in made.hypotheses_at("few")] == ["large", "null", "sure"]


def test_experiments_of_primary_hypotheses_run_first():
    made = plan(hypotheses__0__contrast={"two.plain": 1}, hypotheses__1__primary=False)
    assert made.experiments_at("small") == ["two", "one"]


def test_one_experiment_alone_goes_by_its_name():
    table = tomllib.loads(TEXT)
    del table["experiments"], table["scale"]["few"]
    table["experiment"] = {"experiment": "made_up", "options": {"level": 2.0}}
    table["hypotheses"] = [dict(table["hypotheses"][0], contrast={"made_up.plain": 1})]
    made = parse(table)
    assert made.options("made_up", "small").level == 2.0
    with pytest.raises(InputError, match="not both"):
        parse({**table, "experiments": {}})
    with pytest.raises(InputError, match=r"\[experiment\] names its experiment"):
        parse({**table, "experiment": {"options": {}}})


def test_the_hash_sees_values_alone():
    assert parse(tomllib.loads("# a remark\n" + TEXT)).hash() == plan().hash()
    assert plan(hypotheses__0__margin=0.6).hash() != plan().hash()
    assert plan(experiments__one__options={"level": 1.5}).hash() != plan().hash()


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"kind": "experimnet"}, "kind of plan"),
        ({"kind": 3}, "kind of plan"),
        ({"schema": 2}, "schema must be 1"),
        ({"alpha": 1.5}, "alpha"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"experiments": {}}, "at least one entry under 'experiments'"),
        ({"scale": {}}, "at least one entry under 'scale'"),
        ({"hypotheses": []}, "at least one entry under 'hypotheses'"),
        ({"experiments__one__experiment": "made_down"}, "made_up"),
        ({"experiments__one__options": {"levl": 1.0}}, "level"),
        ({"experiments__one__options": {"level": "high"}}, "level"),
        ({"experiments__a.b": {"experiment": "made_up"}}, "letters, digits"),
        ({"scale__small__seeds": [0, 0]}, "different whole numbers"),
        ({"scale__small__seeds": []}, "at least one"),
        ({"scale__small__seeds": [-1, 2]}, "from 0"),
        ({"scale__small__experiments": ["three"]}, "scale.small"),
        ({"scale__small__options": {"three": {}}}, "scale.small"),
        ({"scale__small__options": {"one": {"lvl": 1.0}}}, "level"),
        ({"hypotheses__0__measure": "made.valu"}, "made.value"),
        ({"hypotheses__0__contrast": {"one.plan": 1}}, "plain"),
        ({"hypotheses__0__contrast": {"one": 1}}, "arm of made.value"),
        ({"hypotheses__0__contrast": {"three.plain": 1}}, "EXPERIMENT.ARM"),
        ({"hypotheses__0__contrast": {}}, "empty contrast"),
        ({"hypotheses__0__at": "final"}, "at of large"),
        ({"hypotheses__0__against": "zero"}, "against"),
        ({"hypotheses__0__sd": -1.0}, "sd must not be negative"),
        ({"hypotheses__0__margin": float("nan")}, "finite"),
        ({"hypotheses__0__diverged": "unigram"}, "inconclusive or a number"),
        ({"hypotheses__0__identity": True}, "no finding can rest on it"),
        ({"hypotheses__1__id": "large"}, "ids must differ"),
        ({"subject": {}}, "subject"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(over, words):
    with pytest.raises(InputError) as error:
        plan(**over)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_scale_is_named():
    with pytest.raises(UnknownNameError, match="smol"):
        plan().at("smol")


def test_power_stands_where_a_spread_is_stated():
    found = check(plan(), "small", simulations=2000)
    assert found.problems == () and found.runs == 12
    assert [p.hypothesis for p in found.powers] == ["large", "pair"]
    assert all(p.result.power > 0.9 for p in found.powers)
    assert any("sure is an identity" in line for line in found.remarks)
    assert any("null states no spread" in line for line in found.remarks)


@pytest.mark.parametrize(
    ("scale", "over", "words"),
    [
        ("few", {}, "at least 5 seeds"),
        ("small", {"hypotheses__0__sd": 0.0}, "large is primary and states no spread"),
        ("small", {"hypotheses__0__sd_source": ""}, "large is primary and states no spread"),
        ("small", {"hypotheses__0__sd": 1.0}, "simulated power"),
        ("small", {"multiplicity": "none"}, "need a correction"),
        ("small", {"hypotheses__0__primary": False, "hypotheses__1__primary": False}, "needs a primary hypothesis"),
    ],
)
def test_a_plan_that_cannot_decide_is_not_locked(scale, over, words):
    found = check(plan(**over), scale, simulations=2000)
    assert any(words in line for line in found.problems)
    with pytest.raises(InputError, match="cannot be locked"):
        found.require()


def test_an_exploratory_or_demo_scale_says_so_and_may_be_locked():
    weak = {"hypotheses__0__sd": 1.0}
    look, smoke = (check(plan(**weak), scale, simulations=2000).require() for scale in ("look", "smoke"))
    assert any("nothing can be supported" in line for line in look.remarks)
    assert any("too small to judge" in line for line in smoke.remarks)
