"""The report of a study: order, every status, hostile and missing content, size, the same bytes for the same records."""

import dataclasses
import math
import re
import time

import pytest
from pages import NULLS, figure_of, read, record, rows, template

from thalweg.errors import InputError
from thalweg.records.measurements import Measurement
from thalweg.reports.contrasts import contrast_figures
from thalweg.reports.study import StudyRecords, headline, write_study_report
from thalweg.reports.text import number
from thalweg.studies.judging import judge
from thalweg.studies.plan import Arm

SEEDS = (0, 1, 2, 3, 4)
ARMS = ("additive", "additive_matched", "mgt")
HOSTILE = "</style></title></svg><script>alert(\"x\")</script><img src='http://evil.example/x' onerror=x> & \x00\u202e"
SECTIONS = [
    "1. Verdict",
    "2. Quality and cost",
    "3. Geometry of the stream by depth",
    "4. Diagnostics: did it move?",
    "5. Deviations, choices, warnings",
    "6. How to reproduce",
    "7. Provenance",
    "8. Citations",
]


def runs(difference=0.06, *, seeds=SEEDS, **kw):
    """mgt ends ``difference`` below the others."""
    base = {s: record(4.0 + 0.1 * s, seed=s, **kw) for s in seeds}
    mgt = {s: record(4.0 + 0.1 * s - difference + 0.002 * (s - 2), seed=s, **kw) for s in seeds}
    return {"additive": base, "additive_matched": base, "mgt": mgt}


def study(found, *, plan=None, scale="small", void=(), **kw):
    plan = plan or template()
    return StudyRecords(plan, scale, judge(plan, scale, found, void=void), found, **kw)


def page(records, tmp_path):
    return read(write_study_report(records, tmp_path / "report.html"))


def test_order_of_sections(tmp_path):
    found = page(study(runs(measures=rows(["effective_rank", "stable_rank", "connection_distance"], 3))), tmp_path)
    assert [h for h in found.headings if h[:1].isdigit()] == SECTIONS
    assert found.headings[0] == template().title
    assert found.said.index("supported") < found.said.index("1. Verdict")
    places = [
        found.text.index(t)
        for t in ("<h3>Normalised effective rank", 'class="more"', "<h3>Stable rank", 'id="diagnostics"')
    ]
    assert [*places, found.text.index("<h3>Distance of the connection")] == sorted(
        [*places, found.text.index("<h3>Distance of the connection")]
    )


@pytest.mark.parametrize(
    ("difference", "kind", "status", "says"),
    [
        (0.06, "confirmatory", "supported", "95.0% interval -0.06"),
        (-0.06, "confirmatory", "refuted", "5 pairs"),
        (0.021, "confirmatory", "inconclusive", "margin -0.02"),
        (0.06, "exploratory", "inconclusive", "an exploratory plan supports nothing"),
        (0.06, "demo", "inconclusive", "demo: too small to judge."),
    ],
)
def test_every_status(tmp_path, difference, kind, status, says):
    plan = template(small={"kind": kind})
    found = page(study(runs(difference), plan=plan), tmp_path)
    assert f'class="verdict {status}"' in found.text
    assert says in found.said
    assert ("Demo: too small to judge." in found.said) == (kind == "demo")
    assert "Effects against their margins" in found.said


def test_void_without_any_run(tmp_path):
    found = page(study({}), tmp_path)
    assert 'class="verdict void"' in found.text
    assert "10 of 10 runs are missing" in found.said
    assert "No run has left a record yet." in found.said
    assert "No geometry was measured." in found.said
    assert "15 of 15 runs are missing: additive seed 0" in found.said
    assert not found.figures()


def test_void_of_an_edited_plan_says_why(tmp_path):
    found = page(study(runs(), void=["the plan was edited after it was locked"]), tmp_path)
    assert "no verdict, the protocol is not fulfilled: the plan was edited after it was locked." in found.said


def test_headline_of_several_hypotheses_counts_them():
    plan = template()
    second = dataclasses.replace(plan.hypotheses[0], id="H2", direction="greater", margin=0.02)
    judged = judge(dataclasses.replace(plan, hypotheses=(*plan.hypotheses, second)), "small", runs())
    assert headline(judged).endswith("Of 2: 1 supported, 1 refuted.")


