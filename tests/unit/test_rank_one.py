"""The algebra of the rank-one operators, in float64."""

import pytest
import torch

from thalweg import connections
from thalweg.connections import Site
from thalweg.errors import InputError
from thalweg.ops.rank_one import delta, direction, reflect, write

D, N = 7, 3


@pytest.fixture
def draws():
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, k, v = randn(2, 5, N, D), direction(randn(2, 5, D)), randn(2, 5, N)
    return x, k, v, 2 * torch.rand(2, 5, generator=generator, dtype=torch.float64)


def shortcut(k, beta):
    """The matrix A = I - beta k k^T, as :func:`delta` applies it to the rows of the identity."""
    eye = torch.eye(D, dtype=torch.float64).expand(*k.shape[:-1], D, D)
    return delta(eye, k, torch.zeros(*k.shape[:-1], D, dtype=torch.float64), beta)


def along(k, x):
    return torch.einsum("btd,btnd->btn", k, x)


def test_direction_has_norm_one_at_every_width():
    generator = torch.Generator().manual_seed(1)
    for width in (2, 64, 1024):
        k = direction(torch.randn(4, width, generator=generator, dtype=torch.float64), eps=1e-5)
        torch.testing.assert_close(k.norm(dim=-1), torch.ones(4, dtype=torch.float64), atol=1e-9, rtol=0)


def test_the_least_eps_has_a_finite_gradient_at_zero_and_smaller_ones_are_refused():
    h = torch.zeros(3, requires_grad=True)
    direction(h, eps=1e-12).sum().backward()
    assert h.grad.isfinite().all()
    for eps in (1e-13, 0.0, float("nan"), float("inf")):
        for name, more in (("delta", {}), ("mhc_delta", {}), ("mgt", {"form": "rank1"})):
            with pytest.raises(InputError, match="direction_eps must be finite and at least 1e-12"):
                connections.create(name, width=8, sites=Site.decoder(1), direction_eps=eps, **more)


def test_direction_follows_its_equation_where_eps_counts():
    h = torch.tensor([3.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(direction(h, eps=12.0), h / 13)


def test_direction_of_zero_is_zero_with_a_finite_gradient():
    h = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    k = direction(h, eps=1e-5)
    (k * torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)).sum().backward()
    assert torch.equal(k, torch.zeros_like(k))
    torch.testing.assert_close(h.grad, 1e5 * torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))


def test_delta_is_the_matrix_equation(draws):
    x, k, v, beta = draws
    columns = x.transpose(-1, -2)  # d x n, as the paper has it
    column, row = k.unsqueeze(-1), k.unsqueeze(-2)
    expected = columns + beta[..., None, None] * column @ (v.unsqueeze(-2) - row @ columns)
    torch.testing.assert_close(delta(x, k, v, beta), expected.transpose(-1, -2), atol=1e-13, rtol=0)


def test_write_is_delta_without_what_was_held(draws):
    x, k, v, beta = draws
    expected = delta(x, k, v + along(k, x), beta)
    torch.testing.assert_close(write(x, k, v, beta), expected, atol=1e-13, rtol=0)


def test_error_shrinks_by_one_minus_beta(draws):
    x, k, v, beta = draws
    k = k / k.norm(dim=-1, keepdim=True)
    after = along(k, delta(x, k, v, beta)) - v
    torch.testing.assert_close(after, (1 - beta).unsqueeze(-1) * (along(k, x) - v), atol=1e-13, rtol=0)


def test_beta_one_matches_the_value(draws):
    x, k, v, beta = draws
    k = k / k.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(along(k, delta(x, k, v, torch.ones_like(beta))), v, atol=1e-13, rtol=0)


def test_beta_zero_is_the_identity(draws):
    x, k, v, beta = draws
    assert torch.equal(delta(x, k, v, torch.zeros_like(beta)), x)


def test_beta_two_with_zero_value_keeps_the_norm_and_undoes_itself(draws):
    x, k, v, beta = draws
    k, v, beta = k / k.norm(dim=-1, keepdim=True), torch.zeros_like(v), torch.full_like(beta, 2.0)
    once = delta(x, k, v, beta)
    assert (once - x).norm() > 1
    torch.testing.assert_close(once.norm(dim=-1), x.norm(dim=-1), atol=1e-12, rtol=0)
    torch.testing.assert_close(delta(once, k, v, beta), x, atol=1e-12, rtol=0)
    torch.testing.assert_close(once, reflect(x, k), atol=1e-12, rtol=0)


def test_what_is_orthogonal_to_the_direction_stays(draws):
    x, k, v, beta = draws
    k = k / k.norm(dim=-1, keepdim=True)

    def rest(state):
        return state - along(k, state).unsqueeze(-1) * k.unsqueeze(-2)

    torch.testing.assert_close(rest(delta(x, k, v, beta)), rest(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize("beta", [-0.5, 0.0, 0.3, 1.0, 1.7, 2.0, 2.5])
def test_determinant_spectrum_and_orthogonality_of_the_shortcut(draws, beta):
    k = draws[1][0, 0] / draws[1][0, 0].norm()
    matrix = shortcut(k, torch.tensor(beta, dtype=torch.float64))
    torch.testing.assert_close(torch.linalg.det(matrix).item(), 1 - beta, atol=1e-12, rtol=0)
    expected = torch.tensor(sorted([1.0] * (D - 1) + [1 - beta]), dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.eigvalsh(matrix), expected, atol=1e-12, rtol=0)
    distance = (matrix @ matrix.T - torch.eye(D, dtype=torch.float64)).norm()
    # |A A^T - I| = |(1 - beta)^2 - 1|, which is 0 at 0 and 2 only
    torch.testing.assert_close(distance.item(), abs((1 - beta) ** 2 - 1), atol=1e-12, rtol=0)


def test_householder_is_symmetric_orthogonal_and_an_involution(draws):
    h = 3.7 * draws[1][1, 2] + 0.1  # any norm
    eye = torch.eye(D, dtype=torch.float64)
    matrix = reflect(eye, h)
    torch.testing.assert_close(matrix, matrix.T, atol=1e-13, rtol=0)
    torch.testing.assert_close(matrix @ matrix, eye, atol=1e-13, rtol=0)
    torch.testing.assert_close(matrix @ h, -h, atol=1e-13, rtol=0)
    torch.testing.assert_close(matrix, eye - 2 * torch.outer(h, h) / h.dot(h), atol=1e-13, rtol=0)


@pytest.mark.parametrize("operator", [delta, write])
def test_gradients(draws, operator):
    inputs = [x.clone().requires_grad_() for x in draws]
    assert torch.autograd.gradcheck(operator, inputs)


def test_gradients_of_direction_and_reflection(draws):
    x, k, _, _ = (x.clone().requires_grad_() for x in draws)
    assert torch.autograd.gradcheck(lambda k: direction(k, 0.3), (k,))
    assert torch.autograd.gradcheck(reflect, (x, 1.5 * k))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_bfloat16_state_is_changed_in_float32(draws, autocast):
    x, k, v, beta = draws
    state = (x * 30).to(torch.bfloat16)
    k, v, beta = k.float(), v.float(), beta.float()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        after = delta(state, k, v, beta)
    assert after.dtype == torch.bfloat16
    assert torch.equal(after, delta(state.float(), k, v, beta).to(torch.bfloat16))
