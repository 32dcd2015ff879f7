"""Births, pruning, layers, statuses and free energy, on a small attention network that really computes."""

import itertools
import math

import pytest
import torch
from growing_toy import Toy, tokens

from thalweg import growth
from thalweg.errors import InputError, ProofError
from thalweg.geometry.directional import DirectionalOperator
from thalweg.geometry.eigenpairs import top_eigenpairs
from thalweg.growth import Controller, FreeEnergy, Growable, GrowthOptions, GrowthRecord, HeadFactors
from thalweg.growth.birth import noise_rise, on_the_plane
from thalweg.growth.options import spectral_dwell
from thalweg.growth.reading import operator_of, span

G = torch.Generator().manual_seed(2)
X = tokens()


def options(**changes):
    return GrowthOptions(**{"head_width": 4, "dwell": 10, "prune_patience": 3, "layer_dwell": 10, **changes})


def run(network, opts, steps=600, train=0.0):
    """Check every five steps until growth ends; with ``train``, plain descent on the network's own loss in between."""
    controller = Controller(network, opts)
    for step in range(0, steps, 5):
        if controller.due(step):
            controller.check(step)
        if controller.finished:
            break
        for _ in range(2 if train else 0):
            parameters = list(network.parameters())
            for p, g in zip(parameters, torch.autograd.grad(network.loss(), parameters), strict=True):
                p.data -= train * g
    return controller


# births


def dense(operator, query, key):
    s, m = operator.x.T @ operator.x / len(operator.x), query @ key.T
    product = s @ (m - m.T) / 2
    return (product + product.T) / 2


def test_a_head_on_the_plane_captures_what_the_formula_says_and_no_random_partner_more():
    """u^T sym(S M_a) u = sigma |P S u|. A minus sign in the keys would give its negative; v along u, zero."""
    net = Toy(X, heads=2)
    operator = operator_of(net.inputs(0), net.heads(0), {}, options())
    values, vectors = top_eigenpairs(operator, 1)
    u = vectors[:, 0]
    birth = growth.on_the_plane(operator, u, values[0].item(), 4, noise=0.0)
    reach = operator.second_moment(u) - (u @ operator.second_moment(u)) * u
    caught = (u @ dense(operator, birth.query, birth.key) @ u).item()
    assert caught == pytest.approx(birth.strength * reach.norm().item(), rel=1e-12)
    assert caught == pytest.approx(birth.captured, rel=1e-12)
    assert caught == pytest.approx(birth.eigenvalue, rel=1e-9)  # by default just what was left there
    m = birth.query @ birth.key.T
    torch.testing.assert_close(m, birth.strength * (torch.outer(birth.partner, u) - torch.outer(u, birth.partner)))
    torch.testing.assert_close(m, -m.T)
    anti = operator.antisymmetric(torch.eye(len(u), dtype=torch.float64))
    assert birth.strength <= torch.linalg.matrix_norm(anti, 2).item() * (1 + 1e-9)
    others = torch.randn(2000, len(u), generator=G, dtype=torch.float64)
    others = torch.nn.functional.normalize(others - (others @ u)[:, None] * u, dim=1)
    assert (birth.strength * others @ operator.second_moment(u)).max().item() < caught


def test_an_eigenvector_of_the_second_moment_captures_nothing_and_is_refused():
    operator = operator_of(X.flatten(0, 1), Toy(X).heads(0), {}, options())
    vectors = torch.linalg.eigh(X.flatten(0, 1).T @ X.flatten(0, 1))[1]
    with pytest.raises(InputError, match="eigenvector of the input's second moment"):
        growth.on_the_plane(operator, vectors[:, -1], 0.1, 4)
    with pytest.raises(InputError, match="width of at least 2"):
        growth.on_the_plane(operator, X[0, 0], 0.1, 1)


