"""The rotary clock: golden numbers of the research note, loop-written references, effective frequencies of every rule."""

import math

import probe_subjects as subjects
import pytest
import torch

from thalweg.capture import locate
from thalweg.continuum import findings
from thalweg.continuum.clocks import clocks_of
from thalweg.errors import InputError, ShapeError
from thalweg.geometry import positions as geometry
from thalweg.models.rotary import RotaryScaling


def test_the_overlap_by_hand():
    """Catches: sum in place of mean, sine, degrees, a distance off by one."""
    theta = torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)
    told = geometry.rotary_overlap(theta, torch.tensor([0, 1, 5, 1000]))
    for m, value in zip((0, 1, 5, 1000), told.tolist(), strict=True):
        assert value == pytest.approx(sum(math.cos(t * m) for t in (1.0, 0.3, 0.01)) / 3, abs=1e-12)


def test_the_overlap_is_what_rotated_vectors_have_in_common():
    from thalweg.models.rotary import angles, rotate

    cos, sin = angles(torch.tensor([[3, 20]]), 8, 100.0, torch.float64)
    x = torch.ones(1, 1, 2, 8, dtype=torch.float64)
    y = rotate(x, cos, sin)[0, 0]
    told = geometry.rotary_overlap(geometry.plain_frequencies(8, 100.0), torch.tensor([17]))
    assert float(y[0] @ y[1]) / 8 == pytest.approx(float(told), abs=1e-12)


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("planes", [8, 64, 256])
def test_golden_long_time_rms(planes, base):
    value, error = geometry.long_time_rms(geometry.plain_frequencies(2 * planes, base), 40_000)
    assert value == pytest.approx(1, abs=0.02) and 0 < error < 0.01


def test_dependent_planes_are_not_taken_for_independent_ones():
    assert geometry.long_time_rms(torch.full((16,), 0.7, dtype=torch.float64), 20_000)[0] == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize(
    ("base", "length", "slope"), [(1e4, 2048, -0.014), (1e4, 8192, -0.12), (5e5, 8192, 0.008), (1e6, 32768, -0.013)]
)
def test_golden_slopes_in_windows(base, length, slope):
    assert geometry.plane_slope(base, length) == pytest.approx(slope, abs=0.002)


def test_the_law_of_long_times_has_its_slope():
    assert geometry.plane_slope(1e4, None, (8, 32, 128)) == pytest.approx(-0.5, abs=0.02)


SHARES = [(1e4, 2048, 0.37), (1e4, 8192, 0.22), (5e5, 8192, 0.45), (5e5, 131072, 0.24), (1e6, 32768, 0.38)]


@pytest.mark.parametrize(("base", "length", "share"), SHARES)
def test_golden_shares_of_planes_that_never_turn(base, length, share):
    law = geometry.unturned_law(base, length)
    assert law == pytest.approx(share, abs=0.006)
    assert geometry.unturned_share(geometry.plain_frequencies(1024, base), length) == pytest.approx(law, abs=0.003)


def test_recurrence_by_search():
    """Catches: the first dip counted as a return, an index off by one, minima in place of maxima."""
    theta = torch.tensor([2 * math.pi / 12, 2 * math.pi / 18], dtype=torch.float64)
    assert geometry.recurrence(theta, 80) == [(36, pytest.approx(1.0)), (72, pytest.approx(1.0))][:1]
    rho = [sum(math.cos(float(t) * m) for t in theta) / 2 for m in range(81)]
    dip = next(m for m in range(80) if rho[m + 1] > rho[m])
    peaks = [m for m in range(dip + 1, 80) if rho[m - 1] <= rho[m] > rho[m + 1]]
    best = sorted(peaks, key=lambda m: -rho[m])[:3]
    assert [m for m, _ in geometry.recurrence(theta, 80, 3)] == best
    assert geometry.recurrence(torch.tensor([1e-3], dtype=torch.float64), 50) == []


@pytest.mark.parametrize(("planes", "most"), [(8, 0.941), (32, 0.552)])
def test_golden_returns_of_random_clocks(planes, most):
    assert geometry.recurrence_null(planes, 200_000, draws=3) == pytest.approx(most, abs=0.05)


