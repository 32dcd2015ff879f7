"""Verdicts by rule: every status, every reason, and that nothing but plan and records decides."""

import dataclasses
import hashlib
import json
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from thalweg.errors import CheckpointError, InputError
from thalweg.records.measurements import Measurement, Measurements
from thalweg.studies.judging import judge
from thalweg.studies.observe import by_depth, observe
from thalweg.studies.plan import Scale, parse
from thalweg.studies.store import RunRecord, Store, read, write
from thalweg.studies.tuning import search
from thalweg.training.config import TrainConfig

SEEDS = (0, 1, 2, 3, 4)
RECORDS = Path(__file__).parents[2] / "plans" / "records"
NULLS = {"unigram_entropy": 6.0, "xz_bits_per_byte": 2.3}


def record(loss=4.0, *, seed=0, status="done", bits=2.0, measures=(), config=None):
    metrics = {"val/loss": [(0, 7.0), (50, loss + 0.1), (100, loss)], "val/bits_per_byte": [(100, bits)]}
    return RunRecord(
        "f" * 64, config or {}, seed, status, {"nulls": NULLS, "cost": {}}, metrics, Measurements(measures)
    )


@pytest.fixture
def plan():
    return parse(tomllib.loads((resources.files("thalweg.studies") / "template.toml").read_text(encoding="utf-8")))


def runs(difference, **kw):
    """mgt beats the matched arm by ``difference`` on average, with a little spread."""
    base = {s: record(4.0 + 0.1 * s, seed=s, **kw) for s in SEEDS}
    mgt = {s: record(4.0 + 0.1 * s - difference + 0.002 * (s - 2), seed=s) for s in SEEDS}
    return {"additive": base, "additive_matched": base, "mgt": mgt}


def only(study):
    (verdict,) = study.verdicts
    return verdict


@pytest.mark.parametrize(
    ("difference", "status", "code"),
    [(0.06, "supported", 0), (-0.06, "refuted", 1), (0.0, "refuted", 1), (0.021, "inconclusive", 3)],
)
def test_rule(plan, difference, status, code):
    study = judge(plan, "small", runs(difference))
    assert only(study).status == status
    assert study.exit_code == code
    assert only(study).estimate == pytest.approx(-difference)
    low, high = only(study).interval
    assert low < -difference < high


def test_a_missing_seed_voids(plan):
    found = runs(0.06)
    del found["mgt"][3]
    study = judge(plan, "small", found)
    assert study.exit_code == 4
    assert only(study).reason == "1 of 10 runs are missing (mgt seed 3)"


def test_an_edited_plan_voids(plan):
    assert judge(plan, "small", runs(0.06), void=["the plan was edited after it was locked"]).status == "void"


def test_a_diverged_arm_takes_the_value_of_its_rule(plan):
    found = runs(0.06)
    found["mgt"][1] = record(status="diverged", seed=1)
    verdict = only(judge(plan, "small", found))
    assert verdict.arms["mgt"][1] == NULLS["unigram_entropy"]
    assert verdict.substituted == ("mgt seed 1: diverged, takes the unigram entropy 6.0000",)
    assert verdict.status == "inconclusive"  # one outlier widens the interval over the margin
    inconclusive = dataclasses.replace(
        plan, hypotheses=(dataclasses.replace(plan.hypotheses[0], diverged="inconclusive"),)
    )
    assert only(judge(inconclusive, "small", found)).reason.startswith("diverged: mgt seed 1")
    number = dataclasses.replace(plan, hypotheses=(dataclasses.replace(plan.hypotheses[0], diverged=9.0),))
    assert only(judge(number, "small", found)).arms["mgt"][1] == 9.0


@pytest.mark.parametrize(("loss", "bits", "says"), [(6.5, 2.0, "unigram entropy"), (4.0, 2.4, "of xz")])
def test_an_arm_that_has_not_learned_is_inconclusive(plan, loss, bits, says):
    found = runs(0.06)
    found["additive_matched"][0] = record(loss, bits=bits)
    verdict = only(judge(plan, "small", found))
    assert verdict.status == "inconclusive"
    assert says in verdict.reason


