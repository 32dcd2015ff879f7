"""Does ``torch.compile`` see one graph, and the same numbers?"""

import torch
from torch import Tensor

from thalweg.connections.base import Tokens
from thalweg.testing.compare import BrokenError, differentiate, require_same
from thalweg.testing.subjects import LENGTH, Subject, embedding_for, sublayers_for


def compiled(subject: Subject) -> None:
    """``torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")`` gives the same outputs and gradients at two lengths and at length 1."""
    stream = subject.random(depth=1)
    sublayers = sublayers_for(stream)

    def whole(embedding: Tensor, mask: Tensor | None) -> Tensor:
        return stream(embedding, sublayers, None if mask is None else Tokens(mask=mask))

    torch._dynamo.reset()  # the number of graphs is limited per process, and whole() is the same code for every subject
    fast = torch.compile(whole, backend="aot_eager", fullgraph=True, dynamic=True)
    try:
        for length in (LENGTH, LENGTH + 2, 1):
            embedding = embedding_for(stream, length=length)
            mask = torch.ones(embedding.shape[:2], dtype=torch.bool) if stream.looks_along_tokens else None
            want = differentiate(lambda e, *_, m=mask: whole(e, m), stream, sublayers, embedding)
            got = differentiate(lambda e, *_, m=mask: fast(e, m), stream, sublayers, embedding)
            require_same(got, want, f"eager at length {length}")
    except torch._dynamo.exc.TorchDynamoException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise BrokenError(f"does not compile as one graph: {' '.join(lines[:3])}") from error
    finally:
        torch._dynamo.reset()
