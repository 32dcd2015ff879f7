"""Constants, starts and counts, read from the finished decoder by what it does: a later initialisation must not have undone them."""

import math

import pytest
import torch
from torch.nn import functional as F

from thalweg.models import Decoder, DecoderConfig, StreamTrace, ThalwegConfig, ThalwegForCausalLM
from thalweg.models.size import parameters

WIDTH, FFN = 32, 128


def config(**changes):
    return DecoderConfig(
        **{"vocab_size": 16, "width": WIDTH, "depth": 2, "heads": 2, "feed_forward": "gelu", **changes}
    )


def bare(config):
    return Decoder(config, generator=torch.Generator().manual_seed(0))


def shelled(config):
    torch.manual_seed(0)
    return ThalwegForCausalLM(ThalwegConfig.of(config)).decoder


def traced(model):
    trace = StreamTrace()
    with torch.no_grad():
        model(torch.randint(16, (2, 6), generator=torch.Generator().manual_seed(1)), trace=trace)
    return trace


def gates_of(model):
    """Gate values [t d] or [t] of every site, from a real pass."""
    with torch.no_grad():
        for site, record in zip(model.stream.sites, traced(model).records, strict=True):
            yield site.gates(record.state_before, record.context, record.update)


# Weights and factors set by depth.


def weights_by_map(model, layers):
    """All entries of each map over some layers, as one vector."""
    pooled = {}
    for layer in layers:
        for sublayer in model.blocks[layer].sublayers:
            for name in ("query", "key", "value", "output", "up", "down"):
                if hasattr(sublayer, name):
                    pooled.setdefault(name, []).append(getattr(sublayer, name).weight.detach().flatten())
    return {name: torch.cat(parts) for name, parts in pooled.items()}


XAVIER = dict.fromkeys(("query", "key", "value", "output"), math.sqrt(2 / (WIDTH + WIDTH))) | dict.fromkeys(
    ("up", "down"), math.sqrt(2 / (WIDTH + FFN))
)


@pytest.mark.parametrize(
    ("connection", "depth", "gain"),
    [("deepnorm", 12, 0.3195), ("deepnorm", 100, 0.1880), ("sub_ln", 12, 1.783), ("sub_ln", 100, 2.302)],
)
def test_xavier_weights_with_the_gain_of_the_depth_on_all_but_queries_and_keys(connection, depth, gain):
    """The standard deviation of n normal draws has a relative error of 1/sqrt(2n); five of them are allowed, and none differs by layer."""
    model = bare(config(connection=connection, depth=depth))
    for layers in (range(depth), [0], [depth - 1]):
        for name, weights in weights_by_map(model, layers).items():
            expected = XAVIER[name] * (1.0 if name in ("query", "key") else gain)
            allowed = 5 / math.sqrt(2 * weights.numel()) + 3e-4  # the gains above have four digits
            assert weights.std().item() == pytest.approx(expected, rel=allowed), (name, layers)
            assert abs(weights.mean().item()) < 5 * expected / math.sqrt(weights.numel())


@pytest.mark.parametrize(("depth", "alpha"), [(12, 24**0.25), (100, 200**0.25)])
def test_deepnorm_writes_with_the_skip_factor_of_its_depth(depth, alpha):
    assert alpha == pytest.approx({12: 2.213, 100: 3.761}[depth], abs=5e-4)
    model = bare(config(connection="deepnorm", depth=depth, embedding_std=1.0)).double()
    records = traced(model).records
    assert len(records) == 2 * depth
    for record in records:
        assert record.update.norm() > 1e-2 * record.state_before.norm()  # enough to tell one factor from another
        wanted = F.rms_norm(alpha * record.state_before + record.update, (WIDTH,), eps=model.config.norm_eps)
        torch.testing.assert_close(record.state_after, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("depth", "factor"), [(12, 24.0), (100, 200.0)])
