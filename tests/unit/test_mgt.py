import copy
import math

import pytest
import torch
from torch import Tensor, nn

from thalweg import connections
from thalweg.connections import Site
from thalweg.errors import InputError
from thalweg.ops.precision import wide

FORMS = ("full", "soft_gate", "delta", "rank1", "delta_rank1")
PRESETS = ("paper", "residual", "identity", "stable")


def create(width: int = 6, depth: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64, **options):
    torch.manual_seed(seed)
    return connections.create("mgt", width=width, sites=Site.decoder(depth), **options).to(dtype)


def linear_sublayers(stream, seed: int = 1, gain: float = 1.0):
    """One random map per site, with the output gain that the connection asks for."""
    generator = torch.Generator().manual_seed(seed)
    width, dtype = stream.width, next(stream.parameters()).dtype
    maps = [torch.randn(width, width, generator=generator, dtype=torch.float64).to(dtype) for _ in stream.sites]
    scale = gain * stream.requirements(stream.layout[0]).output_gain * width**-0.5
    return [lambda x, w=w: torch.tanh(x @ (scale * w)) for w in maps]


def normal(*shape: int, seed: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def site_of(**options):
    return create(depth=1, **options).sites[0]


# The published equations.


def test_two_tokens_by_hand():
    """LayerNorm of two channels is (-1, 1) or (1, -1), and tanh(n artanh(1/2)) = (3^n - 1) / (3^n + 1)."""
    stream = create(width=2, depth=1, final_norm=False, alpha=0.4, alpha_kind="fixed", norm_eps=1e-12)
    site = stream.sites[0]
    half = math.atanh(0.5)
    with torch.no_grad():
        site.gate_matrix.copy_(torch.eye(2))
        site.beta_matrix.copy_(torch.tensor([[half, 0.0], [0.0, 0.0]], dtype=torch.float64))
        site.beta_bias.copy_(torch.tensor([0.0, -half], dtype=torch.float64))
    x = torch.tensor([[[1.0, 2.0], [3.0, -1.0]]], dtype=torch.float64)
    v = torch.tensor([[[2.0, 4.0], [-1.0, 2.0]]], dtype=torch.float64)
    low, high = 0.2689414213699951, 0.7310585786300049  # sigma(-1), sigma(1)
    want = torch.tensor(
        [
            [1 + 0.5 * (low * 2 - 0.4 * 1), 2 - 0.5 * (high * 4 - 0.4 * 2)],
            [3 + 13 / 14 * (-high * 1 - 0.4 * 3), -1 - 0.5 * (low * 2 + 0.4 * 1)],
        ],
        dtype=torch.float64,
    )
    got = site.write(x, v, site.read(x)[1])
    torch.testing.assert_close(got[0], want, rtol=1e-10, atol=0)


def test_parameters_per_sublayer_are_those_of_the_equations():
    d, sites = 7, 4
    additive = connections.create("additive", width=d, sites=Site.decoder(2))
    extra = sum(p.numel() for p in create(width=d).parameters()) - sum(p.numel() for p in additive.parameters())
    assert extra == sites * (2 * d * d + d + 2 * d + 1)


def test_the_soft_gate_starts_as_a_sigmoid_of_standard_normal_logits_whatever_the_scale_of_the_state():
    site = create(width=256, depth=1, dtype=torch.float32).sites[0]
    x = normal(4, 64, 256, dtype=torch.float32)
    gate = site.gates(x, site.read(x)[1])["gate"]
    assert abs(gate.mean().item() - 0.5) < 0.003
    assert abs(gate.std().item() - 0.208) < 0.003
    small, large = (site.gates(x * s, site.read(x * s)[1])["gate"] for s in (0.02, 100.0))
    torch.testing.assert_close(small, gate, rtol=0, atol=2e-3)
    torch.testing.assert_close(large, gate, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("sign", "clamp"), [(-1, False), (1, False), (-1, True)])
def test_negative_beta_with_positive_alpha_amplifies_the_state_and_does_not_erase_it(sign, clamp):
    options = {"alpha": 1.0, "alpha_kind": "fixed", "beta_bias": sign * math.atanh(0.1), "beta_std": 0.0}
    stream = create(width=16, depth=100, final_norm=False, clamp_erase=clamp, **options)
    x = normal(1, 4, 16)
    growth = (stream(x, linear_sublayers(stream)).norm() / x.norm()).item()
    if sign < 0 and not clamp:
        assert growth > 0.5 * 1.1**200
    else:
        assert growth < 10


@pytest.mark.parametrize("form", ["delta", "rank1", "delta_rank1"])
@pytest.mark.parametrize("erase", [0.0, 1.0, 2.0])
def test_what_alpha_beta_does_to_the_old_state(form, erase):
    """0 keeps, 1 erases, 2 reflects: every channel, or the one direction k."""
    site = site_of(form=form, preset="residual", alpha=erase, alpha_kind="fixed")
    x, v = normal(2, 3, 6), normal(2, 3, 6, seed=3)
    context = site.read(x)[1]
    rest = site.write(x, v, context) - site.write(torch.zeros_like(x), v, context)  # what is left of x
    assert torch.allclose(site.gates(x, context)["erase"], torch.tensor(erase, dtype=x.dtype))
    if form == "delta":
        torch.testing.assert_close(rest, (1 - erase) * x)
        return
    u = v * context["gate"] if form == "rank1" else v
    k = u / u.norm(dim=-1, keepdim=True)
    along, left = (x * k).sum(-1, keepdim=True) * k, (rest * k).sum(-1, keepdim=True) * k
    near = {"rtol": 1e-8, "atol": 1e-8}  # k is a unit vector but for direction_eps
    torch.testing.assert_close(left, (1 - erase) * along, **near)
    torch.testing.assert_close(rest - left, x - along, **near)
    if erase == 2:
        torch.testing.assert_close(rest.norm(dim=-1), x.norm(dim=-1), **near)


@pytest.mark.parametrize("form", ["full", "rank1"])
def test_the_spectrum_theorem_holds_for_rank_one_and_not_for_the_element_wise_form(form):
    site = site_of(form=form, alpha=0.8, beta_bias=0.3, beta_std=0.5)
    x, v = normal(1, 1, 6), normal(1, 1, 6, seed=3)
    context = {name: value.detach() for name, value in site.read(x)[1].items()}
    shortcut = torch.func.jacrev(lambda s: site.write(s.view(1, 1, 6), v, context).flatten())(x.flatten())
    values = torch.linalg.eigvals(shortcut).real.sort().values
    erase = site.gates(x, context)["erase"].flatten().detach()
    if form == "rank1":
        want = torch.cat([torch.ones(5, dtype=x.dtype), 1 - erase]).sort().values
        torch.testing.assert_close(torch.linalg.det(shortcut), 1 - erase[0])
    else:
        want = (1 - erase).sort().values
        assert (values - 1).abs().min() > 1e-3
    torch.testing.assert_close(values, want, rtol=1e-8, atol=1e-8)


def test_rank_one_is_the_delta_rule_at_alpha_one():
    """x' = x + beta k (v - k^T x) with v the length of the update."""
    site = site_of(form="delta_rank1", alpha=1.0, beta_bias=0.4, beta_std=0.3)
    x, update = normal(2, 3, 6), normal(2, 3, 6, seed=3)
    context = site.read(x)[1]
    length = update.norm(dim=-1, keepdim=True)
    k, beta = update / length, site.gates(x, context)["beta"].unsqueeze(-1)
    want = x + beta * k * (length - (k * x).sum(-1, keepdim=True))
    torch.testing.assert_close(site.write(x, update, context), want, rtol=1e-8, atol=1e-8)


def test_rank_one_has_finite_gradients_where_the_update_is_zero():
    site = site_of(form="delta_rank1", alpha=1.0)
    x, update = normal(1, 2, 6).requires_grad_(), torch.zeros(1, 2, 6, dtype=torch.float64, requires_grad=True)
    site.write(x, update, site.read(x)[1]).backward(normal(1, 2, 6, seed=4))
    assert x.grad is not None and x.grad.isfinite().all()
    assert update.grad is not None and update.grad.isfinite().all()


# Where it starts.


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "residual", "gate_open": True},
        {"preset": "residual", "gate_open": True, "gate": "fixed_random"},
        {"preset": "residual", "gate_open": True, "gate": "update", "update_norm": True},
        {"preset": "residual", "gate_open": True, "gate": "input_independent", "norm": "layernorm"},
        {"preset": "residual", "gate_bias": 60.0},
        {"preset": "residual", "form": "delta", "gate_input": "norm"},
        {"preset": "residual", "form": "rank1", "gate_open": True},
        {"preset": "residual", "form": "delta_rank1", "beta_scale_learned": True},
        {"preset": "paper", "form": "delta", "beta_std": 0.0, "beta_shift": 1.0, "write_only": True},
        {"form": "soft_gate", "gate_open": True},
    ],
)
def test_residual_with_an_open_gate_is_the_pre_norm_block(options):
    stream = create(**options)
    slots = {name: options[name] for name in ("norm", "update_norm") if name in options}
    additive = connections.create("additive", width=6, sites=Site.decoder(2), **slots).double()
    x, sublayers = normal(2, 3, 6).requires_grad_(), linear_sublayers(stream)
    got, want = stream(x, sublayers), additive(x, sublayers)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    cotangent = normal(2, 3, 6, seed=5)
    gradients = (torch.autograd.grad(y, x, cotangent)[0] for y in (got, want))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    claim = stream.equals_at_start()
    assert "gate_bias" in options or (claim is not None and claim.name == "additive")


