"""What must hold on the finished decoder: limits that a connection claims, two hundred layers, collapse, and rank without attention."""

import math
from itertools import pairwise

import pytest
import torch

from thalweg import connections
from thalweg.connections import Site, Tokens
from thalweg.geometry import effective_rank, gaussian_null, residual_to_rank_one, rms, token_cosine
from thalweg.models import Decoder, DecoderConfig, StreamTrace
from thalweg.models.rotary import angles
from thalweg.models.sublayers import TokenView
from thalweg.ops.rank_one import direction

VOCAB, WIDTH = 32, 16


def gaussian(*shape, seed=2, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ids(length, batch=1, seed=1):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def decoder(connection, *, seed=0, dtype=torch.float64, **changes):
    """Weights of size 1/sqrt(width): at this width the usual 0.02 would leave the sublayers without a voice."""
    values = {
        "vocab_size": VOCAB,
        "width": WIDTH,
        "depth": 3,
        "heads": 1,
        "initial_std": WIDTH**-0.5,
        "embedding_std": 1.0,
    }
    config = DecoderConfig(**values | {"connection": connection} | changes)
    return Decoder(config, generator=torch.Generator().manual_seed(seed)).to(dtype)


def traced(model, x):
    trace = StreamTrace()
    with torch.no_grad():
        model(x, trace=trace)
    return trace


# Limits.


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "residual", "gate_open": True},
        {"preset": "residual", "gate_open": True, "gate_input": "norm", "alpha_per": "network"},
        {"preset": "residual", "gate_open": True, "form": "rank1"},
        {"form": "soft_gate", "gate_open": True},
        {"preset": "residual", "form": "delta"},
    ],
    ids=lambda options: options.get("form", "full"),
)
def test_mgt_residual_with_an_open_gate_is_the_pre_norm_decoder(options):
    ours, theirs = decoder("mgt", connection_options=options), decoder("additive")
    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert other.keys() < mine.keys()
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(other.items()):
            assert torch.equal(parameter, mine[name]), name  # one seed, the same sublayers
            moved = parameter + 0.1 * gaussian(*parameter.shape, seed=100 + seed)
            parameter.copy_(moved)
            mine[name].copy_(moved)
    x = ids(9, batch=2)
    got, want = ours(x).logits, theirs(x).logits
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    cotangent = gaussian(*got.shape)
    gradients = dict(zip(mine, torch.autograd.grad(got, list(mine.values()), cotangent), strict=True))
    wanted = torch.autograd.grad(want, list(other.values()), cotangent)
    for name, gradient in zip(other, wanted, strict=True):
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-11, atol=1e-11, msg=name)
    learning = {name.rsplit(".", 1)[-1] for name in mine.keys() - other.keys() if gradients[name].abs().max() > 1e-6}
    assert learning  # equal at the start, free to leave it


def test_a_gate_that_is_only_nearly_open_is_told_from_the_pre_norm_decoder():
    x = ids(9, batch=2)
    near = decoder("mgt", connection_options={"preset": "residual"})(x).logits
    assert 0.1 < (near - decoder("additive")(x).logits).abs().max() < 5


