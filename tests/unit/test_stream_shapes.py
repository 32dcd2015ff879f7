"""A state of another width or number of streams is one clear line, at every connection, and costs no second graph."""

import pytest
import torch

from thalweg import connections
from thalweg.connections import Site
from thalweg.errors import ShapeError

SITES = Site.decoder(1)


def stream_of(name, **options):
    return connections.create(name, width=8, sites=SITES, **options)


@pytest.mark.parametrize("name", connections.names())
def test_an_embedding_that_does_not_fit(name):
    stream = stream_of(name)
    for wrong in (torch.zeros(2, 3, 9), torch.zeros(3, 8), torch.zeros(2, 3, 1, 8)):
        says = rf"the embedding must be a tensor \[batch, tokens, width 8\], got shape \[{', '.join(map(str, wrong.shape))}\]"
        with pytest.raises(ShapeError, match=says):
            stream.enter(wrong)
        with pytest.raises(ShapeError, match=says):
            stream(wrong, [torch.tanh] * 2)
    with pytest.raises(ShapeError, match=r"width 8.*got a list"):
        stream.enter([1.0])


@pytest.mark.parametrize("name", connections.names())
def test_a_state_of_another_width(name):
    stream, wider = stream_of(name), connections.create(name, width=9, sites=SITES)
    with pytest.raises(ShapeError, match=r"the state must be a tensor .*width 8.*, got shape .* 9\]"):
        stream.sites[0].read(wider.enter(torch.zeros(2, 3, 9)))


@pytest.mark.parametrize("name", ["mhc", "mhc_delta", "hyper_connections"])
def test_a_state_of_another_number_of_streams(name):
    site = stream_of(name, streams=3).sites[0]
    for wrong in (torch.zeros(2, 5, 4, 8), torch.zeros(2, 5, 8)):
        with pytest.raises(ShapeError, match=r"\[batch, tokens, streams 3, width 8\], got shape"):
            site.read(wrong)


@pytest.mark.parametrize(("name", "options"), [("mhc", {"dynamic": False, "mixer": "identity"}), ("additive", {})])
def test_the_check_is_in_no_graph(name, options):
    """One graph at symbolic lengths, and the compiler adds no guard on them."""
    stream, graphs = stream_of(name, **options), []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def whole(x):
        return stream(x, [torch.tanh] * 2)

    torch._dynamo.reset()
    fast = torch.compile(whole, backend=counting, fullgraph=True)
    for length in (5, 6, 9):
        x = torch.randn(2, length, 8)
        torch._dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(fast(x), whole(x))
    assert len(graphs) == 1
    torch._dynamo.reset()
