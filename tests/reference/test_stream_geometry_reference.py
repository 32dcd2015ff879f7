"""Lengths, ratios, angles, alignment, outliers and the diagonal against loops written from the definitions; golden numbers."""

import math

import pytest
import torch

from thalweg.errors import ShapeError
from thalweg.geometry import (
    anisotropy,
    channel_kurtosis,
    cka_of,
    effective_diagonal,
    first_token,
    hsic,
    layer_drop_cosine,
    linear_cka,
    outlier_channels,
    parallel_coefficient,
    parallel_energy,
    parallel_fraction,
    parallel_over_perpendicular,
    relative_update,
    split_update,
    state_cosine,
    token_cosine,
    token_relative_update,
    update_angle,
)
from thalweg.geometry.heads import context_coefficient, full_coefficient, own_weight, value_fraction
from thalweg.geometry.lengths import lengths, over_perpendicular_null
from thalweg.geometry.similarity import mean_pairwise_cosine
from thalweg.geometry.spectrum import (
    effective_rank,
    effective_rank_of_moments,
    large_gaussian_null,
    pooled_effective_rank,
)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pair(*shape):
    return gaussian(*shape), gaussian(*shape, seed=1)


def close(got, expected, **tolerance):
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        **({"rtol": 1e-10, "atol": 1e-12} | tolerance),
    )


def test_golden_numbers_of_an_update():
    z, u = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([2.0, 1.0], dtype=torch.float64)
    coefficient, parallel, perpendicular = split_update(z, u)
    close([coefficient, *parallel, *perpendicular], torch.tensor([0.4, 1.2, 1.6, 0.8, -0.6], dtype=torch.float64))
    close(parallel_over_perpendicular(z, u).item(), 2.0)
    close(parallel_fraction(z, u).item(), 0.894427191)
    close(parallel_energy(z, u).item(), 0.8)
    close(update_angle(z, u).item(), math.degrees(math.atan(0.5)))


def test_golden_numbers_of_a_dropped_layer():
    z, u = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.1, 0.2], dtype=torch.float64)
    assert round(layer_drop_cosine(z, u).item(), 5) == 0.98387
    assert round(1 - layer_drop_cosine(z, u).item(), 6) == 0.016130
    assert round(1 - layer_drop_cosine(z, u, small_angle=True).item(), 6) == 0.016529


def test_every_ratio_follows_from_the_vectors():
    z, u = pair(4, 6, 9)
    coefficient, parallel, perpendicular = split_update(z, u)
    a, b, whole = parallel.norm(dim=-1), perpendicular.norm(dim=-1), u.norm(dim=-1)
    cosine = torch.nn.functional.cosine_similarity(z, u, dim=-1)
    close(parallel_over_perpendicular(z, u), a / b)
    close(parallel_fraction(z, u), a / whole)
    close(parallel_energy(z, u), (a / whole).square())
    close(update_angle(z, u), torch.rad2deg(torch.arccos(cosine)))
    close(token_relative_update(z, u), whole / z.norm(dim=-1))
    close(layer_drop_cosine(z, u), torch.nn.functional.cosine_similarity(z, z + u, dim=-1))
    close(layer_drop_cosine(z, u), state_cosine(z, z + u))
    close(layer_drop_cosine(z, u, small_angle=True), 1 - (b / z.norm(dim=-1) / (1 + coefficient)).square() / 2)
    found = lengths(z, u)
    for got, expected in (
        (found.coefficient, parallel_coefficient(z, u)),
        (found.fraction, parallel_fraction(z, u)),
        (found.energy, parallel_energy(z, u)),
        (found.update, whole),
    ):
        close(got, expected)
    one = lengths(z[:1, :1], u[:1, :1]).relative.squeeze()
    close(one, relative_update(z[0, :1], u[0, :1]))


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1.0])
def test_the_part_across_keeps_its_digits(scale):
    z = gaussian(5, 64)
    across = gaussian(5, 64, seed=1)
    across -= split_update(z, across).parallel
    u = 0.7 * z + scale * across
    close(lengths(z, u).across, scale * across.norm(dim=-1), rtol=1e-3)
    half = lengths(z.float(), (0.7 * z + max(scale, 1e-4) * across).float())
    close(half.across.double(), max(scale, 1e-4) * across.norm(dim=-1), rtol=5e-2)


