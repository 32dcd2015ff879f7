import pytest
import torch
from torch import nn

from thalweg import connections
from thalweg.connections import Site, Tokens

BATCH, LENGTH, WIDTH = 2, 8, 5
MASK = torch.tensor([[True] * 8, [False] * 2 + [True] * 6])
SEGMENTS = torch.tensor([[0] * 3 + [1] * 5, [0] * 8])


@pytest.mark.parametrize(
    "tokens", [None, Tokens(mask=MASK), Tokens(mask=MASK, segments=SEGMENTS)], ids=["plain", "mask", "segments"]
)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 3, "rank": 1},
        {"window": 4, "rank": 2, "strength": 0.6},
        {"window": 6, "rank": 3, "update_norm": True, "norm": "layernorm", "norm_bias": True},
        {"window": 4, "rank": 2, "subspace": "random", "input_norm": False},
        {"window": 4, "rank": 2, "strength": 0.0},
    ],
    ids=str,
)
def test_outputs_and_all_gradients_equal_the_reference(options, tokens):
    torch.manual_seed(0)
    stream = connections.create("tangent_projector", width=WIDTH, sites=Site.decoder(1), **options).double()
    sublayers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in stream.sites)
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    embedding = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn_like(embedding)
    leaves = [embedding, *stream.parameters(), *sublayers.parameters()]
    calls = [lambda x, f=f: torch.tanh(f(x)) for f in sublayers]

    got, want = stream(embedding, calls, tokens), stream.reference(embedding, calls, tokens)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    names = ["embedding", *dict(stream.named_parameters()), *dict(sublayers.named_parameters())]
    for name, a, b in zip(
        names, torch.autograd.grad(got, leaves, cotangent), torch.autograd.grad(want, leaves, cotangent), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
        assert b.abs().max() > 1e-6, f"{name} is not tested: its gradient is zero"


def test_the_reference_projects_nothing_where_the_states_do_not_span_the_rank():
    """A line of states, equal states: both say that a plane is not determined."""
    stream = connections.create("tangent_projector", width=WIDTH, sites=Site.decoder(1), window=4, rank=2).double()
    additive = connections.create("additive", width=WIDTH, sites=Site.decoder(1)).double()
    direction = torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    line = torch.arange(1.0, LENGTH + 1, dtype=torch.float64)[None, :, None] * direction + 1
    for embedding in (line, line[:, :1].expand(1, LENGTH, WIDTH)):
        calls = [lambda x: 0 * x + direction] * 2
        want = additive(embedding, calls)
        torch.testing.assert_close(stream(embedding, calls), want)
        torch.testing.assert_close(stream.reference(embedding, calls), want)
