"""Recomputing blocks changes no gradient; compiled blocks share their graphs and change no number."""

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from thalweg import connections
from thalweg.models import Decoder, DecoderCache, DecoderConfig, StreamTrace

# Tracing looks at .grad of activations and hides torch's warning by a hook that "warnings are errors" overtakes.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
VOCAB = 31


def make(seed=0, **changes):
    cfg = DecoderConfig(**{"vocab_size": VOCAB, "width": 16, "depth": 3, "heads": 2, "kv_heads": 1, **changes})
    return Decoder(cfg, generator=torch.Generator().manual_seed(seed))


def ids(length=8, batch=2, seed=0):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(decoder, x):
    decoder.zero_grad()
    out = decoder(x, labels=x)
    out.loss.backward()
    return out.logits.detach(), [parameter.grad.clone() for parameter in decoder.parameters()]


class Counting:
    """A backend that counts the graphs it is given, and traces them backwards too where asked."""

    def __init__(self, backwards=False):
        self.graphs, self.backwards = 0, backwards

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return aot_eager(graph, example_inputs) if self.backwards else graph


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", connections.names())
def test_checkpointed_gradients_are_bitwise_equal(name):
    plain, recomputed = make(connection=name), make(connection=name, gradient_checkpointing=True)
    entered = []
    recomputed.sublayers[0].register_forward_hook(lambda *_: entered.append(1))
    for ours, theirs in zip(gradients(plain, ids()), gradients(recomputed, ids()), strict=True):
        if isinstance(ours, torch.Tensor):
            assert torch.equal(ours, theirs)
        else:
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len(entered) == 2  # once forward, once more backward


def test_checkpointing_keeps_less():
    from thalweg.models.activations import KeptBytes

    kept = {}
    for checkpointing in (False, True):
        decoder = make(gradient_checkpointing=checkpointing, depth=6)
        with KeptBytes(decoder) as count:
            decoder(ids(), labels=ids())
        kept[checkpointing] = count.bytes
    assert kept[True] < 0.3 * kept[False]


def test_checkpointing_stands_back_for_a_cache_and_a_trace():
    decoder, trace, cache = make(gradient_checkpointing=True), StreamTrace(), DecoderCache()
    decoder(ids(), labels=ids(), trace=trace).loss.backward()
    assert len(trace.records) == 6
    decoder(ids(), cache=cache).logits.mean().backward()
    assert cache.length == 8


def test_the_whole_model_compiles_without_a_break_at_every_length():
    decoder = make(depth=2)
    compiled = torch.compile(decoder, fullgraph=True, backend="eager")  # breaks are the tracer's
    for length in (8, 5, 3, 1):
        x = ids(length)
        torch.testing.assert_close(compiled(x, labels=x).logits, decoder(x, labels=x).logits, rtol=1e-5, atol=1e-6)
    padded = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    masked = compiled(ids(5), attention_mask=padded).logits
    torch.testing.assert_close(masked, decoder(ids(5), attention_mask=padded).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_share_one_graph(checkpointing):
    counts = []
    for depth in (3, 8):
        torch._dynamo.reset()
        decoder, backend = make(depth=depth, gradient_checkpointing=checkpointing), Counting(backwards=depth == 3)
        plain = gradients(decoder, ids())
        decoder.compile_blocks(backend=backend)
        compiled = gradients(decoder, ids())
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-7)
        counts.append([backend.graphs])
        for length in () if checkpointing or depth > 3 else (5, 3):
            x = ids(length)
            torch.testing.assert_close(decoder(x).logits, decoder_eager(decoder, x), rtol=1e-5, atol=1e-6)
            counts[-1].append(backend.graphs)
    assert counts[0][:1] == counts[1]  # however deep
    assert counts[0][0] == 2  # the last layer reads no further
    assert counts[0][1:] in ([], [4, 4])  # the second length makes lengths dynamic, the third is free


def decoder_eager(decoder, x):
    with torch.compiler.set_stance("force_eager"):
        return decoder(x).logits


def test_a_compiled_model_decodes_with_a_cache_and_traces_uncompiled():
    decoder, backend = make().eval(), Counting()
    full = decoder(ids()).logits
    decoder.compile_blocks(backend=backend)
    cache, trace = DecoderCache(), StreamTrace()
    parts = [decoder(part, cache=cache).logits for part in ids().split([3, 1, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-5, atol=1e-6)
    decoder(ids(), trace=trace)
    assert len(trace.records) == 6 and backend.graphs == 0