def test_no_equivalence_is_claimed_where_there_is_none():
    differ = ({}, {"preset": "residual"}, {"preset": "stable"}, {"preset": "residual", "gate_open": True, "alpha": 0.1})
    for options in (*differ, {"form": "soft_gate"}, {"form": "delta", "preset": "residual", "beta_shift": 0.9}):
        assert create(**options).equals_at_start() is None
    claim = create(preset="identity").equals_at_start()
    assert claim is not None and claim.name == "rezero"


@pytest.mark.parametrize("form", ["full", "delta", "rank1", "delta_rank1"])
def test_the_created_stream_starts_at_the_values_of_its_preset(form):
    x = normal(2, 5, 6)

    def start(**options):
        site = create(form=form, depth=3, **options).sites[4]
        gates = site.gates(x, site.read(x)[1])
        shape = (2, 5) if "rank1" in form else (2, 5, 6)
        assert gates["beta"].shape == gates["erase"].shape == shape
        return site, gates["beta"], gates["erase"]

    site, beta, erase = start()
    torch.testing.assert_close(erase, beta / 6)
    assert 0 < beta.abs().mean() < 0.1 and beta.min() < 0 < beta.max()
    assert site.beta_bias.abs().max() == 0
    site, beta, erase = start(preset="residual")
    assert (beta == 1).all() and (erase == 0).all()
    if site.gate_norm is not None:
        assert (site.gate_norm.bias == 3).all() and (site.gate_norm.weight == 1).all()
    _, beta, erase = start(preset="identity")
    assert (beta == 0).all() and (erase == 0).all()
    _, beta, erase = start(preset="stable")
    torch.testing.assert_close(beta, torch.full_like(beta, 0.1), rtol=1e-6, atol=0)
    torch.testing.assert_close(erase, torch.full_like(beta, 0.01), rtol=1e-6, atol=0)
    _, beta, erase = start(preset="stable", alpha=0.5, beta_bias=0.0, beta_shift=1.0)  # explicit over preset
    torch.testing.assert_close((beta, erase), (torch.ones_like(beta), torch.full_like(beta, 0.5)))
    _, beta, erase = start(alpha=0.25, alpha_kind="positive")
    torch.testing.assert_close(erase, 0.25 * beta)


