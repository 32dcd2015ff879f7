"""RMSNorm as a map: golden numbers, loop-written references, and the probe on models."""

import math

import probe_subjects as subjects
import pytest
import torch

from thalweg.capture import locate
from thalweg.continuum import findings
from thalweg.continuum.norms import norms_of
from thalweg.errors import InputError, ShapeError
from thalweg.geometry.normalisation import (
    epsilon_slope,
    power_law,
    rms_inverse,
    rms_jacobian_norm,
    rms_lipschitz,
    rms_map,
)

EPSILONS = torch.logspace(-12, -1, 23, dtype=torch.float64)


def jacobian(x, eps, gain=None):
    """By the definition of a derivative, entry by entry. Catches: s in place of sqrt(s), a mean over the wrong axis, eps inside twice."""
    d = len(x)
    s = sum(float(v) ** 2 for v in x) / d + eps
    found = torch.zeros(d, d, dtype=torch.float64)
    for i in range(d):
        for j in range(d):
            found[i, j] = ((1.0 if i == j else 0.0) - float(x[i]) * float(x[j]) / (d * s)) / math.sqrt(s)
            found[i, j] *= 1.0 if gain is None else float(gain[i])
    return found


@pytest.mark.parametrize("eps", [1e-6, 0.3])
@pytest.mark.parametrize("width", [1, 2, 7])
def test_the_jacobian_and_its_norm(eps, width):
    x = torch.randn(width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))
    told = torch.autograd.functional.jacobian(lambda x: rms_map(x, eps), x)
    torch.testing.assert_close(told, jacobian(x, eps), rtol=1e-10, atol=1e-12)
    top = torch.linalg.svdvals(jacobian(x, eps)).max()
    torch.testing.assert_close(rms_jacobian_norm(x, eps), top, rtol=1e-9, atol=0)


def test_a_gain_multiplies_the_bound():
    g = torch.Generator().manual_seed(0)
    x, gain = torch.randn(9, dtype=torch.float64, generator=g), torch.randn(9, dtype=torch.float64, generator=g)
    exact = torch.linalg.svdvals(jacobian(x, 1e-3, gain)).max()
    assert exact <= gain.abs().max() * rms_jacobian_norm(x, 1e-3) + 1e-12
    assert exact > 0.5 * gain.abs().max() * rms_jacobian_norm(x, 1e-3)
    at_origin = torch.linalg.svdvals(jacobian(torch.zeros(9), 1e-3, gain)).max()
    torch.testing.assert_close(rms_lipschitz(gain, 1e-3), at_origin)


def test_the_inverse_and_the_ball():
    x = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 3
    for eps in (1e-5, 0.5):
        y = rms_map(x, eps)
        assert (y.norm(dim=-1) < 4.0).all()  # sqrt(16)
        # the error of the inverse is the rounding of y times (ms + eps) / eps
        torch.testing.assert_close(rms_inverse(y, eps), x, rtol=1e-9 if eps > 0.1 else 1e-7, atol=0)
    with pytest.raises(InputError, match=r"mean square below 1, got 4"):
        rms_inverse(torch.full((4,), 2.0), 1e-5)
    with pytest.raises(InputError, match="above 0"):
        rms_inverse(torch.zeros(4), 0.0)


@pytest.mark.parametrize(
    ("rms", "slope", "r2"),
    [(0.0, -0.5, 1.0), (1e-6, -0.495, 0.9997), (1e-4, -0.344, None), (1e-2, -0.100, None), (1.0, -0.0006, None)],
)
def test_golden_slopes_of_the_law_of_epsilon(rms, slope, r2):
    found, fit = epsilon_slope(rms**2, EPSILONS)
    assert found == pytest.approx(slope, abs=1e-12 if rms == 0 else 1e-3)
    if r2 is not None:
        assert fit == pytest.approx(r2, abs=1e-12 if rms == 0 else 1e-4)


def test_the_intercept_at_the_origin_is_zero():
    slope, intercept, r2 = power_law(EPSILONS, EPSILONS.rsqrt())
    assert (slope, intercept, r2) == pytest.approx((-0.5, 0.0, 1.0), abs=1e-12)
    with pytest.raises(ShapeError):
        power_law(EPSILONS, EPSILONS[:-1])
    with pytest.raises(InputError, match="positive"):
        power_law(EPSILONS, -EPSILONS)


