"""A study of edits from lock to verdict on a model that it trains itself: what is run, kept, gone on with and refused."""

import json
import shutil
from contextlib import contextmanager

import pytest
from edit_plans import TEXT

from thalweg import studies
from thalweg.cli import main
from thalweg.errors import CheckpointError, InputError, ProofError
from thalweg.studies.edits import measuring, store
from thalweg.studies.edits.study import EditStudy

SMOKE = TEXT.replace("each_layer = 7", "each_layer = 2").partition('[[hypotheses]]\nid = "strength"')[0]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A locked plan whose subject is trained, and all whose edits are recorded."""
    folder = tmp_path_factory.mktemp("edits")
    (folder / "p.toml").write_text(SMOKE)
    study = studies.study(folder / "p.toml", "smoke", workspace=folder / "runs")
    studies.lock(study)
    assert studies.run(study) == 9
    return folder


def opened(folder, home=None):
    study = studies.study(folder / "p.toml", "smoke", workspace=(home or folder) / "runs")
    assert isinstance(study, EditStudy)
    return study


@pytest.fixture
def fresh(home, tmp_path):
    """The same plan and lock, the subject's run at hand, no record of an edit."""
    for name in ("p.toml", "p.smoke.lock.json"):
        shutil.copy(home / name, tmp_path / name)
    shutil.copytree(home / "records", tmp_path / "records")
    shutil.rmtree(tmp_path / "records" / "edits")
    return tmp_path


def only_record(folder):
    (path,) = (folder / "records" / "edits").glob("*.jsonl")
    return path, store.read(path)


def numbers(record):
    return {identity: (row.columns, row.layers, row.drift) for identity, row in record.rows.items()}


def test_every_edit_is_recorded_once_with_its_no_op(home):
    study = opened(home)
    path, record = only_record(home)
    assert path.name.startswith("additive-")
    assert study.missing() == [] and study.progress() == (9, 9)
    # unedited; value: no-op and three; block: no-op and one; alone: no-op and two. "again" is value-par0 in other words
    assert len(record.rows) == 10
    assert record.facts["tokens"] == [[4, 4, 4, 4]] * 3
    found = study.records()
    assert found["again"].row is found["value-par0"].row
    assert found["value-par0"].row.columns != found["value-noop"].row.columns
    noops = [row for row in record.rows.values() if row.role == "no-op"]
    assert len(noops) == 3 and all(row.drift is not None and row.drift < 1e-6 for row in noops)
    assert len(record.rows["unedited"].layers["self_share"]) == 2


def test_an_encoder_that_the_study_trains_is_judged_by_its_masked_tokens(tmp_path):
    text = SMOKE.replace('data = "austen"', 'data = "austen", objective = "masked", connection = "post_norm"')
    text = text.replace("[text]", '[text]\nevaluation = "masked"')
    (tmp_path / "p.toml").write_text(text)
    study = opened(tmp_path)
    studies.lock(study)
    assert studies.run(study, limit=4) == 4
    path, record = only_record(tmp_path)
    assert path.name.startswith("post_norm-")
    assert record.facts["tokens"] == [[16]] * 3
    for row in record.rows.values():
        assert [len(nats) for nats in row.columns["nats"]] == [1] * 3
        assert all(3 < nats / 16 < 12 for (nats,) in row.columns["nats"])  # ln 2049 = 7.6: hardly trained
        assert row.drift is None or row.drift < 1e-6
    assert "16 tokens of each" in record.text["rule"] or "first 16 tokens" in record.text["rule"]


