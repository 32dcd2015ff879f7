"""Half and full bridges: identities to 1e-12, Sinkhorn against a convex solver and a loop, the probe and its null."""

import numpy as np
import probe_subjects as subjects
import pytest
import torch
from scipy.optimize import linprog

from thalweg.continuum import findings
from thalweg.continuum.bridge import permuted
from thalweg.errors import InputError, ShapeError
from thalweg.ops.entropic import (
    causal_bridge,
    causal_columns,
    entropy,
    free_energy,
    full_bridge,
    functional,
    half_bridge,
)


def normal(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_softmax_is_the_least_free_energy(temperature):
    """Catches: the temperature on the wrong term, the sign of the entropy, costs in place of their negatives."""
    cost = normal(5, 7, scale=2)
    plan = half_bridge(cost, temperature)
    torch.testing.assert_close(plan, torch.softmax(-cost / temperature, -1), rtol=0, atol=1e-12)
    least = free_energy(cost, temperature)
    torch.testing.assert_close(functional(plan, cost, temperature), least, rtol=1e-12, atol=1e-12)
    other = torch.softmax(normal(5, 7, seed=1), -1)
    gap = functional(other, cost, temperature) - least
    divergence = temperature * (other * (other / plan).log()).sum(-1)
    torch.testing.assert_close(gap, divergence, rtol=1e-10, atol=1e-12)
    step = 1e-5
    slope = (free_energy(cost, temperature + step) - free_energy(cost, temperature - step)) / (2 * step)
    torch.testing.assert_close(slope, -entropy(plan), rtol=1e-6, atol=1e-8)


def loop(logits, columns, rows, iterations):
    q, k = logits.shape
    plan = [[float(torch.exp(logits[i, j])) for j in range(k)] for i in range(q)]
    for i in range(q):  # the half bridge
        total = sum(plan[i])
        plan[i] = [x * float(rows[i]) / total for x in plan[i]]
    for _ in range(iterations):
        for j in range(k):
            total = sum(plan[i][j] for i in range(q))
            for i in range(q):
                plan[i][j] *= float(columns[j]) / total
        for i in range(q):
            total = sum(plan[i])
            for j in range(k):
                plan[i][j] *= float(rows[i]) / total
    return torch.tensor(plan, dtype=torch.float64)


def test_the_full_bridge_by_a_loop():
    """Catches: marginals transposed, rows and columns in the wrong order, the marginal left out of one side."""
    logits, rows = normal(4, 6), torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=torch.float64)
    columns = torch.tensor([0.5, 1.0, 1.5, 0.3, 0.7, 1.0], dtype=torch.float64)
    found = full_bridge(logits, columns, rows, iterations=3, tolerance=0.0)
    torch.testing.assert_close(found.log_plan.exp(), loop(logits, columns, rows, 3), rtol=1e-10, atol=0)
    torch.testing.assert_close(found.log_plan.exp().sum(-1), rows)
    done = full_bridge(logits, columns, rows, iterations=500, tolerance=1e-12)
    torch.testing.assert_close(done.log_plan.exp().sum(-2), columns, rtol=1e-9, atol=0)
    assert done.residual <= 1e-12 and done.iterations < 500


