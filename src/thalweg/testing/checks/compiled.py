"""Does ``torch.compile`` see one graph, and the same numbers?"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from thalweg.connections.base import Tokens
from thalweg.testing.compare import BrokenError, differentiate, require_same
from thalweg.testing.subjects import LENGTH, Subject, embedding_for


def compiled(subject: Subject) -> None:
    """``torch.compile(fullgraph=True, backend="aot_eager")`` gives the same outputs and gradients at two lengths and at length 1.

    The token axis is symbolic, so that both lengths share one graph; length 1 is specialised by the compiler and has its own.
    """
    stream = subject.random(depth=1)
    sublayers = nn.ModuleList(nn.Tanh() for _ in stream.sites)

    def whole(embedding: Tensor, mask: Tensor | None) -> Tensor:
        return stream(embedding, sublayers, None if mask is None else Tokens(mask=mask))

    torch._dynamo.reset()  # the number of graphs is limited per process, and whole() is the same code for every subject
    graph = torch.compile(whole, backend="aot_eager", fullgraph=True)
    try:
        for length in (LENGTH, LENGTH + 2, 1):
            embedding = embedding_for(stream, length=length)
            mask = torch.ones(embedding.shape[:2], dtype=torch.bool) if stream.looks_along_tokens else None

            def fast(leaf: Tensor, *_: Any, mask: Tensor | None = mask) -> Tensor:
                for tensor in (leaf, mask):
                    if tensor is not None and tensor.shape[1] > 1:
                        torch._dynamo.mark_dynamic(tensor, 1)
                return graph(leaf, mask)

            def slow(leaf: Tensor, *_: Any, mask: Tensor | None = mask) -> Tensor:
                return whole(leaf, mask)

            want = differentiate(slow, stream, sublayers, embedding)
            require_same(differentiate(fast, stream, sublayers, embedding), want, f"eager at length {length}")
    except TorchDynamoException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise BrokenError(f"does not compile as one graph: {' '.join(lines[:3])}") from error
    finally:
        torch._dynamo.reset()