def test_verdict_table_and_values_hold_the_numbers(tmp_path):
    records = study(runs())
    (verdict,) = records.verdict.verdicts
    found = page(records, tmp_path)
    assert verdict.interval is not None
    for value in (verdict.estimate, *verdict.interval, *verdict.values.values()):
        assert number(value) in found.said
    for value in verdict.arms["mgt"].values():
        assert number(value, 6) in found.said
    assert "mgt − additive_matched" in found.said
    assert "least 0.0625" in found.said


def test_cost_and_nulls_stand_beside_quality(tmp_path):
    found = page(study(runs()), tmp_path)
    cost = found.text.partition('id="cost"')[2].partition('id="geometry"')[0]
    for text in (
        "90.8 k",
        "441 MB",
        "7,439",
        "610 k",
        "mgt",
        "(baseline)",
        "(control)",
        "null: unigram entropy",
        "null: xz",
    ):
        assert text in cost
    assert number(NULLS["xz_bits_per_byte"]) in cost
    assert "4.20 ± 0.16" in cost


def test_a_diverged_run_is_shown_and_kept_out_of_the_means(tmp_path):
    found = runs(measures=rows(["effective_rank"], 3))
    broken = record(
        math.nan,
        seed=1,
        status="diverged",
        result={"reason": "loss is NaN", "step": 7},
        measures=rows(["effective_rank"], 3, value=99),
    )
    found["mgt"] = {**found["mgt"], 1: broken}
    shown = page(study(found), tmp_path)
    assert "mgt seed 1 diverged at step 7: loss is NaN" in shown.said
    assert "4, 1 diverged" in shown.said
    assert "mgt seed 1 (diverged)" in figure_of(shown, "Validation loss")
    rank = figure_of(shown, "Normalised effective rank")
    assert "Left out, diverged: mgt seed 1." in rank
    assert "99" not in rank
    assert "Rule for divergence applied: mgt seed 1" in shown.said


def test_an_arm_that_has_not_learned_is_marked_everywhere(tmp_path):
    found = runs()
    found["mgt"] = {**found["mgt"], 2: record(6.5, seed=2)}
    plan = template(small={"kind": "demo"})
    shown = page(study(found, plan=plan), tmp_path)
    assert "demo: too small to judge. Has not learned: mgt." in shown.said
    assert "demo: too small to judge; has not learned: mgt seed 2" in shown.said
    assert "5, 1 not learned" in shown.said
    assert "mgt has not learned: seed 2: loss 6.500 is not below the unigram entropy 6.000." in shown.said
    assert "additive has not learned" not in shown.said


def test_arms_of_a_contrast_that_differ_in_size_are_pointed_out(tmp_path):
    alike = page(study(runs()), tmp_path)
    assert "compares arms that differ" not in alike.said
    found = runs()
    found["mgt"] = {
        s: dataclasses.replace(r, result={**r.result, "cost": {**r.cost, "parameters": 100_000}})
        for s, r in found["mgt"].items()
    }
    shown = page(study(found), tmp_path)
    assert "H1 compares arms that differ in parameters: mgt has 10% more than additive_matched" in shown.said
    assert "differ in FLOPs" not in shown.said


def test_arms_are_described_and_commands_name_no_folder(tmp_path):
    shown = page(study(runs(), plan_path="/home/someone/plans/p.toml"), tmp_path)
    assert "mgt treatment mgt preset residual" in shown.said
    assert "parameters of mgt, by ffn_width" in shown.said
    assert "thalweg study run p.toml --scale small" in shown.said
    assert "/home/someone" not in shown.said


def test_an_arm_that_always_diverges_is_named(tmp_path):
    found = runs(measures=rows(["effective_rank"], 3))
    found["mgt"] = {s: dataclasses.replace(r, status="diverged") for s, r in found["mgt"].items()}
    shown = page(study(found), tmp_path)
    assert "Not measured: mgt." in figure_of(shown, "Normalised effective rank")
    assert "0, 5 diverged" in shown.said


def test_null_curves_are_drawn_once_or_for_each_arm_that_differs(tmp_path):
    found = runs(measures=rows(["effective_rank"], 3, null=0.9))
    same = figure_of(page(study(found), tmp_path), "Normalised effective rank")
    assert same.count('class="null"') == 2  # the curve and its key
    assert "null: Gaussian [64 x 32]" in same
    assert "<td>0.9</td>" in same
    found["mgt"] = runs(measures=rows(["effective_rank"], 3, null=0.7))["mgt"]
    differ = figure_of(page(study(found), tmp_path), "Normalised effective rank")
    assert differ.count('class="null"') == 4
    assert "null: Gaussian [64 x 32] (mgt)" in differ
    none = figure_of(page(study(runs(measures=rows(["rms"], 3, null=None))), tmp_path), "Size of the stream")
    assert "null" not in none


