"""Constants, initial values, sharing and requirements of the baseline connections."""

import copy
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from thalweg import connections
from thalweg.connections import Equivalence, Requirements, Site
from thalweg.errors import InputError, UnknownNameError

BASELINES = (
    "post_norm",
    "deepnorm",
    "sub_ln",
    "layerscale",
    "rezero",
    "highway",
    "ln_scaling",
    "keel",
    "none",
)
WIDTH = 6


def make(name, sites=None, **options):
    torch.manual_seed(0)
    return connections.create(name, width=WIDTH, sites=sites or Site.decoder(2), **options)


def state(seed=1):
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(seed))


def sublayers(stream, seed=2):
    """One tanh of a random map per site."""
    generator = torch.Generator().manual_seed(seed)
    maps = [torch.randn(WIDTH, WIDTH, generator=generator, requires_grad=True) for _ in stream.sites]
    return [lambda x, w=w: torch.tanh(x @ w) for w in maps], maps


# Depth constants


@pytest.mark.parametrize(
    ("depth", "alpha", "beta"),
    [(12, 2.213, 0.3195), (24, 2.632, 0.2686), (48, 3.130, 0.2259), (100, 3.761, 0.1880), (200, 4.472, 0.1581)],
)
def test_deepnorm_constants(depth, alpha, beta):
    stream = make("deepnorm", Site.decoder(depth))
    assert [site.alpha for site in stream.sites] == [pytest.approx(alpha, abs=5e-4)] * (2 * depth)
    for site in stream.layout:
        assert stream.requirements(site) == Requirements(gain=pytest.approx(beta, abs=5e-5), init="xavier")


def test_deepnorm_counts_sublayers():
    decoder, attention_only = make("deepnorm", Site.decoder(6)), make("deepnorm", Site.stack(12, ("attention",)))
    assert decoder.sites[0].alpha == attention_only.sites[0].alpha == 12**0.25
    assert decoder.requirements(decoder.layout[0]) == attention_only.requirements(attention_only.layout[3])


def test_deepnorm_constants_can_be_given():
    stream = make("deepnorm", alpha=1.5, beta=0.25)
    assert stream.sites[1].alpha == 1.5
    assert stream.requirements(stream.layout[1]).gain == 0.25


@pytest.mark.parametrize(("depth", "gain"), [(12, 1.783), (24, 1.968), (48, 2.136), (100, 2.302), (200, 2.448)])
def test_sub_ln_gain_and_inner_norm(depth, gain):
    stream = make("sub_ln", Site.decoder(depth))
    needs = stream.requirements(stream.layout[0])
    assert needs == Requirements(gain=pytest.approx(gain, abs=5e-4), init="xavier", inner_norm=True)


def test_sub_ln_gain_of_a_single_sublayer_is_not_zero():
    (site,) = sites = Site.stack(1, ("attention",))
    assert make("sub_ln", sites).requirements(site).gain == pytest.approx(math.sqrt(math.log(2)))


@pytest.mark.parametrize(("depth", "start"), [(2, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6), (100, 1e-6)])
def test_layerscale_start_depends_on_depth(depth, start):
    stream = make("layerscale", Site.decoder(depth))
    for site in stream.sites:
        torch.testing.assert_close(site.scale.detach(), torch.full((WIDTH,), start), rtol=0, atol=0)


def test_layerscale_start_can_be_fixed():
    stream = make("layerscale", Site.decoder(100), init=0.5)
    assert all((site.scale == 0.5).all() for site in stream.sites)


def test_ln_scaling_factor_belongs_to_the_layer():
    stream = make("ln_scaling", Site.decoder(4))
    x = state()
    for site, layer in zip(stream.sites, [1, 1, 2, 2, 3, 3, 4, 4], strict=True):
        torch.testing.assert_close(site.read(x)[0], site.input_norm(x) / math.sqrt(layer))
    attention_only = make("ln_scaling", Site.stack(9, ("attention",)))
    torch.testing.assert_close(attention_only.sites[8].read(x)[0], attention_only.sites[8].input_norm(x) / 3)
    torch.testing.assert_close(stream.leave(x), stream.final_norm(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("alpha", "value"), [("sublayers", 32.0), ("layers", 16.0), ("sqrt_layers", 4.0), (2.5, 2.5), (3, 3.0)]
)
def test_keel_skip_factor(alpha, value):
    stream = make("keel", Site.decoder(16), alpha=alpha)
    assert {site.alpha for site in stream.sites[1:]} == {value}


@pytest.mark.parametrize(("plain_start", "plain"), [("sublayer", [0]), ("layer", [0, 1, 2]), ("nothing", [])])
def test_keel_plain_start(plain_start, plain):
    stream = make("keel", Site.stack(2, ("attention", "feed_forward", "feed_forward")), plain_start=plain_start)
    x, update = state(), state(3)
    for index, site in enumerate(stream.sites):
        expected = x + update if index in plain else site.output_norm(6 * x + update)
        torch.testing.assert_close(site.write(x, update, None), expected)
        assert (site.output_norm.weight is None) == (index in plain)


@pytest.mark.parametrize("name", ["post_norm", "layerscale", "rezero", "highway", "ln_scaling", "keel", "none"])
def test_other_baselines_ask_nothing_of_sublayers(name):
    stream = make(name, Site.decoder(12))
    assert all(stream.requirements(site) == Requirements() for site in stream.layout)


# Slots


@pytest.mark.parametrize("name", ["post_norm", "deepnorm", "keel"])
def test_post_norm_family_leaves_a_normalised_stream(name):
    stream = make(name)
    functions, _ = sublayers(stream)
    embedding = 30 * state()
    assert stream.final_norm.kind == "none"
    torch.testing.assert_close(stream.enter(embedding), embedding, rtol=0, atol=0)
    rms = stream(embedding, functions).square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones_like(rms), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["post_norm", "deepnorm", "keel"])