def test_a_demo_says_what_has_not_learned(plan):
    found = runs(0.06)
    found["additive_matched"][0] = record(6.5)
    demo = dataclasses.replace(plan, scale={"small": dataclasses.replace(plan.scale["small"], kind="demo")})
    reason = only(judge(demo, "small", found)).reason
    assert reason.startswith("demo: too small to judge; has not learned: additive_matched seed 0 (loss 6.500")


def test_an_edge_of_the_grid_is_inconclusive(plan):
    assert "edge of the grid: mgt" in only(judge(plan, "small", runs(0.06), edges=["mgt", "other"])).reason


@pytest.mark.parametrize(("kind", "says"), [("exploratory", "supports nothing"), ("demo", "demo: too small to judge")])
def test_exploratory_and_demo_never_support(plan, kind, says):
    weaker = dataclasses.replace(plan, scale={"small": dataclasses.replace(plan.scale["small"], kind=kind)})
    study = judge(weaker, "small", runs(0.06))
    assert study.status == "inconclusive"
    assert says in only(study).reason
    assert only(study).statistics is not None


def test_exploratory_can_refute(plan):
    weaker = dataclasses.replace(plan, scale={"small": dataclasses.replace(plan.scale["small"], kind="exploratory")})
    assert judge(weaker, "small", runs(-0.06)).status == "refuted"


def test_a_measure_that_is_not_there_voids(plan):
    other = dataclasses.replace(
        plan, hypotheses=(dataclasses.replace(plan.hypotheses[0], measure="effective_rank", at="last"),)
    )
    assert "not in the records" in only(judge(other, "small", runs(0.06))).reason


def test_secondary_hypotheses_do_not_decide_the_exit_code(plan):
    second = dataclasses.replace(plan.hypotheses[0], id="H2", direction="greater", margin=0.02, primary=False)
    study = judge(dataclasses.replace(plan, hypotheses=(*plan.hypotheses, second)), "small", runs(0.06))
    assert [v.status for v in study.verdicts] == ["supported", "refuted"]
    assert study.status == "supported"


def test_contrast_of_four_arms_is_the_synergy(plan):
    h = dataclasses.replace(
        plan.hypotheses[0],
        contrast={"mgt": -1.0, "additive": -1.0, "additive_matched": 2.0},
        direction="greater",
        margin=0.0,
    )
    verdict = only(judge(dataclasses.replace(plan, hypotheses=(h,)), "small", runs(0.06)))
    assert verdict.values[0] == pytest.approx(-(4.0 - 0.06 - 0.004) - 4.0 + 2 * 4.0)


def test_the_best_of_a_series_is_the_lowest_loss_and_the_highest_share(plan):
    made = record()
    made.metrics["val/loss"] = [(0, 7.0), (50, 3.0), (100, 4.0)]
    made.metrics["task/accuracy"] = [(0, 0.5), (50, 0.8), (100, 0.7)]
    made = dataclasses.replace(made, units={"val/loss": "nats/token", "task/accuracy": "share"})
    for measure, at, value in (
        ("val/loss", "best", 3.0),
        ("task/accuracy", "best", 0.8),
        ("task/accuracy", "final", 0.7),
    ):
        assert observe(made, dataclasses.replace(plan.hypotheses[0], measure=measure, at=at)).value == value


@pytest.mark.parametrize(
    ("at", "value"),
    [("last", 0.2), ("first", 0.8), ("mean", 0.5), ("min", 0.2), ("trend", -1.0), ("layer:1", 0.5), ("layer:9", None)],
)
def test_by_depth(at, value):
    assert by_depth({2: 0.2, 0: 0.8, 1: 0.5}, at, "H") == (value if value is None else pytest.approx(value))