@pytest.mark.parametrize(
    ("form", "preset"), [*(("full", preset) for preset in PRESETS), *((form, "residual") for form in FORMS[1:])]
)
def test_two_hundred_layers_stay_finite(form, preset):
    stream = create(width=16, depth=200, dtype=torch.float32, form=form, preset=preset, final_norm=False)
    x = (0.02 * normal(1, 3, 16, dtype=torch.float32)).requires_grad_()
    state = stream(x, linear_sublayers(stream, gain=3.0))
    assert state.isfinite().all() and state.square().mean().sqrt() < 1e2
    state.backward(normal(1, 3, 16, seed=4, dtype=torch.float32))
    gradients = [x.grad, *(p.grad for p in stream.parameters() if p.grad is not None)]
    assert all(g is not None and g.isfinite().all() for g in gradients)


def test_from_the_identity_only_beta_learns_on_the_first_step():
    stream = create(preset="identity")
    sublayers = [nn.Linear(6, 6).double() for _ in stream.sites]
    stream(normal(2, 3, 6), sublayers).backward(normal(2, 3, 6, seed=4))
    for name, parameter in stream.named_parameters():
        learns = "beta" in name or name == "final_norm.weight"
        assert parameter.grad is not None and (parameter.grad.abs().max() > 0) == learns, name
    assert all(p.grad is None or p.grad.abs().max() == 0 for layer in sublayers for p in layer.parameters())


# Controls.


def test_the_fixed_random_gate_is_drawn_at_reset_saved_and_not_learned():
    one, again, other = create(gate="fixed_random"), create(gate="fixed_random"), create(gate="fixed_random", seed=1)
    name = "sites.0.gate_matrix"
    assert name in one.state_dict() and name not in dict(one.named_parameters())
    assert torch.equal(one.state_dict()[name], again.state_dict()[name])
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])
    assert one.state_dict()[name].std() > 0.2


