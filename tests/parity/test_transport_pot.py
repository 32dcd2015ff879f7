"""The full bridge against POT's entropic transport in the log domain."""

import numpy as np
import ot
import pytest
import torch

from thalweg.ops.entropic import causal_columns, full_bridge, functional


def problem(q, k, seed):
    generator = np.random.default_rng(seed)
    rows, columns = generator.uniform(0.3, 2.0, q), generator.uniform(0.3, 2.0, k)
    return generator.normal(size=(q, k)), rows, columns * rows.sum() / columns.sum()


def theirs(cost, rows, columns, temperature):
    return ot.sinkhorn(rows, columns, cost, temperature, method="sinkhorn_log", numItermax=50_000, stopThr=1e-13)


@pytest.mark.parametrize("temperature", [2.0, 1.0, 0.2])
@pytest.mark.parametrize(("q", "k"), [(5, 5), (4, 7), (1, 3), (9, 2)])
def test_plans_with_any_marginals(q, k, temperature):
    """Catches: marginals of the wrong side, a temperature that multiplies, a plan that has not converged."""
    cost, rows, columns = problem(q, k, seed=q * k)
    masses = [torch.from_numpy(x) for x in (columns, rows)]
    found = full_bridge(torch.from_numpy(-cost / temperature), *masses, iterations=50_000, tolerance=1e-13)
    expected = theirs(cost, rows, columns, temperature)
    np.testing.assert_allclose(found.log_plan.exp().numpy(), expected, rtol=1e-8, atol=1e-11)
    ours = functional(found.log_plan.exp(), torch.from_numpy(cost), temperature).sum().item()
    entropy = -(expected * np.log(expected)).sum()
    assert ours == pytest.approx((expected * cost).sum() - temperature * entropy, rel=1e-9)


def test_the_marginals_of_causal_attention_with_a_dear_future():
    """POT has no mask: the future costs so much that nothing of it is bought."""
    t = 6
    cost = np.random.default_rng(3).normal(size=(t, t))
    hidden = np.triu(np.ones((t, t), bool), 1)
    columns = causal_columns(t, torch.float64)
    logits = torch.from_numpy(-cost).masked_fill(torch.from_numpy(hidden), -torch.inf)
    found = full_bridge(logits, columns, iterations=50_000, tolerance=1e-13).log_plan.exp().numpy()
    expected = theirs(np.where(hidden, 1e3, cost), np.ones(t), columns.numpy(), 1.0)
    np.testing.assert_allclose(found, expected, atol=1e-9)
