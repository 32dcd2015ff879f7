"""The clustering estimator, by scikit-learn's own checks and by what it claims; the collapse panel."""

import math

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.utils.estimator_checks import estimator_checks_generator

from thalweg import growth
from thalweg.errors import InputError
from thalweg.geometry import prototypes as measures
from thalweg.growth import DDCL, collapse_panel

RNG = np.random.default_rng(3)
CENTRES = np.array([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0], [8.0, 8.0]])
TRUTH = np.repeat(np.arange(4), 50)
BLOBS = CENTRES[TRUTH] + RNG.normal(size=(200, 2)) * 0.6


def name_of(check):
    return getattr(check, "func", check).__name__


CHECKS = [  # all but the one that needs an environment variable set before scipy is imported
    check for _, check in estimator_checks_generator(DDCL()) if name_of(check) != "check_array_api_input"
]


def test_there_are_checks():
    assert len(CHECKS) > 40


@pytest.mark.parametrize("check", CHECKS, ids=[f"{i}-{name_of(check)}" for i, check in enumerate(CHECKS)])
def test_the_checks_of_scikit_learn(check):
    check(DDCL())


WAYS = {
    "loss": {},
    "free energy": {"objective": "free_energy"},
    "dual": {"dual": True},
    "cooling": {"learn_temperature": True, "max_iter": 100},
    "cooling, free energy": {"learn_temperature": True, "objective": "free_energy", "max_iter": 100},
}


@pytest.mark.parametrize("way", WAYS)
def test_clear_clusters_are_found_and_the_objective_never_rises(way):
    model = DDCL(4, temperature=4.0, random_state=0, **WAYS[way]).fit(BLOBS)
    assert all(len(set(model.labels_[k == TRUTH])) == 1 for k in range(4)) and len(set(model.labels_)) == 4
    assert (np.diff(model.objective_path_) <= 0).all() and model.n_iter_ == len(model.objective_path_) - 1
    assert model.loss_ == pytest.approx(model.fit_ + model.variance_)
    fit, variance = growth.prototype_loss(
        torch.from_numpy(BLOBS), torch.from_numpy(model.cluster_centers_), model.temperature_
    )
    assert (fit.item(), variance.item()) == pytest.approx((model.fit_, model.variance_), rel=1e-9)
    assert np.array_equal(model.predict(BLOBS), model.labels_)
    assert model.transform(BLOBS).sum(1) == pytest.approx(1.0)
    assert model.score(BLOBS) == pytest.approx(-model.loss_)
    assert model.reconstruct(BLOBS).shape == BLOBS.shape
    if WAYS[way].get("learn_temperature"):
        assert model.temperature_ < 4.0  # it can only cool


def test_the_end_is_a_stationary_point_of_its_own_objective():
    """The direction of descent is the gradient over usage: at the end autograd finds nothing left. Another sign or factor ends elsewhere."""
    model = DDCL(4, random_state=0, tol=1e-14, max_iter=2000, n_init=1).fit(BLOBS)
    p = torch.from_numpy(model.cluster_centers_).requires_grad_()
    growth.prototype_loss(torch.from_numpy(BLOBS), p, model.temperature_).loss.backward()
    assert p.grad.abs().max() < 1e-4 * model.loss_


def test_above_the_critical_temperature_prototypes_fall_together_though_usage_is_even():
    """And below it they part: 4 lambda_max for the loss, 2 lambda_max for the free energy."""
    start = BLOBS.mean(0) + 0.05 * RNG.normal(size=(3, 2))
    for objective, factor in (("loss", 4), ("free_energy", 2)):
        critical = DDCL(3, objective=objective, temperature=1.0).fit(BLOBS).critical_temperature_
        assert critical == pytest.approx(factor * np.linalg.eigvalsh(np.cov(BLOBS.T, bias=True))[-1])
        options = {"init": start, "objective": objective, "max_iter": 3000, "tol": 0.0}
        above = DDCL(3, temperature=1.2 * critical, **options).fit(BLOBS).panel_
        assert above.collapsed and above.effective == pytest.approx(1.0) and above.usage == pytest.approx(3.0)
        assert above.ratio == pytest.approx(1.2) and "COLLAPSED" in above.lines()[0]
        below = DDCL(3, temperature=0.7 * critical, **options).fit(BLOBS).panel_
        assert not below.collapsed and below.farthest > 0.1


def test_the_dual_layer_stays_in_the_span_of_the_samples():
    flat = np.column_stack([BLOBS, np.zeros(200)])
    model = DDCL(3, dual=True, init=np.column_stack([BLOBS[:3], [5.0, 5.0, 5.0]]), max_iter=5).fit(flat)
    assert np.abs(model.cluster_centers_[:, 2]).max() < 1e-9
    free = DDCL(3, init=np.column_stack([BLOBS[:3], [5.0, 5.0, 5.0]]), max_iter=1).fit(flat)
    assert np.abs(free.cluster_centers_[:, 2]).max() > 1e-3


