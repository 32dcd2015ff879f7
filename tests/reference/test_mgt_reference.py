import itertools

import pytest
import torch
from torch import nn

from thalweg import connections
from thalweg.connections import Site

GATES = ("learned", "fixed_random", "input_independent", "update")
PRESETS = ("paper", "residual", "identity", "stable")
CASES = [
    *({"form": f, "gate": g, "preset": p} for f, g, p in itertools.product(("full", "rank1"), GATES, PRESETS)),
    *({"form": "soft_gate", "gate": g} for g in GATES),
    *({"form": f, "preset": p} for f, p in itertools.product(("delta", "delta_rank1"), PRESETS)),
    *({"gate": g, "gate_open": True, "gate_bias": 0.7} for g in GATES),
    *({"form": f, "write_only": True} for f in ("full", "delta", "rank1", "delta_rank1")),
    *({"form": f, "gate_input": "norm", "norm": "layernorm", "norm_bias": True} for f in ("full", "rank1")),
    *(
        {"form": f, "alpha": 1.4, "beta_shift": 1.0, "clamp_erase": True, "alpha_kind": "fixed"}
        for f in ("full", "rank1")
    ),
    {"gate": "update", "update_norm": True, "final_norm": False},
    {"alpha_kind": "positive", "alpha_per": "layer", "beta_scale": 1.5, "beta_shift": 0.2, "beta_scale_learned": True},
    {"form": "rank1", "alpha_per": "network", "beta_scale": 0.5, "direction_eps": 0.1},
    {"form": "soft_gate", "input_norm": False, "gate_spread": 0.4},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_outputs_and_all_gradients_equal_the_reference(options):
    width, depth = 4, 2
    torch.manual_seed(0)
    stream = connections.create("mgt", width=width, sites=Site.decoder(depth), **options).double()
    sublayers = nn.ModuleList(nn.Linear(width, width).double() for _ in stream.sites)
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    embedding = torch.randn(2, 2, width, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn_like(embedding)
    leaves = [embedding, *stream.parameters(), *sublayers.parameters()]
    calls = [lambda x, f=f: torch.tanh(f(x)) for f in sublayers]

    got, want = stream(embedding, calls), stream.reference(embedding, calls)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)
    names = ["embedding", *dict(stream.named_parameters()), *dict(sublayers.named_parameters())]
    for name, a, b in zip(
        names, torch.autograd.grad(got, leaves, cotangent), torch.autograd.grad(want, leaves, cotangent), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
        assert b.abs().max() > 1e-9, f"{name} is not tested: its gradient is zero"
