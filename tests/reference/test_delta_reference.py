"""Deep Delta Learning against its loops: outputs and all gradients in float64, every combination of options."""

import itertools

import pytest
import torch
from torch import nn

from thalweg import connections
from thalweg.connections import Site, TokenMemory, Tokens
from thalweg.errors import InputError

BATCH, LENGTH, WIDTH = 2, 5, 4

STATES = [
    {},
    *(
        {"value_channels": 3, "compress": compress, "expand": expand}
        for compress in ("tokens", "channels")
        for expand in ("repeat", "convolution")
    ),
]
COMBINATIONS = [
    {**state, "gate": gate, "gate_hidden": 3, "value": value, "write_only": write_only}
    for state, gate, value, write_only in itertools.product(STATES, ("linear", "mlp"), ("paper", "code"), (False, True))
]
RICH = {"value_channels": 3, "expand": "convolution", "gate": "mlp", "gate_hidden": 3, "value": "code"}
SPECIAL = [
    {**RICH, "kernel": 1},
    {**RICH, "kernel": 2},
    {**RICH, "kernel": LENGTH + 2},
    {**RICH, "norm": "layernorm", "norm_bias": True, "update_norm": True},
    {"input_norm": False, "value": "code"},
    {"final_norm": False, "value_channels": 2, "compress": "channels"},
    {"direction_eps": 0.5},
    *({"fixed_beta": beta, "value_channels": 2} for beta in (0.5, 1.0, 2.0)),
]


class Mixer(nn.Module):
    """A nonlinear sublayer that looks back along the tokens."""

    def __init__(self, generator):
        super().__init__()
        for name in ("inner", "outer"):
            weight = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
            setattr(self, name, nn.Parameter(weight))

    def forward(self, x):
        return torch.tanh((x + x.cumsum(1)) @ self.inner) @ self.outer


def build(options, sites=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    sites = sites or Site.decoder(2)
    stream = connections.create("delta", width=WIDTH, sites=sites, **options).double()
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    sublayers = nn.ModuleList(Mixer(generator) for _ in sites)
    embedding = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return stream, sublayers, embedding, cotangent


def agree(options, tokens=None, sites=None):
    stream, sublayers, embedding, cotangent = build(options, sites)
    leaves = {"embedding": embedding, **dict(stream.named_parameters()), **dict(sublayers.named_parameters())}
    results = []
    for run in (stream, stream.reference):
        out = run(embedding, sublayers, tokens)
        results.append((out, torch.autograd.grad((out * cotangent).sum(), leaves.values())))
    (fast, fast_grads), (slow, slow_grads) = results
    torch.testing.assert_close(fast, slow, atol=1e-10, rtol=1e-10)
    for name, a, b in zip(leaves, fast_grads, slow_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
        assert b.abs().max() > 1e-8 or options.get("kernel", 0) > LENGTH, f"{name} is not exercised"


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_every_combination_equals_the_loops(options):
    agree(options)


@pytest.mark.parametrize("options", SPECIAL, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()))
def test_special_values_equal_the_loops(options):
    agree(options)


@pytest.mark.parametrize("compress", ["tokens", "channels"])
def test_padding_and_segments_equal_the_loops(compress):
    mask = torch.tensor([[False, True, True, True, True], [True, True, False, True, True]])
    segments = torch.tensor([[0, 0, 0, 1, 1], [4, 2, 2, 2, 7]])
    for tokens in (Tokens(mask=mask), Tokens(segments=segments), Tokens(mask=mask, segments=segments)):
        agree({**RICH, "compress": compress}, tokens)


def test_three_sublayers_a_layer_equal_the_loops():
    agree(RICH, sites=Site.stack(2, ("attention", "feed_forward", "feed_forward")))


def test_the_reference_wants_whole_sequences():
    stream, sublayers, embedding, _ = build(RICH)
    with pytest.raises(InputError, match="whole sequences"):
        stream.reference(embedding, sublayers, Tokens(memory=TokenMemory()))
