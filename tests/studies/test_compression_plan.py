"""Plans of compressions: what their arms are, what is refused, when they can decide, and how their hash stands."""

import pytest
from compression_plans import plan, table

from thalweg import studies
from thalweg.errors import InputError
from thalweg.studies.check import check
from thalweg.studies.compressed.plan import parse_compressions
from thalweg.studies.plan import parse


def test_arms_of_every_subject_and_strength():
    made = plan()
    assert list(made.edits) == [
        "own.noop", "own.rtn-8", "own.rtn-4", "own.rtn-3", "own.rtn-2", "own.prune-0.3", "own.prune-0.5",
        "own.alone-layer0", "own.alone-layer1", "own.alone-layer2", "own.kept", "own.kept_chance",
    ]  # fmt: skip
    assert [a.name for a in made.ranked("own", "small")] == list(made.edits)[1:7]  # neither single layers nor protected
    assert made.edits["own.rtn-3"].options == {"group": 8, "bits": 3}
    kept = made.edits["own.kept"]
    assert kept.protect is not None and kept.protect.of == "own.rtn-3"
    assert kept.identity != made.edits["own.rtn-3"].identity != made.edits["own.rtn-4"].identity


def test_two_subjects_have_arms_of_their_own():
    made = plan(subject__other={"model": "smollm2"}, arms__prune__subjects=["other"])
    assert "other.prune-0.5" in made.edits and "own.prune-0.5" not in made.edits
    assert made.noop_of("other.rtn-4") == "other.noop" and made.subject_of("other.rtn") == "other"


def test_the_kind_decides_which_plan_it_is():
    assert type(parse(table())).__name__ == "CompressionPlan"
    with pytest.raises(InputError, match="kind"):
        parse(table(kind="edits"))


def test_the_hash_sees_every_value():
    assert plan().hash() == plan().hash()
    assert len({plan().hash(), plan(arms__rtn__options={"group": 32}).hash(), plan(scale__small__every=4).hash()}) == 3


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"arms__rtn__vary": {"bits": [4, 4]}}, "strengths must differ"),
        ({"arms__rtn__vary": {"group": [4, 8]}}, "options or in vary"),
        ({"arms__rtn__vary": {"bits": [4], "clip": [1]}}, "one option"),
        ({"arms__rtn__options": {"skip": [1]}}, "layers are chosen by each_layer and protect"),
        ({"arms__alone__vary": {"sym": [0, 1]}}, "one strength"),
        ({"arms__kept__protect": {"by": "size", "of": "rtn-3", "count": 1}}, "'size'"),
        ({"arms__kept__protect": {"by": "total", "of": "rtn-7", "count": 1}}, "'own.rtn-7'.*own.rtn-8"),
        ({"arms__kept__protect": {"by": "total", "of": "rtn-3", "count": 0}}, "at least 1"),
        ({"arms__rtn__subjects": ["owl"]}, "'owl'.*own"),
        ({"scale__small__every": 2}, "at least 3"),
        ({"scale__small__calibration": 30}, "at most documents"),
        ({"scale__small__choices": 1}, "between 2 and documents"),
        ({"hypotheses__0__measure": "rang"}, "'rang'.*rank"),
        ({"hypotheses__0__contrast": {"perp": 1}}, "'perp'.*perpendicular"),
        ({"hypotheses__0__subject": "owl"}, "'owl'.*own"),
        ({"hypotheses__0__fidelity": "loss"}, "'loss'.*loss_change"),
        ({"hypotheses__1__contrast": {"own.rtn-5": 1}}, "'own.rtn-5'.*own.rtn-"),
        ({"hypotheses__2__arm": ""}, "arm of with"),
        ({"hypotheses__3__part": "angle"}, "'angle'"),
        ({"text": {"buckets": 4}}, "buckets"),
    ],
)  # fmt: skip
def test_what_is_refused(over, words):
    with pytest.raises(InputError, match=words):
        parse_compressions(table(**over))


def test_check_wants_documents_arms_behind_a_rank_and_what_predictors_need():
    assert check(plan(), "small", 2000).problems == ()
    assert "at least 20 documents" in check(plan(scale__small__documents=19), "small", 2000).problems[0]
    few = check(plan(arms__rtn__vary={"bits": [8]}, arms__kept__protect={"by": "total", "of": "rtn-8", "count": 1},
                     arms__kept_chance__protect={"by": "total", "of": "rtn-8", "count": 1},
                     hypotheses__2__arm="own.rtn-8", hypotheses__3__contrast={"own.rtn-8": 1}), "small", 2000)  # fmt: skip
    assert "ranks 3 arms, at least 5" in few.problems[0]
    assert "set kl_documents" in check(plan(hypotheses__0__contrast={"kl": 1}), "small", 2000).problems[0]
    kept = plan(arms__kept__protect={"by": "kl", "of": "rtn-3", "count": 1})
    assert check(kept, "small", 2000).problems == ("own.kept protects layers by the layer-wise KL; set kl_documents",)
    assert check(kept, "smoke", 2000).problems == ()
    silent = plan(hypotheses__0__fidelity="accuracy_drop", scale__small__choices=0)
    assert "set choices" in check(silent, "small", 2000).problems[0]


def test_a_plan_opens_as_a_study_of_its_kind(tmp_path):
    from compression_plans import TEXT

    (tmp_path / "p.toml").write_text(TEXT)
    study = studies.study(tmp_path / "p.toml", "smoke")
    assert study.counts == "compressions" and study.progress() == (0, 12)
    assert next(arm.name for arm in study.missing()) == "own.noop"
    assert {arm.name for arm in study.missing()[-2:]} == {"own.kept", "own.kept_chance"}  # they need the rows of others
    shas = {study.groups[0].tables["evaluation"][name]["sha256"] for name in ("errors", "calibration")}
    assert len({*shas, study.groups[0].tables["text"]["sha256"]}) == 3  # no text serves twice
