"""Deep Delta Learning along the token axis: decoding, padding, segments, causality; and its convolution."""

import pytest
import torch
from torch.nn import functional as F

from thalweg import connections
from thalweg.connections import Site, TokenMemory, Tokens
from thalweg.errors import InputError
from thalweg.ops.causal_conv import causal_conv

BATCH, LENGTH, WIDTH = 2, 11, 6
STATES = [
    {},
    *(
        {"value_channels": 3, "compress": compress, "expand": expand}
        for compress in ("tokens", "channels")
        for expand in ("repeat", "convolution")
    ),
    {"value_channels": 2, "expand": "convolution", "kernel": 1},
    {"value_channels": 2, "expand": "convolution", "kernel": 7},
]
CONVOLVED = {"value_channels": 3, "expand": "convolution"}
SPLITS = [(4, 7), (1,) * LENGTH, (1, 2, 5, 1, 1, 1), (10, 1)]
SUBLAYERS = [torch.tanh] * 6  # token by token, so that only the connection can look along the tokens


def make(seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    stream = connections.create("delta", width=WIDTH, sites=Site.decoder(3), **options).double()
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return stream


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def in_chunks(stream, x, splits, mask=None, segments=None):
    """The whole sequence in calls of ``splits`` tokens, with one memory."""
    memory, outputs, start = TokenMemory(), [], 0
    for size in splits:
        part = slice(start, start + size)
        tokens = Tokens(
            mask=None if mask is None else mask[:, part],
            segments=None if segments is None else segments[:, part],
            memory=memory,
        )
        outputs.append(stream(x[:, part], SUBLAYERS, tokens))
        start += size
    assert start == x.shape[1]
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("options", STATES, ids=str)
def test_chunks_and_steps_equal_the_full_pass(options, splits):
    stream, x = make(**options), randn(BATCH, LENGTH, WIDTH)
    torch.testing.assert_close(in_chunks(stream, x, splits), stream(x, SUBLAYERS), atol=1e-12, rtol=0)


@pytest.mark.parametrize("splits", [(LENGTH,), *SPLITS], ids=str)
@pytest.mark.parametrize("options", STATES, ids=str)
def test_left_padding_changes_nothing(options, splits):
    stream, x = make(**options), 3 * randn(BATCH, LENGTH, WIDTH)
    padding = (5, 0)  # longer than a chunk of some splits
    mask = torch.arange(LENGTH) >= torch.tensor(padding)[:, None]
    padded = in_chunks(stream, x, splits, mask=mask)
    for row, pads in enumerate(padding):
        alone = stream(x[row : row + 1, pads:], SUBLAYERS)
        torch.testing.assert_close(padded[row : row + 1, pads:], alone, atol=1e-12, rtol=0)


@pytest.mark.parametrize("splits", [(LENGTH,), *SPLITS], ids=str)
@pytest.mark.parametrize("options", STATES, ids=str)
def test_packed_documents_do_not_see_each_other(options, splits):
    stream, x = make(**options), randn(BATCH, LENGTH, WIDTH)
    segments = torch.tensor([[0] * 4 + [1] * 7, [3] * 2 + [9] + [5] * 8])
    packed = in_chunks(stream, x, splits, segments=segments)
    for row in range(BATCH):
        for name in segments[row].unique():
            own = segments[row] == name
            alone = stream(x[row : row + 1, own], SUBLAYERS)
            torch.testing.assert_close(packed[row : row + 1, own], alone, atol=1e-12, rtol=0)


@pytest.mark.parametrize("options", STATES, ids=str)
def test_the_future_never_changes_the_past(options):
    stream, x = make(**options), randn(BATCH, LENGTH, WIDTH)
    before = stream(x, SUBLAYERS)
    for t in range(LENGTH):
        other = x.clone()
        other[:, t] += randn(BATCH, WIDTH, seed=t + 5)
        after = stream(other, SUBLAYERS)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.allclose(after[:, t], before[:, t])
        reached = not torch.allclose(after[:, t + 1 :], before[:, t + 1 :])
        assert reached == (stream.looks_along_tokens and t + 1 < LENGTH)


def test_padding_may_hold_anything():
    stream, x = make(**CONVOLVED), randn(BATCH, LENGTH, WIDTH)
    mask = torch.arange(LENGTH).expand(BATCH, -1) >= 3
    x[:, :3] = float("nan")
    out = stream(x, SUBLAYERS, Tokens(mask=mask))
    (out[:, 3:] * randn(BATCH, LENGTH - 3, WIDTH, seed=4)).sum().backward()
    assert out[:, 3:].isfinite().all()
    assert stream.expand.taps.grad.isfinite().all() and stream.readout.read.grad.isfinite().all()


def test_a_memory_follows_its_rows():
    stream, x = make(**CONVOLVED), randn(BATCH, LENGTH, WIDTH)
    rows, memory = torch.tensor([1, 1, 0]), TokenMemory()
    with torch.no_grad():
        stream(x[:, :6], SUBLAYERS, Tokens(memory=memory))
        memory.select(rows)
        out = stream(x[rows, 6:], SUBLAYERS, Tokens(memory=memory))
        torch.testing.assert_close(out, stream(x, SUBLAYERS)[rows, 6:], atol=1e-12, rtol=0)


def test_what_needs_no_past_keeps_none():
    for options in ({}, {"value_channels": 3, "compress": "channels"}):
        memory = TokenMemory()
        make(**options)(randn(BATCH, LENGTH, WIDTH), SUBLAYERS, Tokens(memory=memory))
        assert not memory.slots


def test_a_memory_keeps_only_what_the_kernel_reaches():
    memory = TokenMemory()
    make(**CONVOLVED)(randn(BATCH, LENGTH, WIDTH), SUBLAYERS, Tokens(memory=memory))
    assert len(memory.slots) == 1 + 6 + 1  # the expansion, six sites, the readout
    assert all(past.shape[1] == 3 for past, _ in memory.slots.values())


@pytest.mark.parametrize("first", [True, False])
def test_segments_in_some_calls_only_are_refused(first):
    stream, x, memory = make(**CONVOLVED), randn(BATCH, LENGTH, WIDTH), TokenMemory()
    segments = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    with torch.no_grad():
        stream(x, SUBLAYERS, Tokens(memory=memory, segments=segments if first else None))
        with pytest.raises(InputError, match="give segments in all or in none"):
            stream(x, SUBLAYERS, Tokens(memory=memory, segments=None if first else segments))


# The convolution itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [1, 3])
@pytest.mark.parametrize("kernel, length", [(1, 5), (4, 9), (4, 2), (4, 1)])
def test_causal_conv_is_torch_conv1d_padded_on_the_left(inputs, kernel, length):
    x, taps = randn(BATCH, length, inputs, WIDTH), randn(kernel, 3, WIDTH, seed=2)
    channels = x.expand(-1, -1, 3, -1).flatten(2).transpose(1, 2)
    weight = taps.permute(1, 2, 0).reshape(3 * WIDTH, 1, kernel)
    expected = F.conv1d(F.pad(channels, (kernel - 1, 0)), weight, groups=3 * WIDTH)
    expected = expected.transpose(1, 2).unflatten(2, (3, WIDTH))
    torch.testing.assert_close(causal_conv(x, taps), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(causal_conv(x, taps, contract=True), expected.sum(2), atol=1e-12, rtol=0)
    for last in range(1, length):
        torch.testing.assert_close(causal_conv(x, taps, last), expected[:, -last:], atol=1e-12, rtol=0)


@pytest.mark.parametrize("contract", [False, True])
def test_causal_conv_gradients(contract):
    x, taps = randn(1, 5, 2, 2).requires_grad_(), randn(3, 2, 2, seed=2).requires_grad_()
    mask, segments = torch.tensor([[True, False, True, True, True]]), torch.tensor([[0, 0, 0, 1, 1]])
    assert torch.autograd.gradcheck(
        lambda x, taps: causal_conv(x, taps, 4, mask=mask, segments=segments, contract=contract), (x, taps)
    )