@pytest.mark.parametrize("channels", [1, 3])
def test_delta_at_beta_one_writes_its_value_and_nothing_else_along_its_direction(channels):
    model = decoder("delta", connection_options={"value_channels": channels, "direction_eps": 1e-12})
    trace = traced(model, ids(8, batch=2))
    for record in trace.records:
        assert (record.context.beta == 1).all()  # the declared start, in the finished model
        k = direction(record.update, 1e-12).unsqueeze(-2)
        before, after = (torch.linalg.vecdot(s, k) for s in (record.state_before, record.state_after))
        assert (before - record.context.v).abs().mean() > 0.1
        torch.testing.assert_close(after, record.context.v, rtol=1e-10, atol=1e-12)
        rest_before, rest_after = record.state_before - before[..., None] * k, record.state_after - after[..., None] * k
        torch.testing.assert_close(rest_after, rest_before, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("channels", [1, 3])
def test_delta_at_beta_two_without_value_keeps_the_norm_through_the_network_and_undoes_itself(channels):
    options = {"value_channels": channels, "fixed_beta": 2.0, "direction_eps": 1e-12}
    model = decoder("delta", connection_options=options)
    with torch.no_grad():
        for site in model.stream.sites:
            site.value.weight.zero_()
    trace = traced(model, ids(8, batch=2))
    for site, record in zip(model.stream.sites, trace.records, strict=True):
        torch.testing.assert_close(record.state_after.norm(dim=-1), trace.entered.norm(dim=-1), rtol=1e-10, atol=0)
        assert (record.state_after - record.state_before).norm() > 0.1 * record.state_before.norm()
        again = site.write(record.state_after, record.update, record.context)
        torch.testing.assert_close(again, record.state_before, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("channels", [1, 2])
def test_the_shortcut_of_delta_has_determinant_one_minus_beta_at_every_site(channels):
    options = {"value_channels": channels, "direction_eps": 1e-12}
    model = decoder("delta", connection_options=options)
    with torch.no_grad():
        for index, site in enumerate(model.stream.sites):
            site.gate.weight.copy_(gaussian(*site.gate.weight.shape, seed=index))
    trace, seen = traced(model, ids(3)), []
    for site, record in zip(model.stream.sites, trace.records, strict=True):
        for t in range(3):
            held = type(record.context)(*(value[:, t : t + 1] for value in record.context))
            state, update = record.state_before[:, t : t + 1], record.update[:, t : t + 1]

            def write(flat, site=site, like=state, update=update, held=held):
                return site.write(flat.view_as(like), update, held).flatten()

            shortcut = torch.func.jacrev(write)(state.flatten())
            seen.append(held.beta.item())
            assert torch.linalg.det(shortcut).item() == pytest.approx((1 - seen[-1]) ** channels, abs=1e-10)
    assert min(seen) < 0.3 and max(seen) > 1.7


# Two hundred layers.

# Finite, but the gradient grows with every layer: largest entry at this seed delta 3e24 (3e8 at width 64), none 4e23, highway 3e11,
# post_norm 1e11; the others stay below 1e3. Beyond 1e19 the float32 norm of the gradient, a root of squares, is infinite.
LOUD = {"delta", "highway", "none", "post_norm"}
# The battery looks at all connections, whether they stay finite; here stand those of which more is said.
DEEP = {
    name: (name, {}) for name in sorted(LOUD | {"additive", "deepnorm", "hyper_connections", "mgt", "mhc", "rezero"})
} | {
    f"mgt {preset}": ("mgt", {"preset": preset})
    for preset in ("residual", "identity", "stable")  # its default is paper
}


@pytest.mark.parametrize("case", DEEP)
def test_two_hundred_layers_start_finite(case):
    name, options = DEEP[case]
    model = decoder(name, depth=200, dtype=torch.float32, connection_options=options)
    trace = StreamTrace()
    logits = model(ids(8), trace=trace).logits
    assert logits.isfinite().all() and logits.std() > 0.1
    assert len(trace.records) == 400
    states = [model.stream.observe(record.state_after).detach() for record in trace.records]
    sizes = torch.stack([state.square().mean().sqrt() for state in states])
    assert sizes.isfinite().all() and sizes.max() < 1e3 and sizes.min() > 1e-3
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(logits, parameters, gaussian(*logits.shape, dtype=torch.float32))
    assert [key for key, gradient in zip(names, gradients, strict=True) if not gradient.isfinite().all()] == []
    assert gradients[names.index("embedding.weight")].abs().max() > 1
    largest = max(gradient.abs().max().item() for gradient in gradients)
    assert (largest > 1e5) == (case in LOUD), f"largest gradient {largest:.1e}"


@pytest.mark.parametrize(
    ("beta", "clamp", "factor"), [(-0.1, False, 1.1), (-0.5, False, 1.5), (0.1, False, 0.9), (-0.1, True, 1.0)]
)
def test_negative_beta_with_positive_alpha_blows_up(beta, clamp, factor):
    """x' = (1 - alpha beta) x + beta G V: the old state is multiplied by 1 + |beta| four hundred times."""
    options = {"alpha": 1.0, "beta_bias": math.atanh(beta), "beta_std": 0.0, "clamp_erase": clamp}
    model = decoder("mgt", depth=200, dtype=torch.float32, connection_options=options)
    trace = traced(model, ids(8))
    growth = (trace.records[-1].state_after.double().square().mean() / trace.entered.double().square().mean()).sqrt()
    if factor < 1.1:
        assert growth < 2
    elif factor == 1.1:
        assert growth > 1e6
        assert math.log(growth) == pytest.approx(400 * math.log(factor), rel=0.01)
    else:
        assert 400 * math.log(factor) > math.log(torch.finfo(torch.float32).max)
        assert not trace.records[-1].state_after.isfinite().all()
        finite = [record.site.index for record in trace.records if record.state_after.isfinite().all()]
        assert len(finite) == pytest.approx(math.log(torch.finfo(torch.float32).max) / math.log(factor), rel=0.02)


# Positive control: rank collapse, on our own blocks.

COLLAPSE_TOKENS = 32


def attention_stack(connection, seed, *, causal):
    """States of 24 layers of attention alone. Not causal: every token sees every token, and nobody has a position."""
    model = decoder(connection, seed=seed, depth=24, layers=("attention",), vocab_size=64)
    x = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[None, :COLLAPSE_TOKENS]
    trace = StreamTrace()
    with torch.no_grad():
        if causal:
            model(x, trace=trace)
        else:
            nowhere = torch.zeros_like(x)
            all_see_all = torch.ones(1, 1, COLLAPSE_TOKENS, COLLAPSE_TOKENS, dtype=torch.bool)
            view = TokenView(*angles(nowhere, WIDTH, dtype=torch.float64), all_see_all)
            model.run(model.embedding(x), Tokens(positions=nowhere), view, trace=trace)
    return [trace.entered, *(record.state_after for record in trace.records)]


def residuals(states):
    return [residual_to_rank_one(state).item() for state in states]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_attention_alone_without_skips_collapses_doubly_exponentially(seed):
    """Each layer about cubes a small residual (Dong et al. 2021), so its logarithm is multiplied by 3, down to rounding."""
    states = attention_stack("none", seed, causal=False)
    found = residuals(states)
    assert found[0] > 0.95 and max(found[6:]) < 1e-14
    growth = [math.log(b) / math.log(a) for a, b in pairwise(found) if 1e-13 < b < a < 0.5]
    assert len(growth) >= 2 and min(growth) > 2.5  # a plain exponential tends to 1
    small = [math.log(b) / math.log(a) for a, b in pairwise(found) if a < 0.05 and b > 5e-15]
    assert small and all(2.7 < exponent < 3.4 for exponent in small)
    before, after = states[0], states[-1]
    assert effective_rank(before) > 0.9 and effective_rank(after).item() == pytest.approx(1 / WIDTH, rel=1e-4)
    assert abs(token_cosine(before)) < 0.03 and token_cosine(after).item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_causal_attention_without_skips_collapses_at_a_steady_rate(seed):
    """Measured: a plain exponential. A triangular mixing matrix keeps a second eigenvalue, the second token's look at itself, near 1/2."""
    states = attention_stack("none", seed, causal=True)
    found = residuals(states)
    assert found[0] > 0.95 and 1e-9 < found[24] < 1e-5
    rate = (found[24] / found[12]) ** (1 / 12)
    assert 0.35 < rate < 0.6
    late = [math.log(b) / math.log(a) for a, b in pairwise(found[12:])]
    assert max(late) < 1.6  # not the 3 of the bidirectional stack
    before, after = states[0], states[-1]
    assert effective_rank(before) > 0.9 and effective_rank(after) < 1.05 / WIDTH
    assert abs(token_cosine(before)) < 0.03 and token_cosine(after) > 1 - 1e-9


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_attention_alone_with_skips_does_not_collapse(seed, causal):
    states = attention_stack("additive", seed, causal=causal)
    assert min(residuals(states)) > 0.9
    assert effective_rank(states[-1]) > 0.85 and abs(token_cosine(states[-1])) < 0.1


# Rank without any attention: why a rank above one half is no sign of geometry.

TOY = 64  # tokens, and width
SEEDS = (0, 1, 2, 3)


def after_linear_sublayers(name, options, seed):
    """200 sublayers, each one random linear map of its normalised input: no token sees another."""
    torch.manual_seed(seed)  # the connection draws its own maps from here
    generator = torch.Generator().manual_seed(seed)
    stream = connections.create(name, width=TOY, sites=Site.decoder(100), final_norm=False, **options).double()
    entered = 0.02 * torch.randn(1, TOY, TOY, generator=generator, dtype=torch.float64)
    maps = [0.04 * torch.randn(TOY, TOY, generator=generator, dtype=torch.float64) for _ in stream.sites]
    with torch.no_grad():
        return entered, stream(entered, [lambda x, w=w: x @ w for w in maps])


@pytest.mark.parametrize(
    ("name", "options", "rank", "size"),
    [
        ("additive", {}, 0.333, 4.5),  # falls, although nothing mixes tokens
        ("mgt", {"form": "soft_gate"}, 0.572, 2.45),  # a plain gate lifts it above one half
        ("mgt", {"form": "soft_gate", "gate": "fixed_random"}, 0.572, 2.45),  # learned or not: it has not learned yet
        ("mgt", {"form": "soft_gate", "gate": "update"}, 0.561, 2.45),
        ("mgt", {"form": "soft_gate", "gate": "input_independent"}, 0.333, 2.28),  # one half of everything: no lift
        ("mgt", {"alpha": 1.0, "beta_std": 0.0, "beta_shift": 1.0}, 0.602, 0.175),  # every block overwrites
        ("mgt", {"alpha": 1.0, "beta_std": 0.0, "beta_bias": math.atanh(-0.1)}, 0.658, 8.2e6),  # the highest: exploding
    ],
)
def test_rank_without_attention(name, options, rank, size):
    """Mean over four seeds; the values are measured here, and agree with the pattern at width 256 (.31 and .58)."""
    runs = [after_linear_sublayers(name, options, seed) for seed in SEEDS]
    ranks = [effective_rank(left).item() for _, left in runs]
    null = gaussian_null(TOY, TOY)
    assert all(effective_rank(entered).item() == pytest.approx(null.value, abs=4 * null.sd) for entered, _ in runs)
    assert sum(ranks) / len(SEEDS) == pytest.approx(rank, abs=0.01)
    assert sum(rms(left).item() for _, left in runs) / len(SEEDS) == pytest.approx(size, rel=0.05)
    assert (max(ranks) < 0.45) if rank < 0.45 else (min(ranks) > 0.5)
