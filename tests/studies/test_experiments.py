"""The experiments themselves: each runs at a tiny size and leaves its columns; what algebra gives them they give."""

import dataclasses
import math

import pytest
import torch

from thalweg import studies
from thalweg.errors import InputError
from thalweg.geometry.directional import DirectionalOperator
from thalweg.geometry.eigenpairs import top_eigenpairs
from thalweg.growth import Growable, GrowthOptions, on_the_plane
from thalweg.growth.drift import drift
from thalweg.growth.reading import look
from thalweg.ops.prototypes import assignment
from thalweg.records import Measurements
from thalweg.studies.experiments import (
    epsilon_law,
    prototype_layer,
    pruning_safety,
    separation,
    subjects,
    symmetric_reaction,
    torsion,
    uniqueness,
)
from thalweg.studies.experiments.base import registry
from thalweg.studies.experiments.growing import GrowingLayer, planes, rotation, seeded, teacher, tokens
from thalweg.studies.library import shipped_folder

OWN = {
    "data": "copy:vocab=8,half=6",
    "depth": 2,
    "width": 16,
    "heads": 2,
    "steps": 3,
    "sequence_length": 16,
    "batch_size": 2,
    "geometry": False,
    "eval_batches": 1,
    "threads": 1,
}


def quiet(line):
    pass


def run(name, values, seed=0):
    entry = registry[name]
    return entry.rows(name, entry.options(values), seed, quiet)


def one(rows, measure, arm):
    (row,) = rows.where(measure=measure, arm=arm)
    return row.value


SMOKE = [
    (plan, name)
    for plan, names in {
        "growth-claims": ("order", "split", "separation", "layer", "unique", "amplify", "complexity"),
        "continuum-claims": ("recurrence",),
    }.items()
    for name in names
]


@pytest.mark.parametrize(("plan", "name"), SMOKE)
def test_the_smoke_scale_of_shipped_plans_runs_and_repeats_itself(plan, name):
    use = studies.study(shipped_folder() / f"{plan}.toml", "smoke").uses[name]
    entry = registry[use.experiment]
    values = [[row.value for row in entry.rows(name, use.options, seed, quiet)] for seed in (5, 5, 6)]
    assert torch.tensor(values[0]).nan_to_num().tolist() == torch.tensor(values[1]).nan_to_num().tolist()
    if name != "complexity":  # whole counts of births, which two seeds may share
        assert str(values[0]) != str(values[2])


# One layer that grows


def layer(prototypes=0, seed=3):
    x = tokens(2, 8, 8, seeded(seed, 0))
    query, key = planes(rotation(8, seeded(seed, 1)), [1.0, 0.5])
    target = teacher(x, query, key, seeded(seed, 2))
    return GrowingLayer(x, target, query, key, prototypes=prototypes, generator=seeded(seed, 3))


@pytest.mark.parametrize("prototypes", [0, 3])
def test_the_layer_is_growable_and_births_and_masks_do_what_they_say(prototypes):
    network = layer(prototypes)
    assert isinstance(network, Growable)
    reading = look(network, 0, {}, GrowthOptions(head_width=4))
    birth = on_the_plane(reading.operator, reading.vectors[:, 0], reading.top, 4)
    before = network.outputs().clone()
    (head,) = network.add_heads(0, [birth])
    assert drift(before, network.outputs()) == 0 and [h.id for h in network.heads(0)] == [0, 1]
    network.train_steps(3, 0.05)
    trained = network.outputs()
    assert drift(before, trained) > 0
    network.mask_head(0, head, 0.0)
    masked = network.outputs().clone()
    network.prune_heads(0, [head])
    assert drift(masked, network.outputs()) == 0 and drift(trained, masked) > 0
    with pytest.raises(InputError, match="stands alone"):
        network.add_layer()


def test_training_lowers_the_loss():
    network = layer(3)
    before = network.fit()
    assert network.train_steps(60, 0.02) < before


def test_planes_are_antisymmetric_with_their_strengths():
    basis = rotation(6, seeded(0, 0))
    query, key = planes(basis, [2.0, 0.5])
    m = query @ key.T
    assert torch.allclose(m, -m.T, atol=1e-12)
    assert torch.linalg.svdvals(m)[:4].tolist() == pytest.approx([2.0, 2.0, 0.5, 0.5])


def test_tokens_have_their_rank():
    assert torch.linalg.matrix_rank(tokens(2, 16, 8, seeded(0, 0), rank=3).flatten(0, 1)) == 3


