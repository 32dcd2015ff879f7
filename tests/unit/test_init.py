"""Initialisation, looked at on the finished model."""

import pytest
import torch

from thalweg import connections
from thalweg.connections import Requirements, Site
from thalweg.models import Decoder, DecoderConfig
from thalweg.models.init import initialise_map
from thalweg.models.sublayers import Attention, FeedForward


def config(**changes):
    return DecoderConfig(**{"vocab_size": 64, "width": 64, "depth": 3, "heads": 4, **changes})


def make(seed=0, **changes):
    return Decoder(config(**changes), generator=torch.Generator().manual_seed(seed))


def stds(decoder, index):
    return {name: p.std().item() for name, p in decoder.sublayers[index].named_parameters() if name.endswith("weight")}


def test_additive_shrinks_the_last_map_of_every_sublayer_and_nothing_else():
    decoder = make(initial_std=0.05, embedding_std=0.5)
    shrunk = 0.05 * 6**-0.5
    for index in range(6):
        for name, std in stds(decoder, index).items():
            expected = shrunk if name in ("output.weight", "down.weight") else 0.05
            assert std == pytest.approx(expected, rel=0.06), (index, name)
    assert decoder.embedding.weight.std().item() == pytest.approx(0.5, rel=0.06)
    assert decoder.head.weight is decoder.embedding.weight


def test_an_untied_head_has_the_standard_deviation_of_the_maps():
    decoder = make(tie_embeddings=False, initial_std=0.05, embedding_std=0.5)
    assert decoder.head.weight.std().item() == pytest.approx(0.05, rel=0.06)
    assert decoder.head.weight is not decoder.embedding.weight


@pytest.mark.parametrize("name", connections.names())
def test_the_finished_model_has_the_required_gains_and_the_declared_start(name):
    decoder = make(connection=name, bias=True)
    plain = make(connection="none", bias=True, connection_options={})
    for site, ours, theirs in zip(decoder.config.sites, decoder.sublayers, plain.sublayers, strict=True):
        required = decoder.stream.requirements(site)
        base = plain.stream.requirements(site)
        for mine, other in zip(ours.maps(), theirs.maps(), strict=True):
            factor = 1.0
            for requirements, power in ((required, 1), (base, -1)):
                gain = requirements.gain if mine.gained else 1.0
                gain *= requirements.output_gain if mine.last else 1.0
                if requirements.init == "xavier":
                    gain *= (
                        2 / (mine.linear.in_features + mine.linear.out_features)
                    ) ** 0.5 / decoder.config.initial_std
                factor *= gain**power
            torch.testing.assert_close(mine.linear.weight, other.linear.weight * factor, rtol=1e-5, atol=1e-8)
            assert not mine.linear.bias.any()
    torch.manual_seed(0)
    declared = connections.create(name, width=64, sites=Site.decoder(3), norm="rmsnorm", norm_eps=1e-6)
    for (key, value), wanted in zip(decoder.stream.state_dict().items(), declared.state_dict().values(), strict=True):
        if wanted.numel() == 1 or wanted.std() == 0:  # constants are the same; what is drawn has the same size
            torch.testing.assert_close(value, wanted, rtol=0, atol=0, msg=key)
        else:
            assert value.std().item() == pytest.approx(wanted.std().item(), rel=0.3), key


def test_deepnorm_scales_the_value_path_and_leaves_queries_and_keys():
    decoder = make(connection="deepnorm", depth=8)
    gain = decoder.stream.requirements(decoder.config.sites[0]).gain
    assert gain < 0.5
    xavier = (2 / 128) ** 0.5
    attention = stds(decoder, 0)
    assert attention["query.weight"] == pytest.approx(xavier, rel=0.06)
    assert attention["key.weight"] == pytest.approx(xavier, rel=0.06)
    assert attention["value.weight"] == pytest.approx(gain * xavier, rel=0.06)
    assert attention["output.weight"] == pytest.approx(gain * xavier, rel=0.06)
    feed_forward, fans = stds(decoder, 1), (2 / (64 + 176)) ** 0.5
    assert feed_forward["up.weight"] == pytest.approx(gain * fans, rel=0.06)
    assert feed_forward["down.weight"] == pytest.approx(gain * fans, rel=0.06)
    assert feed_forward["gate.weight"] == pytest.approx(fans, rel=0.06)  # a gate chooses; two maps carry


@pytest.mark.parametrize(("gain", "output_gain"), [(0.5, 1.0), (1.0, 0.25), (0.5, 0.25)])
def test_gains_multiply_the_draw_exactly(gain, output_gain):
    cfg = config(attention_gate="element")
    for cls in (Attention, FeedForward):
        drawn = {}
        for required in (Requirements(), Requirements(gain=gain, output_gain=output_gain)):
            layer = cls(cfg, required, 0)
            torch.manual_seed(1)
            with torch.no_grad():
                for linear_map in layer.maps():
                    initialise_map(linear_map, required, 0.02)
            drawn[required.gain, required.output_gain] = {n: p.clone() for n, p in layer.named_parameters()}
        plain, scaled = drawn[1.0, 1.0], drawn[gain, output_gain]
        factors = {"value": gain, "up": gain, "output": gain * output_gain, "down": gain * output_gain}
        for name, weight in plain.items():
            assert torch.equal(scaled[name], weight * factors.get(name.split(".")[0], 1.0)), name


def test_every_map_of_a_sublayer_is_named_once():
    for kind in ("attention", "feed_forward", "parallel"):
        layer = make(layers=(kind,), attention_gate="head").sublayers[0]
        linear = [m for m in layer.modules() if isinstance(m, torch.nn.Linear)]
        assert {id(m.linear) for m in layer.maps()} == {id(m) for m in linear}
        assert len(list(layer.maps())) == len(linear)


def test_one_seed_one_model():
    def same(a, b):
        return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))

    torch.manual_seed(7)
    first, after = Decoder(config()), torch.rand(3)
    torch.manual_seed(7)
    second, again = Decoder(config(connection="mgt")), torch.rand(3)
    torch.manual_seed(7)
    third = Decoder(config())
    assert same(first, third)
    assert torch.equal(after, again)  # the architecture does not move the global generator
    assert torch.equal(first.embedding.weight, second.embedding.weight)
    for ours, theirs in zip(first.sublayers, second.sublayers, strict=True):
        assert torch.equal(next(iter(ours.maps())).linear.weight, next(iter(theirs.maps())).linear.weight)
    assert same(make(3), make(3)) and not same(make(3), make(4))


def test_a_generator_of_its_own_leaves_the_global_one_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    make(5)
    assert torch.equal(before, torch.random.get_rng_state())


def test_sub_ln_puts_a_norm_before_the_last_map():
    decoder = make(connection="sub_ln")
    for layer in decoder.sublayers:
        assert layer.inner_norm.weight is not None
        assert torch.equal(layer.inner_norm.weight, torch.ones_like(layer.inner_norm.weight))
