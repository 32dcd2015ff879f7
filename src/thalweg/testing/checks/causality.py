"""Does information flow only where it may: not from the future, not between batch entries, not along tokens unless declared?"""

import torch
from torch import Tensor

from thalweg.connections.base import Stream
from thalweg.connections.tokens import TokenMemory, Tokens
from thalweg.testing.compare import DoesNotApplyError, require, require_close
from thalweg.testing.subjects import BATCH, LENGTH, Subject, embedding_for, sublayers_for

STRICT = 1e-12


def causality(subject: Subject) -> None:
    """Changing a future token changes no past output: in a full pass, and within a chunk of cached decoding."""
    stream = subject.random()
    sublayers, embedding = sublayers_for(stream), embedding_for(stream)
    with torch.no_grad():
        output = stream(embedding, sublayers)
        for first in range(1, LENGTH):
            moved = stream(_changed_from(embedding, first), sublayers)
            require_close(
                f"output before token {first} after a change there", moved[:, :first], output[:, :first], STRICT
            )
            require(
                not torch.equal(moved[:, first:], output[:, first:]),
                f"a change from token {first} on changes nothing at all",
            )
        token_wise = sublayers_for(stream, along_tokens=False)
        kept, altered = (
            _second_chunk(stream, token_wise, e) for e in (embedding, _changed_from(embedding, LENGTH - 1))
        )
        require_close("output in a cached chunk before a changed token", altered[:, :-1], kept[:, :-1], STRICT)


def batch(subject: Subject) -> None:
    """Batch entries do not see each other: permuting them permutes the output, and one alone gives what it gives among others."""
    stream = subject.random()
    sublayers, embedding = sublayers_for(stream), embedding_for(stream, batch=BATCH + 1)
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        output = stream(embedding, sublayers)
        require_close("output of a permuted batch", stream(embedding[order], sublayers), output[order])
        require_close("output of one batch entry alone", stream(embedding[1:2], sublayers), output[1:2])


def token_order(subject: Subject) -> None:
    """With token-wise sublayers, permuting the tokens permutes the output (for those that do not look along tokens)."""
    stream = subject.random()
    if stream.looks_along_tokens:
        raise DoesNotApplyError("this connection looks along the token axis")
    sublayers, embedding = sublayers_for(stream, along_tokens=False), embedding_for(stream)
    order = torch.tensor([3, 0, 4, 2, 1])
    with torch.no_grad():
        output = stream(embedding, sublayers)
        require_close("output of permuted tokens", stream(embedding[:, order], sublayers), output[:, order])


def _changed_from(embedding: Tensor, first: int) -> Tensor:
    changed = embedding.clone()
    changed[:, first:] = -3.0 * changed[:, first:] + 1.0
    return changed


def _second_chunk(stream: Stream, sublayers, embedding: Tensor) -> Tensor:
    memory, half = TokenMemory(), LENGTH // 2
    stream(embedding[:, :half], sublayers, Tokens(memory=memory))
    return stream(embedding[:, half:], sublayers, Tokens(memory=memory))