def test_zeros_have_no_direction():
    z, u, none = gaussian(1, 4), gaussian(1, 4, seed=1), torch.zeros(1, 4, dtype=torch.float64)
    assert update_angle(z, none).item() == 90 and update_angle(none, u).item() == 90
    assert parallel_over_perpendicular(z, none).item() == 0 and parallel_over_perpendicular(none, u).item() == 0
    assert parallel_over_perpendicular(z, 2 * z).item() > 1e14
    assert token_relative_update(none, u).item() == math.inf and token_relative_update(none, none).item() == 0
    assert layer_drop_cosine(none, u).item() == 0 and layer_drop_cosine(z, none).item() == 1
    assert layer_drop_cosine(z, -2 * z).item() == pytest.approx(-1)


@pytest.mark.parametrize("function", [parallel_over_perpendicular, update_angle, layer_drop_cosine])
def test_gradients(function):
    z, u = (x.requires_grad_() for x in pair(3, 5))
    assert torch.autograd.gradcheck(function, (z, u))


def test_the_null_of_the_unbounded_ratio_is_its_mean():
    u = gaussian(20_000, 12)
    z = torch.zeros(12, dtype=torch.float64)
    z[0] = 1
    drawn = parallel_over_perpendicular(z, u)
    assert over_perpendicular_null(12) == pytest.approx(drawn.mean().item(), abs=4 * drawn.std().item() / 20_000**0.5)
    assert over_perpendicular_null(2) == math.inf


def reference_hsic(k, m, unbiased):
    n = len(k)
    if not unbiased:
        h = torch.eye(n, dtype=torch.float64) - 1 / n
        return torch.trace(k @ h @ m @ h) / (n - 1) ** 2
    total = 0.0
    for i in range(n):
        for j in range(n):
            for q in range(n):
                for r in range(n):
                    if len({i, j, q, r}) == 4:
                        total += k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q])
    return total / (n * (n - 1) * (n - 2) * (n - 3))  # the U-statistic over ordered quadruples


@pytest.mark.parametrize("unbiased", [False, True])
def test_linear_cka_is_its_definition(unbiased):
    x, y = gaussian(6, 3), gaussian(6, 5, seed=1)
    k, m = x @ x.mT, y @ y.mT
    kl, kk, ll = (reference_hsic(a, b, unbiased) for a, b in ((k, m), (k, k), (m, m)))
    close(hsic(torch.stack([k, m]), unbiased), torch.tensor([[kk, kl], [kl, ll]], dtype=torch.float64))
    close(linear_cka(x, y, unbiased), kl / (kk * ll).sqrt())


def test_linear_cka_sees_neither_rotation_scale_nor_mean():
    x = gaussian(40, 6)
    turn = torch.linalg.qr(gaussian(6, 6, seed=2)).Q
    for unbiased in (False, True):
        close(linear_cka(x, 3 * x @ turn + 5, unbiased), 1.0)
    y = gaussian(40, 30, seed=3)
    assert abs(linear_cka(x, y).item()) < 0.2 < linear_cka(x, y, unbiased=False).item()
    assert linear_cka(x, torch.ones(40, 2)).item() == 0
    with pytest.raises(ShapeError, match="of the same tokens"):
        linear_cka(x, y[:20])
    with pytest.raises(ShapeError, match="n at least 4"):
        linear_cka(x[:3], y[:3])


def test_minibatches_give_the_cka_of_the_whole():
    common = gaussian(2000, 8)
    x, y = common + 0.5 * gaussian(2000, 8, seed=1), common + 0.5 * gaussian(2000, 8, seed=2)
    whole = linear_cka(x, y).item()
    grams = [torch.stack([a @ a.mT, b @ b.mT]) for a, b in zip(x.split(20), y.split(20), strict=True)]
    joint = sum(hsic(g) for g in grams)
    assert cka_of(joint)[0, 1].item() == pytest.approx(whole, abs=0.01)
    biased = sum(hsic(g, unbiased=False) for g in grams)
    assert cka_of(biased)[0, 1].item() > whole + 0.05  # why minibatches take the unbiased one


def test_anisotropy_is_the_mean_over_all_pairs():
    x = gaussian(3, 5, 4) + 0.5
    flat = x.flatten(0, 1)
    cosines = [state_cosine(flat[i], flat[j]) for i in range(15) for j in range(i)]
    close(anisotropy(x), sum(cosines) / len(cosines))
    unit = torch.nn.functional.normalize(flat, dim=-1)
    close(mean_pairwise_cosine(unit.sum(0), 15.0, 15), anisotropy(x))
    assert (anisotropy(x) - token_cosine(x).mean()).abs() > 1e-3


