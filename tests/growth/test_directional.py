"""The directional residual: against loops and dense matrices, golden identities, eigenpairs by every method, online trackers, mutants."""

import math

import pytest
import torch

from thalweg.errors import InputError, ShapeError, UnknownNameError
from thalweg.geometry import catalog
from thalweg.geometry.directional import (
    CHANCE,
    DirectionalOperator,
    asymmetry,
    directional_residual,
    directional_top,
    energy_of,
    head_energy,
    input_condition,
)
from thalweg.geometry.eigenpairs import (
    METHODS,
    canonical_basis,
    choose,
    degenerate,
    positive_part,
    signed,
    spectrum,
    top_eigenpairs,
)
from thalweg.growth import OjaTracker, mca_exin
from thalweg.growth.checks import check_inputs

G = torch.Generator().manual_seed(5)
D, R, N = 12, 5, 40


def draw(*shape):
    return torch.randn(*shape, generator=G, dtype=torch.float64)


def subject(captured=2, width=D, rank=R):
    x = draw(N, width) * torch.linspace(2, 0.2, width, dtype=torch.float64) + 0.3
    basis = torch.linalg.qr(draw(width, captured))[0] if captured else None
    return x, draw(width, rank), draw(width, rank), basis


def by_loop(x, query, key, captured, center=False):
    """The operator entry by entry, normalised, from its definition."""
    n, d = x.shape
    if center:
        x = x - sum(x) / n
    s = [[sum(x[t][i] * x[t][j] for t in range(n)).item() / n for j in range(d)] for i in range(d)]
    m = [[sum(query[i][r] * key[j][r] for r in range(query.shape[1])).item() for j in range(d)] for i in range(d)]
    anti = [[(m[i][j] - m[j][i]) / 2 for j in range(d)] for i in range(d)]
    product = [[sum(s[i][k] * anti[k][j] for k in range(d)) for j in range(d)] for i in range(d)]
    a = torch.tensor([[(product[i][j] + product[j][i]) / 2 for j in range(d)] for i in range(d)], dtype=torch.float64)
    outside = torch.eye(d, dtype=torch.float64)
    if captured is not None:
        for u in captured.T:
            outside = outside - torch.outer(u, u)
    size = max(torch.linalg.eigvalsh(torch.tensor(s, dtype=torch.float64))).item()
    return outside @ a @ outside / (size * math.sqrt(sum(v * v for row in m for v in row)))


SUBJECTS = {count: subject(count) for count in (0, 2)}