def test_norms_are_told_by_what_they_do():
    """Catches: LayerNorm taken for RMSNorm, epsilon read from the wrong place, the gain of Gemma without its one."""
    from transformers import GemmaConfig, GemmaForCausalLM

    found = norms_of(locate(subjects.llama(rms_norm_eps=3e-4)))
    assert len(found) == 5 and [n.layer for n in found] == [0, 0, 1, 1, None]
    assert all(
        n.epsilon == pytest.approx(3e-4, rel=1e-4) and n.largest_gain == pytest.approx(1, abs=1e-4) for n in found
    )
    assert norms_of(locate(subjects.bert())) == [] and norms_of(locate(subjects.gpt2())) == []
    torch.manual_seed(0)
    gemma = GemmaForCausalLM(GemmaConfig(**subjects.SMALL, head_dim=8, num_key_value_heads=2, **subjects.IDS))
    with torch.no_grad():
        gemma.model.norm.weight[3] = 1.5
    last = norms_of(locate(gemma))[-1]
    assert last.gain[3] == pytest.approx(2.5, rel=1e-4) and last.gain[0] == pytest.approx(1.0, rel=1e-4)
    half = norms_of(locate(subjects.llama(rms_norm_eps=1e-5).bfloat16()))
    assert len(half) == 5 and all(n.epsilon == pytest.approx(1e-5, rel=0.05) for n in half)


@pytest.mark.parametrize("connection", ["additive", "mhc", "post_norm"])
def test_the_probe_on_models(connection):
    model = subjects.ours(connection, qk_norm=connection == "additive")
    (_, one) = findings(model, subjects.texts(), ["rmsnorm"], length=16)
    assert not one.failed and one.sketch and "slope -0.5 at the origin" in one.summary
    rows = one.rows
    assert {r.split.partition(":")[0] for r in rows} == {"sketch"}
    for row in rows.where(measure="rmsnorm.lipschitz_local"):
        assert row.n == 10 and row.low <= row.value <= row.high and row.null > row.value
        top = rows.where(measure="rmsnorm.lipschitz_global", site=row.site)
        assert next(iter(top)).value == pytest.approx(row.null)
    checks = [r.value for r in rows.where(measure="rmsnorm.lipschitz_check")]
    assert checks and all(0.9 < value <= 1 + 1e-4 for value in checks)
    (origin,) = rows.where(measure="rmsnorm.slope.origin")
    assert origin.value == pytest.approx(-0.5, abs=1e-9) and origin.null == 0


def test_the_local_constant_by_hand():
    """Catches: padding counted as tokens, the mean of squares taken over tokens, a gain left out."""
    model = subjects.llama()
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[5] = -3.0
    documents = subjects.texts(4, 7)
    (_, one) = findings(model, documents, ["rmsnorm"], length=9)
    (row,) = one.rows.where(measure="rmsnorm.lipschitz_local", site="model.layers.0.input_layernorm")
    table, values = model.model.embed_tokens.weight.detach().double(), []
    for ids in documents:
        for start in range(0, len(ids), 9):
            part = ids[start : start + 9]
            values += [3.0 / math.sqrt(float(table[i].square().mean()) + 1e-6) for i in part] if len(part) > 1 else []
    assert row.value == pytest.approx(sum(values) / len(values), rel=1e-4)


def test_a_norm_at_the_origin_follows_the_law_and_others_do_not():
    """The null of the probe: activations at zero are told from activations of size one."""
    flat = subjects.llama(rms_norm_eps=1e-2)
    with torch.no_grad():
        flat.model.embed_tokens.weight.mul_(1e-7)
    (_, one) = findings(flat, subjects.texts(), ["rmsnorm"], length=16)
    row = next(iter(one.rows.where(measure="rmsnorm.slope.activations", site="model.layers.0.input_layernorm")))
    felt = next(iter(one.rows.where(measure="rmsnorm.felt", site="model.layers.0.input_layernorm")))
    assert row.value < -0.49 and felt.value == 1
    (_, two) = findings(subjects.llama(), subjects.texts(), ["rmsnorm"], length=16)
    row = next(iter(two.rows.where(measure="rmsnorm.slope.activations", site="model.layers.0.input_layernorm")))
    assert -0.2 < row.value < -0.01


def test_layernorm_is_not_applicable():
    for model in (subjects.bert(), subjects.gpt2()):
        (_, one) = findings(model, subjects.texts(), ["rmsnorm"], length=16)
        assert "LayerNorm" in one.not_applicable and not len(one.rows)


def test_what_a_dtype_leaves_of_an_epsilon():
    """By hand: 1e-6 in float32 is lost where half a unit in the last place is larger, from 2^5; in bfloat16 from 2^-11."""
    from thalweg.continuum.rmsnorm import held

    for dtype, power in ((torch.float32, 5), (torch.bfloat16, -11), (torch.float16, -8)):
        stored, lost = held(1e-6, dtype)
        assert stored == float(torch.tensor(1e-6, dtype=torch.float64).to(dtype)) and lost == 2.0**power
        top, below = torch.tensor(lost).to(dtype), torch.tensor(lost / 2).to(dtype)
        assert top + torch.tensor(stored, dtype=dtype) == top and below + torch.tensor(stored, dtype=dtype) != below
    assert held(1e-9, torch.float16)[0] == 0.0  # below its smallest number: no epsilon at all
