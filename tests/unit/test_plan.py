"""Plan files: strict reading, identity, power check, locks."""

import copy
import datetime
import json
import re
import tomllib
from importlib import resources

import pytest

from thalweg.cli import main
from thalweg.errors import CheckpointError, InputError, UnknownNameError
from thalweg.studies import locking as locks
from thalweg.studies.check import check
from thalweg.studies.library import find, shipped_folder
from thalweg.studies.plan import digest, load, parse


@pytest.fixture
def table():
    return tomllib.loads((resources.files("thalweg.studies") / "template.toml").read_text(encoding="utf-8"))


def changed(table, path, value):
    """A deep copy of ``table`` with the value at the dotted ``path`` replaced."""
    new = copy.deepcopy(table)
    *heads, last = path.split(".")
    place = new
    for key in heads:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[last] = value
    return new


def test_template_is_a_plan_that_can_be_locked(table):
    assert check(parse(table), "small").problems == ()


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("schema", 2, "schema must be 1"),
        ("alpha", 1.5, "alpha must lie between"),
        ("arms.mgt.conection", "mgt", "Did you mean 'arms.mgt.connection'"),
        ("hypotheses.0.contrast", {"mtg": 1}, "Did you mean 'mgt'"),
        ("hypotheses.0.direction", "lower", "unknown value for hypotheses[0].direction"),
        ("hypotheses.0.sd", float("inf"), "must be a finite number"),
        ("hypotheses.0.contrast", {}, "empty contrast"),
        ("arms.additive_matched.match", {"parameters": "mgt", "flops": "mgt"}, "exactly one"),
        ("arms.additive_matched.match", {"parameters": "additive_matched"}, "matched itself"),
        ("scale.small.seeds", [0, 0, 1], "must be different"),
        ("scale.small.tuning_seed", 0, "is one of the seeds"),
        ("scale.small.tuning_seed", [1000, 4], "tuning_seed 4 is one of the seeds"),
        ("scale.small.tuning_seed", [1000, 1000], "must be one integer or different ones"),
        ("scale.small.tuning_seed", [], "must be one integer or different ones"),
        ("scale.small.tuning_seed", "many", "scale.small.tuning_seed must be"),
        ("scale.small.kind", "serious", "unknown value for scale.small.kind"),
        ("scale.small.seeds", "five", "must be"),
        ("hypotheses", [], "at least one entry"),
        ("train.clip", float("nan"), "train.clip must be a finite number"),
        ("scale.small.train.lr", float("inf"), "scale.small.train.lr must be a finite number"),
        ("arms.mgt.options.preset", datetime.date(2026, 1, 2), "arms.mgt.options.preset is a date"),
        ("scale.small.learning_rates", [1e-3, float("nan"), 4e-3], "scale.small.learning_rates[1] must be a finite"),
        ("scale.small.learning_rates", [0.0, 1e-3, 2e-3], "must be positive and finite"),
        ("scale.small.tuning_fraction", 0.0, "must lie in (0, 1]"),
        ("scale.small.tuning_fraction", 1.5, "must lie in (0, 1]"),
        ("scale.small.extend", -1, "must be 0 or more"),
        ("arms.a/b", {"connection": "mgt"}, "a name holds only letters"),
        ("scale.", {"kind": "demo", "seeds": [0]}, "a name holds only letters"),
    ],
)
def test_wrong_plans(table, path, value, says):
    with pytest.raises(InputError, match=re.escape(says)):
        parse(changed(table, path, value))


def test_hash_sees_values_and_nothing_else(table, tmp_path):
    text = (resources.files("thalweg.studies") / "template.toml").read_text(encoding="utf-8")
    (tmp_path / "a.toml").write_text(text)
    (tmp_path / "b.toml").write_text("# another comment\n" + text.replace("alpha = 0.05", "alpha   =  0.05"))
    assert load(tmp_path / "a.toml").hash() == load(tmp_path / "b.toml").hash()
    assert parse(changed(table, "hypotheses.0.margin", -0.03)).hash() != parse(table).hash()


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("scale.small.seeds", [0, 1, 2], "at least 5 seeds"),
        ("hypotheses.0.sd", 0.2, "simulated power"),
        ("scale.small.learning_rates", [], "one grid"),
        ("scale.small.learning_rates", [1e-3, 2e-3], "at least 3"),
        ("hypotheses.0.primary", False, "needs a primary hypothesis"),
        ("hypotheses.0.at", "finale", "at must be one of final, best"),
        ("hypotheses.0.at", "layer:-1", "layer:K with a number"),
        ("hypotheses.0.diverged", "unigramm", "diverged must be unigram, inconclusive or a finite number"),
    ],
)
def test_confirmatory_plans_that_cannot_decide_are_refused(table, path, value, says):
    with pytest.raises(InputError, match=says):
        check(parse(changed(table, path, value)), "small").require()


def test_every_tuning_seed_is_counted(table):
    several = parse(changed(table, "scale.small.tuning_seed", [1000, 1001, 1002]))
    assert check(several, "small").tuning_runs == 3 * check(parse(table), "small").tuning_runs > 0


