"""What a study of trained arms finds out about its lock, its data and its records, and how it shares its runs with another process."""

import json
import math
import shutil

import pytest
import training_plans as plans

from thalweg import studies
from thalweg.cli import main
from thalweg.errors import CheckpointError, InputError, InUseError
from thalweg.records.run import RunFolder
from thalweg.reports.study import note_lines
from thalweg.studies import locking as locks
from thalweg.studies import runner, store
from thalweg.studies.check import check
from thalweg.studies.observe import why_unlearned
from thalweg.studies.resolve import fingerprint


def reasons(study):
    return [verdict.reason for verdict in studies.verdict(study).verdicts]


# Locks


def test_the_lock_of_another_scale_is_void_and_runs_nothing(tmp_path, monkeypatch):
    plans.locked(tmp_path, monkeypatch, scale="look")
    shutil.copyfile(tmp_path / "p.look.lock.json", tmp_path / "p.small.lock.json")
    study = plans.study(tmp_path)
    plans.plant(study)
    assert reasons(study) == ["the lock of scale small is one of scale look"]
    for refused in (lambda: studies.run(study), lambda: studies.lock(study)):
        with pytest.raises(InputError, match=r"small\.lock\.json is the lock of scale look; restore the one of this"):
            refused()


def test_a_lock_says_how_many_runs_were_there_before_it(tmp_path, monkeypatch, capsys):
    """Catches: a margin that is changed, and locked anew, once the results are known."""
    study = plans.locked(tmp_path, monkeypatch)
    plans.plant(study)
    assert locks.read(study.path, "small").recorded_before == 0
    assert not any("locked when" in note for note in studies.verdict(study).notes)
    locks.path_of(study.path, "small").unlink()
    study.path.write_text(plans.TEXT.replace("margin = -0.02", "margin = -0.03"))
    assert main(["study", "lock", str(study.path), "--scale", "small"]) == 0
    said = "locked when 10 of 10 seed runs were recorded (some may belong to other plans)"
    assert f"note: {said}" in capsys.readouterr().err
    again = studies.study(study.path, "small")
    judged = studies.verdict(again)
    assert judged.notes[-1] == said and judged.status == "supported"
    assert any("10 of 10 seed runs were recorded" in line for line in note_lines(judged, again.plan))
    assert main(["study", "verdict", str(study.path), "--scale", "small"]) == 0
    assert said in capsys.readouterr().out
    assert main(["study", "verdict", str(study.path), "--scale", "small", "--json"]) == 0
    assert said in json.loads(capsys.readouterr().out)["notes"]


def test_a_lock_of_before_that_count_is_read_and_notes_nothing(tmp_path, monkeypatch):
    study = plans.locked(tmp_path, monkeypatch)
    held = locks.path_of(study.path, "small")
    table = json.loads(held.read_text())
    held.write_text(json.dumps({**table, "recorded_before": True}))
    with pytest.raises(CheckpointError, match="recorded_before must be a whole number, got True"):
        locks.read(study.path, "small")
    del table["recorded_before"]
    held.write_text(json.dumps(table))
    plans.plant(study)
    assert locks.read(study.path, "small").note(10, "seed runs") == "" and studies.verdict(study).status == "supported"


# Data and records


@pytest.mark.parametrize("odd", ["mgt_seed_3", "additive_lr_0.004"])
def test_data_that_changed_between_runs_are_void(tmp_path, monkeypatch, odd):
    study = plans.locked(tmp_path, monkeypatch)
    plans.plant(study, **{odd: {"data": "b" * 64}})
    (reason,) = reasons(study)
    assert reason.startswith("the data text:novel.txt changed between runs: aaaaaaaaaaaa in mgt seed 0,")
    assert f"bbbbbbbbbbbb in {odd.replace('_', ' ')}" in reason and "run those anew" in reason


def test_data_that_arms_ask_for_in_other_words_may_differ(tmp_path, monkeypatch):
    text = plans.TEXT.replace('connection = "additive"', 'connection = "additive"\ntrain = { tokenizer = "byte" }')
    study = plans.locked(tmp_path, monkeypatch, text)
    other = {job.name.replace(" ", "_"): {"data": "b" * 64} for job in study.missing() if job.arm == "additive"}
    plans.plant(study, **other, **{f"additive_seed_{seed}": {"data": "b" * 64} for seed in range(5)})
    assert studies.verdict(study).status == "supported"