def test_entering_norm_is_an_option_and_is_reset(name):
    stream = make(name, enter_norm=True)
    with torch.no_grad():
        stream.enter_norm.weight.fill_(7.0)
    stream.reset_parameters()
    entered = stream.enter(30 * state())
    torch.testing.assert_close(entered.square().mean(-1).sqrt(), torch.ones(2, 3), rtol=1e-4, atol=0)


def test_norm_free_baselines_have_no_norm_parameters():
    assert {name for name, _ in make("rezero").named_parameters()} == {"scalars.0.alpha", "scalars.1.alpha"}
    assert not list(make("none", input_norm=False, final_norm=False).parameters())


def test_no_skip_forgets_the_state():
    site = make("none").sites[0]
    update = state(3)
    torch.testing.assert_close(site.write(state(4), update, None), site.write(state(5), update, None), rtol=0, atol=0)


# ReZero: one scalar per layer


def test_rezero_starts_as_the_identity_and_moves_the_scalars_first():
    stream = make("rezero")
    functions, maps = sublayers(stream)
    embedding = state()
    output = stream(embedding, functions)
    torch.testing.assert_close(output, embedding, rtol=0, atol=0)
    output.backward(state(7))
    assert all((w.grad == 0).all() for w in maps)
    assert all(scalar.alpha.grad.abs() > 1e-3 for scalar in stream.scalars.values())


@pytest.mark.parametrize(
    "sites",
    [Site.decoder(3), Site.stack(3, ("attention",)), Site.stack(3, ("a", "b", "c"))],
    ids=["two", "one", "three"],
)
def test_rezero_counts_a_shared_scalar_once(sites):
    stream = make("rezero", sites)
    names = ["scalars.0.alpha", "scalars.1.alpha", "scalars.2.alpha"]
    assert [name for name, _ in stream.named_parameters(remove_duplicate=False)] == names
    assert list(stream.state_dict()) == names
    assert sum(p.numel() for p in stream.parameters()) == 3
    for site, module in zip(sites, stream.sites, strict=True):
        assert module.scalar.alpha is stream.scalars[str(site.layer)].alpha


def test_rezero_scalar_gathers_the_gradient_of_its_whole_layer():
    """Both sublayers of a layer feed one gradient: it is the sum of what two separate scalars would get."""
    stream = make("rezero", Site.decoder(1), init=0.3)
    (first, second), _ = sublayers(stream)
    x, cotangent = state(), state(7)
    stream(x, [first, second]).backward(cotangent)
    alphas = [torch.full((1,), 0.3, requires_grad=True) for _ in range(2)]
    middle = x + alphas[0] * first(x)
    (middle + alphas[1] * second(middle)).backward(cotangent)
    assert min(alpha.grad.abs() for alpha in alphas) > 1e-2
    torch.testing.assert_close(stream.scalars["0"].alpha.grad, alphas[0].grad + alphas[1].grad)


def test_rezero_sharing_survives_copies_files_and_replaced_parameters(tmp_path):
    stream = make("rezero", init=0.3)
    functions, _ = sublayers(stream)
    x = state()
    before = stream(x, functions)

    twin = copy.deepcopy(stream)
    with torch.no_grad():
        twin.scalars["1"].alpha.fill_(-0.7)
    assert all(site.scalar.alpha.item() == pytest.approx(-0.7) for site in twin.sites[2:])
    torch.testing.assert_close(stream(x, functions), before, rtol=0, atol=0)

    save_file(twin.state_dict(), tmp_path / "stream.safetensors")
    loaded = make("rezero")
    loaded.load_state_dict(load_file(tmp_path / "stream.safetensors"), assign=True)
    torch.testing.assert_close(loaded(x, functions), twin(x, functions), rtol=0, atol=0)

    called = functional_call(stream, dict(twin.named_parameters()), (x, functions))
    torch.testing.assert_close(called, twin(x, functions), rtol=0, atol=0)
    assert (called - before).abs().max() > 1e-2

    wide = copy.deepcopy(stream).double()
    assert all(site.scalar.alpha.dtype == torch.float64 for site in wide.sites)


def test_rezero_hints():
    (hint,) = make("rezero", lr_mul=0.1).group_hints().values()
    assert (hint.lr_mul, hint.weight_decay) == (0.1, 0.0)


