"""What stands between reading the stream and writing to it."""

from thalweg.connections import Requirements
from thalweg.models.config import DecoderConfig
from thalweg.models.sublayers.attention import Attention
from thalweg.models.sublayers.base import Map, Sublayer, TokenView
from thalweg.models.sublayers.feed_forward import FeedForward
from thalweg.models.sublayers.moe import MixtureOfExperts
from thalweg.models.sublayers.parallel import Parallel
from thalweg.models.sublayers.prototypes import PrototypeLayer, Prototypes

KINDS: dict[str, type[Sublayer]] = {
    cls.kind: cls for cls in (Attention, FeedForward, Parallel, MixtureOfExperts, Prototypes)
}


def create(kind: str, config: DecoderConfig, requirements: Requirements, index: int) -> Sublayer:
    """The sublayer of ``kind`` for the site ``index``, made as the connection requires."""
    return KINDS[kind](config, requirements, index)


__all__ = [
    "KINDS",
    "Attention",
    "FeedForward",
    "Map",
    "MixtureOfExperts",
    "Parallel",
    "PrototypeLayer",
    "Prototypes",
    "Sublayer",
    "TokenView",
    "create",
]