def test_depth_profile_of_states_and_of_sublayers(plan):
    sublayers = [(0, 0, "a", 0.9), (5, 0, "a", 0.5), (5, 0, "f", 0.4), (5, 1, "a", 0.3), (5, 1, "f", 0.1)]
    ends = [(5, 2, "stream.end", 0.2), (5, 2, "stream.left", 0.8)]
    rows = [
        Measurement(name, v, layer=layer, site=site, step=step)
        for name, cases in (("effective_rank", sublayers + ends), ("gate.mean", sublayers))
        for step, layer, site, v in cases
    ]
    assert record(measures=rows).depth_profile("effective_rank") == {0: 0.5, 1: 0.3, 2: 0.2}
    assert record(measures=rows).depth_profile("effective_rank", step=0) == {0: 0.9}
    assert record(measures=rows).depth_profile("gate.mean") == {0: pytest.approx(0.45), 1: pytest.approx(0.2)}
    h = dataclasses.replace(plan.hypotheses[0], measure="effective_rank", at="last")
    assert observe(record(measures=rows), h).value == 0.2


def test_a_profile_that_was_written_from_the_end_is_read_by_depth():
    rows = [(2, "stream.end", 1.0), (1, "f", 1.1), (1, "a", 1.2), (0, "f", 1.3), (0, "a", 1.4)]
    measures = [Measurement("amax_gain.to_end.backward", v, layer=layer, site=site, step=5) for layer, site, v in rows]
    found = record(measures=measures).depth_profile("amax_gain.to_end.backward")
    assert list(found.items()) == [(0, 1.4), (1, 1.2), (2, 1.0)]


@pytest.mark.parametrize("name", ["amax_gain{}.forward", "amax_gain{}.backward", "sigma_2{}"])
def test_the_product_to_the_end_of_all_sites_is_the_one_from_the_start(name):
    path = min(RECORDS.glob("hyper_connections-*.jsonl"))
    found = read(path)
    to_end, from_start = (found.depth_profile(name.format(scope)) for scope in (".to_end", ".from_start"))
    assert to_end[0] == pytest.approx(from_start[max(from_start)], rel=1e-5)
    assert to_end[max(to_end)] == pytest.approx(from_start[0], rel=1e-5)


@pytest.mark.parametrize("at", ["middle", "layer:x"])
def test_wrong_at(at):
    with pytest.raises(InputError):
        by_depth({0: 1.0}, at, "H")


def test_store_round_trip(tmp_path):
    rows = [
        Measurement("effective_rank", float("nan"), layer=0, step=5, stream="mean", n=16, low=0.1, high=0.2),
        Measurement("effective_rank", 0.25, layer=1, step=5, stream="mean", n=16, null=0.8, null_kind="Gaussian"),
        Measurement(
            "effective_rank", 0.5, layer=2, step=5, stream="mean", null=0.8, null_kind="Gaussian", site="stream.end"
        ),
        Measurement("jacobian", 2.0),
    ]
    kept = dataclasses.replace(
        record(measures=rows, status="diverged"), metrics={"train/loss": [(1, float("nan")), (2, 3.0)]}
    )
    write(tmp_path / "r.jsonl", kept)
    back = read(tmp_path / "r.jsonl")
    assert back.measures == kept.measures
    assert str(back.metrics) == str(kept.metrics)  # NaN is not equal to itself
    assert (back.status, back.nulls, back.fingerprint) == (kept.status, kept.nulls, kept.fingerprint)


@pytest.mark.parametrize("cut", [20, 200, 500])
def test_broken_records_are_refused(tmp_path, cut):
    write(tmp_path / "r.jsonl", record())
    text = (tmp_path / "r.jsonl").read_text()
    (tmp_path / "r.jsonl").write_text(text[:cut] + "\n" + text[cut:])
    with pytest.raises((CheckpointError, InputError)):
        read(tmp_path / "r.jsonl")


