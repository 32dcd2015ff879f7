"""What a forward pass did to the stream, recorded for measurement."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from thalweg.connections import Site


@dataclass(frozen=True)
class SiteRecord:
    """One sublayer of one pass: ``read`` gave input and context, the sublayer gave update, ``write`` gave state_after.

    branches: the named parts of the update; more than one for a composite sublayer.
    """

    site: Site
    state_before: Any
    input: Tensor
    context: Any
    update: Tensor
    state_after: Any
    branches: dict[str, Tensor]


@dataclass
class StreamTrace:
    """Hand one to ``Decoder.forward``; afterwards it holds the state that entered, a record per site, and what the unembedding saw [b t d].

    Tensors are those of the pass itself: they carry gradients unless the pass ran without.
    """

    entered: Any = None
    records: list[SiteRecord] = field(default_factory=list)
    left: Tensor | None = None

    def clear(self) -> None:
        """Forget an earlier pass."""
        self.entered, self.left = None, None
        self.records.clear()