def test_advised_bases():
    same, ntk = geometry.advised_base(1e4, 2048, 8192, 64)
    assert geometry.unturned_law(same, 8192) == pytest.approx(geometry.unturned_law(1e4, 2048), abs=1e-9)
    slow = geometry.plain_frequencies(64, ntk)[-1] * 8192
    assert float(slow) == pytest.approx(float(geometry.plain_frequencies(64, 1e4)[-1] * 2048), rel=1e-9)
    with pytest.raises(InputError, match="at least 7 tokens"):
        geometry.advised_base(1e4, 4, 8, 64)


RULES = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 12},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": 12, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "dynamic": {"factor": 4.0},
}


@pytest.mark.parametrize("rule", RULES)
def test_effective_frequencies_are_those_of_the_module(rule):
    """Catches: the buffer of before the scaling, the formula of the base in place of what the module does."""
    model = subjects.llama(hidden_size=64, rope_parameters={"rope_type": rule, "rope_theta": 500.0, **RULES[rule]})
    (clock,) = clocks_of(locate(model))
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.tensor([[0, 1]]))
    told = torch.atan2(sin[0, 1, :8], cos[0, 1, :8]).double()
    torch.testing.assert_close(clock.frequencies, told, rtol=1e-5, atol=1e-7)
    plain = geometry.plain_frequencies(16, 500.0)
    assert clock.base == 500 and clock.rule == rule and clock.length == subjects.LENGTH
    assert ((clock.frequencies / plain - 1).abs().max() > 0.1) == (rule != "dynamic")
    assert (clock.scale > 1) == (rule == "yarn")


def test_clocks_of_ours_and_of_several_kinds():
    scaled = RotaryScaling("linear", 2.0)
    (clock,) = clocks_of(locate(subjects.ours("mhc", rope_base=300.0, rotary_scaling=scaled)))
    torch.testing.assert_close(clock.frequencies, geometry.plain_frequencies(8, 300.0) / 2)
    assert clocks_of(locate(subjects.ours(positions="learned"))) == []
    two = clocks_of(locate(subjects.ours(windows=(8, 0), window_rope_base=50.0)))
    assert [c.base for c in two] == [10000.0, 50.0]


def test_partial_rotation_leaves_planes_still():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    (clock,) = clocks_of(
        locate(GPTNeoXForCausalLM(GPTNeoXConfig(**subjects.SMALL, **subjects.IDS, rope_parameters=rope)))
    )
    assert (len(clock.frequencies), clock.heads, clock.still) == (2, 8, 0.5)


def test_a_head_of_which_a_part_has_no_positions():
    """DeepSeek's heads: some channels turn, the others hold no positions. Catches: the turning ones taken for the head."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 12, "v_head_dim": 8, "q_lora_rank": 8, "kv_lora_rank": 8}
    config = DeepseekV3Config(**subjects.SMALL, **subjects.IDS, **heads, num_key_value_heads=4, first_k_dense_replace=2)
    torch.manual_seed(0)
    (clock,) = clocks_of(locate(DeepseekV3ForCausalLM(config)))
    assert (len(clock.frequencies), clock.heads, clock.still) == (2, 16, 0.75)


def gptj():
    from transformers import GPTJConfig, GPTJForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 48, "rotary_dim": 8}
    return GPTJForCausalLM(GPTJConfig(**sizes, bos_token_id=1, eos_token_id=2))


def test_a_table_of_sines_is_a_clock():
    model = gptj()
    (clock,) = clocks_of(locate(model), 4096)
    torch.testing.assert_close(clock.frequencies, geometry.plain_frequencies(8, 1e4), rtol=1e-6, atol=1e-8)
    assert (clock.heads, clock.still, clock.length) == (16, 0.5, 48)
    (one,) = findings(model, None, ["rotary"], options={"rotary": {"lags": 256}})
    (walk,) = one.rows.where(measure="rotary.holonomy")
    assert walk.value < 3 * walk.null
    with torch.no_grad():
        model.transformer.rotary_emb.embed_positions.fill_(0.3)
    (one,) = findings(model, None, ["rotary"])
    assert "could not be read: rotary_dim, GPTJRotaryEmbedding speak of them" in one.not_applicable


LENGTHS = {"dynamic": 12, "longrope": 12}  # the most tokens for which a module keeps its first frequencies


def of_lengths(rule):
    known = {"rope_type": rule, "rope_theta": 500.0, "factor": 4.0}
    if rule == "longrope":
        known |= {
            "original_max_position_embeddings": 12,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 1.5, 2.0, 3.0],
        }
    return subjects.llama(rope_parameters=known, max_position_embeddings=12 if rule == "dynamic" else 48)


def state(module):
    plain = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    return {key: value.clone() for key, value in module._buffers.items()}, plain


@pytest.mark.parametrize("rule", LENGTHS)
def test_a_module_that_changes_its_frequencies_is_left_as_it_was(rule):
    """Catches: the probe's own calls left in the module; a list of clocks that depends on what the model read before."""
    model = of_lengths(rule)
    module, located = model.model.rotary_emb, locate(model)
    (held, plain), inside = state(module), module.inv_freq
    before = clocks_of(located, 48)
    findings(model, None, ["rotary"], options={"rotary": {"length": 48, "lags": 64}})
    assert module.inv_freq is inside and state(module)[1] == plain
    assert module._buffers.keys() == held.keys() and all(held[key].equal(module._buffers[key]) for key in held)
    with torch.no_grad():
        module(torch.zeros(1), torch.arange(40)[None])  # as a long text does
    assert not module.inv_freq.equal(held["inv_freq"])
    after = clocks_of(located, 48)
    assert [(c.name, c.length, c.beyond) for c in before] == [(c.name, c.length, c.beyond) for c in after]
    assert all(one.frequencies.equal(two.frequencies) for one, two in zip(before, after, strict=True))