# Separation


def test_variance_and_force_are_those_of_loops():
    g = seeded(1, 0)
    x, p = (
        torch.randn(2, 7, 3, generator=g, dtype=torch.float64),
        torch.randn(2, 4, 3, generator=g, dtype=torch.float64),
    )
    q = assignment(x, p, torch.tensor([0.7, 2.0], dtype=torch.float64))
    variance, force = separation.separated(q, p)
    for b in range(2):
        total, gradient = 0.0, torch.zeros(4, 3, dtype=torch.float64)
        for n in range(7):
            about = sum(q[b, n, k] * p[b, k] for k in range(4))
            total += sum((q[b, n, k] * (p[b, k] - about).square().sum()).item() for k in range(4)) / 7
            for k in range(4):
                gradient[k] += 2 * q[b, n, k] * (p[b, k] - about) / 7
        assert variance[b].item() == pytest.approx(total, abs=1e-12)
        assert force[b].item() == pytest.approx(gradient.norm().item(), abs=1e-12)


def test_at_a_fixed_assignment_nothing_falls_and_with_a_free_one_some_do():
    rows = run("separation", {"trials": 200})
    assert one(rows, "separation.force_fell", "fixed") == 0 == one(rows, "separation.variance_fell", "fixed")
    assert 0.05 < one(rows, "separation.force_fell", "free") < 0.6


# Uniqueness


@pytest.mark.parametrize("arm", uniqueness.SPECTRA)
def test_the_known_operator_has_the_eigenvalues_that_it_is_made_for(arm):
    options = uniqueness.UniquenessOptions()
    operator = uniqueness.known(options, uniqueness.VALUES[arm], seeded(0, 0))
    values = top_eigenpairs(operator, 6)[0]
    wanted = torch.tensor([*uniqueness.VALUES[arm], uniqueness.BELOW, 0.8 * uniqueness.BELOW], dtype=torch.float64)
    assert torch.allclose(values / values[0], wanted, atol=1e-9)


def test_matching_undoes_a_permutation_and_angles_see_spaces():
    p = torch.randn(5, 3, generator=seeded(0, 0), dtype=torch.float64)
    assert uniqueness._matched(torch.cdist(p, p[[3, 1, 4, 0, 2]])) == pytest.approx(0, abs=1e-7)
    basis = rotation(6, seeded(0, 1))
    turned = basis[:, :2] @ rotation(2, seeded(0, 2))
    assert uniqueness._angle(basis[:, :2], turned) == pytest.approx(0, abs=1e-9)
    assert uniqueness._angle(basis[:, :2], basis[:, 1:3]) == pytest.approx(math.pi / 2)


# Prototypes beside feed-forward layers


def test_layers_have_equal_parameters_and_their_spans_are_what_they_write():
    options = {"tokens": 64, "steps": 2}
    rows = run("prototype_layer", options)
    sizes = {arm: one(rows, "layer.parameters", arm) for arm in prototype_layer.ARMS}
    assert sizes["trained"] == sizes["frozen"] and sizes["prototypes"] == sizes["trained"] + 1  # its temperature
    best = {row.arm: row.value for row in rows.where(measure="layer.best")}
    assert all(one(rows, "layer.kept", arm) <= best[arm] + 1e-9 for arm in prototype_layer.ARMS)
    made = prototype_layer.FeedForward(6, 2)
    span = prototype_layer._span(made)
    y = made(torch.randn(9, 6)).detach().double()
    assert span.shape == (6, 2) and torch.allclose(y @ span @ span.T, y, atol=1e-6)


def test_a_frozen_layer_stays_as_it_was(monkeypatch):
    made = []
    kept = prototype_layer.FeedForward

    class Watched(kept):
        def __init__(self, *given):
            super().__init__(*given)
            made.append((self, self.down.weight.detach().clone()))

    monkeypatch.setattr(prototype_layer, "FeedForward", Watched)
    run("prototype_layer", {"tokens": 64, "steps": 2})
    trained, frozen = (not torch.equal(layer.down.weight, before) for layer, before in made)
    assert trained and not frozen


# Pruning


def embeddings(n=40, d=20, heads=3):
    g = seeded(0, 0)
    query, key = (torch.randn(heads, d, 4, generator=g, dtype=torch.float64) for _ in range(2))
    return subjects.LayerStates(tokens(1, n, d, g)[0], query, key)