# Highway


def test_highway_starts_by_carrying():
    stream = make("highway", bias=-2.0)
    gates = [site.read(state())[1] for site in stream.sites]
    assert all(abs(gate.mean().item() - torch.sigmoid(torch.tensor(-2.0)).item()) < 0.02 for gate in gates)
    assert all(gate.std() > 1e-4 for gate in gates)  # the weights are not zero: it depends on the token


@pytest.mark.parametrize(("bias", "reads_update"), [(-40.0, False), (40.0, True)])
def test_highway_closes_and_opens(bias, reads_update):
    site = make("highway", bias=bias).sites[0]
    x, update = state(), state(3)
    _, gate = site.read(x)
    torch.testing.assert_close(site.write(x, update, gate), update if reads_update else x)


def test_highway_gate_reads_the_raw_state():
    site = make("highway", gate_std=1.0).sites[0]
    (small_input, small_gate), (large_input, large_gate) = site.read(state()), site.read(50 * state())
    torch.testing.assert_close(small_input, large_input, rtol=1e-3, atol=1e-4)
    assert (small_gate - large_gate).abs().max() > 0.1


@pytest.mark.parametrize("autocast", [False, True])
def test_highway_gate_stays_in_float32(autocast):
    site, x = make("highway").sites[0], state()
    if not autocast:
        site, x = site.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        _, gate = site.read(x)
        after = site.write(x, x.bfloat16(), gate)
    assert gate.dtype == torch.float32
    assert after.dtype == x.dtype


def test_highway_gates_are_named_for_measurement():
    site = make("highway").sites[0]
    _, gate = site.read(state())
    assert set(site.gates(state(), gate)) == {"gate", "erase"}


# What all of them keep


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("sites", [Site.decoder(2), Site.stack(3, ("attention",))], ids=["decoder", "attention-only"])
def test_reset_restores_the_declared_start(name, sites):
    stream = make(name, sites)
    torch.manual_seed(0)
    fresh = {key: value.clone() for key, value in make(name, sites).state_dict().items()}
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.fill_(9.0)
    torch.manual_seed(0)
    stream.reset_parameters()
    assert list(stream.state_dict()) == list(fresh)
    for key, value in stream.state_dict().items():
        torch.testing.assert_close(value, fresh[key], rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("name", sorted({*BASELINES} - {"sub_ln", "ln_scaling"}))  # these two write as additive does
@pytest.mark.parametrize(
    ("stream_dtype", "update_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_write_keeps_the_dtype_of_the_state(name, stream_dtype, update_dtype):
    site = make(name).sites[1]
    x = state().to(stream_dtype)
    _, context = site.read(x)
    assert site.write(x, state(3).to(update_dtype), context).dtype == stream_dtype


@pytest.mark.parametrize(
    ("name", "options", "sites"),
    [
        ("sub_ln", {}, Site.decoder(3)),
        ("layerscale", {"init": 1.0}, Site.decoder(3)),
        ("rezero", {"init": 1.0, "norm": "layernorm", "final_norm": True}, Site.decoder(3)),
        ("ln_scaling", {"update_norm": True}, Site.decoder(1)),
    ],
)
def test_declared_equivalence_holds(name, options, sites):
    stream = make(name, sites, **options)
    claim = stream.equals_at_start()
    assert isinstance(claim, Equivalence)
    assert claim.name == "additive"
    twin = make("additive", sites, **claim.options)
    functions, _ = sublayers(stream)
    torch.testing.assert_close(stream(state(), functions), twin(state(), functions), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", BASELINES)
def test_nothing_is_claimed_that_does_not_hold_by_default(name):
    claim = make(name, Site.decoder(3)).equals_at_start()
    assert (claim is not None) == (name == "sub_ln")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("deepnorm", {"alpha": 0.0}, "deepnorm.alpha must be a positive number, got 0.0"),
        ("deepnorm", {"beta": math.inf}, "deepnorm.beta must be a positive number, got inf"),
        ("layerscale", {"init": math.nan}, "layerscale.init must be a finite number, got nan"),
        ("rezero", {"init": math.inf}, "rezero.init must be a finite number, got inf"),
        ("rezero", {"lr_mul": 0.0}, "rezero.lr_mul must be a positive number, got 0.0"),
        ("highway", {"bias": math.nan}, "highway.bias must be a finite number, got nan"),
        ("highway", {"gate_std": -0.1}, "highway.gate_std must be zero or a positive number, got -0.1"),
        ("keel", {"alpha": -1.0}, "keel.alpha must be sublayers, layers, sqrt_layers or a positive number, got -1.0"),
        ("keel", {"alpha": "depth"}, "keel.alpha must be"),
        ("keel", {"alpha": True}, "keel.alpha must be"),
    ],
)
def test_wrong_options_are_refused(name, options, words):
    with pytest.raises(InputError) as error:
        make(name, **options)
    assert words in str(error.value)


def test_unknown_option_names_the_nearest():
    with pytest.raises(UnknownNameError, match=r"Did you mean 'keel\.plain_start'"):
        make("keel", plain_strt="layer")