@pytest.mark.parametrize("rule", LENGTHS)
def test_every_length_has_its_own_clock_and_a_closed_walk(rule):
    model = of_lengths(rule)
    short, long = clocks_of(locate(model), 48)
    assert (short.name, short.length, short.beyond) == ("model.rotary_emb", LENGTHS[rule], long.name)
    assert (long.name, long.length, long.beyond) == ("model.rotary_emb at 48 tokens", 48, "")
    for clock in (short, long):
        module = of_lengths(rule).model.rotary_emb
        cos, sin = (x[0, 1, :4] for x in module(torch.zeros(1), torch.arange(clock.length)[None]))
        torch.testing.assert_close(clock.frequencies, torch.atan2(sin, cos).double(), rtol=1e-5, atol=1e-7)
        assert clock.scale == pytest.approx(float((cos[0] ** 2 + sin[0] ** 2).sqrt()), rel=1e-5)
    (one,) = findings(model, None, ["rotary"], options={"rotary": {"length": 48, "lags": 64}})
    walks = list(one.rows.where(measure="rotary.holonomy"))
    assert len(walks) == 2 and all(row.value < 3 * row.null for row in walks)
    assert any("up to 12 tokens, those of 'model.rotary_emb at 48 tokens' on longer ones" in c for c in one.caveats)


def test_the_probe_and_its_null():
    """In a window the clock of a model stands far from the law of long times; one of fast random planes does not."""
    (one,) = findings(subjects.llama(head_dim=64), None, ["rotary"], options={"rotary": {"length": 2048, "lags": 4096}})
    assert not one.failed and not one.sketch and "never turn" in one.summary
    rows = {row.measure: row for row in one.rows}
    assert rows["rotary.window_rms"].value > 1.5 and rows["rotary.window_rms"].null == 1
    assert rows["rotary.long_time_rms"].low < 1 < rows["rotary.long_time_rms"].high
    assert rows["rotary.holonomy"].value < 3 * rows["rotary.holonomy"].null
    assert rows["rotary.base.ntk"].step == 4 * 2048 and rows["rotary.slope.long"].value == pytest.approx(-0.5, abs=0.03)
    random = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3 + 0.1
    assert geometry.window_rms(random, 2048) == pytest.approx(1, abs=0.1)


def test_models_without_rotary_positions():
    for model in (subjects.bert(), subjects.gpt2(), subjects.ours(positions="learned")):
        (one,) = findings(model, None, ["rotary"])
        assert "no rotary positions" in one.not_applicable


def test_bad_input_is_one_line():
    with pytest.raises(ShapeError, match="one for each plane"):
        geometry.rotary_overlap(torch.ones(2, 2), torch.tensor([1]))
    with pytest.raises(InputError, match="no plane turns"):
        geometry.turning(torch.zeros(3))
    with pytest.raises(InputError, match="whole number of tokens"):
        geometry.window_rms(torch.ones(3), 0)