def test_a_record_changed_by_hand_is_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    write(path, record())
    head, _, body = path.read_text().partition("\n")
    path.write_bytes(f"{head}\n{body}".replace("\n", "\r\n").encode())
    assert read(path).last("val/loss") == 4.0
    path.write_text(f"{head}\n{body.replace('4.0', '3.0')}")
    with pytest.raises(CheckpointError, match="was changed by hand"):
        read(path)


@pytest.mark.parametrize(
    "edit",
    [
        {"status": "diverged"},
        {"seed": 3},
        {"fingerprint": "e" * 64},
        {"config": {"lr": 0.1}},
        {"result": {"nulls": {}}},
        {"notes": ["nothing to see"]},
        {"more": 1},
        {"schema": 1},
        {"sha256": None},
        {"sha256": "0" * 64},
    ],
)
def test_an_edited_header_is_refused_in_one_line(tmp_path, edit):
    path = tmp_path / "r.jsonl"
    write(path, record())
    head, _, body = path.read_text().partition("\n")
    edited = {key: value for key, value in {**json.loads(head), **edit}.items() if value is not None}
    path.write_text(f"{json.dumps(edited)}\n{body}")
    with pytest.raises(CheckpointError, match=r"was changed by hand: .* restore it from version control") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def older(path):
    """The file as schema 1 had it: with a checksum of the lines after the header."""
    head, _, body = path.read_text().partition("\n")
    table = {**json.loads(head), "schema": 1, "sha256": hashlib.sha256(body.encode()).hexdigest()}
    path.write_text(f"{json.dumps(table)}\n{body}")


def test_an_older_record_is_read(tmp_path):
    path = tmp_path / "r.jsonl"
    write(path, record())
    older(path)
    assert read(path).last("val/loss") == 4.0
    path.write_text(path.read_text().replace("4.0", "3.0"))
    with pytest.raises(CheckpointError, match="was changed by hand"):
        read(path)


def test_every_committed_record_is_read():
    """Of each kind one with its measurements, which take most of the time; the checksum covers those of the others."""
    paths = sorted(RECORDS.glob("*.jsonl"))
    records = {path: read(path, measures=False) for path in paths}
    assert [path for path in paths if records[path].fingerprint[:12] != path.stem[-12:]] == [] and len(paths) > 400
    kinds = {(record.config.get("connection"), record.config["steps"]): path for path, record in records.items()}
    assert len(kinds) > 20 and all(len(read(path).measures) > 100 for path in kinds.values())


def test_an_outcome_is_read_once_while_its_file_stays_as_it_is(tmp_path, monkeypatch):
    store = Store(tmp_path)
    row = Measurement("sigma_2", 0.5, layer=0)
    path = store.path("f" * 64, "mhc", 0)
    assert store.outcome("f" * 64, "mhc", 0) is None
    write(path, record(4.0, measures=[row]))
    reads = []
    monkeypatch.setattr("thalweg.studies.store.read", lambda path, **how: reads.append(path) or read(path, **how))
    found = [store.outcome("f" * 64, "mhc", 0) for _ in range(3)]
    assert reads == [path] and {r.last("val/loss") for r in found} == {4.0} and all(len(r.measures) == 0 for r in found)
    assert list(store.find("f" * 64, "mhc", 0).measures) == [row]  # whole, whatever is remembered of it
    write(path, record(3.25))
    assert store.outcome("f" * 64, "mhc", 0).last("val/loss") == 3.25
    with pytest.raises(CheckpointError, match="belongs to another run"):
        store.outcome("f" * 63 + "e", "mhc", 0)
    path.write_text(path.read_text().replace("3.25", "3.24"))
    with pytest.raises(CheckpointError, match="was changed by hand"):
        store.outcome("f" * 64, "mhc", 0)
    path.unlink()
    assert store.outcome("f" * 64, "mhc", 0) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("status", "running"),
        ("status", 1),
        ("seed", "0"),
        ("seed", True),
        ("config", []),
        ("result", {"nulls": {"unigram_entropy": "x"}}),
        ("result", {"cost": 3}),
        ("notes", "none"),
        ("versions", 2),
    ],
)
def test_a_record_of_wrong_types_is_broken(tmp_path, key, value):
    path = tmp_path / "r.jsonl"
    write(path, record())
    older(path)
    head, _, body = path.read_text().partition("\n")
    path.write_text(f"{json.dumps({**json.loads(head), key: value})}\n{body}")
    with pytest.raises(CheckpointError, match="is a broken study record"):
        read(path)