def test_a_record_of_other_defaults_names_the_version_that_made_it(tmp_path):
    """Stating the old value, which was the advice, makes another run of it."""
    study = plans.study(tmp_path)
    run = study.missing()[0].config
    made = plans.record(run, 3.0, versions={"thalweg": "0.0.9"}, provenance={"git": {"commit": "c0ffee" * 7}})
    made.config["clip"] = 0.25
    plans.keep(study, run, made)
    with pytest.raises(InputError) as caught:
        study.look_up(run)
    says = str(caught.value)
    assert "was made by thalweg 0.0.9 at commit c0ffeec0ffee, with other defaults for clip; go on with that" in says
    stated = plans.study(tmp_path, plans.TEXT.replace("[train]", "[train]\nclip = 0.25")).missing()[0].config
    assert fingerprint(stated) != fingerprint(run)


@pytest.mark.parametrize("schema", [1, 2])
def test_a_record_without_a_checksum_is_refused(tmp_path, schema):
    study = plans.study(tmp_path)
    run = study.missing()[0].config
    plans.keep(study, run, plans.record(run, 3.0))
    path = study.store.path(fingerprint(run), run.connection, run.seed)
    head, _, body = path.read_text().partition("\n")
    table = {**json.loads(head), "schema": schema}
    del table["sha256"]
    path.write_text(f"{json.dumps(table)}\n{body.replace('3.0', '2.0')}")
    with pytest.raises(CheckpointError, match=r"was changed by hand: .* restore it from version control, or remove it"):
        study.look_up(run)


def test_the_best_of_a_long_series_is_kept():
    series = [(i, 5.0 - i / 500) for i in range(500)]
    series[123], series[345], series[77] = (123, 0.5), (345, 9.0), (77, math.nan)
    kept = store._thin(series)
    assert {(123, 0.5), (345, 9.0), series[0], series[-1]} <= set(kept) and len(kept) <= store.MOST_POINTS + 2
    assert kept == sorted(kept, key=lambda point: point[0])
    assert store._thin(series[:80]) == series[:80]


@pytest.mark.parametrize(
    ("loss", "bits", "says"),
    [(math.nan, None, "the final loss is nan"), (math.inf, None, "is inf"), (1.0, math.nan, "bits/byte is nan")],
)
def test_a_loss_that_is_not_a_number_has_not_learned(loss, bits, says):
    for nulls in ({}, {"unigram_entropy": 6.0, "xz_bits_per_byte": 2.0}):
        assert says in why_unlearned(loss, bits, nulls)
    assert why_unlearned(1.0, 1.0, {"unigram_entropy": 6.0, "xz_bits_per_byte": 2.0}) == ""


# Hypotheses that nothing can judge

SECOND = """
[[hypotheses]]
id = "H2"
statement = "lower"
measure = "MEASURE"
contrast = { mgt = 1, additive = -1 }
at = "AT"
primary = false
"""


def second(measure, at):
    return plans.TEXT + SECOND.replace("MEASURE", measure).replace("AT", at) + plans.JUDGED


@pytest.mark.parametrize(
    ("measure", "at", "says"),
    [
        ("val/loss", "last", "val/loss is a logged series, taken at final or best, got 'last'"),
        ("task/exact_match", "layer:1", "is a logged series"),
        ("effective_rank", "best", "effective_rank is a measure by depth, taken at last, final"),
    ],
)
def test_the_check_refuses_what_no_record_can_say(tmp_path, measure, at, says):
    study = plans.study(tmp_path, second(measure, at))
    with pytest.raises(InputError, match=f"hypothesis H2: .*{says}"):
        check(study.plan, "small").require()
    assert check(plans.study(tmp_path).plan, "small").problems == ()


