"""The two forms of Sinkhorn's iterations, with logarithms and with products of exponentials, are one function, gradients included."""

import math

import pytest
import torch

from thalweg.errors import InputError
from thalweg.ops import doubly_stochastic, sinkhorn
from thalweg.ops.birkhoff import birkhoff
from thalweg.ops.forward_mode import load_rules
from thalweg.ops.grouped import grouped_linear


def loops(logits, iterations):
    """Columns, then rows, one number at a time; torch's own gradient."""
    n = len(logits)
    p = [[torch.exp(logits[i, j] - logits.max()) for j in range(n)] for i in range(n)]
    for _ in range(iterations):
        for j in range(n):
            total = sum(p[i][j] for i in range(n))
            for i in range(n):
                p[i][j] = p[i][j] / total
        for i in range(n):
            total = sum(p[i])
            p[i] = [x / total for x in p[i]]
    return torch.stack([torch.stack(row) for row in p])


def both(logits, cotangent, iterations):
    z = logits.clone().requires_grad_()
    out = sinkhorn(z, iterations)
    out.backward(cotangent)
    return out.detach(), z.grad


@pytest.fixture(params=["exponentials", "logarithms"])
def form(request, monkeypatch):
    if request.param == "logarithms":
        monkeypatch.setattr(doubly_stochastic, "NARROW", {})
    return request.param


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("iterations", [1, 2, 7])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_values_and_gradients_are_those_of_loops(form, n, iterations):
    logits, cotangent = 3 * random(2, n, n), random(2, n, n, seed=1)
    out, gradient = both(logits, cotangent, iterations)
    for b in range(2):
        z = logits[b].clone().requires_grad_()
        expected = loops(z, iterations)
        expected.backward(cotangent[b])
        torch.testing.assert_close(out[b], expected.detach(), atol=1e-14, rtol=1e-12)
        torch.testing.assert_close(gradient[b], z.grad, atol=1e-13, rtol=1e-11)


def test_both_can_be_differentiated_twice(form):
    assert torch.autograd.gradgradcheck(lambda z: sinkhorn(z, 3), random(2, 3, 3).requires_grad_())


def wrong(name):
    """A backward pass of scalings with one mistake."""

    def backward(z, gradient, iterations):
        e, pairs = doubly_stochastic._scalings(z, iterations)
        u, v = pairs[-1]
        weight = gradient * u * v
        dz = e * weight
        df, dg = dz.sum(1, keepdim=True), dz.sum(0, keepdim=True)
        for step in range(iterations - 1, -1, -1):
            u, v = pairs[step]
            a = df * u
            weight = weight - a * v
            dg = dg - v * (e * a).sum(0, keepdim=True)
            before = pairs[step - 1][0] if step and name != "scaling of the same iteration" else torch.ones_like(u)
            before = u if step and name == "scaling of the same iteration" else before
            b = dg * v
            weight = weight - before * b
            df = -before * (e * b).sum(1, keepdim=True)
            dg = torch.zeros_like(dg) if name != "gradient counted twice" else dg
            if name == "last iteration only":
                break
        return e * weight

    return backward


@pytest.mark.parametrize(
    ("name", "same"),
    [("right", True), ("scaling of the same iteration", False), ("gradient counted twice", False), ("last iteration only", False)],
)  # fmt: skip
def test_mistakes_in_the_backward_pass_are_seen(monkeypatch, name, same):
    logits, cotangent = 3 * random(4, 3, 3), random(4, 3, 3, seed=1)
    _, expected = both(logits, cotangent, 5)
    monkeypatch.setattr(doubly_stochastic, "_backward_narrow", wrong(name))
    _, found = both(logits, cotangent, 5)
    assert torch.allclose(found, expected, atol=1e-10) == same