def test_seeded_and_clonable():
    one, again, other = (DDCL(4, random_state=s, n_init=1).fit(BLOBS).cluster_centers_ for s in (0, 0, 1))
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    assert clone(DDCL(3, dual=True)).get_params()["dual"] is True
    assert list(DDCL(2).fit(BLOBS).get_feature_names_out()) == ["ddcl0", "ddcl1"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DDCL(8).fit(BLOBS[:3]), "8 prototypes need as many samples, got n_samples=3"),
        (lambda: DDCL(2).fit(np.ones((9, 2))), "same point"),
        (lambda: DDCL(2).fit(np.full((9, 2), np.nan)), "NaN"),
        (lambda: DDCL(0).fit(BLOBS), "n_clusters must be a whole number"),
        (lambda: DDCL(2, temperature=-1).fit(BLOBS), "temperature must be 'auto' or a positive number"),
        (lambda: DDCL(2, objective="both").fit(BLOBS), "objective must be loss or free_energy"),
        (lambda: DDCL(2, init="random").fit(BLOBS), "init must be"),
        (lambda: DDCL(2, init=np.ones((3, 2))).fit(BLOBS), "init must be finite and"),
        (lambda: DDCL(2, init=np.array([["a", "b"]] * 2)).fit(BLOBS), "of real numbers, got ndarray of <U1"),
        (lambda: DDCL(2, init=[[1.0], [2.0, 3.0]]).fit(BLOBS), "of real numbers, got list"),
        (lambda: DDCL(2, init=np.ones((2, 2)) * 1j).fit(BLOBS), "of real numbers, got ndarray of complex128"),
        (
            lambda: DDCL(2, init=np.full((2, 2), 1e200)).fit(BLOBS),
            "overflow in float64: init holds values up to 1e.200",
        ),
        (
            lambda: DDCL(2).fit(BLOBS * 1e200),
            "overflow in float64: X holds values up to .*; divide the data by their size",
        ),
        (lambda: DDCL(2).fit(BLOBS).predict(BLOBS * 1e200), "overflow in float64: X holds"),
        (lambda: DDCL(2).fit(BLOBS * 1e-200), "vanish in float64"),
        (lambda: DDCL(2).fit(1e3 + 1e-16 * BLOBS), "same point"),
        (lambda: DDCL(2).fit(np.float32(1e3) + np.float32([[0.0], [1.2e-4]] * 9)), r"same point \(up to rounding\)"),
        (lambda: DDCL(2, learn_temperature="no").fit(BLOBS), "learn_temperature must be True or False, got 'no'"),
        (lambda: DDCL(2, dual="x").fit(BLOBS), "dual must be True or False, got 'x'"),
    ],
)
def test_what_cannot_be_fitted_is_said(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_clusters_far_from_the_origin_are_found_in_float32():
    model = DDCL(4, random_state=0).fit((1e3 + BLOBS / 8).astype(np.float32))
    assert len(set(model.labels_)) == 4 and not model.panel_.collapsed
    assert DDCL(2, dual=np.bool_(False)).fit(BLOBS).n_iter_ > 0  # as a grid of parameters gives it


# the panel


def test_the_panel_against_numbers_by_hand():
    x = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0]])
    p = torch.tensor([[0.0, 0.0], [0.0, 1e-6], [2.0, 2.0]])
    panel = collapse_panel(x, p, 0.5)
    spread = math.sqrt(2.0)
    assert panel.closest == pytest.approx(1e-6 / spread, rel=1e-3)
    assert panel.farthest == pytest.approx(math.sqrt(8) / spread)
    q = torch.softmax(-torch.cdist(x.double(), p.double()).square() / 0.5, 1)
    mean = q.mean(0)
    merged = torch.stack([mean[0] + mean[1], mean[2]])
    assert panel.effective == pytest.approx(torch.exp(-(merged * merged.log()).sum()).item())
    assert panel.usage == pytest.approx(torch.exp(-(mean * mean.log()).sum()).item())
    assert panel.hardness == pytest.approx((-(q * q.log()).sum(1).mean() / math.log(3)).item(), rel=1e-6)
    assert panel.ratio == pytest.approx(0.5 / 4.0) and panel.identity < 1e-12
    force = torch.stack([2 * (torch.diag(w) - torch.outer(w, w)) @ p.double() for w in q]).mean(0)
    assert panel.force == pytest.approx(force.norm().item())
    d = torch.cdist(x.double(), p.double()).square()
    over = ((d - (q * d).sum(1, keepdim=True)) / 0.5 - 1).clamp(min=0)
    assert panel.repulsion == pytest.approx((q * over).sum(1).mean().item())
    rows = panel.rows(layer=2)
    assert {row.layer for row in rows} == {2} and len(rows) == 13
    assert collapse_panel(x, p, 0.5, gradient="detached").ratio == pytest.approx(0.25)


def test_one_prototype_and_chains():
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    one = collapse_panel(x, x[:1], 1.0)
    assert (one.usage, one.effective, one.hardness, one.farthest) == (1, 1, 0, 0) and math.isinf(one.closest)
    assert not one.collapsed
    step = 0.9e-3 * measures.spread(x.double())
    chain = torch.arange(4.0, dtype=torch.float64)[:, None] * step * torch.tensor([1.0, 0.0, 0.0])
    assert measures.groups(x.double(), chain).tolist() == [0, 0, 0, 0]
    with pytest.raises(InputError, match="temperature must be positive"):
        collapse_panel(x, x[:2], 0.0)
