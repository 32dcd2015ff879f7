"""What every sublayer is: a map of [b t d] to [b t d] that can name its branches and its weights."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Bool, Float
from torch import Tensor, nn

from thalweg.connections import Requirements
from thalweg.models.cache import DecoderCache
from thalweg.models.config import DecoderConfig

if TYPE_CHECKING:
    from thalweg.models.sublayers.moe import ExpertLinear


@dataclass
class TokenView:
    """What the sublayers of one call share.

    cos, sin [b t w/2]: rotary angles of the tokens of this call; None with learned positions. allowed [b or 1, 1, t, p+t], True where a
    token may look; None: plain causal attention over the tokens of this call, in an encoder attention over all of them. real [b t], True
    where a token is no padding; None: all are. windowed: by window size, the same for the layers that see so many tokens only.
    """

    cos: Float[Tensor, "b t half"] | None
    sin: Float[Tensor, "b t half"] | None
    allowed: Bool[Tensor, "b 1 t k"] | None = None
    real: Bool[Tensor, "b t"] | None = None
    windowed: "dict[int, TokenView]" = field(default_factory=dict)


@dataclass(frozen=True)
class Map:
    """One linear map of a sublayer, or one per expert, for its initialisation.

    gained: it carries what the stream sees (value, attention output, feed-forward in and out), so ``Requirements.gain`` holds for it;
    queries, keys and gates only choose. last: the last map of its branch, which ``Requirements.output_gain`` is for.
    """

    linear: "nn.Linear | ExpertLinear"
    gained: bool = True
    last: bool = False


class Sublayer(nn.Module):
    """Base of the sublayers. ``index`` is the site it serves; its cache slot has the same number."""

    kind: ClassVar[str]

    def __init__(self, config: DecoderConfig, requirements: Requirements, index: int):
        super().__init__()
        self.requirements, self.index = requirements, index

    def forward(
        self, x: Float[Tensor, "b t d"], view: TokenView, cache: DecoderCache | None = None
    ) -> Float[Tensor, "b t d"]:
        raise NotImplementedError(f"{type(self).__name__} does not say what it computes")

    def branches(self, x: Tensor, view: TokenView, cache: DecoderCache | None = None) -> dict[str, Tensor]:
        """Named parts [b t d] whose sum is what :meth:`forward` returns; more than one for composite sublayers."""
        return {self.kind: self(x, view, cache)}

    def maps(self) -> Iterator[Map]:
        """Every linear map of the sublayer."""
        raise NotImplementedError(f"{type(self).__name__} does not name its maps")