class Searches:
    base = TrainConfig(steps=100, depth=1)
    scale = Scale(kind="confirmatory", seeds=SEEDS, learning_rates=(1e-3, 2e-3, 4e-3), extend=2)

    def run_all(self, loss_of):
        asked = []
        known = {}

        def look_up(run):
            return known.get((run.lr, run.seed, run.total_steps))

        while (state := search(self.base, self.scale, look_up)).pending:
            for run in state.pending:
                asked.append(run.lr)
                loss = loss_of(run.lr)
                known[(run.lr, run.seed, run.total_steps)] = (
                    record(loss) if loss is not None else record(status="diverged")
                )
        return state, asked


class TestTuning(Searches):
    def test_inner_optimum(self):
        state, asked = self.run_all(lambda lr: abs(lr - 2e-3))
        assert (state.best, state.edge, len(asked)) == (2e-3, False, 3)

    def test_the_grid_grows_towards_its_edge(self):
        state, asked = self.run_all(lambda lr: abs(lr - 8e-3))
        assert (state.best, state.edge) == (8e-3, False)
        assert asked == [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]

    def test_an_optimum_out_of_reach_is_at_the_edge(self):
        state, asked = self.run_all(lambda lr: -lr)
        assert (state.best, state.edge, len(asked)) == (1.6e-2, True, 5)

    def test_divergence_loses_and_downward_growth(self):
        state, asked = self.run_all(lambda lr: None if lr > 1e-3 else 1 + abs(lr - 5e-4))
        assert (state.best, state.edge) == (5e-4, False)
        assert asked[3:] == [5e-4, 2.5e-4]

    def test_everything_diverges(self):
        state, _ = self.run_all(lambda lr: None)
        assert (state.best, state.edge) == (1e-3, True)

    def test_several_seeds_choose_by_their_mean(self):
        scale = dataclasses.replace(self.scale, tuning_seed=(1000, 1001))
        losses = {1e-3: (3.0, 3.0), 2e-3: (2.5, 2.7), 4e-3: (2.0, 3.6)}  # the last is best on the first seed alone
        known = {(rate, 1000 + i): record(loss) for rate, pair in losses.items() for i, loss in enumerate(pair)}

        def look_up(run):
            return known.get((run.lr, run.seed))

        state = search(self.base, scale, look_up)
        assert (state.best, state.edge, state.pending) == (2e-3, False, ())
        assert state.losses == pytest.approx({1e-3: 3.0, 2e-3: 2.6, 4e-3: 2.8})
        assert search(self.base, self.scale, look_up).pending[0].lr == 8e-3  # one seed went to the edge
        lost = known.pop((1e-3, 1001))
        state = search(self.base, scale, look_up)
        assert [(run.lr, run.seed, run.total_steps) for run in state.pending] == [(1e-3, 1001, 50)]
        assert state.best is None and set(state.losses) == {2e-3, 4e-3}
        known |= {(1e-3, 1001): lost, (2e-3, 1001): record(status="diverged")}
        assert search(self.base, scale, look_up).losses[2e-3] == float("inf")

    def test_the_search_is_shorter_and_on_its_own_seed(self):
        state = search(self.base, self.scale, lambda run: None)
        assert {(run.seed, run.total_steps) for run in state.pending} == {(1000, 50)}