def test_outlier_channels_and_kurtosis_by_hand():
    x = torch.ones(10, 8)
    assert outlier_channels(x, top=2).item() == pytest.approx(0.25) and channel_kurtosis(x).item() == 1
    x[:, 3] = 0
    x[:, 3] += 10
    assert outlier_channels(x, top=1).item() == pytest.approx(100 / 107)
    energy = [1] * 7 + [100]
    assert channel_kurtosis(x).item() == pytest.approx(sum(e * e for e in energy) / 8 / (sum(energy) / 8) ** 2)
    alone = torch.zeros(4, 6)
    alone[:, 2] = gaussian(4)
    assert channel_kurtosis(alone).item() == pytest.approx(6) and outlier_channels(alone).item() == pytest.approx(1)


def test_first_token_by_hand():
    ratio, share = first_token(torch.tensor([[6.0, 1.0, 2.0, 3.0], [1, 1, 1, 1], [0, 0, 0, 0]]))
    assert ratio.tolist() == [3, 1, 1]
    assert share.tolist() == pytest.approx([36 / 50, 0.25, 0.25])
    with pytest.raises(ShapeError, match="at least 2 tokens"):
        first_token(torch.ones(3, 1))


def test_rank_from_moments_is_the_pooled_rank():
    x = gaussian(3, 30, 7) * torch.logspace(0, -2, 7) + 0.3
    flat = x.flatten(0, 1)
    close(effective_rank_of_moments(flat.mT @ flat, 90), pooled_effective_rank(x))
    mean = flat.sum(0)
    close(
        effective_rank_of_moments(flat.mT @ flat - torch.outer(mean, mean) / 90, 90),
        pooled_effective_rank(x, center=True),
    )
    rest = x[:, 1:].flatten(0, 1)
    close(effective_rank_of_moments(rest.mT @ rest, 87), pooled_effective_rank(x, drop_first=True))
    few = gaussian(4, 7)
    close(effective_rank_of_moments(few.mT @ few, 4), effective_rank(few), rtol=1e-6)


@pytest.mark.parametrize(("tokens", "width", "within"), [(512, 64, 2e-3), (64, 512, 2e-3), (64, 64, 5e-3)])
def test_the_null_of_large_matrices_is_what_gaussian_ones_give(tokens, width, within):
    drawn = effective_rank(gaussian(8, tokens, width)).mean().item()
    assert large_gaussian_null(tokens, width).value == pytest.approx(drawn, abs=within)


def test_the_diagonal_of_golden_numbers():
    v, o, c = (torch.tensor(x, dtype=torch.float64) for x in ([1.0, 1.0], [1.0, 0.75], [0.25, 0.0]))
    assert effective_diagonal(c, v, v).item() == -0.125
    assert 0.75 + effective_diagonal(o, v, v).item() == -0.125
    assert effective_diagonal(o, v, v, scale=1.0).item() == 0


def test_the_diagonal_of_a_residual_edit_matches_the_product_with_the_state():
    z, w, values, weights = (
        gaussian(6),
        gaussian(6, 4, seed=1),
        gaussian(5, 4, seed=2),
        torch.rand(5, dtype=torch.float64),
    )
    update = w @ (weights @ values)
    change = effective_diagonal(update, z, w @ values[-1], scale=0.3)
    edited = 0.3 * split_update(z, update).parallel + split_update(z, update).perpendicular
    weights[-1] += change
    close((w @ (weights @ values)) @ z, edited @ z)
    flat = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert effective_diagonal(flat, flat, torch.tensor([-1e-12, 1.0], dtype=torch.float64)).item() == pytest.approx(1e8)


def test_heads_in_value_space_in_loops():
    weights = gaussian(2, 4, 5, 5).tril().exp().tril()
    weights = weights / weights.sum(-1, keepdim=True)
    v = gaussian(2, 5, 2, 3, seed=1)
    o = torch.einsum("bhts,bshd->bthd", weights, v.repeat_interleave(2, 2))
    own = own_weight(weights)
    for b in range(2):
        for t in range(5):
            for h in range(4):
                value, out = v[b, t, h // 2], o[b, t, h]
                context = out - weights[b, h, t, t] * value
                close(full_coefficient(o, v)[b, t, h], out @ value / (value @ value))
                close(context_coefficient(o, v, own)[b, t, h], context @ value / (value @ value))
                close(value_fraction(o, v)[b, t, h], (out @ value).abs() / (out.norm() * value.norm()))
    assert value_fraction(0 * o, v).eq(0).all()
    with pytest.raises(ShapeError, match=r"\[\.\.\. t t\]"):
        own_weight(weights[..., :3])
