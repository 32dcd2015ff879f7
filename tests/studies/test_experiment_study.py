"""A study of experiments from lock to report; verdicts by rule on planted values, and rules that are none."""

import dataclasses
import json
import math

import pytest
from experiment_plans import TEXT, known, plan  # noqa: F401  # a fixture

from thalweg import config, studies
from thalweg.cli import main
from thalweg.errors import CheckpointError, InputError
from thalweg.records import Measurements
from thalweg.studies import judging
from thalweg.studies import locking as locks
from thalweg.studies.experiments import study as running
from thalweg.studies.experiments.base import registry, value_of
from thalweg.studies.observe import Observation
from thalweg.training.config import TrainConfig


def written(folder, text=TEXT, name="p"):
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def locked(folder, text=TEXT, scale="small"):
    study = studies.study(written(folder, text), scale)
    studies.lock(study)
    return study


def status(study):
    return {v.hypothesis: v.status for v in studies.verdict(study).verdicts}


# Running


def test_nothing_runs_before_the_lock(tmp_path):
    study = studies.study(written(tmp_path), "small")
    with pytest.raises(InputError, match="not locked"):
        studies.run(study)
    assert set(status(study).values()) == {"void"}


def test_runs_go_in_complete_seed_blocks_and_resume(tmp_path):
    study = locked(tmp_path)
    assert [job.name for job in study.missing()][:3] == ["one seed 0", "two seed 0", "one seed 1"]
    said = []
    assert studies.run(study, limit=3, say=said.append) == 3 and study.progress() == (3, 12)
    assert "  seed 0" in said
    assert status(study)["large"] == "void"  # of six seeds two are there
    again = studies.study(tmp_path / "p.toml", "small")
    assert again.missing()[0].name == "two seed 1"
    assert studies.run(again) == 9 and studies.run(again) == 0 and again.missing() == []
    assert len(list((tmp_path / "records" / "experiments").glob("made_up-s*.jsonl"))) == 12


def test_equal_options_share_their_record(tmp_path):
    study = locked(tmp_path, TEXT.replace("level = 0.2", "level = 1.0"))
    assert studies.run(study) == 6 and study.progress() == (12, 12)


def test_a_plan_edited_after_its_lock_is_void_and_does_not_run(tmp_path):
    study = locked(tmp_path)
    studies.run(study)
    assert status(study)["large"] == "supported"
    changed = studies.study(written(tmp_path, TEXT.replace("margin = 0.5", "margin = 0.4")), "small")
    assert set(status(changed).values()) == {"void"}
    with pytest.raises(InputError, match="needs a new name"):
        studies.run(changed)


def test_a_record_changed_by_hand_is_refused(tmp_path):
    study = locked(tmp_path)
    studies.run(study, limit=1)
    (path,) = (tmp_path / "records" / "experiments").glob("*.jsonl")
    path.write_text(path.read_text().replace('"value": [1.0', '"value": [9.0'))
    with pytest.raises(CheckpointError, match="changed by hand"):
        study.missing()


def test_a_default_that_changed_is_seen_by_the_lock(tmp_path, monkeypatch):
    study = locked(tmp_path)
    studies.run(study)
    entry = registry["made_up"]

    @dataclasses.dataclass(frozen=True)
    class Later(entry.Options):
        noise: float = 0.5

    monkeypatch.setitem(
        registry._entries,
        "made_up",
        dataclasses.replace(registry.entry("made_up"), value=dataclasses.replace(entry, Options=Later)),
    )
    now = studies.study(tmp_path / "p.toml", "small")
    with pytest.raises(CheckpointError, match="another noise"):
        now.records()


def test_what_cannot_run_here_leaves_the_others_running(tmp_path):
    study = locked(tmp_path, TEXT.replace("level = 0.2", 'fail = "no such model: get it by pip"'))
    with pytest.raises(InputError) as error:
        studies.run(study)
    assert str(error.value) == "6 runs finished; two seed 0 (and 5 more) cannot run here: no such model: get it by pip"
    assert study.progress() == (6, 12) and status(study)["large"] == "supported" and status(study)["pair"] == "void"


