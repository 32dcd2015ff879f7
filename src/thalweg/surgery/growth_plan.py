"""What a conversion makes larger, in one table: layers, heads, widths, one after the other."""

from dataclasses import dataclass
from typing import Any

import torch

from thalweg.errors import InputError
from thalweg.surgery.change import attentions
from thalweg.surgery.depth import grow_depth
from thalweg.surgery.heads import grow_heads
from thalweg.surgery.width import grow_width


@dataclass(frozen=True)
class Growth:
    """How much larger a model becomes: ``depth`` layers on top, ``heads`` query heads in every layer, the stream and the feed-forward
    sublayers as wide as ``width`` and ``ffn_width`` say (None: as they are). seed: of new weights that are drawn.

    Raises: InputError where nothing grows or a number is negative.
    """

    heads: int = 0
    width: int | None = None
    ffn_width: int | None = None
    depth: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("heads", "depth", "seed"):
            if getattr(self, name) < 0:
                raise InputError(
                    f"{name} cannot be negative, got {getattr(self, name)}; thalweg prune takes heads away"
                )
        if not (self.heads or self.depth) and self.width is None and self.ffn_width is None:
            raise InputError("nothing grows: give heads, width, ffn_width or depth")

    def apply(self, model: Any, *, allow_drift: bool = False) -> tuple[Any, bool, tuple[str, ...]]:
        """The grown model, whether it is the same function, and what was done, in words. Raises: InputError as the operations do."""
        generator = torch.Generator().manual_seed(self.seed)
        equal, words = True, []
        if self.depth:
            at = [model.config.depth] * self.depth
            model, change = grow_depth(model, at, allow_drift=allow_drift, generator=generator)
            equal = not change.drift
            words.append(change.what)
        if self.heads:
            layers = dict.fromkeys(attentions(model), self.heads)
            if not layers:
                raise InputError(f"layers {', '.join(model.config.layers)} have no heads; leave heads out")
            model, change = grow_heads(model, layers, generator=generator)
            words.append(f"grew {self.heads} heads in every layer")
        if self.width is not None or self.ffn_width is not None:
            model, change = grow_width(model, width=self.width, ffn_width=self.ffn_width, generator=generator)
            words.append(change.what)
        return model, equal, tuple(words)
