"""Attention residuals: a sublayer reads a softmax-weighted sum of the embedding and of all earlier updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from thalweg.connections import register
from thalweg.connections.base import (
    ConnectionOptions,
    Equivalence,
    Facts,
    GroupHint,
    Requirements,
    Site,
    Stream,
    StreamSite,
    each_token,
    reference_norm,
    shaped,
)
from thalweg.errors import InputError
from thalweg.ops.norms import Norm
from thalweg.ops.precision import full_precision, wide
from thalweg.registry import REFERENCE


@dataclass(frozen=True)
class AttentionResidualsOptions(ConnectionOptions):
    """Options of attention residuals.

    block_size: updates added up into one source before the next begins; 1 keeps every update apart (the full form).
    """

    block_size: int = 1

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InputError(f"block_size must be at least 1, got {self.block_size}")


class DepthAttention(nn.Module):
    """One learned query over the sources of a token: weights = softmax_i(query . key_norm(source_i)).

    Shapes: sources, a list of s tensors [b t d] -> (sum [b t d], weights [b t s]).
    """

    def __init__(self, width: int, options: ConnectionOptions):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width))
        self.key_norm = Norm(width, "rmsnorm", eps=options.norm_eps)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        self.key_norm.reset_parameters()

    def forward(self, sources: list[Tensor]) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b t s"]]:
        values = torch.stack([wide(source) for source in sources], dim=2)
        with full_precision(values):
            weights = torch.softmax(self.key_norm(values) @ wide(self.query), -1)
            mixed = (weights.unsqueeze(-2) @ values).squeeze(-2)
        return mixed.to(sources[0].dtype), weights


class AttentionResidualsSite(StreamSite):
    """Reads norm(sum_i weight_i source_i); what the sublayer returns joins the source of its block. The state is the tuple of sources."""

    def __init__(self, width: int, site: Site, options: AttentionResidualsOptions):
        super().__init__(width, site, options)
        self.slot = 1 + site.index // options.block_size
        self.filled = self.slot + (
            site.index % options.block_size > 0
        )  # the running block is a source once it holds something
        self.attention = DepthAttention(width, options)

    def read(self, state, tokens=None):
        x, weights = self.attention([shaped(source, self.input_norm.width) for source in state[: self.filled]])
        return self.input_norm(x), weights

    def parts(self, state):
        return state[self.filled - 1], state[: self.filled - 1]

    def write(self, state, update, context):
        update = self.update_norm(update)
        source = (update if self.filled == self.slot else state[self.slot] + update).to(state[0].dtype)
        return (*state[: self.slot], source, *state[self.slot + 1 :])

    def gates(self, state, context, update=None):
        return {"depth_weight": context}

    def reset_parameters(self):
        super().reset_parameters()
        self.attention.reset_parameters()


@register(
    "attention_residuals",
    summary="each sublayer attends over the embedding and all earlier updates with one learned query: x = sum_i softmax(q . norm(v_i)) v_i",
    source="Kimi Team 2026, Attention Residuals (arXiv 2603.15031)",
    aliases=("attnres",),
)
class AttentionResiduals(Stream):
    """Attention over depth in place of the running sum; full (``block_size=1``) or by blocks of summed updates.

    Shapes: state: a tuple of 1 + ceil(sites / block_size) sources [b t d], the embedding first; unfilled ones hold zeros.
    ``observe`` gives the sum of the sources: the stream that an additive network would hold.
    Raises: InputError for a block size below 1.
    Source: Kimi Team 2026, arXiv 2603.15031, reconstructed from the public description and the operation of flash-linear-attention.
    """

    Options = AttentionResidualsOptions
    SiteModule = AttentionResidualsSite
    options: AttentionResidualsOptions
    facts = Facts(
        source="Kimi Team 2026, Attention Residuals, arXiv 2603.15031; reconstructed from its public description (the text was not read)",
        equation="v_0 = embedding;  h_l = sum_{i<l} a_{i,l} v_i;  a_{.,l} = softmax_i(q_l . rmsnorm(v_i));  v_l = F_l(norm(h_l))\n"
        "blocks: v_l are added up within a block; a sublayer attends over finished blocks and the running sum",
        words="Nothing is added to a running stream: the embedding and every update [b t d] are kept. A sublayer, and the end of the network, "
        "reads a sum of them with weights that a learned query [d] gives to each by a softmax over depth.",
        constraint="weights are positive and sum to one over the sources",
        chosen=(
            "queries start at zero (all sources weigh the same), as the public description says",
            "the end of the network attends with a query of its own before the final norm",
            "every attention and feed-forward sublayer is a layer of the equation",
        ),
        verified=(
            REFERENCE,
            "Liger: the attention over depth; outputs and gradients in float32",
        ),
        bibtex="@article{kimi2026attention, title={Attention Residuals}, author={{Kimi Team}}, journal={arXiv:2603.15031}, year={2026}}",
    )

    def __init__(self, width: int, sites: Sequence[Site], options: AttentionResidualsOptions):
        super().__init__(width, sites, options)
        self.sources = 1 + -(-len(self.layout) // options.block_size)
        self.readout = DepthAttention(width, options)

    def _own_sites(self) -> list[AttentionResidualsSite]:
        return cast("list[AttentionResidualsSite]", list(self.sites))

    def enter(self, embedding, tokens=None):
        shaped(embedding, self.width, what="embedding")
        empty = embedding.new_zeros(()).expand_as(embedding)
        return (embedding, *[empty] * (self.sources - 1))

    def leave(self, state, tokens=None):
        return self.final_norm(self.readout(list(state))[0])

    def observe(self, state):
        return torch.stack(state, 0).sum(0).unsqueeze(2)

    def reset_parameters(self):
        super().reset_parameters()
        self.readout.reset_parameters()

    def requirements(self, site):
        return Requirements()

    def group_hints(self):
        return {"*.query": GroupHint(weight_decay=0.0)}

    def frozen(self):
        return {"sites.0.attention.*": "the first sublayer has one source, whose weight is 1 whatever the query is"}

    @classmethod
    def variants(cls):
        return [{"block_size": 3}]

    def equals_at_start(self):
        o = self.options
        if not (o.input_norm and o.final_norm) or o.block_size > 1:
            return None  # equal weights over blocks are not equal weights over updates while a block is running
        # the mean for the sum: only the eps of a norm sees the factor
        return Equivalence("additive", o.slots(), o.norm_eps * self.sources**2)

    def reference(self, embedding, sublayers, tokens=None):
        values, block = [embedding], self.options.block_size

        def attend(attention: DepthAttention, rows: list[Tensor]) -> Tensor:
            scores = []
            for row in rows:
                key = reference_norm(attention.key_norm, row)
                scores.append(torch.exp((attention.query * key).sum()))
            return sum((s / sum(scores) * row for s, row in zip(scores, rows, strict=True)), torch.zeros_like(rows[0]))

        for index, (site, sublayer) in enumerate(zip(self._own_sites(), sublayers, strict=True)):
            h = each_token(lambda *rows, s=site: attend(s.attention, list(rows)), *values)
            update = sublayer(each_token(lambda row, s=site: reference_norm(s.input_norm, row), h))
            update = each_token(lambda row, s=site: reference_norm(s.update_norm, row), update)
            if index % block == 0:
                values.append(update)
            else:
                values[-1] = values[-1] + update
        end = each_token(lambda *rows: attend(self.readout, list(rows)), *values)
        return each_token(lambda row: reference_norm(self.final_norm, row), end)