def test_a_seed_that_cannot_run_leaves_the_other_seeds_running(tmp_path):
    study = locked(tmp_path, TEXT.replace("level = 0.2", 'level = 0.2, fail = "no head can go", fails_at = [1]'))
    with pytest.raises(InputError, match=r"^11 runs finished; two seed 1 cannot run here: no head can go$"):
        studies.run(study)
    assert [job.name for job in study.missing()] == ["two seed 1"]


def test_a_seed_whose_training_diverged_is_a_result(tmp_path):
    """It takes the value that each hypothesis states, also where rows are reduced and less their null."""
    text = TEXT.replace("level = 1.0", "level = 1.0, diverges_at = [5]").replace(
        "margin = 0.5", "margin = 0.5\ndiverged = 0.9", 1
    )
    said = []
    study = locked(tmp_path, text)
    assert studies.run(study, say=said.append) == 12 and study.missing() == []
    assert "  the model diverged at seed 5" in said
    found = {v.hypothesis: v for v in studies.verdict(study).verdicts}
    assert found["large"].status == "supported" and found["large"].values[5] == 0.9
    assert found["large"].substituted == ("one.plain seed 5: not finite, takes 0.9",)
    for name in ("pair", "null", "sure"):
        assert found[name].status == "inconclusive" and "diverged: one." in found[name].reason


def test_a_reduction_does_not_pass_over_what_is_not_a_number():
    rows = Measurements()
    for value in (1.0, math.nan, 2.0):
        rows.add("made.many", value, arm="turned")
    assert all(math.isnan(value_of(rows, "made.many", "turned", at, "value")) for at in ("min", "max", "mean"))


def test_the_lock_holds_the_defaults_of_a_nested_training(tmp_path, monkeypatch):
    """Catches: a changed default of a training that no lock sees; and a lock or record of before it held them that is refused."""
    study = locked(tmp_path, TEXT.replace("level = 1.0", "level = 1.0, train = { depth = 2 }"))
    studies.run(study)
    table = study.uses["one"].table
    assert table["train.depth"] == 2 and table["train.clip"] == TrainConfig().clip and "train.seed" not in table
    assert not any(key.startswith("train.") for key in study.uses["two"].table)

    def without(place):
        made = json.loads(place.read_text())
        for use in made["arms"].values():
            for key in [key for key in use if key.startswith("train.")]:
                del use[key]
        place.write_text(json.dumps(made))

    plain = config.to_plain
    monkeypatch.setattr(
        config, "to_plain", lambda v: {**plain(v), "clip": 0.25} if isinstance(v, TrainConfig) else plain(v)
    )
    now = running.ExperimentStudy(tmp_path / "p.toml", "small")
    with pytest.raises(InputError, match="resolves one differently"):
        studies.run(now)
    with pytest.raises(CheckpointError, match=r"another train\.clip"):
        now.records()
    assert now.uses["one"].fingerprint == study.uses["one"].fingerprint
    without(locks.path_of(tmp_path / "p.toml", "small"))
    locks.require(now)


def test_a_run_must_leave_what_its_experiment_declares(tmp_path):
    study = locked(tmp_path, TEXT.replace("level = 0.2", "leave_out = true"))
    with pytest.raises(InputError, match=r"left no row made\.many of arm 'turned'"):
        studies.run(study)


def test_several_jobs_are_refused(tmp_path):
    with pytest.raises(InputError, match="one after the other"):
        studies.run(locked(tmp_path), jobs=2)


# Verdicts


def judged(tmp_path, scale="small", **values):
    """The study whose records are planted: values of ``one`` and ``two`` by seed."""
    study = locked(tmp_path, scale=scale)
    for name, column in values.items():
        for seed, value in enumerate(column):
            rows = Measurements()
            rows.add("made.value", value, arm="plain", null=0.0)
            rows.add("made.zero", 0.0, arm="plain")
            for i in range(3):
                rows.add("made.many", value + i, arm="turned", step=i, null=1.0)
            use = study.uses[name]
            run = running.RunRecord(use.fingerprint, use.table, seed, "done", {"seconds": 1.0}, {}, rows)
            running.write(study.store.path(use.fingerprint, use.experiment, seed), run)
    return study