def test_a_birth_takes_its_eigenvalue_and_adds_nothing_positive():
    """Residual after = deflated residual - sigma |P S u| v v^T: the sum of positive eigenvalues falls by the eigenvalue at least."""
    net = Toy(X, heads=2)
    heads, x = net.heads(0), net.inputs(0)
    operator = operator_of(x, heads, {}, options())
    values, vectors = top_eigenpairs(operator, 1)
    birth = growth.on_the_plane(operator, vectors[:, 0], values[0].item(), 4, noise=0.0)
    grown = operator_of(x, [*heads, HeadFactors(9, birth.query, birth.key)], {9: birth.direction}, options())
    change = grown.dense(raw=True) - operator.without(vectors).dense(raw=True)
    want = -birth.captured * torch.outer(birth.partner, birth.partner)
    torch.testing.assert_close(change, want, rtol=1e-8, atol=1e-12)


def test_heads_are_summed_not_averaged():
    """Two copies of a head have twice its interaction; the mutant that averages leaves it as it was. A masked head counts by its mask."""
    x = X.flatten(0, 1)
    one = HeadFactors(0, *(torch.randn(12, 3, generator=G, dtype=torch.float64) for _ in range(2)))
    other = HeadFactors(1, *(torch.randn(12, 3, generator=G, dtype=torch.float64) for _ in range(2)))
    both = operator_of(x, [one, other], {}, options()).dense(raw=True)
    apart = [operator_of(x, [h], {}, options()).dense(raw=True) for h in (one, other)]
    torch.testing.assert_close(both, apart[0] + apart[1])
    half = operator_of(x, [one, HeadFactors(1, other.query, other.key, 0.5)], {}, options()).dense(raw=True)
    torch.testing.assert_close(half, apart[0] + apart[1] / 2)


def test_directions_that_are_held_already_add_nothing_to_the_span():
    u, v = torch.eye(3, dtype=torch.float64)[:2]
    basis = span([u, u + v, 2 * v], u)
    assert basis is not None and basis.shape == (3, 2)
    torch.testing.assert_close(basis.T @ basis, torch.eye(2, dtype=torch.float64))
    assert span([], u) is None


# the controller


@pytest.fixture(scope="module")
def grown():
    network = Toy(X, layers=2, heads=2)
    return network, run(network, options())


def test_growth_converges_with_a_reason_and_a_record(grown):
    network, controller = grown
    assert isinstance(network, Growable)
    assert controller.status == "converged" and "below the threshold" in controller.reason
    births = [event for event in controller.record if event.kind == "birth"]
    assert len(births) >= 3 and {event.layer for event in births} == {0, 1}
    for event in births:
        assert event.drift == 0 and event.parameters_after > event.parameters_before
        assert event.eigenvalues[0] > event.threshold
        direction = torch.tensor(event.directions[0])
        assert direction.norm().item() == pytest.approx(1.0) and direction[direction.abs().argmax()] > 0
        assert f"layer {event.layer}: birth of head" in event.line()
    for layer in (0, 1):
        mine = [event for event in births if event.layer == layer]
        assert [event.eigenvalues[0] for event in mine] == sorted((e.eigenvalues[0] for e in mine), reverse=True)
        assert all(b.step - a.step >= 10 for a, b in itertools.pairwise(mine))  # dwell


def test_the_free_energy_falls_at_every_birth_by_what_is_proved(grown):
    """weight (lambda - theta) at least; the residual's Frobenius norm, which does not fall, would not do."""
    _, controller = grown
    births = [event for event in controller.record if event.kind == "birth"]
    for event in births:
        assert event.must_fall
        assert event.positive_before - event.positive_after >= event.eigenvalues[0] * (1 - 1e-3)
        assert event.energy_before - event.energy_after >= (event.eigenvalues[0] - event.threshold) * (1 - 1e-3)
    assert any(event.residual_after > event.residual_before for event in births)


def test_every_layer_is_tested_on_its_own_input():
    network = Toy(X, layers=2, heads=2)
    inner = network.inputs

    def blind(layer):
        return inner(0)

    own = Controller(network, options())
    own.check(0)
    network = Toy(X, layers=2, heads=2)
    network.inputs = blind
    first = Controller(network, options())
    first.check(0)
    tops = [[row.value for row in c.observed.where(measure="growth.top")] for c in (own, first)]
    assert tops[0][0] == tops[1][0] and tops[0][1] != tops[1][1]