def test_pruning_leaves_dictionaries_of_their_own_alone_at_once(monkeypatch):
    monkeypatch.setattr(pruning_safety, "layer_states", lambda *given: embeddings())
    rows = run("pruning_safety", {"heads": 3, "width": 4, "prototypes": 3, "tokens": 40, "warm": 3, "after": 2})
    assert one(rows, "pruning.force", "own_at") == 0 == one(rows, "pruning.closest", "own_at")
    assert one(rows, "pruning.fit", "own_at") > 0
    assert one(rows, "pruning.top", "direction") > -1e-12  # interlacing


def test_a_masked_head_is_a_head_that_is_not_there():
    o = pruning_safety.PruningOptions(heads=3, width=4, prototypes=3)
    x = torch.randn(30, 12, generator=seeded(0, 0))
    for shared in (False, True):
        network = pruning_safety.Reconstruction(x, o, shared=shared, seed=0)
        network.mask[1] = 0.0
        network.loss().backward()
        gradient = network.value.grad
        assert gradient is not None and gradient[:, 4:8].abs().max() == 0 and gradient[:, :4].abs().max() > 0


def test_factors_of_an_encoder_are_those_of_its_scores():
    from transformers import BertConfig, BertModel

    model = BertModel(
        BertConfig(vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16)
    ).eval()

    class Words:
        def __call__(self, text, **_):
            ids = torch.tensor([[1, *(len(word) % 40 + 2 for word in text.split()[:20]), 1]])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    opened = subjects.Subject(model, Words(), "bert")
    subjects._opened.cache_clear()
    original, subjects._opened = subjects._opened, lambda name: opened
    try:
        found = subjects.layer_states("bert", 0, 1, 30)
        with pytest.raises(InputError, match="no layer 7 of BERT's kind"):
            subjects.layer_states("bert", 0, 7, 30)
    finally:
        subjects._opened = original
    assert found.inputs.shape == (30, 12) and found.query.shape == (3, 12, 4)
    attention = model.encoder.layer[1].attention.self
    x = found.inputs.float()
    scores = (x @ attention.query.weight.T).unflatten(-1, (3, 4)).movedim(1, 0) @ (
        (x @ attention.key.weight.T).unflatten(-1, (3, 4)).movedim(1, 0).mT
    )
    ours = torch.einsum("nd,hdw,hew,me->hnm", found.inputs, found.query, found.key, found.inputs)
    assert torch.allclose(ours.float(), scores, atol=1e-4)
    assert isinstance(DirectionalOperator(found.inputs, found.query[0], found.key[0]).scale, float)


# Models and texts


def test_a_model_that_is_not_there_says_so_in_one_line():
    with pytest.raises(InputError) as error:
        run("epsilon_law", {"model": "/nowhere/model"})
    assert "\n" not in str(error.value)


def test_training_belongs_to_a_model_of_ours():
    with pytest.raises(InputError, match="leave it out"):
        run("epsilon_law", {"model": "smollm2", "train": {"depth": 1}})


@pytest.fixture
def planted(monkeypatch):
    """Rows in the place of those of a probe."""

    def plant(module, made, unlearned=""):
        subject = subjects.Subject(torch.nn.Identity(), None, "made", unlearned)
        monkeypatch.setattr(module, "probed", lambda *given: (made, subject))

    return plant


def test_the_law_of_epsilon_reads_median_and_steepest_norm(planted):
    made = Measurements()
    made.add("rmsnorm.slope.origin", -0.5)
    for slope, felt in ((-0.4, 0.5), (-0.1, 0.2), (-0.01, 0.0)):
        made.add("rmsnorm.slope.activations", slope)
        made.add("rmsnorm.felt", felt)
    planted(epsilon_law, made, "loss too high")
    rows = run("epsilon_law", {})
    assert one(rows, "epsilon.slope", "activations") == -0.1 and one(rows, "epsilon.steepest", "activations") == -0.4
    assert one(rows, "epsilon.felt", "activations") == 0.5 and one(rows, "has_learned", "origin") == 0


