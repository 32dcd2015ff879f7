"""Hot operations shared by both stairs of the house; imports nothing of thalweg above this floor."""

from typing import TYPE_CHECKING

from thalweg._lazy import lazy

if TYPE_CHECKING:
    from thalweg.ops.doubly_stochastic import sinkhorn

__all__ = ["sinkhorn"]

__getattr__, __dir__ = lazy(__name__, {"doubly_stochastic": ("sinkhorn",)})
