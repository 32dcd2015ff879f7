"""Plans of edits: strict reading, what families expand to, identity, power; and that plans of training runs kept theirs."""

import re

import pytest
from edit_plans import TEXT, plan, table

from thalweg.errors import InputError
from thalweg.studies import load
from thalweg.studies.check import check
from thalweg.studies.edits.plan import EditPlan, parse_edits
from thalweg.studies.library import shipped_folder
from thalweg.studies.plan import Plan

# Locked before this kind of plan existed; not a bit of them may change.
LOCKED = {
    "mgt-ablation": "412ecff18c4fb3d85f431c6ca24e10b1b405bb12092ef3c6313170f19c30f0a6",
    "mgt-rank": "84cc7a1ea7ab21ca5f1a29279a84235b3264b40e5d688d64c4c39880d6e9a633",
    "streams-gain": "a448e359470370776abf2907ab5c1e929e2a532b1f5d7b756d122fc138ed156b",
}


@pytest.mark.parametrize(("name", "digest"), LOCKED.items())
def test_hashes_of_locked_plans_stand(name, digest):
    made = load(shipped_folder() / f"{name}.toml")
    assert isinstance(made, Plan)
    assert made.hash() == digest


def test_families_expand_to_named_arms_with_their_no_op():
    made = plan()
    assert [a.name for a in made.members["value"]] == ["value-noop", "value-par0", "value-par0.5", "value-perp0"]
    assert [a.name for a in made.members["alone"]] == ["alone-noop", *(f"alone-layer{i}" for i in range(7))]
    assert made.edits["value-perp0"].options.perpendicular == 0 and made.edits["value-perp0"].options.parallel == 1
    assert made.edits["alone-layer3"].options.layers == (3,)
    assert made.edits["value-noop"].options.is_identity


def test_the_same_edit_in_other_words_is_one():
    edits = plan().edits
    assert edits["again"].identity == edits["value-par0"].identity != edits["value-par0.5"].identity
    assert edits["again-noop"].identity == edits["value-noop"].identity != edits["block-noop"].identity
    # 13 arms and no-ops of value, again, block and alone; two of them twice
    assert check(plan(), "small").runs == len({a.identity for a in edits.values()}) == len(edits) - 2


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("schema", 2, "schema must be 1"),
        ("subject__own__model", "smollm2", "exactly one of model and train"),
        ("subject__own__trian", {}, "Did you mean 'subject.own.train'"),
        ("arms__value__edit", {"sight": "value"}, "Did you mean 'arms.value.edit.site'"),
        ("arms__value__edit", {"site": "vale"}, "arms.value.edit: unknown site"),
        ("arms__value__edit", {"site": "value", "parallel": 0.5}, "in the edit or in a grid"),
        (
            "arms__value__edit",
            {"site": "value", "coefficient": "layer_mean"},
            "a coefficient is measured on text first",
        ),
        ("arms__value__parallel", [0.0, 1.0], "the scale 1 is the no-op value-noop"),
        ("arms__value__parallel", [0.0, 0.0], "scales must differ"),
        ("arms__value__parallel", ["0"], "arms.value.parallel[0] must be float"),
        ("arms__alone__edit", {"site": "mlp", "layers": [1]}, "leave layers out"),
        ("arms__block__subject", "ours", "Known: own"),
        ("arms", {"a/b": {"edit": {"site": "mlp"}}}, "a name holds only letters"),
        ("hypotheses__0__contrast", {"value-par1": 1}, "Did you mean 'value-par0"),
        ("hypotheses__0__contrast", {}, "empty contrast"),
        ("hypotheses__0__measure", "embedding_change", "evaluation likelihood"),
        ("hypotheses__0__at", "middle", "unknown at of asymmetry"),
        ("hypotheses__0__diverged", "unigram", "diverged must be inconclusive or a number"),
        ("hypotheses__1__primary", True, "layers, which are no sample"),
        ("hypotheses__1__against", "size", "unknown against of strength"),
        ("hypotheses__1__contrast", {"value": 1}, "each_layer"),
        ("scale__small__documents", 0, "must be at least 1"),
        ("scale__small__arms", ["values"], "Did you mean 'value'"),
        ("scale__small__models", {"ours": "x"}, "Known: own"),
    ],
)
def test_wrong_plans(path, value, says):
    with pytest.raises(InputError, match=re.escape(says)):
        plan(**{path: value})


def test_hash_sees_values_and_nothing_else(tmp_path):
    (tmp_path / "a.toml").write_text(TEXT)
    (tmp_path / "b.toml").write_text("# a comment\n" + TEXT.replace("tokens = 16", "tokens   = 16"))
    made = load(tmp_path / "a.toml")
    assert isinstance(made, EditPlan)
    assert made.hash() == load(tmp_path / "b.toml").hash() != plan(hypotheses__0__margin=0.2).hash()


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("scale__small__documents", 19, "at least 20 documents"),
        ("hypotheses__0__sd", 2.0, "simulated power"),
        ("hypotheses__0__primary", False, "needs a primary hypothesis"),
        ("scale__small__tokens", 18, "multiple of buckets"),
        ("scale__small__audit", 0, "need audited documents"),
        ("scale__small__arms", ["block"], "no hypothesis has all its arms"),
        ("arms__value__documents", 5, "asymmetry is judged on 20 documents, arms.value reads 5; leave documents out"),
        (
            "arms__alone__edit",
            {"site": "block", "parallel": 0.0},
            "strength is against applied, which has no value at site",
        ),
    ],
)
def test_confirmatory_plans_that_cannot_decide_are_refused(path, value, says):
    with pytest.raises(InputError, match=says):
        check(plan(**{path: value}), "small").require()


def test_a_family_may_read_all_documents_and_layers_of_blocks_have_a_drift():
    assert check(plan(arms__value__documents=20, arms__alone__documents=5), "small").problems == ()
    blocks = plan(arms__alone__edit={"site": "block", "parallel": 0.0}, hypotheses__1__against="drift")
    assert check(blocks, "small").problems == ()


def test_layers_have_no_power_and_several_claims_need_a_correction():
    assert [p.hypothesis for p in check(plan(), "small").powers] == ["asymmetry"]
    assert check(plan(), "small").problems == ()
    tables = table(multiplicity="none")
    tables["hypotheses"].append({**tables["hypotheses"][0], "id": "second"})
    assert any("need a correction" in problem for problem in check(parse_edits(tables), "small").problems)