def test_torsion_is_the_mean_over_layers_beside_its_nulls(planted):
    made = Measurements()
    for layer, (cosine, other) in enumerate(((0.8, 0.3), (0.4, 0.5))):
        made.add("splitting.cosine", cosine, layer=layer)
        made.add("splitting.cosine.other_tokens", other, layer=layer, null=0.1)
    made.add("splitting.cosine.other_layer", 0.2, layer=1)
    planted(torsion, made)
    rows = run("torsion", {})
    assert one(rows, "torsion.cosine", "bracket") == pytest.approx(0.6)
    assert one(rows, "torsion.cosine", "other_layer") == 0.2
    assert (
        one(rows, "torsion.excess", "bracket") == pytest.approx(-0.1) and one(rows, "torsion.positive", "bracket") == 1
    )


def test_a_gated_model_is_treated_as_one(planted):
    made = Measurements()
    for branch, share in (("model", 0.5), ("symmetric", 0.0), ("tied_down", 0.2)):
        made.add("reaction.imaginary_share", share, branch=branch, null=0.6, null_kind="random")
    for i, name in enumerate(symmetric_reaction.CONTROLS):
        made.add("reaction.excess", float(i), branch=f"symmetric - {name}", n=4)
    planted(symmetric_reaction, made)
    with pytest.raises(InputError, match="is gated, the plan says gated = false"):
        run("symmetric_reaction", {})
    rows = run("symmetric_reaction", {"gated": True})
    assert one(rows, "symmetric.untied_gate", "symmetric") == 0.2 and one(rows, "symmetric.excess", "rotated") == 2


def test_own_models_are_trained_once_for_a_seed_and_probed():
    subjects._trained.cache_clear()
    rows = run("torsion", {"train": {**OWN, "data": "austen"}, "tokens": 32, "length": 16})
    made = subjects.subject_of(subjects.SubjectOptions(train={**OWN, "data": "austen"}), 0)
    assert subjects._trained.cache_info().hits == 1 and "not below" in made.unlearned
    assert one(rows, "has_learned", "bracket") == 0


# Vortices


def test_a_run_leaves_the_columns_of_a_vortex():
    train = {
        **OWN,
        "depth": 1,
        "steps": 250,
        "optimizer": "sgd",
        "lr": 0.1,
        "weight_decay": 0.5,
        "schedule": "constant",
    }
    rows = run("training_vortex", {"train": train, "records": 1, "skip": 0.0, "surrogates": 19, "walks": 1})
    share = one(rows, "vortex.stationary", "weights")
    assert 0 <= share <= 1 and math.isnan(one(rows, "vortex.circulates", "weights")) == (share == 0)


def test_what_the_probe_calls_decides(monkeypatch):
    from thalweg import continuum
    from thalweg.continuum import Finding

    def found(relaxations, called):
        rows = Measurements()
        for site, value in relaxations.items():
            rows.add("vortex.relaxations", value, site=site)
            rows.add("vortex.area_rate", 0.1 if site == "a" else -0.1, site=site)
            rows.add("vortex.area_rate", -0.1, site=site, branch="time backwards")
            for branch in ("sign_flip", "block_shuffle"):
                rows.add("vortex.p", 0.01, site=site, branch=branch)
            rows.add("vortex.found", called, site=site)
        rows.add("vortex.found", 0.1, branch="random walks in place of the weights", n=10)
        rows.add("vortex.found", called)
        return (Finding("vortex", rows=rows),)

    train = {**OWN, "depth": 1, "steps": 4}
    monkeypatch.setattr(continuum, "findings", lambda *a, **k: found({"a": 20.0, "b": 30.0}, 1.0))
    rows = run("training_vortex", {"train": train, "records": 1})
    assert one(rows, "vortex.circulates", "weights") == 1 and one(rows, "vortex.stationary", "weights") == 1
    assert one(rows, "vortex.beats_reversal", "weights") == 0.5  # b turns the other way
    assert one(rows, "vortex.walks", "walks") == 0.1
    monkeypatch.setattr(continuum, "findings", lambda *a, **k: found({"a": 3.0, "b": float("nan")}, 0.0))
    rows = run("training_vortex", {"train": train, "records": 1})
    assert math.isnan(one(rows, "vortex.circulates", "weights")) and one(rows, "vortex.stationary", "weights") == 0


def test_seed_and_records_are_not_for_the_training_table():
    for key in ("seed", "trajectory"):
        with pytest.raises(InputError, match=key):
            run("training_vortex", {"train": {key: 1}})


def test_options_are_frozen_dataclasses_with_defaults():
    for name in registry.names():
        options = registry[name].Options
        assert dataclasses.is_dataclass(options) and options.__dataclass_params__.frozen
        options()