def check(make, center=False):
    """What ``make`` gives as a dense matrix against the loop, with and without captured directions."""
    for x, query, key, captured in SUBJECTS.values():
        found = make(x, query, key, captured)
        torch.testing.assert_close(found, by_loop(x, query, key, captured, center), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("center", [False, True])
def test_the_operator_equals_the_loop(center):
    check(lambda *subject: DirectionalOperator(*subject, center=center).dense(), center)


def minus_sign(x, query, key, captured):
    return -DirectionalOperator(x, query, key, captured).dense()


def keys_for_queries(x, query, key, captured):
    return DirectionalOperator(x, key, query, captured).dense()


def centred(x, query, key, captured):
    return DirectionalOperator(x, query, key, captured, center=True).dense()


def deflation_missing(x, query, key, captured):
    return DirectionalOperator(x, query, key).dense()


def mean_over_heads(x, query, key, captured):
    """Two heads of the joint factors, averaged: half the interaction in a numerator whose normaliser is that of the sum."""
    operator = DirectionalOperator(x, query, key, captured)
    return operator.dense() / 2


def symmetric_part(x, query, key, captured):
    operator = DirectionalOperator(x, query, key, captured)
    s, m = x.T @ x / len(x), query @ key.T
    a = s @ (m + m.T) / 2
    return operator.outside(operator.outside((a + a.T) / 2 / operator.scale).T)


def not_normalised(x, query, key, captured):
    return DirectionalOperator(x, query, key, captured).dense(raw=True)


@pytest.mark.parametrize(
    "mutant",
    [minus_sign, keys_for_queries, centred, deflation_missing, mean_over_heads, symmetric_part, not_normalised],
)
def test_the_comparison_rejects_mutants(mutant):
    with pytest.raises(AssertionError):
        check(mutant)


def test_golden_identities():
    """sym(S M_a) = [S, M_a] / 2; trace 0; rank at most 4 r; bounded by 1; products, columns and matrix agree."""
    x, query, key, _ = SUBJECTS[0]
    operator = DirectionalOperator(x, query, key)
    s, m = x.T @ x / N, query @ key.T
    anti = (m - m.T) / 2
    sym = (s @ anti + (s @ anti).T) / 2
    assert (sym - (s @ anti - anti @ s) / 2).abs().max() < 1e-12
    assert (operator.dense(raw=True) - sym).abs().max() < 1e-12
    assert abs(operator.dense().trace().item()) < 1e-15
    assert operator.frobenius() == pytest.approx(operator.dense().norm().item(), rel=1e-12)
    small = DirectionalOperator(x, query[:, :2], key[:, :2])
    assert torch.linalg.matrix_rank(small.dense()) == small.rank == 8
    assert operator.dense().norm(p=2) < 1
    scaled = DirectionalOperator(1e3 * x, 7 * query, 0.01 * key)
    torch.testing.assert_close(scaled.dense(), operator.dense())  # free of scale


def test_columns_are_held_a_block_at_a_time(monkeypatch):
    x, query, key, captured = SUBJECTS[2]
    operator = DirectionalOperator(x, query, key, captured)
    monkeypatch.setattr("thalweg.geometry.directional.BLOCK", 5)
    assert operator.frobenius() == pytest.approx(operator.dense().norm().item(), rel=1e-12)


def test_white_input_grows_nothing_whatever_the_weights():
    x = torch.linalg.qr(draw(N, D))[0] * math.sqrt(N)
    operator = DirectionalOperator(x, draw(D, R), draw(D, R))
    assert operator.condition == pytest.approx(1.0, abs=1e-12)
    assert operator.frobenius() < 1e-14
    assert input_condition(x).item() == pytest.approx(1.0, abs=1e-12)


def test_symmetric_interaction_has_no_residual():
    query = draw(D, R)
    assert directional_residual(SUBJECTS[0][0], query, query).item() < 1e-15
    assert asymmetry(query, query).item() < 1e-7
    assert head_energy(SUBJECTS[0][0], query, query).item() < 1e-7


def test_asymmetry_of_random_factors_is_its_chance():
    """1 / sqrt 2 within 0.01 at 256 x 64, and the cheap form equals the matrix."""
    query, key = draw(256, 64), draw(256, 64)
    found = asymmetry(query, key).item()
    assert found == pytest.approx(CHANCE, abs=0.01)
    m = query @ key.T
    assert found == pytest.approx(((m - m.T) / 2).norm().item() / m.norm().item(), rel=1e-12)
    for name in ("directional.asymmetry", "prototypes.effective"):
        assert catalog.entry(name).null


def test_energy_of_a_head_is_the_norm_of_s_times_its_antisymmetric_part():
    x, query, key, _ = SUBJECTS[0]
    operator = DirectionalOperator(x, query, key)
    m = query[:, :2] @ key[:, :2].T
    want = (x.T @ x / N @ (m - m.T) / 2).norm().item()
    assert energy_of(operator, query[:, :2], key[:, :2], 1.0).item() == pytest.approx(want, rel=1e-10)


def test_fewer_tokens_than_width_have_no_smallest_eigenvalue():
    x = draw(5, D)
    assert input_condition(x).item() == math.inf
    flat = draw(N, D)
    flat[:, 3] = 0
    assert input_condition(flat).item() == math.inf
    y = draw(N, D)
    values = torch.linalg.eigvalsh(y.T @ y)
    assert input_condition(y).item() == pytest.approx((values[-1] / values[0]).item(), rel=1e-8)


def test_extremes_by_lanczos_are_those_of_the_matrix(monkeypatch):
    y = draw(90, 30)
    want = input_condition(y).item()
    monkeypatch.setattr("thalweg.geometry.directional.LARGEST_GRAM", 8)
    assert input_condition(y).item() == pytest.approx(want, rel=1e-6)
    assert input_condition(y[:20]).item() == math.inf


# eigenpairs


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_same_eigenpairs(method):
    x, query, key, captured = subject(3, width=50, rank=4)
    operator = DirectionalOperator(x, query, key, captured)
    values, vectors = top_eigenpairs(operator, 5, method)
    want = torch.linalg.eigvalsh(operator.dense()).flip(0)
    torch.testing.assert_close(values, want[:5], rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(operator.apply(vectors), vectors * values, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(5, dtype=torch.float64), rtol=1e-8, atol=1e-9)
    assert (captured.T @ vectors).abs().max() < 1e-8  # across what is captured
    assert (vectors.gather(0, vectors.abs().argmax(0)[None]) > 0).all()
    assert directional_top(x, query, key, captured).item() == pytest.approx(values[0].item(), rel=1e-8)
    whole = spectrum(operator, 50, method)
    assert positive_part(whole[:8]) == pytest.approx(positive_part(want[:8]), rel=1e-7)


def test_what_auto_stands_for():
    narrow, wide = (DirectionalOperator(draw(4, d), draw(d, r), draw(d, r)) for d, r in ((20, 3), (1100, 3)))
    many = DirectionalOperator(draw(4, 1100), draw(1100, 300), draw(1100, 300))
    assert [choose(o) for o in (narrow, wide, many)] == ["dense", "factored", "lanczos"]
    a, b = top_eigenpairs(wide, 3), top_eigenpairs(wide, 3, "lanczos")
    torch.testing.assert_close(a[0], b[0], rtol=1e-7, atol=1e-12)
    with pytest.raises(UnknownNameError, match="Did you mean 'lanczos'"):
        choose(wide, "lanzcos")  # type: ignore[arg-type]


def planes(strengths, width=16, seed=0):
    """Input and factors whose operator has each of ``strengths`` (up to one factor) as an eigenvalue: antisymmetric planes between two axes
    of different variance."""
    g = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(width, width, generator=g, dtype=torch.float64))[0]
    variances = torch.tensor([3.0, 1.0] * (width // 2), dtype=torch.float64)
    x = math.sqrt(width) * (turn * variances.sqrt()).T  # S = turn diag(variances) turn^T, exactly
    query, key = [], []
    for i, strength in enumerate(strengths):
        a, b = turn[:, 2 * i], turn[:, 2 * i + 1]
        query += [strength * a, -strength * b]
        key += [b, a]
    return x, torch.stack(query, 1), torch.stack(key, 1)


def test_degenerate_eigenvalues_are_counted_and_span_one_subspace():
    x, query, key = planes((2.0, 2.0, 2.0, 1.0))
    for method in ("dense", "factored", "lanczos"):
        values, vectors = top_eigenpairs(DirectionalOperator(x, query, key), 6, method)
        assert degenerate(values, 1e-6) == 3
        turn = torch.linalg.qr(draw(3, 3))[0]
        one, other = canonical_basis(vectors[:, :3]), canonical_basis(vectors[:, :3] @ turn)
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)  # of the span alone
        torch.testing.assert_close(one @ one.T, vectors[:, :3] @ vectors[:, :3].T, rtol=1e-7, atol=1e-8)
    assert degenerate(torch.tensor([1.0, 0.9]), 1e-3) == 1
    assert torch.equal(signed(torch.tensor([[-2.0, 1.0], [1.0, 0.0]])), torch.tensor([[2.0, 1.0], [-1.0, 0.0]]))


def test_deflation_returns_the_eigenvalues_of_a_fixed_operator_in_order():
    """Why the order of births on a fixed operator is no finding."""
    x, query, key, _ = SUBJECTS[0]
    want = torch.linalg.eigvalsh(DirectionalOperator(x, query, key).dense()).flip(0)
    captured, found = None, []
    for _ in range(4):
        values, vectors = top_eigenpairs(DirectionalOperator(x, query, key, captured), 1)
        found.append(values[0])
        captured = vectors if captured is None else torch.cat([captured, vectors], 1)
    torch.testing.assert_close(torch.stack(found), want[:4], rtol=1e-8, atol=1e-12)


# online


def test_oja_follows_the_top_direction_at_any_scale():
    x, query, key, _ = SUBJECTS[0]
    operator = DirectionalOperator(x, query, key)
    values, vectors = top_eigenpairs(operator, 2)
    matrix = operator.dense()
    for scale in (1.0, 1e4, 1e-6):
        tracker = OjaTracker(D)
        u = tracker.track((scale * matrix).mv, 3000)
        assert tracker.value == pytest.approx(scale * values[0].item(), rel=1e-6)
        assert (u @ vectors[:, 0]).abs().item() == pytest.approx(1.0, abs=1e-4)
    moved = DirectionalOperator(x.flip(1), query, key)
    tracker.norm = 0.0
    tracker.track(moved.dense().mv, 4000)
    assert tracker.value == pytest.approx(top_eigenpairs(moved, 1)[0].item(), rel=1e-4)


def test_oja_with_a_fixed_step_fails_where_ours_does_not():
    """Step x (largest - smallest) above 2: the plain rule does not settle; ours divides the step by the size of the operator."""
    matrix = torch.diag(torch.tensor([3.0, 1.0, -4.0], dtype=torch.float64))
    u = torch.nn.functional.normalize(torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64), dim=0)
    for _ in range(2000):
        u = torch.nn.functional.normalize(u + 0.5 * (matrix @ u - (u @ matrix @ u) * u), dim=0)
    assert abs(u @ matrix @ u - 3.0) > 0.1
    tracker = OjaTracker(3)
    tracker.track(lambda v: matrix @ v, 2000)
    assert tracker.value == pytest.approx(3.0, abs=1e-9)


def test_mca_exin_goes_to_zero_on_an_indefinite_operator_and_is_right_on_a_shifted_one():
    operator = DirectionalOperator(*SUBJECTS[0][:3])
    lowest = spectrum(operator)[-1].item()
    assert lowest < -0.01
    matrix = operator.dense()
    _, value = mca_exin(matrix.mv, draw(D), 20_000, 5.0)
    assert abs(value) < 1e-8  # documented: not the smallest eigenvalue
    _, value = mca_exin(matrix.mv, draw(D), 20_000, 0.5, shift=1.0)
    assert value == pytest.approx(lowest, rel=1e-6)


def test_captured_directions_are_orthonormal_to_the_digits_of_their_dtype():
    """Columns that are not left an eigenvalue of -1.64 in what is promised to lie within [-1, 1]."""
    x, query, key, captured = SUBJECTS[2]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        given = captured.to(dtype)
        for operator in (DirectionalOperator(x, query, key, given), DirectionalOperator(x, query, key).without(given)):
            assert torch.linalg.matrix_norm(operator.dense(), 2) < 1
    with pytest.raises(InputError, match="orthonormal columns, got products that are off by 8"):
        DirectionalOperator(x, query, key, 3 * torch.eye(D, dtype=torch.float64)[:, :2])
    with pytest.raises(InputError, match=r"off by 2e-06; give torch.linalg.qr\(captured\).Q"):
        DirectionalOperator(x, query, key).without((1 + 1e-6) * captured)


def test_products_through_the_moment_are_those_through_the_tokens(monkeypatch):
    x, query, key, captured = SUBJECTS[2]
    operator = DirectionalOperator(x, query, key, captured)
    assert operator.moment is not None and operator.without(None).moment is operator.moment
    monkeypatch.setattr("thalweg.geometry.directional.LARGEST_GRAM", D - 1)
    other = DirectionalOperator(x, query, key, captured)
    assert other.moment is None and DirectionalOperator(x[:5], query, key).moment is None
    torch.testing.assert_close(operator.dense(), other.dense(), rtol=1e-10, atol=1e-14)
    assert operator.condition == pytest.approx(other.condition, rel=1e-8)


def alike(offset, noise, dtype=torch.float32):
    """Tokens that are one vector but for noise of this size."""
    vector = offset * torch.ones(D, dtype=torch.float64)
    return (vector + noise * draw(N, D)).to(dtype)


def test_tokens_that_differ_by_rounding_are_one_vector():
    """And those that differ by more are not, however far from the origin."""
    for dtype in (torch.float32, torch.float64):
        for size in (1e-30, 1.0, 1e30):
            step = size * torch.finfo(dtype).eps
            with pytest.raises(InputError, match="one and the same vector"):
                DirectionalOperator(alike(size, 2 * step, dtype), draw(D, R), draw(D, R))
            DirectionalOperator(alike(size, 100 * step, dtype), draw(D, R), draw(D, R))
    DirectionalOperator(alike(1e3, 1.0), draw(D, R), draw(D, R))
    DirectionalOperator(alike(1.0, 0.05, torch.bfloat16), draw(D, R), draw(D, R))
    with pytest.raises(InputError, match=r"layer 1: .*one and the same vector"):
        check_inputs(alike(1.0, 2e-7), 1)
    check_inputs(alike(1e3, 1.0), 1)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: OjaTracker(4, rate=1.5), InputError, "at most 0.9"),
        (lambda: DirectionalOperator(draw(9, 3), draw(4, 2), draw(4, 2)), ShapeError, r"\[tokens, 4\]"),
        (lambda: DirectionalOperator(draw(9, 4), draw(4, 2), draw(4, 3)), ShapeError, "both be"),
        (lambda: DirectionalOperator(torch.ones(9, 4), draw(4, 2), draw(4, 2)), InputError, "one and the same vector"),
        (lambda: DirectionalOperator(draw(9, 4) * math.nan, draw(4, 2), draw(4, 2)), InputError, "NaN or infinite"),
        (lambda: DirectionalOperator(draw(9, 4), torch.zeros(4, 2), draw(4, 2)), InputError, "interaction .* is zero"),
        (lambda: DirectionalOperator(draw(9, 4), draw(4, 2), draw(4, 2), draw(3, 1)), ShapeError, "captured"),
        (lambda: DirectionalOperator(draw(9, 4), draw(4, 2), draw(4, 2), draw(4)), ShapeError, "captured"),
        (lambda: top_eigenpairs(DirectionalOperator(*SUBJECTS[0][:3]), 0), InputError, "at least 1"),
    ],
)
def test_what_cannot_be_is_one_line(make, error, words):
    with pytest.raises(error, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