def test_audit_and_likelihoods_agree_with_the_model_itself(home):
    """Against the model called by hand: loss of the unedited model, and a strength that no edit of another layer has."""
    import torch

    from thalweg.studies.edits.subjects import open_subject
    from thalweg.studies.store import Store

    study = opened(home)
    _, record = only_record(home)
    subject = open_subject(study.plan, "smoke", "own", Store(home / "records"), home / "runs")
    (group,) = study.groups
    text = group.reading.documents[1].text
    ids = subject.tokenizer.encode(text)[:16]
    rows = torch.tensor([[subject.tokenizer.end_of_text, *ids[:-1]]])
    with torch.no_grad():
        logits = subject.model(rows).logits[0].double().log_softmax(-1)
    nats = [-float(logits[i, token]) for i, token in enumerate(ids)]
    assert sum(record.rows["unedited"].columns["nats"][1]) == pytest.approx(sum(nats), rel=1e-5)
    assert record.rows["unedited"].columns["nats"][1][2] == pytest.approx(sum(nats[8:12]), rel=1e-5)
    found = study.records()
    strength = found["alone-layer1"].row.layers["applied"]
    assert strength[0] is None and strength[1] is not None and 0 < strength[1] <= 1
    assert found["alone-layer1"].row.layers["drift"][0] == 0 < found["alone-layer1"].row.layers["drift"][1]


def test_without_a_lock_nothing_runs(fresh):
    (fresh / "p.smoke.lock.json").unlink()
    with pytest.raises(InputError, match="is not locked"):
        studies.run(opened(fresh))
    assert studies.verdict(opened(fresh)).status == "void"


def test_an_edited_plan_does_not_run_and_is_void(fresh):
    (fresh / "p.toml").write_text(SMOKE.replace("parallel = [0.0, 0.5]", "parallel = [0.0, 0.25]"))
    with pytest.raises(InputError, match="edited after it was locked"):
        studies.run(opened(fresh))
    assert studies.verdict(opened(fresh)).status == "void"
    with pytest.raises(InputError, match="give the changed plan a new name"):
        studies.lock(opened(fresh))


def test_a_stopped_study_goes_on_and_gives_the_same_record(home, fresh, monkeypatch):
    edited, calls = measuring.Bench.edited, []

    def interrupted(self, arm, noop, unedited):
        calls.append(arm.name)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return edited(self, arm, noop, unedited)

    monkeypatch.setattr(measuring.Bench, "edited", interrupted)
    with pytest.raises(KeyboardInterrupt):
        studies.run(opened(fresh, home))
    # no-ops first, those of hypotheses before the others, then the arms that hypotheses rest on
    assert calls == ["value-noop", "block-noop", "alone-noop", "value-perp0"]
    _, half = only_record(fresh)
    assert len(half.rows) == 4 and all(row.columns["nats"] for row in half.rows.values())
    monkeypatch.undo()
    assert studies.run(opened(fresh, home), limit=2) == 2
    assert studies.run(opened(fresh, home)) == 4
    assert numbers(only_record(fresh)[1]) == numbers(only_record(home)[1])


def test_a_record_of_other_weights_is_not_gone_on_with(home, fresh, monkeypatch):
    studies.run(opened(fresh, home), limit=1)
    monkeypatch.setattr("thalweg.studies.edits.subjects.weights_digest", lambda model: "0" * 64)
    with pytest.raises(InputError, match="made with another subject: its weights differ"):
        studies.run(opened(fresh, home))


def test_a_record_changed_by_hand_is_refused(home, fresh):
    shutil.copytree(home / "records" / "edits", fresh / "records" / "edits")
    path, _ = only_record(fresh)
    lines = path.read_text().splitlines()
    row = json.loads(lines[-1])
    row["columns"]["nats"][0][0] += 0.5
    path.write_text("\n".join([*lines[:-1], json.dumps(row)]) + "\n")
    with pytest.raises(CheckpointError, match="was changed by hand"):
        opened(fresh).records()


def test_a_no_op_that_changes_something_stops_the_study(home, fresh, monkeypatch):
    @contextmanager
    def wrong(subject, arm):
        from thalweg.editing import edit

        with edit(subject.model, site="block", parallel=-3.0, perpendicular=-3.0) as facts:
            yield facts

    monkeypatch.setattr(measuring, "entered", wrong)
    with pytest.raises(ProofError, match=r"value-noop changes nothing and moves a document by .* at most 0.001"):
        studies.run(opened(fresh, home))