@pytest.mark.parametrize("n", [2, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_exponentials_hold_at_the_edge_of_what_they_are_given(n, seed):
    """Logits at both ends of the range, which scale the most; float32 against the logarithms of float64."""
    edge = doubly_stochastic.NARROW[torch.float32]
    choice = torch.rand(64, n, n, generator=torch.Generator().manual_seed(seed)) < 0.5
    logits = torch.where(choice, 0.0, -edge)
    assert doubly_stochastic._narrow(logits.permute(1, 2, 0))
    cotangent = 1e4 * random(64, n, n, seed=seed, dtype=torch.float32)
    out, gradient = both(logits, cotangent, 20)
    assert out.isfinite().all() and gradient.isfinite().all()
    z = logits.double()
    exact, slope = both(z, cotangent.double(), 20)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-4)
    assert float((gradient.double() - slope).abs().max()) <= 2e-4 * float(cotangent.abs().max())


@pytest.mark.parametrize("spread", [1e2, 1e4])
def test_wide_logits_go_to_the_logarithms(spread):
    logits = spread * random(8, 4, 4, dtype=torch.float32)
    assert not doubly_stochastic._narrow(logits)
    out, gradient = both(logits, torch.ones(8, 4, 4), 20)
    assert out.isfinite().all() and gradient.isfinite().all()


def test_values_that_cannot_be_read_go_to_the_logarithms():
    seen = []
    rule = doubly_stochastic._narrow

    def watched(z):
        seen.append(rule(z))
        return seen[-1]

    doubly_stochastic._narrow = watched
    try:
        logits = random(3, 2, 4, 4)
        torch.testing.assert_close(torch.func.vmap(lambda z: sinkhorn(z, 4))(logits), sinkhorn(logits, 4))
    finally:
        doubly_stochastic._narrow = rule
    assert seen == [False, True]
    assert not rule(torch.full((2, 2, 1), math.nan)) and not rule(torch.zeros(2, 2, 0))
    assert not rule(torch.tensor([[[math.inf]], [[0.0]]]))


@pytest.mark.parametrize(
    ("n", "size", "iterations"), [(4, 1e5, 2000), (2, 1e7, 20), (4, 1e7, 200), (4, 1e8, 20), (4, 1e30, 20)]
)
def test_derivatives_stay_small_where_the_grain_of_the_logits_is_large(n, size, iterations):
    """Each half-step multiplies by a matrix whose sums are one; were they the exponential's, up to n, they would multiply to 1e21."""
    logits = size * random(32, n, n, dtype=torch.float32).sign()
    cotangent = random(32, n, n, seed=1, dtype=torch.float32)
    _, gradient = both(logits, cotangent, iterations)
    assert gradient.abs().max() < 2 * cotangent.abs().max()
    load_rules()
    pushed = torch.func.jvp(lambda z: sinkhorn(z, iterations), (logits,), (cotangent,))[1]
    assert pushed.abs().max() < 2 * cotangent.abs().max()


@pytest.mark.parametrize("eps", [1e-38, -1.0, math.inf, math.nan])
def test_an_eps_that_sums_of_float32_do_not_bear(eps):
    with pytest.raises(InputError, match="eps must be 0 or a finite number of at least 1e-30"):
        sinkhorn(torch.zeros(2, 2), 2, eps=eps)


def test_the_least_eps_keeps_huge_logits_finite():
    logits = (1e4 * random(8, 4, 4, dtype=torch.float32).sign()).requires_grad_()
    out = sinkhorn(logits, eps=1e-30)
    out.backward(1e4 * torch.ones_like(out))
    assert out.isfinite().all() and logits.grad.isfinite().all()


WEIGHT, SIZES = random(2, 4, 3, dtype=torch.float32), torch.tensor([2, 3])
OPERATIONS = {
    "sinkhorn": sinkhorn,
    "birkhoff": birkhoff,
    "grouped": lambda x: grouped_linear(x[:, 0], WEIGHT, SIZES),
}


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # Dynamo instantiates it, and says so
@pytest.mark.parametrize("name", OPERATIONS)
def test_forward_mode_inside_a_compiled_function_is_not_zero(name):
    load_rules()
    torch._dynamo.reset()
    x, direction = (random(5, 3, 3, seed=seed, dtype=torch.float32) for seed in (0, 1))

    def pushed(point, along):
        return torch.func.jvp(OPERATIONS[name], (point,), (along,))[1]

    whole = name != "grouped"  # sizes are data, which a graph does not look at
    compiled = torch.compile(pushed, backend="eager", fullgraph=whole)
    assert torch.allclose(compiled(x, direction), pushed(x, direction), atol=1e-6)
    torch._dynamo.reset()
