"""Does ``torch.compile`` see one graph, and the same numbers?"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from thalweg.connections.base import Stream
from thalweg.connections.tokens import Tokens
from thalweg.testing.compare import BrokenError, differentiate, require_same
from thalweg.testing.subjects import LENGTH, Subject, embedding_for


def compiled(subject: Subject) -> None:
    """``torch.compile(fullgraph=True)`` gives the same outputs and gradients at two lengths and at length 1.

    The token axis is symbolic, so that both lengths share one graph, which is traced forwards (``eager``: backwards it costs three times
    as much); length 1 is specialised by the compiler and has its own, which is traced backwards too (``aot_eager``). Options other than the
    defaults are compiled for one length, forwards alone, which is quicker.
    """
    stream = subject.random(depth=1)
    sublayers = nn.ModuleList(nn.Tanh() for _ in stream.sites)

    def whole(embedding: Tensor, mask: Tensor | None) -> Tensor:
        return stream(embedding, sublayers, None if mask is None else Tokens(mask=mask))

    graphs = (("eager", (LENGTH,)),) if subject.options else (("eager", (LENGTH, LENGTH + 2)), ("aot_eager", (1,)))
    try:
        for backend, lengths in graphs:
            torch._dynamo.reset()  # the number of graphs is limited per process, and whole() is the same code for every subject
            graph = torch.compile(whole, backend=backend, fullgraph=True)
            for length in lengths:
                _require_parity(whole, graph, stream, sublayers, length, symbolic=len(lengths) > 1)
    except TorchDynamoException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise BrokenError(f"does not compile as one graph: {' '.join(lines[:3])}") from error
    finally:
        torch._dynamo.reset()


def _require_parity(
    whole: Any, graph: Any, stream: Stream, sublayers: nn.ModuleList, length: int, *, symbolic: bool
) -> None:
    embedding = embedding_for(stream, length=length)
    mask = torch.ones(embedding.shape[:2], dtype=torch.bool) if stream.looks_along_tokens else None

    def fast(leaf: Tensor, *_: Any) -> Tensor:
        for tensor in (leaf, mask):
            if tensor is not None and symbolic:
                torch._dynamo.mark_dynamic(tensor, 1)
        return graph(leaf, mask)

    def slow(leaf: Tensor, *_: Any) -> Tensor:
        return whole(leaf, mask)

    want = differentiate(slow, stream, sublayers, embedding)
    require_same(differentiate(fast, stream, sublayers, embedding), want, f"eager at length {length}")