def test_a_second_process_is_told_and_what_the_first_did_stays(home, fresh, monkeypatch):
    """Catches: one file read, changed and written by two processes, of whose rows the last writer's are left."""
    edited, second, refused = measuring.Bench.edited, opened(fresh, home), []

    def meanwhile(self, arm, noop, rows):
        if not refused:
            with pytest.raises(InputError, match=r"another process adds to the record .*\.jsonl; wait for it") as error:
                studies.run(second)
            refused.append(str(error.value))
        return edited(self, arm, noop, rows)

    monkeypatch.setattr(measuring.Bench, "edited", meanwhile)
    assert studies.run(opened(fresh, home), limit=2) == 2
    assert refused and "\n" not in refused[0]
    assert studies.run(second) == 7
    assert only_record(fresh)[1].rows.keys() == only_record(home)[1].rows.keys()


def test_what_another_process_did_before_the_lock_is_not_done_again(home, fresh, monkeypatch):
    first, entered, held = opened(fresh, home), [], store.held

    @contextmanager
    def later(*place):
        if not entered:
            entered.append(True)
            assert studies.run(opened(fresh, home)) == 9  # between the first look and the lock
        with held(*place):
            yield

    monkeypatch.setattr(store, "held", later)
    assert studies.run(first) == 0
    assert numbers(only_record(fresh)[1]) == numbers(only_record(home)[1])


def test_a_subject_whose_training_diverged_leaves_the_others_running(tmp_path):
    """And says what can be done: the same command cannot go on."""
    train = SMOKE[SMOKE.index("train = {") : SMOKE.index("\n\n[text]")]
    gone = train.replace(" }", ', diverge_rms = 1e-9, eval_every = 2, connection = "rezero" }')
    text = SMOKE.replace("[text]", f"[subject.gone]\n{gone}\n\n[text]")
    for family in ("value", "again", "alone"):
        text = text.replace(f"[arms.{family}]", f'[arms.{family}]\nsubject = "own"')
    (tmp_path / "p.toml").write_text(text.replace("[arms.block]", '[arms.block]\nsubject = "gone"'))
    study = opened(tmp_path)
    studies.lock(study)
    with pytest.raises(InputError, match=r"^7 edits finished; subject gone: .*rezero diverged .* a new plan") as error:
        studies.run(study)
    assert "the same command" not in str(error.value) and study.progress() == (7, 9)


def test_what_hypotheses_rest_on_runs_first(tmp_path):
    """Also the arms of a secondary one, after several primary ones that share theirs."""
    primary, _, _ = TEXT.partition('[[hypotheses]]\nid = "strength"')
    claim = primary[primary.index("[[hypotheses]]") :]
    more = [claim.replace('"asymmetry"', f'"again{i}"') for i in range(4)]
    last = claim.replace('"asymmetry"', '"last"').replace("value-perp0 = 1, value-par0 = -1", "alone-layer4 = 1")
    (tmp_path / "p.toml").write_text(primary + "".join(more) + last + "primary = false\n")
    names = [arm.name for arm in opened(tmp_path).missing()]
    assert names[:3] == ["value-noop", "alone-noop", "block-noop"]
    assert names[3:7] == ["value-perp0", "value-par0", "alone-layer4", "value-par0.5"]


def test_one_edit_after_the_other(home):
    with pytest.raises(InputError, match="jobs 2; leave it out"):
        studies.run(opened(home), jobs=2)


def test_a_text_that_is_too_short(home, tmp_path):
    (tmp_path / "p.toml").write_text(SMOKE.replace("documents = 3", "documents = 3\nskip = 5000"))
    with pytest.raises(InputError, match=r"document 2 would be piece 5002; take fewer"):
        studies.lock(opened(tmp_path))


def test_commands(home, tmp_path, capsys):
    where = [str(home / "p.toml"), "--scale", "smoke", "--workspace", str(home / "runs")]
    assert main(["study", "status", *where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) | {"plan": "p", "runs": 9, "of": 9, "next": []} == {
        "plan": "p", "scale": "smoke", "runs": 9, "of": 9, "learning_rates": {}, "next": [],
    }  # fmt: skip
    assert main(["study", "verdict", *where, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["verdicts"][0]["sample"] == "document"
    assert main(["study", "check", *where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == 9
    assert main(["report", str(home / "p.toml"), "--scale", "smoke", "-o", str(tmp_path / "r.html")]) == 0
    assert "What each edit costs" in (tmp_path / "r.html").read_text()