def test_rows_and_files_keep_the_record(grown, tmp_path):
    _, controller = grown
    rows = controller.record.rows(run="r")
    first = controller.record.events[0]
    found = [row.value for row in rows if row.measure == "growth.event.eigenvalue"]
    assert found[0] == first.eigenvalues[0]
    chance = {row.null for row in controller.observed.where(measure="growth.asymmetry")}
    assert chance == {1 / math.sqrt(2)}
    controller.record.save(tmp_path / "growth.jsonl")
    assert GrowthRecord.load(tmp_path / "growth.jsonl").events == controller.record.events
    (tmp_path / "other.jsonl").write_text('{"schema": 1, "kind": "measurements"}\n', encoding="utf-8")
    with pytest.raises(InputError, match="is no growth record"):
        GrowthRecord.load(tmp_path / "other.jsonl")


def test_what_decides_each_size_is_said(grown):
    _, controller = grown
    said = {what: (who, how) for what, who, how in controller.decisions()}
    assert said["depth"][0] == said["head width"][0] == said["dictionary size"][0] == "the user"
    assert "theta = 0.1 x" in said["heads per layer"][1]
    assert "0.707" in {w: h for w, _, h in Controller(Toy(X), options(most_layers=2)).decisions()}["depth"]


def test_the_count_follows_the_threshold():
    counts = []
    for threshold in (0.5, 0.2, 0.1, 0.02):
        network = Toy(X, heads=2)
        assert run(network, options(threshold=threshold)).status == "converged"
        counts.append(len(network.heads(0)))
    assert counts == sorted(counts) and counts[0] < counts[-1]


def test_a_cap_is_a_cap():
    network = Toy(X, heads=2)
    controller = run(network, options(threshold=0.02, most_heads=3))
    assert controller.status == "capped" and "not converged" in controller.reason and len(network.heads(0)) == 3


def test_isotropic_input_is_said():
    white = torch.linalg.qr(torch.randn(128, 12, generator=G, dtype=torch.float64))[0].view(8, 16, 12)
    network = Toy(white)
    assert any("alike in every direction" in w for w in growth.forecast(network, options()).warnings)
    controller = run(network, options())
    assert controller.status == "isotropic" and "whitening" in controller.reason and not len(controller.record)


def test_equal_eigenvalues_get_their_heads_at_once():
    """Three planes of one strength: the mutant without it adds one head a dwell."""
    d = 12
    x = (torch.eye(d, dtype=torch.float64) * torch.tensor([3.0, 1.0] * 6, dtype=torch.float64).sqrt())[None]
    network = Toy(x, width=6)
    with torch.no_grad():
        head = network.blocks[0]["0"]
        head.query.zero_(), head.key.zero_()
        for i in range(3):
            a, b = 2 * i, 2 * i + 1
            head.query[a, 2 * i], head.query[b, 2 * i + 1] = 1.0, -1.0
            head.key[b, 2 * i], head.key[a, 2 * i + 1] = 1.0, 1.0
    controller = Controller(network, options(head_width=6))
    (event,) = controller.check(0)
    assert event.degenerate and len(event.heads) == 3 and event.drift == 0
    us = torch.tensor(event.directions)
    torch.testing.assert_close(us @ us.T, torch.eye(3), atol=1e-6, rtol=0)
    assert event.next_eigenvalue < event.threshold
    assert event.energy_before - event.energy_after >= 3 * (event.eigenvalues[0] - event.threshold) * (1 - 1e-3)


def test_a_network_that_averages_its_heads_is_caught():
    with pytest.raises(ProofError, match=r"changed the outputs .* a sum over heads"):
        run(Toy(X, heads=2, mean=True), options())


def test_float32_births_keep_the_function():
    network = Toy(X.float(), heads=2, dtype=torch.float32)
    controller = run(network, options())
    assert controller.status == "converged" and max(e.drift for e in controller.record if e.drift is not None) <= 1e-6


@pytest.mark.parametrize("changes", [{"captured": "current"}, {"center": True}, {"birth": "random"}, {"dwell": "gap"}])
def test_the_other_ways_run_and_end(changes):
    controller = run(Toy(X, heads=2), options(threshold=0.2, most_heads=8, **changes), steps=3000)
    assert controller.finished and controller.reason
    assert all(not e.must_fall for e in controller.record if e.kind == "birth") == (
        changes.get("birth") == "random" or changes.get("captured") == "current"
    ) or not len(controller.record)


