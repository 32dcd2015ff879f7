"""One layer of sublayers; it knows the protocol of connections and nothing of any connection."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from thalweg.connections import Requirements, Site, StreamSite, Tokens
from thalweg.models import sublayers
from thalweg.models.cache import DecoderCache
from thalweg.models.config import DecoderConfig
from thalweg.models.sublayers import Sublayer, TokenView
from thalweg.models.trace import SiteRecord, StreamTrace

Carry = tuple[Any, Any, Any]  # state, input of the next sublayer (None after the last), context of its read


class Block(nn.Module):
    """The sublayers of one layer.

    Its sites belong to the stream and come in at the call: so no parameter is registered twice, and blocks of one shape share one
    compiled graph.
    """

    def __init__(self, config: DecoderConfig, sites: Sequence[Site], requirements: Sequence[Requirements]):
        super().__init__()
        self.sublayers = nn.ModuleList(
            sublayers.create(site.kind, config, required, site.index)
            for site, required in zip(sites, requirements, strict=True)
        )

    def forward(
        self,
        carry: Carry,
        sites: Sequence[StreamSite],
        following: StreamSite | None,
        tokens: Tokens,
        view: TokenView,
        cache: DecoderCache | None = None,
        trace: StreamTrace | None = None,
    ) -> Carry:
        """Run the layer: carry -> carry. ``following`` is the first site of the next layer, None in the last."""
        for i, sublayer in enumerate(cast("list[Sublayer]", self.sublayers)):
            state, x, context = carry
            if trace is None:
                branches, update = {}, sublayer(x, view, cache)
            else:
                branches = sublayer.branches(x, view, cache)
                update = functools.reduce(torch.add, branches.values())
            behind = sites[i + 1] if i + 1 < len(sites) else following
            carry = sites[i].advance(behind, state, update, context, tokens)
            if trace is not None:
                trace.records.append(SiteRecord(sites[i].site, state, x, context, update, carry[0], branches))
        return carry
