"""RMSNorm as a map: golden numbers, loop-written references, and the probe on models."""

import math
from dataclasses import replace

import probe_subjects as subjects
import pytest
import torch

from thalweg.capture import locate
from thalweg.continuum import findings
from thalweg.continuum.norms import norms_of
from thalweg.errors import InputError, ShapeError
from thalweg.geometry.normalisation import (
    epsilon_slope,
    local_slope,
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


@pytest.mark.parametrize(("last", "slope"), [(-5, -1e-5), (-1, -0.0186), (0, -0.0427), (1, -0.0716)])
def test_a_fitted_slope_depends_on_its_range_and_the_local_one_has_none(last, slope):
    epsilons = torch.logspace(-12, last, 23, dtype=torch.float64)
    assert epsilon_slope(0.0132, epsilons)[0] == pytest.approx(slope, rel=0.02)
    assert float(local_slope(torch.tensor(0.0132), 1e-5)) == pytest.approx(-3.785e-4, rel=1e-3)


def test_the_local_slope_is_the_derivative():
    """Catches: a factor of two, the derivative in epsilon in place of its logarithm."""
    ms = torch.tensor([0.0, 1e-6, 0.3, 40.0], dtype=torch.float64)
    for eps in (1e-6, 0.3):
        up, down = ((ms + eps * math.exp(h)).rsqrt().log() for h in (1e-4, -1e-4))
        torch.testing.assert_close(local_slope(ms, eps), (up - down) / 2e-4, rtol=1e-6, atol=1e-11)
    assert local_slope(ms, 1e-6)[0] == -0.5 and not local_slope(ms, 0.0).any()
    with pytest.raises(InputError, match="at least 0"):
        local_slope(ms, -1.0)


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


def test_norms_of_a_float64_model_that_sum_in_float32():
    """Norms of transformers take the mean square in float32, some return float64 all the same."""
    from transformers import T5Config, T5EncoderModel

    model = subjects.llama(rms_norm_eps=3e-4).double()
    with torch.no_grad():
        model.model.norm.weight[3] = -2.5
    found = norms_of(locate(model))
    assert len(found) == 5 and found[-1].gain[3] == pytest.approx(-2.5, rel=1e-5)
    assert all(n.epsilon == pytest.approx(3e-4, rel=1e-4) and n.dtype == torch.float64 for n in found)
    (_, one) = findings(model, subjects.texts(), ["rmsnorm"], length=16)
    assert one.summary.startswith("5 RMSNorms, epsilon 0.0003")
    torch.manual_seed(0)
    t5 = T5EncoderModel(T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=40, num_layers=1, num_heads=4)).double()
    located = replace(locate(subjects.llama()), model=t5, blocks=())
    assert len(norms_of(located)) == 3


class OddNorm(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(weight), 1e-6

    def forward(self, x):
        return self.weight * rms_map(x, 0.3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_epsilon_unlike_the_stated_one_is_seen(dtype):
    model = subjects.llama()
    model.model.norm = OddNorm(torch.ones(32))
    last = norms_of(locate(model.to(dtype)))[-1]
    assert last.name == "model.norm" and last.said == 1e-6
    assert last.epsilon == pytest.approx(0.3, rel=0.05 if dtype == torch.bfloat16 else 1e-4)


def test_norms_whose_gain_is_zero_are_called_that():
    model = subjects.llama()
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.zero_()
    (_, one) = findings(model, subjects.texts(), ["rmsnorm"], length=16)
    says = "1 norms give zero for every vector, as their gain is zero, as model.layers.1.input_layernorm; they are left out."
    assert says in one.caveats and one.summary.startswith("4 RMSNorms")
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.weight.zero_()
    (_, none) = findings(model, subjects.texts(), ["rmsnorm"], length=16)
    assert "its norms (LlamaRMSNorm) give zero for every vector, as their gain is zero" in none.not_applicable
    assert "mean" not in none.not_applicable


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


def test_the_slope_at_the_epsilon_of_the_model_comes_first():
    """By hand, of the first norm; the fitted slope and its range stand behind it."""
    model, documents = subjects.llama(rms_norm_eps=1e-4), subjects.texts(4, 8)
    (_, one) = findings(model, documents, ["rmsnorm"], length=8)
    (row,) = one.rows.where(measure="rmsnorm.slope.local", site="model.layers.0.input_layernorm")
    table = model.model.embed_tokens.weight.detach().double()
    parts = [ids[start : start + 8] for ids in documents for start in range(0, len(ids), 8)]
    squares = [float(table[i].square().mean()) for part in parts if len(part) > 1 for i in part]
    slopes = [-1e-4 / 2 / (ms + 1e-4) for ms in squares]
    assert row.value == pytest.approx(sum(slopes) / len(slopes), rel=1e-4) and row.low <= row.value <= row.high
    (fitted,) = one.rows.where(measure="rmsnorm.slope.activations", site="model.layers.0.input_layernorm")
    middle = math.exp(sum(math.log(ms) for ms in squares) / len(squares))
    assert fitted.value == pytest.approx(epsilon_slope(middle, EPSILONS)[0], rel=1e-4)  # locked studies read it
    assert one.summary.index("slope in that epsilon") < one.summary.index("slope fitted over epsilons of 1e-12 to 0.1")
    assert one.figures[0].measures == ("rmsnorm.slope.local",)
    assert any("epsilons of 1e-12 to 0.1" in caveat for caveat in one.caveats)


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
