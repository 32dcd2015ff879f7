"""A connection from outside the package: a stream that leaks, x' = (1 - rate) x + F(norm(x)), with a learned rate for each channel.

The same five steps as in CONTRIBUTING.md. In a distribution of its own the file is found through the entry point group
``thalweg.connections``; here importing it registers it. It is then a connection like any other: decoder, training, cost, reports.
"""

from dataclasses import dataclass

import torch
from torch import nn

from thalweg.connections import ConnectionOptions, Equivalence, Facts, GroupHint, Site, Stream, StreamSite, register
from thalweg.connections.base import each_token, reference_norm
from thalweg.connections.cost import measure_cost
from thalweg.errors import InputError
from thalweg.models import Decoder, DecoderConfig
from thalweg.ops.precision import wide
from thalweg.testing import check_connection


@dataclass(frozen=True)
class LeakyOptions(ConnectionOptions):
    """rate: what every channel loses at each sublayer at the start, in [0, 1)."""

    rate: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise InputError(f"rate must lie in [0, 1), got {self.rate}")


class LeakySite(StreamSite):
    """x' = (1 - rate) x + F(norm(x)), rate [d]."""

    def __init__(self, width: int, site: Site, options: LeakyOptions):
        super().__init__(width, site, options)
        self.start = options.rate
        self.rate = nn.Parameter(torch.zeros(width))

    def write(self, state, update, context):
        return ((1 - wide(self.rate)) * state + self.update_norm(update)).to(state.dtype)

    def gates(self, state, context, update=None):
        return {"erase": wide(self.rate).expand(state.shape)}

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.constant_(self.rate, self.start)


@register("leaky", summary="pre-norm residual that leaks: x' = (1 - rate) x + F(norm(x))", source="an example")
class Leaky(Stream):
    """Residual stream that loses a learned share of every channel at each sublayer. Shapes: state [b t d]; rate [d]."""

    Options = LeakyOptions
    SiteModule = LeakySite
    options: LeakyOptions
    facts = Facts(
        source="an example",
        equation="x' = (1 - rate) x + F(norm(x))",
        words="The sublayer reads the normalised stream [b t d]; its update [b t d] is added to the stream, of which each "
        "channel keeps the share 1 - rate [d].",
        constraint="skip Jacobian is diag(1 - rate)",
        chosen=("rate starts at 0",),
    )

    def group_hints(self):
        return {"sites.*.rate": GroupHint(weight_decay=0.0)}

    @classmethod
    def variants(cls):
        return [{"rate": 0.1}]

    def equals_at_start(self):
        return Equivalence("additive", self.options.slots()) if self.options.rate == 0 else None

    def reference(self, embedding, sublayers, tokens=None):
        x = embedding
        for site, sublayer in zip(self.sites, sublayers, strict=True):
            update = sublayer(each_token(lambda row, s=site: reference_norm(s.input_norm, row), x))
            update = each_token(lambda row, s=site: reference_norm(s.update_norm, row), update)
            x = each_token(
                lambda old, new, s=site: torch.stack([(1 - s.rate[i]) * old[i] + new[i] for i in range(len(old))]),
                x,
                update,
            )
        return each_token(lambda row: reference_norm(self.final_norm, row), x)


if __name__ == "__main__":
    checks = [
        "facts",
        "reference",
        "causality",
        "moves",
        "declared_start",
        "storage",
        "cost",
    ]  # all of them: leave ``only`` out
    print(check_connection("leaky", only=checks))
    print(measure_cost("leaky", width=512, sites=Site.decoder(12)).extra_parameters, "more parameters than additive")
    model = Decoder(
        DecoderConfig(vocab_size=64, width=32, depth=2, heads=2, connection="leaky", connection_options={"rate": 0.1})
    )
    ids = torch.randint(64, (2, 16))
    print("loss of the untrained decoder:", round(model(ids, labels=ids).loss.item(), 3))