def test_a_hypothesis_that_cannot_be_read_leaves_the_others_judged(tmp_path, monkeypatch):
    """A plan that was locked before the check knew it."""
    monkeypatch.setattr("thalweg.studies.check.check_rules", lambda h: None)
    study = plans.locked(tmp_path, monkeypatch, second("val/loss", "last"))
    plans.plant(study)
    judged = studies.verdict(study)
    assert [v.status for v in judged.verdicts] == ["supported", "void"] and judged.status == "void"
    assert judged.verdicts[1].reason.startswith("hypothesis H2: val/loss is a logged series")


# Counts, flags, and runs that another process has


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run p.toml --limit -1", "--limit must be at least 1, got -1"),
        ("run p.toml --limit 0", "--limit must be at least 1, got 0"),
        ("run p.toml --jobs 0", "--jobs must be at least 1, got 0"),
        ("run p.toml --jobs -2", "--jobs must be at least 1, got -2"),
        ("verdict p.toml --limit 3", "--limit belongs to `study run`; `study verdict` takes none, leave it out"),
        ("lock p.toml --jobs 2", "--jobs belongs to `study run`"),
        ("check p.toml --kind training", "--kind belongs to `study new`"),
        ("new q.toml --jobs 1", "--jobs belongs to `study run`"),
    ],
)
def test_counts_and_flags_of_other_verbs_are_refused(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    plans.study(tmp_path)
    assert main(["study", *words.split()]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    assert not (tmp_path / "q.toml").exists()


@pytest.mark.parametrize(("name", "count"), [("limit", 0), ("limit", -1), ("jobs", 0)])
def test_counts_are_refused_in_python_too(tmp_path, monkeypatch, name, count):
    with pytest.raises(InputError, match=f"{name} must be at least 1, got {count}"):
        studies.run(plans.locked(tmp_path, monkeypatch), **{name: count})


def finished(config, folder, on_event=None):
    """Stands for a training run: the folder is held, as by a run, and left as one that ended."""
    if RunFolder.is_run(folder):
        return
    with RunFolder.hold(folder):
        (folder / "run.json").write_text("{}")


def kept(study, job):
    plans.keep(study, job.config, plans.record(job.config, plans.LOSSES[job.arm] + abs(job.config.lr - 2e-3)))
    return "done"


@pytest.fixture
def sharing(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_train", finished)
    monkeypatch.setattr(runner, "_keep", kept)
    study = plans.locked(tmp_path, monkeypatch)
    study.workspace = tmp_path / "runs"
    return study


def test_a_run_that_another_process_is_doing_is_left_to_it(sharing):
    """Catches: a second process that ends at the first run that is taken, though others are free."""
    taken, *free = sharing.missing()
    said = []
    with RunFolder.hold(runner.folder_of(sharing, taken)):
        assert studies.run(sharing, say=said.append) == len(free) == 5
    assert said[0] == f"{taken.name}: another process is doing it; going on with the next run"
    assert said[-1].startswith(f"another process is doing {taken.name}; when it has ended, the same command")
    assert [job.name for job in sharing.missing()] == [taken.name]
    assert studies.run(sharing, say=said.append) == 11 and sharing.missing() == []
    assert "another process" not in said[-1]


def test_a_run_that_is_left_to_another_process_does_not_count_for_the_limit(sharing):
    taken, first, second, *_ = sharing.missing()
    with RunFolder.hold(runner.folder_of(sharing, taken)):
        assert studies.run(sharing, limit=2) == 2
    left = {job.name for job in sharing.missing()}
    assert taken.name in left and not {first.name, second.name} & left


def test_workers_leave_a_run_to_another_process_too(sharing, monkeypatch):
    taken, *free = sharing.missing()
    with RunFolder.hold(runner.folder_of(sharing, taken)):
        found = {job.name: status for job, status in runner._execute(sharing, [taken, *free[:2]], 2, None)}
    assert found == {taken.name: None, free[0].name: "done", free[1].name: "done"}


def test_a_held_folder_is_said_by_an_error_of_its_own(tmp_path):
    with (
        RunFolder.hold(tmp_path),
        pytest.raises(InUseError, match="in use by another process"),
        RunFolder.hold(tmp_path),
    ):
        pass