def test_figures_show_what_the_verdict_reads(tmp_path):
    """The last measurement, the mean over sublayers, states as they enter; step 0 beside it."""
    measures = [
        *(
            Measurement("rms", 1.0 + layer, layer=layer, site=f"layers.{layer}.attention", step=s, n=16)
            for layer in (0, 1)
            for s in (0, 100)
        ),
        *(Measurement("rms", 50.0, layer=layer, site=f"layers.{layer}.feed_forward", step=100) for layer in (0, 1)),
        Measurement("rms", 3.0, layer=2, site="stream.end", step=100),
        Measurement("rms", 77.0, layer=2, site="stream.left", step=100),
        *(
            Measurement("gate.mean", v, layer=0, site=f"layers.0.{k}", branch=k, step=100)
            for k, v in (("attention", 0.25), ("feed_forward", 0.75))
        ),
    ]
    found = page(study({"mgt": {0: record(measures=measures)}}), tmp_path)
    rms, gate = figure_of(found, "Size of the stream"), figure_of(found, "Gate on the update, mean")
    assert re.findall(r"<td>(.*?)</td>", rms) == ["1", "1", "2", "2", "3", "–"]
    assert "mgt, step 0" in rms
    assert "At step 100; 1 seed." in rms
    assert "Dotted: step 0." in rms
    assert re.findall(r"<td>(.*?)</td>", gate) == ["0.5"]


def test_unknown_measures_and_those_of_a_hypothesis(tmp_path):
    plan = template()
    asked = dataclasses.replace(
        plan, hypotheses=(dataclasses.replace(plan.hypotheses[0], measure="stable_rank", at="last"),)
    )
    found = page(study(runs(measures=rows(["never.heard_of", "stable_rank"], 3)), plan=asked), tmp_path)
    more = found.text.index('class="more"')
    assert found.text.index("<h3>Stable rank") < more < found.text.index("<h3>never: heard of")
    assert "Other measures (1)" in found.said


def test_measures_of_the_whole_network_are_in_a_table(tmp_path):
    measures = [
        Measurement("stability.spikes", 0.25, step=100, n=40, null=0.1, null_kind="a series without order"),
        Measurement("beta.transition", 3.5, unit="sites", branch="attention", site="stream", step=0),
        Measurement("beta.transition", 4.5, unit="sites", branch="attention", site="stream", step=100),
    ]
    found = page(study({"mgt": {0: record(measures=measures)}, "additive": {0: record()}}), tmp_path)
    table = found.text.partition("Stability and other measures")[2].partition("</table>")[0]
    assert "beta transition, attention, [sites]" in table
    assert re.findall(r"<td>(.*?)</td>", table) == ["4.5", "0.25", "–", "–", "–", "0.1 (a series without order)"]


def test_values_that_are_not_finite_or_missing(tmp_path):
    strange = [math.nan, math.inf, -math.inf]
    measures = [
        Measurement("effective_rank", value, layer=layer, step=100, null=math.nan, null_kind="k")
        for layer, value in enumerate(strange)
    ]
    measures += [Measurement("rms", value, step=100) for value in strange]
    bare = dataclasses.replace(
        record(measures=measures),
        result={},
        metrics={"val/loss": [(0, math.nan)], "task/exact_match": []},
        units={},
        provenance={},
        versions={},
        config={},
    )
    odd = record(
        measures=measures,
        result={"cost": {"parameters": math.nan, "peak_memory": None}, "nulls": {"unigram_entropy": math.nan}},
    )
    found = page(study({"additive": {0: bare}, "mgt": {0: odd}}), tmp_path)
    rank = figure_of(found, "Normalised effective rank")
    assert "no finite value" in rank
    assert [re.findall(r"<td>(.*?)</td>", rank)[i] for i in (0, 3, 6)] == ["NaN", "∞", "-∞"]


def test_learning_rates(tmp_path):
    tuning = {"mgt": {1e-3: 4.5, 2e-3: 4.2, 4e-3: math.inf}, "additive": {1e-3: 4.4, 2e-3: 4.3}}
    found = page(study(runs(), tuning=tuning, rates={"mgt": 2e-3, "additive": 2e-3}), tmp_path)
    table = found.text.partition("<h3>Learning rates</h3>")[2].partition("</table>")[0]
    assert re.findall(r"<td>(.*?)</td>", table) == ["0.002", "4.5", "4.2 *", "∞", "0.002", "4.4", "4.3 *", "–"]
    one = page(study(runs(), rates=dict.fromkeys(ARMS, 4e-3)), tmp_path)
    assert "One learning rate for all arms, not tuned: 0.004." in one.said