HIGH = [0.9, 1.0, 1.1, 0.95, 1.05, 1.0]
LOW = [0.1, 0.2, 0.15, 0.1, 0.2, 0.15]
WIDE = [0.0, 1.2, 0.1, 1.1, 0.3, 0.9]


@pytest.mark.parametrize(("one", "wanted"), [(HIGH, "supported"), (LOW, "refuted"), (WIDE, "inconclusive")])
def test_a_value_is_judged_against_its_margin(tmp_path, one, wanted):
    study = judged(tmp_path, one=one, two=LOW)
    found = next(v for v in studies.verdict(study).verdicts if v.hypothesis == "large")
    assert found.status == wanted
    assert found.estimate == pytest.approx(sum(one) / 6) and found.statistics.smallest_sign_flip == 2.0**-5


def test_two_columns_are_paired_by_seed(tmp_path):
    two = [v - 0.6 for v in WIDE]  # far apart in both columns, of one difference
    study = judged(tmp_path, one=WIDE, two=two)
    assert status(study)["pair"] == "supported" and status(study)["large"] == "inconclusive"


def test_rows_are_reduced_and_their_null_is_taken_off(tmp_path):
    study = judged(tmp_path, one=HIGH, two=LOW)
    found = next(v for v in studies.verdict(study).verdicts if v.hypothesis == "null")
    assert found.estimate == pytest.approx(sum(HIGH) / 6 + 1 - 1)
    rows = study.records()["one"][0].measures
    assert [value_of(rows, "made.many", "turned", at, "value") for at in ("min", "max", "median")] == [0.9, 2.9, 1.9]
    with pytest.raises(InputError, match="has 3 rows"):
        value_of(rows, "made.many", "turned", "only", "value")
    with pytest.raises(InputError, match="has no null"):
        value_of(rows, "made.zero", "plain", "only", "null")


def test_a_column_of_several_rows_without_a_reduction_voids_its_hypothesis_alone(tmp_path):
    """Catches: one hypothesis that cannot be read, which no check sees before a run, and which ends the whole verdict."""
    study = locked(tmp_path, TEXT.replace('at = "mean"\n', ""))
    studies.run(study)
    found = {v.hypothesis: v for v in studies.verdict(study).verdicts}
    assert found["null"].status == "void" and "made.many of turned has 3 rows" in found["null"].reason
    assert found["large"].status == "supported" and studies.verdict(study).status == "void"


def test_an_exploratory_plan_supports_nothing_and_a_demo_is_not_judged(tmp_path):
    look = judged(tmp_path, "look", one=HIGH, two=LOW)
    assert status(look)["large"] == "inconclusive" and "supports nothing" in studies.verdict(look).verdicts[0].reason
    studies.lock(studies.study(tmp_path / "p.toml", "smoke"))
    assert set(status(studies.study(tmp_path / "p.toml", "smoke")).values()) == {"inconclusive"}


def test_a_value_that_is_not_finite_takes_its_rule(tmp_path):
    study = judged(tmp_path, one=[*HIGH[:5], math.nan], two=LOW)
    assert status(study)["large"] == "inconclusive"
    other = TEXT.replace("margin = 0.5", "margin = 0.5\ndiverged = 0.0", 1)
    (tmp_path / "other").mkdir()
    changed = locked(tmp_path / "other", other)
    for path in study.store.folder.glob("*.jsonl"):
        changed.store.folder.mkdir(parents=True, exist_ok=True)
        (changed.store.folder / path.name).write_bytes(path.read_bytes())
    found = studies.verdict(changed).verdicts[0]
    assert found.values[5] == 0.0 and found.substituted and found.status == "inconclusive"


def test_what_has_not_learned_decides_nothing(tmp_path):
    study = locked(tmp_path, TEXT.replace("level = 1.0", "level = 1.0, learned = false"))
    studies.run(study)
    found = {v.hypothesis: v for v in studies.verdict(study).verdicts}
    assert found["large"].status == "inconclusive" and "loss too high" in found["large"].reason