def test_power_is_shown_in_the_sign_of_the_contrast_and_asks_nothing_of_a_demo(table):
    (power,) = check(parse(table), "small").powers
    assert (power.result.effect, power.result.margin, power.direction) == (-0.06, -0.02, "less")
    assert -0.06 < power.result.detectable < -0.02
    weak = check(parse(changed(table, "hypotheses.0.sd", 0.5)), "smoke")
    assert weak.problems == ()
    assert not any("needs" in remark for remark in weak.remarks)


def test_a_power_that_rests_on_a_guess_is_said(table):
    def says(plan, scale="small"):
        return [remark for remark in check(parse(plan), scale).remarks if "is a guess" in remark]

    assert len(says(table)) == 1  # the template's own spread is one
    assert says(table, "smoke") == []
    assert says(changed(table, "hypotheses.0.sd_source", "pilot of three seeds: 0.02")) == []


def test_check_of_a_plan_with_problems_ends_in_one_error_line(table, tmp_path, capsys):
    text = (resources.files("thalweg.studies") / "template.toml").read_text(encoding="utf-8")
    (tmp_path / "p.toml").write_text(text.replace('at = "final"', 'at = "finale"').replace("sd = 0.015", "sd = 0.5"))
    assert main(["study", "check", str(tmp_path / "p.toml"), "--scale", "smoke", "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert "< -0.02" in out
    assert re.fullmatch(r"error: the plan cannot be locked at scale smoke: [^\n]*'finale'\n", err)


@pytest.mark.parametrize("verb", ["check", "lock"])
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('connection = "mgt"', 'connection = "mgtt"', "unknown connection 'mgtt'"),
        ("[train]", '[train]\nattention_edit = "value:full:0,layers=9"', "layers are numbers from 0 to"),
    ],
)
def test_an_arm_whose_model_cannot_be_made_is_named_before_the_study_runs(tmp_path, capsys, verb, old, new, says):
    text = (resources.files("thalweg.studies") / "template.toml").read_text(encoding="utf-8")
    path = tmp_path / "p.toml"
    assert text.count(old) >= 1
    path.write_text(text.replace("NAME", "p").replace(old, new))
    assert main(["study", verb, str(path), "--scale", "smoke", "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("error: arm ") and says in line
    assert not (tmp_path / "records").exists() and not path.with_name("p.smoke.lock.json").exists()


@pytest.mark.parametrize(
    ("key", "value"), [("arms", []), ("arms", {"mgt": 1}), ("power", 3), ("plan_hash", None), ("locked", {})]
)
def test_a_lock_of_wrong_types_is_broken(tmp_path, key, value):
    path = tmp_path / "p.toml"
    path.write_text((resources.files("thalweg.studies") / "template.toml").read_text(encoding="utf-8"))
    locks.write(path, "small", {"mgt": {"width": 8}}, {"H1": 0.9})
    held = locks.path_of(path, "small")
    held.write_text(json.dumps({**json.loads(held.read_text()), key: value}))
    with pytest.raises(CheckpointError, match=f"is broken: {key}"):
        locks.read(path, "small")


def test_two_primary_hypotheses_need_a_correction(table):
    second = {**table["hypotheses"][0], "id": "H2"}
    plan = parse({**table, "hypotheses": [*table["hypotheses"], second], "multiplicity": "none"})
    assert any("need a correction" in problem for problem in check(plan, "small").problems)


def test_lock_is_never_replaced(table, tmp_path):
    path = tmp_path / "p.toml"
    path.write_text((resources.files("thalweg.studies") / "template.toml").read_text(encoding="utf-8"))
    arms = {"mgt": {"width": 8}}
    first = locks.write(path, "small", arms, {"H1": 0.9})
    assert locks.write(path, "small", arms, {"H1": 0.9}) == first == locks.read(path, "small")
    assert locks.differences(load(path), "small", arms, first) == []
    assert locks.differences(load(path), "small", {"mgt": {"width": 8, "field_of_tomorrow": 1}}, first) == []
    assert "resolves mgt differently" in locks.differences(load(path), "small", {"mgt": {"width": 9}}, first)[0]
    with pytest.raises(InputError, match="give the changed plan a new name"):
        locks.write(path, "small", {"mgt": {"width": 9}}, {})
    path.write_text(path.read_text().replace("margin = -0.02", "margin = -0.01"))
    assert locks.differences(load(path), "small", arms, first) == ["the plan was edited after it was locked"]


def test_no_lock_says_what_to_do(tmp_path):
    with pytest.raises(InputError, match="thalweg study lock"):
        locks.read(tmp_path / "p.toml", "small")


def test_find_by_name_and_by_path(tmp_path):
    assert find("demo") == shipped_folder() / "demo.toml"
    with pytest.raises(UnknownNameError, match="Did you mean 'demo'"):
        find("demmo")
    with pytest.raises(InputError, match="no such plan"):
        find(tmp_path / "x.toml")


@pytest.mark.parametrize("path", sorted(shipped_folder().glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_plans_parse(path):
    plan = load(path)
    assert plan.name == path.stem
    for name in plan.scale:
        assert plan.hypotheses_at(name)
        assert check(plan, name, simulations=2000).problems == ()


def test_digest_refuses_nan():
    with pytest.raises(ValueError, match="JSON compliant"):
        digest({"x": float("nan")})
