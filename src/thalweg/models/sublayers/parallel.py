"""Attention and feed-forward side by side, as one composite sublayer."""

from thalweg.models.sublayers.attention import Attention
from thalweg.models.sublayers.base import Sublayer
from thalweg.models.sublayers.feed_forward import FeedForward


class Parallel(Sublayer):
    """y = attention(x) + feed_forward(x): both read the same input and write one update.

    Shapes: [b t d] -> [b t d]. Source: Wang and Komatsuzaki 2021 (GPT-J-6B); Chowdhery et al. 2022 (arXiv 2204.02311), Section 2.
    """

    kind = "parallel"

    def __init__(self, config, requirements, index):
        super().__init__(config, requirements, index)
        self.attention = Attention(config, requirements, index)
        self.feed_forward = FeedForward(config, requirements, index)

    def forward(self, x, view, cache=None):
        return self.attention(x, view, cache) + self.feed_forward(x, view)

    def branches(self, x, view, cache=None):
        return {"attention": self.attention(x, view, cache), "feed_forward": self.feed_forward(x, view)}

    def maps(self):
        yield from self.attention.maps()
        yield from self.feed_forward.maps()