def test_at_a_small_temperature_it_is_the_transport_plan():
    cost = normal(5, 5, seed=3)
    equal = [[1.0 if j // 5 == i else 0.0 for j in range(25)] for i in range(5)]
    equal += [[1.0 if j % 5 == i else 0.0 for j in range(25)] for i in range(5)]
    best = linprog(cost.flatten().numpy(), A_eq=np.array(equal), b_eq=np.ones(10)).x.reshape(5, 5)
    plan = full_bridge(-cost / 0.01, iterations=5000, tolerance=1e-9).log_plan.exp()
    np.testing.assert_allclose(plan.numpy(), best, atol=1e-3)


def test_uniform_columns_under_a_causal_mask_force_the_identity():
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    logits = normal(6, 6, seed=4).masked_fill(hidden, -torch.inf)
    plan = full_bridge(logits, iterations=5000, tolerance=1e-6).log_plan.exp()
    assert plan.diagonal().min() > 0.99
    columns = causal_columns(6, torch.float64)
    assert columns.tolist() == pytest.approx([sum(1 / (i + 1) for i in range(j, 6)) for j in range(6)])
    even = torch.zeros(6, 6, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(full_bridge(even, columns).log_plan.exp().sum(-2), columns)
    meets = full_bridge(logits, columns, iterations=500, tolerance=1e-9)
    assert meets.residual <= 1e-9 and meets.log_plan.exp().diagonal().min() < 0.9


def test_the_causal_bridge_sees_no_later_query():
    """Catches: a column sum over all rows, which lets the future in (plain Sinkhorn does)."""
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    one = normal(2, 7, 7, seed=5).masked_fill(hidden, -torch.inf)
    two = one.clone()
    two[:, 4:] += normal(2, 3, 7, seed=6, scale=2)
    a, b = causal_bridge(one), causal_bridge(two)
    torch.testing.assert_close(a[:, :4], b[:, :4])
    torch.testing.assert_close(a.exp().sum(-1), torch.ones(2, 7, dtype=torch.float64))
    plain = [full_bridge(x, causal_columns(7)).log_plan[:, 1].exp() for x in (one, two)]
    assert not torch.allclose(*plain, atol=1e-6)
    columns = causal_columns(7, torch.float64)
    off = lambda plan: (plan.exp().sum(-2) - columns).abs().sum(-1)  # noqa: E731
    many = normal(32, 7, 7, seed=8).masked_fill(hidden, -torch.inf)
    assert off(causal_bridge(many)).mean() < 0.8 * off(torch.log_softmax(many, -1)).mean()
    even = torch.zeros(7, 7, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(causal_bridge(even).exp(), torch.softmax(even, -1))


def test_the_null_keeps_each_row_and_its_mask():
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    scores = normal(2, 6, 6, seed=7).masked_fill(hidden, -torch.inf)
    mixed = permuted(scores, 0)
    torch.testing.assert_close(mixed.sort(-1).values, scores.sort(-1).values)
    assert ((mixed == -torch.inf) == (scores == -torch.inf)).all() and not mixed.equal(scores)


@pytest.mark.parametrize(
    "make", [subjects.llama, subjects.bert, subjects.gpt2, subjects.ours, lambda: subjects.ours("mhc")]
)
def test_the_probe_on_models_with_random_attention_finds_its_null(make):
    (_, one) = findings(make(), subjects.texts(12, 40), ["bridge"], options={"bridge": {"window": 16, "every": 1}})
    assert not one.failed and "half bridge" in one.summary
    rows = one.rows
    assert all(
        row.value < 1e-12 for name in ("identity", "temperature") for row in rows.where(measure=f"bridge.{name}_error")
    )
    found = rows.where(measure="bridge.distance")
    assert len(found) == 8
    # queries and keys of random weights share next to nothing: half and full differ as little as for permuted scores, up to sampling
    assert max(row.value for row in found) < 0.2 and max(abs(row.value - row.null) for row in found) < 0.05


def test_the_probe_finds_keys_that_all_queries_share():
    model = subjects.llama(attention_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias.fill_(3.0)
            layer.self_attn.k_proj.weight.mul_(12)
    (_, one) = findings(model, subjects.texts(12, 40), ["bridge"], options={"bridge": {"window": 16, "every": 1}})
    found = one.rows.where(measure="bridge.distance")
    assert sum(row.low > row.null for row in found) >= 6, [(row.value, row.null) for row in found]


def test_untrained_models_lie_above_the_null_too_and_it_is_said():
    """Intervals over many windows are narrow, and keys of one vector are like each other: no sign of learning."""
    (_, one) = findings(subjects.llama(), subjects.texts(60, 40), ["bridge"], options={"bridge": {"window": 16}})
    found = one.rows.where(measure="bridge.distance")
    assert sum(row.low > row.null for row in found) > 4
    assert any("no sign of learning" in line for line in one.caveats)
    (_, short) = findings(subjects.llama(), subjects.texts(1, 40), ["bridge"], options={"bridge": {"window": 16}})
    assert short.summary.endswith("no interval to hold against a null: needs 3 windows, got 1")


def test_a_stopped_iteration_is_no_lower_bound_and_the_columns_are():
    """Peaked scores: after 50 iterations some distances are above those of the limit; none is below that of the columns."""
    t = 16
    columns, hidden = causal_columns(t, torch.float64), torch.ones(t, t, dtype=torch.bool).triu(1)
    logits = (normal(100, t, 4, seed=0) @ normal(100, 4, t, seed=1) * 10).masked_fill(hidden, -torch.inf)
    half = torch.softmax(logits, -1)
    stopped, limit = (
        (half - full_bridge(logits, columns, None, n, 1e-9).log_plan.exp()).abs().sum(-1).mean(-1) / 2
        for n in (50, 3000)
    )
    least = (half.sum(-2) - columns).abs().sum(-1) / (2 * t)
    assert 0 < int((stopped > limit + 1e-4).sum()) < 50
    assert bool((least < limit).all())
    model = subjects.llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(3000)
    (_, one) = findings(model, subjects.texts(6, 40), ["bridge"], options={"bridge": {"window": 16, "iterations": 5}})
    (line,) = (line for line in one.caveats if line.startswith("Sinkhorn stopped"))
    assert "some too large" in line and "bounds them from below is bridge.column_distance" in line


def test_options_are_checked_before_the_model_is_read():
    for name, bad in (("tolerance", -1.0), ("window", 2), ("batch_size", -1), ("seed", -1)):
        with pytest.raises(InputError, match=f"{name} of bridge must be at least"):
            findings(None, None, ["bridge"], options={"bridge": {name: bad}})


def test_bad_input_is_one_line():
    with pytest.raises(ShapeError, match="must hold 3 masses"):
        full_bridge(torch.zeros(2, 3), torch.ones(2))
    with pytest.raises(InputError, match="one mass"):
        full_bridge(torch.zeros(2, 3), torch.ones(3))
    with pytest.raises(InputError, match="positive masses"):
        full_bridge(torch.zeros(2, 2), torch.tensor([2.0, 0.0]))
    with pytest.raises(InputError, match="temperature"):
        half_bridge(torch.zeros(2), 0.0)


def test_factors_are_the_logarithms_and_give_way_to_them(monkeypatch):
    """Catches: a factor on the wrong side, a tolerance met elsewhere, and a kernel that underflows in silence."""
    from thalweg.ops import entropic

    logits = normal(2, 3, 12, 12, scale=3).float().masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), -torch.inf)
    columns = causal_columns(12)
    by_factors = full_bridge(logits, columns, None, 40, 1e-3)
    steep = full_bridge(60 * logits, columns, None, 40, 1e-3)  # entries far below what float32 holds
    with monkeypatch.context() as patch:
        patch.setattr(entropic, "_by_factors", lambda *_: None)
        for found, scale in ((by_factors, 1), (steep, 60)):
            wanted = full_bridge(scale * logits, columns, None, 40, 1e-3)
            torch.testing.assert_close(found.log_plan.exp(), wanted.log_plan.exp(), rtol=1e-4, atol=1e-6)
            assert found.iterations == wanted.iterations
            assert found.residual == pytest.approx(wanted.residual, rel=1e-2, abs=1e-6)
    z = torch.log_softmax(60 * logits, -1)
    assert entropic._by_factors(z, torch.ones(12), columns, 40, 0.0) is None
    assert entropic._by_factors(torch.log_softmax(logits, -1), torch.ones(12), columns, 40, 0.0) is not None
    grown = logits.clone().requires_grad_()
    assert full_bridge(grown, columns).log_plan.requires_grad