def test_keel_writes_with_the_number_of_sublayers(depth, factor):
    model = bare(config(connection="keel", depth=depth, embedding_std=1.0, initial_std=0.2)).double()
    first, *rest = traced(model).records
    torch.testing.assert_close(first.state_after, first.state_before + first.update)
    for record in rest:
        wanted = F.rms_norm(factor * record.state_before + record.update, (WIDTH,), eps=model.config.norm_eps)
        torch.testing.assert_close(record.state_after, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("depth", [12, 100])
def test_sub_ln_normalises_before_the_last_map_of_every_sublayer(depth):
    model = bare(config(connection="sub_ln", depth=depth)).double()
    seen = []
    for sublayer in model.sublayers:
        last = sublayer.output if sublayer.kind == "attention" else sublayer.down
        last.register_forward_pre_hook(lambda _, args: seen.append(args[0].square().mean(-1)))
    traced(model)
    assert len(seen) == 2 * depth
    for power in seen:
        assert power.max() <= 1 + 1e-12 and power.min() > 0.9  # below 1 by eps over the power before


@pytest.mark.parametrize(("depth", "start"), [(12, 0.1), (18, 0.1), (24, 1e-5), (48, 1e-6), (100, 1e-6)])
def test_layerscale_starts_by_depth(depth, start):
    model = bare(config(connection="layerscale", depth=depth, embedding_std=1.0, initial_std=0.2)).double()
    for record, gates in zip(traced(model).records, gates_of(model), strict=True):
        torch.testing.assert_close(gates["beta"], torch.full_like(gates["beta"], start), rtol=1e-6, atol=0)
        step = record.state_after - record.state_before
        torch.testing.assert_close(step, start * record.update, rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize("depth", [12, 100])
def test_rezero_has_one_scalar_a_layer_at_zero(depth):
    model = bare(config(connection="rezero", depth=depth))
    scalars = {name: p for name, p in model.named_parameters() if name.endswith(".alpha")}
    assert len(scalars) == depth and all(p.shape == (1,) and p.item() == 0 for p in scalars.values())
    assert [name for name, _ in model.stream.named_parameters()] == [f"scalars.{i}.alpha" for i in range(depth)]
    trace = traced(model)
    assert all(torch.equal(record.state_after, trace.entered) for record in trace.records)
    with torch.no_grad():
        scalars["stream.scalars.1.alpha"].fill_(0.5)  # both sublayers of layer 1 read this one
    for record in traced(model).records:
        step = record.state_after - record.state_before
        torch.testing.assert_close(step, 0.5 * record.update if record.site.layer == 1 else torch.zeros_like(step))


# Where gates begin.

CONSTANT = [
    ("mgt", {"preset": "residual"}, {"beta": 1.0, "erase": 0.0}),
    ("mgt", {"preset": "residual", "gate_spread": 0.0}, {"beta": 1.0, "erase": 0.0, "gate": 0.9525741268}),
    ("mgt", {"preset": "residual", "gate_open": True}, {"beta": 1.0, "erase": 0.0, "gate": 1.0}),
    ("mgt", {"preset": "residual", "gate": "input_independent"}, {"beta": 1.0, "erase": 0.0, "gate": 0.9525741268}),
    ("mgt", {"preset": "identity"}, {"beta": 0.0, "erase": 0.0}),
    ("mgt", {"preset": "stable"}, {"beta": 0.1, "erase": 0.01}),
    ("mgt", {"preset": "stable", "alpha_per": "network", "alpha": 0.3}, {"beta": 0.1, "erase": 0.03}),
    ("mgt", {"beta_std": 0.0, "beta_shift": 1.0}, {"beta": 1.0, "erase": 0.25}),  # alpha = 1 / number of sublayers
    ("mgt", {"preset": "residual", "form": "rank1"}, {"beta": 1.0, "erase": 0.0}),
    ("delta", {}, {"beta": 1.0, "erase": 1.0}),
    ("delta", {"beta_start": 0.3}, {"beta": 0.3, "erase": 0.3}),
    ("delta", {"beta_start": 1.7, "gate": "mlp", "value_channels": 2}, {"beta": 1.7, "erase": 1.7}),
    ("highway", {"gate_std": 0.0}, {"gate": 0.1192029220, "erase": 0.1192029220}),
    ("highway", {"gate_std": 0.0, "bias": -3.0}, {"gate": 0.0474258732, "erase": 0.0474258732}),
]


@pytest.mark.parametrize("make", [bare, shelled])
@pytest.mark.parametrize(("connection", "options", "starts"), CONSTANT)
def test_gates_of_the_finished_model_begin_where_they_were_told_to(connection, options, starts, make):
    model = make(config(connection=connection, connection_options=options, embedding_std=1.0)).double()
    found = list(gates_of(model))
    assert len(found) == 4
    for gates in found:
        for name, start in starts.items():
            torch.testing.assert_close(gates[name], torch.full_like(gates[name], start), rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("make", [bare, shelled])
@pytest.mark.parametrize(("preset", "shift"), [("paper", 0.0), ("residual", 3.0), ("identity", 0.0), ("stable", 0.0)])
def test_the_logits_of_the_soft_gate_begin_at_its_shift_with_unit_spread(preset, shift, make):
    """LayerNorm makes mean and variance over the channels of every token exact: a bias or scale that was overwritten shows."""
    model = make(config(connection="mgt", connection_options={"preset": preset}, embedding_std=1.0)).double()
    for gates in gates_of(model):
        logits = torch.logit(gates["gate"])
        torch.testing.assert_close(logits.mean(-1), torch.full_like(logits[..., 0], shift), rtol=0, atol=1e-9)
        torch.testing.assert_close(logits.std(-1, correction=0), torch.ones_like(logits[..., 0]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("make", [bare, shelled])
def test_highway_begins_by_carrying(make):
    """With W of standard deviation 0.02 the logit varies by 0.02 |x|, here 0.11, about the bias."""
    model = make(config(connection="highway", embedding_std=1.0)).double()
    for site, gates in zip(model.stream.sites, gates_of(model), strict=True):
        logits = torch.logit(gates["gate"])
        assert (site.gate_bias == -2).all()
        assert logits.mean().item() == pytest.approx(-2, abs=0.05)
        assert logits.std().item() == pytest.approx(0.02 * math.sqrt(WIDTH), rel=0.35)


@pytest.mark.parametrize("make", [bare, shelled])
def test_a_drawn_subspace_is_still_a_frame(make):
    options = {"window": 4, "rank": 2, "subspace": "random"}
    model = make(config(connection="tangent_projector", connection_options=options))
    for site in model.stream.sites:
        torch.testing.assert_close(site.basis.T @ site.basis, torch.eye(2), rtol=0, atol=1e-6)


# Parameters of MGT.

D = 256


def wide_config(connection, depth, **options):
    """Attention of 4 d^2 and a GELU feed-forward of 8 d^2 a layer."""
    return config(width=D, depth=depth, heads=8, connection=connection, connection_options=options)


def planned(made):
    """What the plan says, without embeddings."""
    return sum(count for part, count in parameters(made).items() if part not in ("embedding", "unembedding"))


def counted(connection, depth, **options):
    """What the finished model has, without embeddings."""
    made = wide_config(connection, depth, **options)
    with torch.device("meta"):
        model = Decoder(made)
    count = sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel()
    assert count == planned(made)
    return count


@pytest.mark.parametrize("depth", [1, 5])
def test_mgt_adds_two_square_maps_three_vectors_and_a_scalar_to_every_sublayer(depth):
    base = counted("additive", depth)
    assert base == depth * (12 * D**2 + 2 * D) + D  # two norms a layer and the last one
    extra = counted("mgt", depth) - base
    assert extra == 2 * depth * (2 * D**2 + D + 2 * D + 1)
    # The matrices alone: 4 d^2 on 12 d^2, a third of the base and a quarter of the whole. The vectors add 0.2 % and 0.1 %.
    assert (f"{extra / base:.1%}", f"{extra / (base + extra):.1%}") == ("33.5%", "25.1%")
    assert extra / base == pytest.approx(1 / 3, rel=0.006) and extra / (base + extra) == pytest.approx(1 / 4, rel=0.006)
    for options, per_sublayer in (
        ({"form": "soft_gate"}, D**2 + 2 * D),
        ({"form": "delta"}, D**2 + D + 1),
        ({"write_only": True}, 2 * D**2 + 3 * D),
        ({"gate": "fixed_random"}, D**2 + 3 * D + 1),
        ({"gate": "input_independent"}, D**2 + 2 * D + 1),
        ({"form": "rank1"}, D**2 + 2 * D + D + 1 + 1),
        ({"beta_scale_learned": True}, 2 * D**2 + 3 * D + 2),
    ):
        assert counted("mgt", depth, **options) - base == 2 * depth * per_sublayer, options
    assert counted("mgt", depth, alpha_per="layer") - base == extra - depth
    assert counted("mgt", depth, alpha_per="network") - base == extra - 2 * depth + 1


@pytest.mark.parametrize(
    ("depth", "base", "mgt"), [(12, 9.4, 12.6), (24, 18.9, 25.2), (48, 37.7, 50.3), (100, 78.6, 104.9)]
)
def test_equal_hyper_parameters_are_not_equal_parameters(depth, base, mgt):
    """Millions without embeddings: 12 d^2 and 16 d^2 a layer; the vectors add less than 0.25 %."""
    for connection, squares, millions in (("additive", 12, base), ("mgt", 16, mgt)):
        matrices = squares * D**2 * depth
        assert round(matrices / 1e6, 1) == millions
        assert matrices < planned(wide_config(connection, depth)) < 1.0025 * matrices