def test_random_births_that_lower_nothing_end_as_unstable():
    """First-party code adds such heads by the hundred; here the run says that they do not pay."""
    network = Toy(X, heads=1)
    calm = network.inputs

    def restless(layer):  # every look finds more left than the one before
        restless.calls += 1
        return calm(layer) * torch.linspace(1, 0.05 + 0.01 * restless.calls, 12, dtype=torch.float64)

    restless.calls = 0
    network.inputs = restless
    controller = run(network, options(birth="random", threshold=0.01, stall=2, dwell=0, most_heads=200), steps=2000)
    assert controller.status in ("unstable", "converged", "capped") and controller.finished
    state = controller.layers[0]
    state.last_top, state.futile, controller.status = 0.0, 1, "growing"
    reading = controller._look(0, 0)
    assert (
        not controller._pays(state, reading) and controller.status == "unstable" and "without end" in controller.reason
    )


def test_it_grows_while_it_trains_and_the_energy_is_recorded():
    network = Toy(X, layers=1, heads=1)
    controller = run(network, options(most_heads=10), train=0.05, steps=300)
    energies = [row.value for row in controller.observed.where(measure="growth.free_energy")]
    assert len(energies) >= 3 and all(map(math.isfinite, energies))
    fits = [row.value for row in controller.observed.where(measure="growth.fit")]
    assert fits[-1] < fits[0]
    assert all(e.energy_after < e.energy_before for e in controller.record if e.must_fall)


def test_the_noise_of_new_heads_raises_the_residual_by_no_more_than_is_said():
    """At a noise of 1 the fall by lambda does not hold at every birth; at every birth the rise is bounded, and then F need not fall."""
    bounds = []
    for noise in (1e-3, 0.3, 1.0):
        controller = run(Toy(X, layers=2, heads=2), options(noise=noise, most_heads=6))
        births = [event for event in controller.record if event.kind == "birth" and len(event.heads) == 1]
        assert births
        for event in births:
            if event.must_fall:
                assert event.energy_after < event.energy_before
        bounds.append(sum(event.must_fall for event in births) / len(births))
    assert bounds[0] == 1 and bounds[2] < bounds[0]


@pytest.mark.parametrize("noise", [1e-3, 0.3, 1.0, 3.0])
def test_the_bound_of_the_rise_holds_for_the_operator_itself(noise):
    x = X.flatten(0, 1)
    first = HeadFactors(0, *(torch.randn(12, 3, generator=G, dtype=torch.float64) for _ in range(2)))
    operator = operator_of(x, [first], {}, options())
    values, vectors = top_eigenpairs(operator, 1)
    made = on_the_plane(operator, vectors[:, 0], values[0].item(), 4, noise=noise, generator=G)
    grown = operator_of(x, [first, HeadFactors(1, made.query, made.key)], {1: made.direction}, options())

    def positive(found):
        return torch.linalg.eigvalsh(found.dense(raw=True)).clamp(min=0).sum().item() / operator.scale

    rise = positive(grown) - (positive(operator) - values[0].item())
    assert rise <= noise_rise(made, operator) and (rise > 0 or noise < 1)


def test_a_diverged_network_ends_as_unstable():
    network = Toy(X)
    controller = Controller(network, options())
    controller.check(0)
    with torch.no_grad():
        network.readout.fill_(math.nan)
    controller.check(5)
    assert controller.status == "unstable" and "diverged" in controller.reason and controller.check(10) == []


# pruning


def with_a_symmetric_head(output):
    """Two heads, the second with W_q = W_k: no directional energy, whatever it does."""
    network = Toy(X, heads=2)
    with torch.no_grad():
        head = network.blocks[0]["1"]
        head.key.copy_(head.query)
        head.output.mul_(output)
    return network


def test_a_head_that_does_nothing_is_masked_then_removed_without_drift():
    network = with_a_symmetric_head(0.0)
    controller = run(network, options(threshold=0.9))
    kinds = [event.kind for event in controller.record]
    # What follows may be a birth: without the head |M| is smaller, and what is left a larger share of it.
    assert kinds[:2] == ["mask", "prune"] and controller.status == "converged"
    mask, prune = controller.record.events[:2]
    assert prune.step - mask.step == 4 * 5 and prune.drift == 0 and prune.heads == (1,)
    assert prune.parameters_after < prune.parameters_before and prune.energy_after <= prune.energy_before
    assert 1 not in [head.id for head in network.heads(0)]