# Rules that are none


def cases():
    """(values, kind, wanted) of the hypothesis ``large``."""
    return [
        (HIGH, "confirmatory", "supported"),
        (LOW, "confirmatory", "refuted"),
        (WIDE, "confirmatory", "inconclusive"),
        (HIGH, "exploratory", "inconclusive"),
        ([0.4, 0.45, 0.42, 0.44, 0.41, 0.43], "confirmatory", "refuted"),  # above zero, short of the margin
        ([-v for v in HIGH], "confirmatory", "refuted"),
        ([*HIGH[:5], None], "confirmatory", "void"),
        ([*HIGH[:5], math.nan], "confirmatory", "inconclusive"),
    ]


def holds(rule):
    """Whether a rule gives what the planted values must give."""
    made = plan()
    h = made.hypotheses[0]
    for values, kind, wanted in cases():
        seen = {
            seed: None
            if v is None
            else Observation(v)
            if math.isfinite(v)
            else Observation(None, diverged=True, reason="not finite")
            for seed, v in enumerate(values)
        }
        found = rule(made, "small", kind, [judging.Trial(h, {"one.plain": seen})], 6)
        if found.verdicts[0].status != wanted:
            return False
    return True


def without_margin(made, scale, kind, trials, units, **more):
    trials = [judging.Trial(dataclasses.replace(t.h, margin=0.0), t.seen) for t in trials]
    return judging.rule(made, scale, kind, trials, units, **more)


def other_sign(made, scale, kind, trials, units, **more):
    trials = [judging.Trial(dataclasses.replace(t.h, direction="less"), t.seen) for t in trials]
    return judging.rule(made, scale, kind, trials, units, **more)


def always_confirmatory(made, scale, kind, trials, units, **more):
    return judging.rule(made, scale, "confirmatory", trials, units, **more)


def present_only(made, scale, kind, trials, units, **more):
    trials = [
        judging.Trial(
            t.h, {c: {s: o for s, o in by.items() if o is not None and o.value is not None} for c, by in t.seen.items()}
        )
        for t in trials
    ]
    return judging.rule(made, scale, kind, trials, units, **more)


def by_mean_alone(made, scale, kind, trials, units, **more):
    seen = [
        judging.Trial(
            t.h,
            {
                c: {s: o and Observation(sum(v.value for v in by.values()) / len(by)) for s, o in by.items()}
                for c, by in t.seen.items()
            },
        )
        if t.complete()
        else t
        for t in trials
    ]
    return judging.rule(made, scale, kind, seen, units, **more)


def test_the_rule_holds_and_mutants_do_not():
    assert holds(judging.rule)
    for mutant in (without_margin, other_sign, always_confirmatory, present_only, by_mean_alone):
        assert not holds(mutant), mutant.__name__


# From the command line


def test_from_template_to_report(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*args):
        code = main([*args])
        return code, capsys.readouterr().out

    assert run("study", "new", "q.toml", "--kind", "experiment")[0] == 0
    assert run("study", "check", "q.toml", "--scale", "small")[0] == 0
    assert run("study", "lock", "q.toml", "--scale", "smoke")[0] == 0
    assert run("study", "run", "q.toml", "--scale", "smoke", "--quiet")[0] == 0
    code, text = run("study", "status", "q.toml", "--scale", "smoke")
    assert code == 0 and "2 of 2 runs recorded" in text
    code, text = run("study", "verdict", "q.toml", "--scale", "smoke", "--json")
    assert code == 3 and json.loads(text)["verdicts"][0]["hypothesis"] == "H1"
    code, text = run("report", "q.toml", "--scale", "smoke", "-o", "q.html")
    page = (tmp_path / "q.html").read_text()
    assert code == 0 and "recurrence.rms" in page and "an identity" in page and "judged by a hypothesis" in page


def test_the_report_of_a_study_without_records_names_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    assert main(["report", "p.toml", "--scale", "small", "-o", "p.html"]) == 0
    page = (tmp_path / "p.html").read_text()
    assert "12 of 12 runs are missing" in page and "void" in page
