"""Cached decoding, left padding and packed documents give what the full pass gives."""

import torch
from torch import Tensor, nn

from thalweg.connections.base import Stream
from thalweg.connections.tokens import TokenMemory, Tokens
from thalweg.testing.compare import require_close
from thalweg.testing.subjects import BATCH, Subject, embedding_for, sublayers_for

LONG = 7
CHUNKS = (3, 2, 1, 1)  # a prefill in two pieces, then token by token


def decoding(subject: Subject) -> None:
    """Chunked prefill, then single tokens with a TokenMemory, equals the full pass; also after the batch was reordered (beams)."""
    stream = subject.random()
    sublayers, embedding = _token_wise(stream), embedding_for(stream, length=LONG)
    with torch.no_grad():
        full = stream(embedding, sublayers)
        for sizes in (CHUNKS, (1,) * LONG):
            require_close(f"output decoded in chunks of {sizes}", decode(stream, sublayers, embedding, sizes), full)
        rows = torch.tensor([1, 0, 1])
        memory = TokenMemory()
        start = stream(embedding[:, :4], sublayers, Tokens(memory=memory))
        require_close("output of the first chunk", start, full[:, :4])
        memory.select(rows)
        rest = stream(embedding[rows, 4:], sublayers, Tokens(memory=memory))
        require_close("output after the memory was reordered", rest, full[rows, 4:])


def padding(subject: Subject) -> None:
    """Left padding, different in every row, changes no real token: in the full pass and in cached decoding."""
    stream = subject.random()
    sublayers, embedding = _token_wise(stream), embedding_for(stream, length=LONG)
    mask = torch.ones(BATCH, LONG, dtype=torch.bool)
    mask[0, :3] = False
    with torch.no_grad():
        alone = stream(embedding[:1, 3:], sublayers), stream(embedding[1:], sublayers)
        padded = stream(embedding, sublayers, Tokens(mask=mask))
        decoded = decode(stream, sublayers, embedding, CHUNKS, mask)
    for how, output in (("left-padded", padded), ("left-padded and decoded in chunks", decoded)):
        require_close(f"output of a {how} row", output[:1, 3:], alone[0])
        require_close(f"output of a row without padding beside a {how} one", output[1:], alone[1])


def packing(subject: Subject) -> None:
    """Two documents packed into one row (``segments``) give what each gives alone."""
    stream = subject.random()
    sublayers, embedding = _token_wise(stream), embedding_for(stream, length=LONG)
    segments = torch.tensor([0, 0, 0, 1, 1, 1, 1]).expand(BATCH, LONG)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3]).expand(BATCH, LONG)
    with torch.no_grad():
        packed = stream(embedding, sublayers, Tokens(segments=segments, positions=positions))
        require_close("output of the first packed document", packed[:, :3], stream(embedding[:, :3], sublayers))
        require_close("output of the second packed document", packed[:, 3:], stream(embedding[:, 3:], sublayers))


def decode(
    stream: Stream, sublayers: nn.ModuleList, embedding: Tensor, sizes: tuple[int, ...], mask: Tensor | None = None
) -> Tensor:
    """Feed ``embedding`` in pieces through one memory."""
    memory, outputs, at = TokenMemory(), [], 0
    for size in sizes:
        here = slice(at, at + size)
        positions = torch.arange(at, at + size).expand(embedding.shape[0], size)
        tokens = Tokens(mask=None if mask is None else mask[:, here], positions=positions, memory=memory)
        outputs.append(stream(embedding[:, here], sublayers, tokens))
        at += size
    return torch.cat(outputs, 1)


def _token_wise(stream: Stream) -> nn.ModuleList:
    """Sublayers that see one token each: whatever crosses tokens then comes from the connection."""
    return sublayers_for(stream, along_tokens=False)