def test_what_each_gate_depends_on():
    x, other, v, w = (normal(1, 4, 6, seed=s) for s in (2, 3, 4, 5))

    def gate(site, state, update):
        return site.gates(state, site.read(state)[1], update)["gate"]

    for kind, reads_state, reads_update in (
        ("learned", True, False),
        ("fixed_random", True, False),
        ("input_independent", False, False),
        ("update", False, True),
    ):
        site = site_of(gate=kind)
        assert torch.equal(gate(site, x, v), gate(site, other, v)) != reads_state, kind
        assert torch.equal(gate(site, x, v), gate(site, x, w)) != reads_update, kind
        written = site.write(torch.zeros_like(x), v, site.read(x)[1])
        torch.testing.assert_close(written, site.read(x)[1]["beta"] * gate(site, x, v) * v)
    assert "gate" not in site_of(gate="update").gates(x, site_of(gate="update").read(x)[1])


def test_gates_can_read_the_normalised_state():
    site = site_of(gate_input="norm")
    x = normal(1, 4, 6)
    near, far = site.read(x)[1], site.read(1000 * x)[1]
    torch.testing.assert_close(near, far, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(site_of().read(x)[1]["beta"], site_of().read(1000 * x)[1]["beta"], atol=1e-2)


def test_write_only_has_no_alpha_and_erases_nothing():
    stream = create(write_only=True)
    assert not any("alpha" in name for name, _ in stream.named_parameters())
    x = normal(1, 4, 6)
    assert (stream.sites[0].gates(x, stream.sites[0].read(x)[1])["erase"] == 0).all()


@pytest.mark.parametrize(("per", "count"), [("sublayer", 6), ("layer", 3), ("network", 1)])
def test_alpha_is_shared_as_asked_and_stays_so_in_a_copy(per, count):
    stream = create(depth=3, alpha_per=per)
    for made in (stream, copy.deepcopy(stream)):
        owned = [p for name, p in made.named_parameters(remove_duplicate=False) if name.endswith(".value")]
        assert len(owned) == count
        assert {id(site.alpha.value) for site in made.sites} == {id(p) for p in owned}
    assert stream.sites[0].alpha.value is not copy.deepcopy(stream).sites[0].alpha.value
    hinted = [pattern for pattern in stream.group_hints() if pattern.endswith("value")]
    assert hinted == ["sites.*.alpha.value" if per == "sublayer" else "alphas.*.value"]


def test_positive_alpha_stays_positive():
    site = site_of(alpha_kind="positive", alpha=0.5)
    with torch.no_grad():
        site.alpha.value.fill_(-30.0)
    assert 0 < site.alpha().item() < 1e-12


def test_coefficients_are_wide_in_a_bfloat16_stream():
    for form in FORMS:
        site = create(form=form, depth=1, dtype=torch.bfloat16).sites[0]
        x = normal(1, 3, 6, dtype=torch.bfloat16)
        normed, context = site.read(x)
        assert normed.dtype == torch.bfloat16 and all(c.dtype == torch.float32 for c in context.values())
        assert site.write(x, x, context).dtype == torch.bfloat16
        assert wide(x).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "delta", "gate": "update"}, "no gate"),
        ({"form": "delta_rank1", "gate_open": True}, "no gate"),
        ({"form": "soft_gate", "alpha": 0.1}, "no erase term"),
        ({"form": "soft_gate", "write_only": True}, "no beta"),
        ({"write_only": True, "alpha": 0.1}, "no erase term"),
        ({"alpha_kind": "fixed", "alpha_per": "layer"}, "no learned alpha"),
        ({"gate": "input_independent", "gate_spread": 0.5}, "no norm inside"),
        ({"direction_eps": 1e-3}, "no erase direction"),
        ({"gate_input": "norm", "input_norm": False}, "gate_input"),
        ({"gate_open": True, "gate_spread": 1.0}, "leave one out"),
        ({"preset": "residual", "alpha_kind": "positive"}, "alpha > 0"),
        ({"beta_scale": 0.0}, "beta_scale must be positive"),
        ({"beta_bias": math.inf}, "beta_bias must be finite"),
        ({"beta_std": -0.1}, "must not be negative"),
        ({"form": "mhc"}, "Known"),
    ],
)
def test_options_that_contradict_each_other_or_do_nothing_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        create(**options)


def test_a_clamped_erase_stops_alpha_at_its_edge_and_beta_brings_it_back():
    """Why the battery decides on dead parameters by several draws: outside [0, 2] on every token alpha has no gradient, beta has."""
    stream = connections.create("mgt", width=8, sites=Site.decoder(1), form="rank1", preset="stable").double()
    site, generator = stream.sites[0], torch.Generator().manual_seed(0)
    x, update = (torch.randn(2, 5, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    for alpha, learns in ((0.1, True), (-0.1, False)):  # beta is 0.1 everywhere at the start
        stream.zero_grad()
        with torch.no_grad():
            site.alpha.value.fill_(alpha)
        _, context = site.read(x)
        site.write(x, update, context).square().sum().backward()
        assert (site.alpha.value.grad.abs().item() > 0) is learns
        assert site.beta_bias.grad.abs().item() > 0