def test_deviations_choices_notes_and_provenance(tmp_path):
    plan = dataclasses.replace(template(), deviations=("shorter than the paper",))
    plan = dataclasses.replace(
        plan, arms={**plan.arms, "mgt": dataclasses.replace(plan.arms["mgt"], note="residual preset")}
    )
    found = page(
        study(
            runs(
                notes=["resumed, not bitwise: threads 1 -> 2"],
                result={"data": {"name": "austen", "notes": ["cut at 10 MB"]}},
            ),
            plan=plan,
            locked="2026-01-02T03:04:05+00:00",
            version="0.1.0",
            plan_text="schema = 1",
            plan_path="p.toml",
            citations=["@article{one}", "@article{two}"],
            deviations=["mgt leaves its source: x"],
        ),
        tmp_path,
    )
    for text in (
        "Deviation: shorter than the paper",
        "Our choice: optimiser",
        "mgt: residual preset",
        "mgt: resumed, not bitwise: threads 1 -> 2",
        "Data: cut at 10 MB",
        "mgt leaves its source: x",
        "2 layers, width 32, sequences of 64 tokens",
        "2026-01-02 03:04 UTC by thalweg 0.1.0",
        "thalweg study run p.toml --scale small",
        "schema = 1",
        "@article{one} @article{two}",
        plan.hash(),
        "a processor",
        "torch 2",
    ):
        assert text in found.said, text


def test_hostile_content_never_becomes_markup(tmp_path):
    plan = template()
    arms = {HOSTILE: Arm("mgt", note=HOSTILE), "mgt": plan.arms["mgt"]}
    h = dataclasses.replace(
        plan.hypotheses[0], id=HOSTILE, statement=HOSTILE, unit=HOSTILE, contrast={HOSTILE: 1.0, "mgt": -1.0}
    )
    plan = dataclasses.replace(
        plan,
        name=HOSTILE,
        title=HOSTILE,
        question=HOSTILE,
        source=HOSTILE,
        arms=arms,
        hypotheses=(h,),
        choices=(HOSTILE,),
        deviations=(HOSTILE,),
    )
    measures = [
        dataclasses.replace(row, unit=HOSTILE, null_kind=HOSTILE, split=HOSTILE, branch=HOSTILE)
        for row in rows(["effective_rank", HOSTILE], 2)
    ] + [Measurement(HOSTILE, 1.0, unit=HOSTILE, branch=HOSTILE, null=1.0, null_kind=HOSTILE)]
    one = record(
        measures=measures,
        notes=[HOSTILE],
        metrics={f"task/{HOSTILE}": [(0, 1.0), (1, 2.0)], f"stability/{HOSTILE}": [(1, 1.0)]},
        config={"depth": HOSTILE, "data": HOSTILE, "lr": HOSTILE},
        result={"nulls": {HOSTILE: 1.0}, "data": {"name": HOSTILE, "notes": [HOSTILE]}, "reason": HOSTILE},
    )
    one = dataclasses.replace(
        one,
        units={"val/loss": HOSTILE},
        provenance={HOSTILE: HOSTILE},
        versions={HOSTILE: HOSTILE},
        fingerprint=HOSTILE,
    )
    two = dataclasses.replace(one, seed=1, status="diverged")
    found = page(
        study(
            {HOSTILE: {0: one, 1: two}, "mgt": {0: one, 1: two}},
            plan=plan,
            void=[HOSTILE],
            rates={HOSTILE: 1.0},
            tuning={HOSTILE: {1.0: 2.0}},
            locked=HOSTILE,
            version=HOSTILE,
            plan_text=HOSTILE,
            plan_path=HOSTILE,
            citations=[HOSTILE],
            deviations=[HOSTILE],
        ),
        tmp_path,
    )
    assert "script" not in found.tags  # and all that `read` checks
    assert "\x00" not in found.text
    assert "\u202e" not in found.text
    assert found.said.count("alert(") > 40  # shown, as text


