"""A study of compressions from lock to report on a model that it trains itself."""

import json
import shutil

import pytest
import torch
from compression_plans import TEXT

from thalweg import studies
from thalweg.cli import main
from thalweg.errors import InputError, ProofError
from thalweg.studies.compressed import measuring
from thalweg.studies.compressed.plan import BRANCHES
from thalweg.studies.edits import store


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A locked plan whose subject is trained, and all whose compressions are recorded."""
    folder = tmp_path_factory.mktemp("compressions")
    (folder / "p.toml").write_text(TEXT)
    study = studies.study(folder / "p.toml", "smoke", workspace=folder / "runs")
    studies.lock(study)
    assert studies.run(study) == 12
    return folder


def opened(folder):
    return studies.study(folder / "p.toml", "smoke", workspace=folder / "runs")


def only_record(folder):
    (path,) = (folder / "records" / "compressions").glob("*.jsonl")
    return path, store.read(path)


def test_every_compression_is_recorded_with_its_columns(home):
    study = opened(home)
    assert study.progress() == (12, 12) and study.missing() == []
    found = study.records()
    row = found["own.rtn-2"].row
    shapes = {name: (len(column), len(column[0])) for name, column in row.columns.items()}
    assert shapes["nats"] == shapes["kl"] == shapes["correct"] == (4, 1)
    assert {shapes[f"{b}.{p}"] for b in BRANCHES for p in ("total", "parallel", "noise", "null")} == {(4, 3)}
    assert len(row.layers["kl"]) == 3 and row.layers["bits"] == [pytest.approx(2 + (16 + 2) / 8)] * 3
    noop = found["own.noop"].row
    assert (
        noop.drift == 0 and max(map(max, noop.columns["block.total"])) == 0 and max(map(max, noop.columns["kl"])) == 0
    )


def test_fewer_bits_are_larger_errors_and_a_layer_alone_has_its_own(home):
    found = opened(home).records()
    sizes = [sum(map(sum, found[f"own.rtn-{bits}"].row.columns["block.total"])) for bits in (8, 4, 3, 2)]
    assert sizes == sorted(sizes)
    alone = found["own.alone-layer1"].row.columns["block.total"]
    whole = found["own.rtn-3"].row.columns["block.total"]
    for document in range(4):
        assert alone[document][0] == 0 == alone[document][2]
        # local mode: a layer sees the dense input, so its error does not know what was done to others
        assert alone[document][1] == pytest.approx(whole[document][1], rel=1e-5)
    triangle = found["own.rtn-3"].row.columns
    for document in range(4):  # the parts are means over tokens, so only a bound holds
        assert triangle["block.perpendicular"][document][1] <= triangle["block.total"][document][1] * (1 + 1e-6)


def test_losses_and_kl_agree_with_the_models_called_by_hand(home):
    from thalweg import compression
    from thalweg.studies.compressed.measuring import Bench
    from thalweg.studies.edits.subjects import open_subject
    from thalweg.studies.store import Store

    study = opened(home)
    subject = open_subject(study.plan, "smoke", "own", Store(home / "records"), home / "runs")
    bench = Bench.of(subject, study.plan, "smoke")
    row = study.records()["own.prune-0.5"].row
    import copy

    model = copy.deepcopy(subject.model).eval()
    compression.compress(model, "magnitude", sparsity=0.5)
    window = bench.windows[2]
    with torch.no_grad():
        before, after = (
            torch.log_softmax(m(torch.tensor([window.inputs])).logits.double()[0], -1)
            for m in (subject.model.eval(), model)
        )
    nats = -sum(after[i, target] for i, target in enumerate(window.targets))
    assert row.columns["nats"][2][0] == pytest.approx(float(nats), rel=1e-5)
    assert row.columns["kl"][2][0] == pytest.approx(float((before.exp() * (before - after)).sum(-1).mean()), rel=2e-3)
    true, *others = bench.endings[2]
    assert true.targets == window.targets[-4:] and true.inputs[:13] == window.inputs[:13]
    assert [w.targets for w in others] == [bench.windows[j].targets[-4:] for j in (3, 0, 1)]


def test_the_worst_layer_stays_dense(home):
    study = opened(home)
    found = study.records()
    by_layer = torch.tensor(found["own.rtn-3"].row.columns["block.perpendicular"]).mean(0)
    kept = found["own.kept"].row.columns["block.total"][0]
    assert [v == 0 for v in kept] == [i == int(by_layer.argmax()) for i in range(3)]
    assert found["own.kept"].row.layers["bits"][int(by_layer.argmax())] == 16
    assert any("left dense: layers" in note for note in found["own.kept"].row.notes)


def test_a_protected_arm_without_its_row_says_so(home):
    from thalweg.studies.edits.subjects import open_subject
    from thalweg.studies.store import Store

    study = opened(home)
    bench = study.bench(
        open_subject(study.plan, "smoke", "own", Store(home / "records"), home / "runs"), study.groups[0]
    )
    with pytest.raises(InputError, match=r"own\.rtn-3 names, which has no record"):
        bench.edited(study.plan.edits["own.kept"], study.plan.edits["own.noop"], {})


def test_layers_that_nothing_was_measured_of_cannot_be_chosen(home):
    from dataclasses import replace

    study = opened(home)
    arm, rows = study.plan.edits["own.kept"], study.records()
    by_kl = replace(arm, protect=replace(arm.protect, by="kl"))
    assert len(measuring.chosen_by(by_kl, rows["own.rtn-3"].row, 3)) == 3
    with pytest.raises(
        InputError, match=r"own\.kept protects layers by kl, which the record of own\.rtn-3 does not hold; set kl"
    ):
        measuring.chosen_by(by_kl, replace(rows["own.rtn-3"].row, layers={}), 3)


def test_a_dropped_layer_has_lost_its_whole_update(home):
    from dataclasses import replace

    from thalweg.studies.edits.subjects import open_subject
    from thalweg.studies.store import Store

    study = opened(home)
    bench = study.bench(
        open_subject(study.plan, "smoke", "own", Store(home / "records"), home / "runs"), study.groups[0]
    )
    dropped = replace(study.plan.edits["own.prune-0.5"], method="layer_drop", options={"count": 1})
    row = bench.edited(dropped, study.plan.edits["own.noop"], {})
    (gone,) = [i for i, bits in enumerate(row.layers["bits"]) if bits == 0]
    for document in row.columns["block.total"]:
        assert [round(v, 5) for v in document] == [float(i == gone) for i in range(3)]
    assert len(row.layers["kl"]) == 3 and row.layers["kl"][gone] > 0


def test_a_copy_that_is_not_the_subject_is_refused(home, monkeypatch):
    from thalweg.studies.edits.subjects import open_subject
    from thalweg.studies.store import Store

    study = opened(home)
    bench = study.bench(
        open_subject(study.plan, "smoke", "own", Store(home / "records"), home / "runs"), study.groups[0]
    )

    def bent(model):
        import copy

        found = copy.deepcopy(model)
        with torch.no_grad():
            next(p for n, p in found.named_parameters() if n.endswith("down.weight")).mul_(1.01)
        return found

    monkeypatch.setattr(measuring, "deepcopy", bent)
    noop = study.plan.edits["own.noop"]
    with pytest.raises(ProofError, match="nothing was done to"):
        bench.edited(noop, noop, only_record(home)[1].rows)


def test_what_is_done_is_not_done_again_and_the_report_is_written(home, tmp_path, capsys):
    for name in ("p.toml", "p.smoke.lock.json"):
        shutil.copy(home / name, tmp_path / name)
    shutil.copytree(home / "records", tmp_path / "records")
    study = studies.study(tmp_path / "p.toml", "smoke", workspace=home / "runs")
    path, record = only_record(tmp_path)
    last = study.plan.edits["own.alone-layer2"].identity
    before = record.rows.pop(last)
    store.write(path, record)
    assert studies.run(study) == 1
    again = only_record(tmp_path)[1].rows[last]
    assert (again.columns, again.layers) == (before.columns, before.layers)
    assert studies.verdict(study).status == "inconclusive"  # a demo decides nothing
    out = tmp_path / "r.html"
    assert main(["report", str(tmp_path / "p.toml"), "--scale", "smoke", "-o", str(out)]) == 0
    assert "Which number foretells it" in out.read_text()
    capsys.readouterr()
    assert main(["study", "status", str(tmp_path / "p.toml"), "--scale", "smoke", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["of"] == 12