def test_a_head_that_matters_is_restored_though_it_holds_no_direction():
    network = with_a_symmetric_head(8.0)
    before = network.target = network.outputs()  # what it computes is right, so that any loss of it shows
    controller = run(network, options(threshold=0.9), steps=300)
    assert [event.kind for event in controller.record][:2] == ["mask", "restore"]
    assert controller.finished and len(network.heads(0)) == 2
    assert torch.equal(network.outputs(), before)


def test_the_last_head_stays_and_a_pruned_direction_is_free_again():
    network = Toy(X, heads=1)
    controller = run(network, options(threshold=0.3, weight=0.0))  # 0: the price of a head does not vote
    head = next(iter(controller.layers[0].directions))
    with torch.no_grad():
        network.blocks[0][str(head)].key.copy_(network.blocks[0][str(head)].query)
        network.blocks[0][str(head)].key.mul_(1e-3), network.blocks[0][str(head)].query.mul_(1e-3)
    controller.status = "growing"
    for step in range(1000, 1400, 5):
        controller.check(step)
    assert any(event.kind == "prune" and head in event.heads for event in controller.record)
    assert head not in controller.layers[0].directions and head not in controller.layers[0].born
    single = Toy(X, heads=1)
    with torch.no_grad():
        single.blocks[0]["0"].key.copy_(single.blocks[0]["0"].query)
    assert run(single, options()).status == "converged" and len(single.heads(0)) == 1


def test_median_and_threshold_bounds():
    from thalweg.growth.reading import look, prune_bound

    reading = look(Toy(X, heads=3), 0, {}, options())
    assert prune_bound(reading, 0.5, options()) == pytest.approx(0.005)
    middle = sorted(reading.energies.values())[1]
    assert prune_bound(reading, 0.5, options(prune_relative_to="median")) == pytest.approx(0.01 * middle)


# layers


def test_a_layer_is_added_on_a_calm_directional_top_and_depth_is_the_users_without_the_rule():
    network = Toy(X, heads=1)
    with torch.no_grad():  # an antisymmetric head: asymmetry 1
        head = network.blocks[0]["0"]
        head.query[:, 2:], head.key[:, 2:] = 0, 0
        head.key[:, 0], head.key[:, 1] = head.query[:, 1], -head.query[:, 0]
    controller = run(network, options(most_layers=2, most_heads=6), steps=2000)
    layers = [event for event in controller.record if event.kind == "layer"]
    assert len(layers) == 1 and layers[0].drift == 0 and not layers[0].must_fall and network.layers() == 2
    assert layers[0].asymmetry > 0.9
    assert {row.layer for row in controller.observed.where(measure="growth.top")} == {0, 1}


# resuming, forecasting, options


def test_resuming_is_exact():
    whole, halved = (Toy(X, layers=2, heads=2) for _ in range(2))
    reference = run(whole, options(threshold=0.05))
    first = Controller(halved, options(threshold=0.05))
    for step in range(0, 25, 5):
        first.check(step)
    second = Controller(halved, options(threshold=0.05))
    second.load_state_dict(first.state_dict())
    for step in range(25, 600, 5):
        if not second.finished:
            second.check(step)
    assert second.record.events == reference.record.events and second.status == reference.status
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), halved.parameters(), strict=True))
    assert second.observed == reference.observed


def test_a_forecast_changes_nothing_and_counts_what_a_fixed_operator_would_get():
    network = Toy(X, heads=2)
    before = network.outputs()
    found = growth.forecast(network, options())
    values = torch.linalg.eigvalsh(DirectionalOperator(
        network.inputs(0), torch.cat([h.query for h in network.heads(0)], 1), torch.cat([h.key for h in network.heads(0)], 1)
    ).dense())  # fmt: skip
    assert found.layers[0].above == int((values > 0.1 * values.norm()).sum())
    assert found.threshold == pytest.approx(0.1 * values.norm().item()) and found.births == pytest.approx(
        4 * math.log(10)
    )
    assert torch.equal(network.outputs(), before) and len(network.heads(0)) == 2
    assert any("above the threshold" in line for line in found.lines()) and len(found.rows()) > 10
    controller = run(network, options())
    births = sum(len(e.heads) for e in controller.record if e.kind == "birth")
    assert births <= found.layers[0].above  # each block takes more away, never less
    assert any("cap is 2" in w for w in growth.forecast(Toy(X, heads=2), options(most_heads=2)).warnings)