def test_the_same_records_give_the_same_bytes(tmp_path):
    records = study(runs(measures=rows(["effective_rank", "gate.mean", "other"], 3)), plan_text="x")
    first = write_study_report(records, tmp_path / "a.html").read_bytes()
    assert write_study_report(records, tmp_path / "b.html").read_bytes() == first


def test_21_arms_5_seeds_12_layers_30_measures(tmp_path):
    plan = template()
    names = [f"arm_{i}" for i in range(18)]
    plan = dataclasses.replace(plan, arms={**plan.arms, **{name: Arm("mgt") for name in names}})
    measures = rows([f"measure_{i}" for i in range(28)] + ["effective_rank", "rms"], 12)
    found = {arm: {s: record(4.0 + 0.01 * s, seed=s, measures=measures, points=80) for s in SEEDS} for arm in plan.arms}
    records = study(found, plan=plan)
    start = time.perf_counter()
    path = write_study_report(records, tmp_path / "big.html")
    seconds = time.perf_counter() - start
    assert path.stat().st_size < 3e6
    assert seconds < 30  # about 3 on an idle core
    page = read(path)
    assert len(page.figures()) == 3 + 30 + 1
    assert "arm_17" in figure_of(page, "Normalised effective rank")


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="cannot be written"):
        write_study_report(study({}), tmp_path / "file" / "report.html")
    assert (tmp_path / "file").read_text() == "mine"


def test_losses_per_sequence_are_called_so(tmp_path):
    found = runs(metrics={"task/accuracy": [(100, 0.7)], "task/accuracy_low": [(100, 0.6)]})
    units = {"val/loss": "nats/sequence", "train/loss": "nats/sequence"}
    found = {arm: {s: dataclasses.replace(r, units=units) for s, r in seeds.items()} for arm, seeds in found.items()}
    said = page(study(found, tuning={"mgt": {1e-3: 4.5, 2e-3: 4.2}}, rates={"mgt": 2e-3}), tmp_path).said
    for text in ("final loss [nats/sequence] bits/byte accuracy parameters", "last val/loss [nats/sequence]"):
        assert text in said
    assert "Final validation loss [nats/sequence] on the tuning seed" in said


def test_notes_of_the_data_stand_once(tmp_path):
    found = runs(notes=["cut at 10 MB", "resumed"], result={"data": {"name": "austen", "notes": ["cut at 10 MB"]}})
    said = page(study(found), tmp_path).said
    assert said.count("cut at 10 MB") == 1 and "Data: cut at 10 MB" in said and "mgt: resumed" in said


def test_contrasts_are_drawn_at_every_step_with_their_intervals():
    """By hand: mgt - additive at two steps over three seeds; a diverged run takes its seed out, a NaN its step."""
    plan = template()
    h = dataclasses.replace(plan.hypotheses[0], contrast={"mgt": 1.0, "additive": -1.0})
    base = {0: [5.0, 4.0, 3.0], 1: [5.1, 4.2, 3.1], 2: [5.3, 4.1, 3.3], 3: [9.0, 9.0, 9.0]}
    drop = {0: [0.0, 0.1, 0.2], 1: [0.0, 0.3, 0.2], 2: [0.0, 0.2, math.nan], 3: [1.0, 1.0, 1.0]}

    def run(values, seed, status="done"):
        made = record(values[-1], seed=seed, status=status)
        return dataclasses.replace(made, metrics={**made.metrics, "val/loss": [*zip((0, 10, 20), values, strict=True)]})

    arms = {
        "additive": [run(base[s], s) for s in base],
        "mgt": [
            run([b - d for b, d in zip(base[s], drop[s], strict=True)], s, "diverged" if s == 3 else "done")
            for s in base
        ],
    }
    (figure,) = contrast_figures([h], arms)
    (first, second) = (row[1] for row in figure.rows)
    assert [row[0] for row in figure.rows] == ["0", "10"] and first.startswith("0")
    half = 4.302653 * 0.1 / math.sqrt(3)  # t at 97.5 % with two degrees of freedom, sd 0.1
    found = [float(text) for text in re.findall(r"-?\d+\.\d+", second.replace("\u2212", "-"))]
    assert found == pytest.approx([-0.2, -0.2 - half, -0.2 + half], abs=2e-3)
    assert f"{h.id} seed 3" in figure.caption
    assert (
        contrast_figures([h], {"mgt": arms["mgt"]}) == []
        and contrast_figures([h], {k: v[:1] for k, v in arms.items()}) == []
    )
    assert contrast_figures([dataclasses.replace(h, at="last")], arms) == []
