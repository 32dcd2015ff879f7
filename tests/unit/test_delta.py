"""Deep Delta Learning: its declared start, its options, what it shares, and the law of one write."""

import copy
import fnmatch
import itertools
import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from thalweg import connections
from thalweg.connections import Site
from thalweg.errors import InputError, UnknownNameError

WIDTH, LENGTH = 8, 6


def make(depth=2, **options):
    torch.manual_seed(0)
    return connections.create("delta", width=WIDTH, sites=Site.decoder(depth), **options).double()


def scrambled(stream, scale=0.5):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return stream


def embedding(seed=2, batch=2):
    return torch.randn(batch, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MATRIX = [
    {"value_channels": 4, "compress": compress, "expand": expand}
    for compress in ("tokens", "channels")
    for expand in ("repeat", "convolution")
]
STATES = [{}, *MATRIX]


def test_alias():
    assert connections.registry["ddl"] is connections.registry["delta"]


# One write -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", STATES)
def test_the_direction_of_a_write_has_norm_one(options):
    stream = scrambled(make(write_only=True, fixed_beta=1.0, **options))
    state = stream.enter(embedding())
    _, context = stream.sites[0].read(state)
    step = stream.sites[0].write(state, 100 * embedding(3), context) - state  # k v^T
    torch.testing.assert_close(step.norm(dim=-1), context.v.abs(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("options", STATES)
@pytest.mark.parametrize("value", ["paper", "code"])
@pytest.mark.parametrize("beta", [0.0, 0.7, 1.0, 2.0])
def test_the_error_of_a_write_shrinks_by_one_minus_beta(options, value, beta):
    stream = scrambled(make(fixed_beta=beta, value=value, **options))
    state, update = stream.enter(embedding()), embedding(3)
    _, context = stream.sites[1].read(state)
    after = stream.sites[1].write(state, update, context)
    k = update / update.norm(dim=-1, keepdim=True)

    def error(x):
        return torch.einsum("btnd,btd->btn", x, k) - context.v

    torch.testing.assert_close(error(after), (1 - beta) * error(state), atol=1e-8, rtol=0)


def test_a_gate_held_at_two_reflects_and_undoes_itself():
    stream = scrambled(make(fixed_beta=2.0, direction_eps=1e-9, value_channels=3))
    site, update = stream.sites[0], embedding(3)
    with torch.no_grad():
        site.value.weight.zero_()
    state = stream.enter(embedding())
    _, context = site.read(state)
    once = site.write(state, update, context)
    torch.testing.assert_close(once.norm(dim=-1), state.norm(dim=-1), atol=1e-12, rtol=0)
    torch.testing.assert_close(site.write(once, update, context), state, atol=1e-12, rtol=0)


def test_a_gate_held_at_zero_never_writes_and_says_so():
    stream, x = make(fixed_beta=0.0, value_channels=3), embedding()
    out = stream(x, [torch.tanh] * 4)
    torch.testing.assert_close(out, stream.final_norm(x), atol=1e-12, rtol=0)
    (out * embedding(3)).sum().backward()
    for name, parameter in stream.named_parameters():
        declared = any(fnmatch.fnmatch(name, pattern) for pattern in stream.frozen())
        assert declared == (not parameter.grad.any()), name
    assert not make().frozen()


def test_the_scale_of_a_sublayer_does_not_matter():
    stream = scrambled(make())
    once = stream(embedding(), [torch.tanh] * 4)
    torch.testing.assert_close(stream(embedding(), [lambda x: 50 * torch.tanh(x)] * 4), once, atol=1e-6, rtol=0)


def test_gates_name_what_is_erased():
    for write_only in (False, True):
        stream = scrambled(make(write_only=write_only))
        state = stream.enter(embedding())
        _, context = stream.sites[0].read(state)
        gates = stream.sites[0].gates(state, context)
        assert gates["beta"].shape == (2, LENGTH) and gates["beta"].std() > 0.1
        assert torch.equal(gates["erase"], torch.zeros_like(gates["beta"]) if write_only else gates["beta"])


# The start -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["linear", "mlp"])
@pytest.mark.parametrize("beta", [0.2, 1.0, 1.6])
def test_the_gate_starts_at_beta_start(gate, beta):
    stream = make(gate=gate, beta_start=beta)
    for site in stream.sites:
        assert site.gate.bias.item() == pytest.approx(math.log((beta / 2) / (1 - beta / 2)), abs=1e-6)
        _, context = site.read(stream.enter(embedding()))
        torch.testing.assert_close(context.beta, torch.full_like(context.beta, beta), atol=1e-6, rtol=0)


def test_the_mlp_gate_has_its_hidden_units():
    assert make(gate="mlp").sites[0].gate.hidden.shape == (128, WIDTH)
    assert make(gate="mlp", gate_hidden=5).sites[0].gate.hidden.shape == (5, WIDTH)


def test_the_bounded_value_starts_near_two():
    stream = make(value="code")
    _, context = stream.sites[0].read(torch.zeros(2, LENGTH, 1, WIDTH, dtype=torch.float64))
    assert torch.equal(context.v, torch.full_like(context.v, 2.0))


def test_values_start_with_standard_deviation_one_half():
    torch.manual_seed(0)
    stream = connections.create("delta", width=400, sites=Site.decoder(1), value_channels=50)
    assert stream.sites[0].value.weight.std().item() * 400**0.5 == pytest.approx(0.5, rel=0.03)


def test_the_code_value_reads_the_raw_state_and_the_paper_value_the_normalised_one():
    for value, same in (("paper", True), ("code", False)):
        stream = scrambled(make(value=value))
        state = stream.enter(embedding())
        small, large = (stream.sites[0].read(scale * state)[1].v for scale in (1.0, 3.0))
        assert torch.allclose(small, large, atol=1e-5) is same


@pytest.mark.parametrize("options", STATES)
def test_the_entered_state_repeats_the_embedding(options):
    x, stream = embedding(), make(**options)
    state = stream.enter(x)
    n = options.get("value_channels", 1)
    assert torch.equal(state, x.unsqueeze(2).expand(-1, -1, n, -1))
    assert stream.observe(state).shape == (2, LENGTH, n, WIDTH)


@pytest.mark.parametrize("options", STATES)
def test_compressors_start_as_the_mean_of_the_channels(options):
    stream = make(**options)
    state = torch.randn(2, LENGTH, options.get("value_channels", 1), WIDTH, dtype=torch.float64)
    for module in (*stream.compressors.values(), stream.readout):
        torch.testing.assert_close(module(state, None, "x"), state.mean(2), atol=1e-12, rtol=0)


def test_reset_undoes_a_generic_initialisation():
    stream = make(gate="mlp", value="code", value_channels=4, expand="convolution")
    fresh = {name: parameter.clone() for name, parameter in stream.named_parameters()}
    scrambled(stream)
    stream.reset_parameters()
    drawn = ("gate.hidden", "value.weight")
    for name, parameter in stream.named_parameters():
        assert name.endswith(drawn) or torch.equal(parameter, fresh[name]), name


# Sharing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", MATRIX)
def test_a_layer_shares_its_compressor_and_names_it_once(options):
    stream = make(depth=3, **options)
    shared = [site.compress for site in stream.sites]
    assert shared[0] is shared[1] and shared[2] is shared[3] and len(set(map(id, shared))) == 3
    assert stream.readout not in shared
    names = [name for name, _ in stream.named_parameters(remove_duplicate=False)]
    assert len(names) == len(set(names)) == len({id(p) for p in stream.parameters()})
    assert set(stream.state_dict()) == set(names)
    assert not any(name.startswith("sites") and "compress" in name for name in names)


def test_a_copy_reads_through_its_own_compressors():
    stream = scrambled(make(value_channels=3))
    twin = copy.deepcopy(stream)
    assert twin.sites[0].compress is twin.compressors["0"]
    before = stream(embedding(), [torch.tanh] * 4)
    with torch.no_grad():
        twin.compressors["0"].read.mul_(3)
    assert torch.equal(stream(embedding(), [torch.tanh] * 4), before)
    assert not torch.allclose(twin(embedding(), [torch.tanh] * 4), before)


def test_a_saved_stream_loads():
    options = {"value_channels": 3, "expand": "convolution", "gate": "mlp"}
    stream, other = scrambled(make(**options)), make(**options)
    other.load_state_dict(stream.state_dict())
    assert torch.equal(stream(embedding(), [torch.tanh] * 4), other(embedding(), [torch.tanh] * 4))


def test_layers_may_have_any_number_of_sublayers():
    sites = Site.stack(2, ("attention", "feed_forward", "feed_forward"))
    stream = connections.create("delta", width=WIDTH, sites=sites, value_channels=2)
    assert list(stream.compressors) == ["0", "1"]
    assert stream.sites[5].compress is stream.compressors["1"]


# Declarations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", STATES)
def test_convolutions_do_not_decay_and_every_hint_names_a_parameter(options):
    stream = make(**options)
    hints = stream.group_hints()
    for name, _ in stream.named_parameters():
        hinted = [hint for pattern, hint in hints.items() if fnmatch.fnmatch(name, pattern)]
        assert (hinted != []) == name.startswith(("expand", "compressors", "readout"))
        assert all(hint.weight_decay == 0 for hint in hinted)
    for pattern in hints:
        assert any(fnmatch.fnmatch(name, pattern) for name, _ in stream.named_parameters()), pattern


def test_who_looks_along_tokens():
    assert not make().looks_along_tokens
    assert not make(value_channels=4, compress="channels").looks_along_tokens
    assert not make(value_channels=4, kernel=1).looks_along_tokens
    assert make(value_channels=4).looks_along_tokens
    assert make(value_channels=4, compress="channels", expand="convolution").looks_along_tokens


@pytest.mark.parametrize("options", STATES)
@pytest.mark.parametrize("gate", ["linear", "mlp"])
def test_every_parameter_has_a_gradient_and_moves_within_three_steps(options, gate):
    stream = make(gate=gate, value="code", **options)
    start = {name: parameter.clone() for name, parameter in stream.named_parameters()}
    mixes = [torch.nn.Linear(WIDTH, WIDTH).double() for _ in stream.sites]
    cotangent = embedding(5)
    for _ in range(3):
        stream.zero_grad()
        (stream(embedding(), mixes) * cotangent).sum().backward()
        with torch.no_grad():
            for name, parameter in stream.named_parameters():
                assert parameter.grad is not None, name
                parameter -= 0.1 * parameter.grad
    for name, parameter in stream.named_parameters():
        assert not torch.equal(parameter, start[name]), name


@pytest.mark.parametrize(
    "options, words",
    [
        ({"beta_start": 0.0}, r"inside \(0, 2\)"),
        ({"beta_start": 2.0}, r"inside \(0, 2\)"),
        ({"beta_start": float("nan")}, r"inside \(0, 2\)"),
        ({"fixed_beta": 2.1}, r"in \[0, 2\]"),
        ({"value_channels": 0}, "at least 1"),
        ({"value_channels": 4, "kernel": 0}, "at least 1"),
        ({"gate": "mlp", "gate_hidden": 0}, "at least 1"),
        ({"direction_eps": 0.0}, "at least 1e-12"),
        ({"compress": "channels"}, "value_channels=4"),
        ({"expand": "convolution"}, "value_channels=4"),
    ],
)
def test_options_that_cannot_be(options, words):
    with pytest.raises(InputError, match=words):
        make(**options)


def test_an_unknown_value_branch_is_named():
    with pytest.raises(UnknownNameError, match="paper"):
        make(value="papper")


@pytest.mark.parametrize("given, used", [(0.001, 0.01), (1.999, 1.99)])
def test_a_start_too_near_the_ends_is_drawn_in_with_a_warning(given, used):
    with pytest.warns(UserWarning, match=str(used)):
        stream = make(beta_start=given)
    assert stream.options.beta_start == used
    _, context = stream.sites[0].read(stream.enter(embedding()))
    torch.testing.assert_close(context.beta, torch.full_like(context.beta, used), atol=1e-6, rtol=0)


# Precision and compilation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", STATES)
@pytest.mark.parametrize("half", ["autocast", "cast"])
def test_coefficients_stay_in_float32(options, half):
    stream = scrambled(make(**options)).float()
    x = embedding().float()
    if half == "cast":
        stream, x = stream.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half == "autocast"):
        state = stream.enter(x)
        c, context = stream.sites[0].read(state)
        after = stream.sites[0].write(state, c.bfloat16(), context)
    assert context.beta.dtype == context.v.dtype == torch.float32
    assert state.dtype == c.dtype == after.dtype == x.dtype
    twin = copy.deepcopy(stream).double()
    expected = twin.sites[0].gate(c.double())  # the same, had nothing been rounded after c
    torch.testing.assert_close(context.beta.double(), expected, atol=1e-6, rtol=0)


@torch.no_grad()
def test_one_compiled_graph_serves_every_site():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    stream = scrambled(make(depth=3, value_channels=3, expand="convolution"))

    @torch.compile(fullgraph=True, backend=counter)
    def block(site, following, state, x, context):
        return site.advance(following, state, torch.tanh(x), context)

    state = stream.enter(embedding())
    x, context = stream.sites[0].read(state)
    for site, following in itertools.pairwise(stream.sites):
        expected = site.advance(following, state, torch.tanh(x), context)
        state, x, context = block(site, following, state, x, context)
        torch.testing.assert_close((state, x), expected[:2], atol=1e-12, rtol=0)
    assert counter.frame_count == 1