def test_what_is_left_has_one_name_for_each_number():
    network = Toy(X)
    lines = growth.forecast(network, options()).lines()
    assert lines[0].startswith("layer 0: 1 head, residual ")
    assert (
        "9.2 births in each layer if every head takes 22% of the residual" in lines[-1] and "at most" not in lines[-1]
    )
    line = run(network, options()).record.events[0].line()
    assert "(top eigenvalue " in line and "; sum of positive eigenvalues " in line and "left" not in line
    assert "at most" not in growth.forecast(network, options()).lines()[0]


@pytest.mark.parametrize("dwell", ["foo", 2.5, True, None])
def test_a_dwell_is_a_number_or_gap(dwell):
    from thalweg.growth.options import from_table

    for make in (lambda: options(dwell=dwell), lambda: from_table({"head_width": 4, "dwell": dwell})):
        with pytest.raises(InputError, match="dwell must be a whole number of steps, or gap, got"):
            make()
    assert from_table({"head_width": 4, "dwell": "gap"}).dwell == "gap" and options(dwell=0).dwell == 0


def test_dwell_from_the_gap():
    assert spectral_dwell(1.0, 1.0, 1.0) == 10_000
    assert spectral_dwell(1.0, 0.5, 1.0) == math.ceil(2 * math.log(20) / (0.5 * 0.25))
    assert spectral_dwell(10.0, 5.0, 10.0) == spectral_dwell(1.0, 0.5, 1.0)


def test_free_energy_of_its_parts():
    before, after = FreeEnergy(2.0, 1.0, 3, 0.1, 0.5), FreeEnergy(2.0, 0.8, 4, 0.1, 0.5)
    assert before.total == pytest.approx(2 + 0.5 * (1 + 0.3))
    assert before.fell_to(after) and not after.fell_to(before)
    with pytest.raises(InputError, match="not be negative"):
        FreeEnergy(1.0, 1.0, 1, -0.1)


# bad input


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.ones(2, 4, 12, dtype=torch.float64), "one and the same vector"),
        (torch.full((2, 4, 12), math.nan, dtype=torch.float64), "NaN or infinite"),
        (torch.zeros(2, 0, 12, dtype=torch.float64), "not empty"),
    ],
)
def test_a_probe_set_that_cannot_be_read_is_one_line(x, words):
    with pytest.raises(InputError, match=words) as caught:
        Controller(Toy(x), options()).check(0)
    assert "\n" not in str(caught.value) and "layer 0" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: growth.check_labels([1, 1, 1]), "only class 1"),
        (lambda: growth.check_labels(torch.tensor([], dtype=torch.long)), "no label"),
        (lambda: growth.check_labels(torch.tensor([[0, -100], [0, -100]])), "only class 0"),
        (lambda: growth.check_texts(["a", " "]), "1 of 2 texts are empty"),
        (lambda: growth.check_texts([]), "no texts"),
        (lambda: growth.check_inputs(X[0, :3], 1, prototypes=8), "8 prototypes need at least as many tokens"),
        (lambda: options(threshold=2.0), "threshold must be above 0 and below 1"),
        (lambda: options(prune_level=1.0), "born again at once"),
        (lambda: options(head_width=1), "head_width must be at least 2"),
        (lambda: options(birth="plan"), "Did you mean 'plane'"),
        (lambda: options(dwell=-1), "dwell must be at least 0"),
    ],
)
def test_what_cannot_be_is_one_line(make, words):
    with pytest.raises(InputError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_good_labels_are_counted():
    assert growth.check_labels([0, 1, 1, 2]) == 3 and growth.check_labels([0, 1, -100]) == 2
    growth.check_texts(["a", "b"])
