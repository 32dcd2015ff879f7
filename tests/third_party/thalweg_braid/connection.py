"""A stream of several strands that a matrix ``mix[to, from]``, made from the state, moves at every site."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from thalweg.connections import ConnectionOptions, Equivalence, Facts, Mixing, Stream, StreamSite
from thalweg.connections.base import each_token, reference_norm
from thalweg.ops.precision import full_precision, wide


@dataclass(frozen=True)
class BraidOptions(ConnectionOptions):
    """streams: how many strands, an even number."""

    streams: int = 4


class Coefficients(NamedTuple):
    pre: Tensor  # [b t n], sums to one
    post: Tensor  # [b t n]
    mix: Tensor  # [b t to from], rows sum to one


class BraidSite(StreamSite):
    """x = pre . s; s' = mix s + post u. Everything but the bias of ``post`` starts uniform or at zero."""

    def __init__(self, width, site, options):
        super().__init__(width, site, options)
        self.n = options.streams
        self.maps = nn.Parameter(torch.empty(2 * self.n + self.n**2, width))
        self.bias = nn.Parameter(torch.empty(2 * self.n + self.n**2))
        self.forced: Tensor | None = None

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.zeros_(self.maps)
        start = torch.zeros(2 * self.n + self.n**2)
        start[self.n : 2 * self.n] = torch.tensor([1.0, -1.0]).repeat(
            self.n // 2
        )  # strands must differ, or nothing learns to mix
        start[2 * self.n :] = 3 * torch.eye(self.n).flatten()
        with torch.no_grad():
            self.bias.copy_(start)

    mixes = True

    def mixing(self, state, context):
        return Mixing(context.pre, context.post, context.mix)

    def force_mix(self, mix):
        self.forced = mix

    def coefficients(self, state):
        with full_precision(state):
            mean = wide(state).mean(2)
            logits = torch.tanh(mean) @ wide(self.maps).mT + wide(self.bias)
            pre, post, mix = logits.split([self.n, self.n, self.n**2], -1)
            mix = mix.unflatten(-1, (self.n, self.n)).softmax(-1)
            if self.forced is not None:
                mix = self.forced.to(mix).expand_as(mix)
            return Coefficients(pre.softmax(-1), 2 * post.sigmoid(), mix)

    def read(self, state, tokens=None):
        found = self.coefficients(state)
        with full_precision(state):
            x = torch.einsum("btn,btnd->btd", found.pre, wide(state))
        return self.input_norm(x.to(state.dtype)), found

    def write(self, state, update, context):
        with full_precision(state):
            moved = torch.einsum("btmn,btnd->btmd", context.mix, wide(state))
            return (moved + context.post.unsqueeze(-1) * wide(self.update_norm(update)).unsqueeze(2)).to(state.dtype)


class Braid(Stream):
    """Several strands, read by a weighted mean and written with a weight each. State [b t n d]."""

    Options = BraidOptions
    SiteModule = BraidSite
    facts = Facts(
        source="made for the tests",
        equation="s' = mix s + post F(norm(pre . s))",
        words="The sublayer reads a mean of the strands [b t n d]; a matrix [to, from] moves them and the update is added to each.",
    )

    @classmethod
    def variants(cls):
        return [{"streams": 2, "norm": "layernorm", "update_norm": True}]

    def enter(self, embedding, tokens=None):
        return embedding.unsqueeze(2).repeat(1, 1, self.options.streams, 1)

    def leave(self, state, tokens=None):
        return self.final_norm(wide(state).mean(2).to(state.dtype))

    def observe(self, state):
        return state

    def equals_at_start(self):
        o = self.options
        return Equivalence("additive", {"norm": o.norm, "update_norm": o.update_norm})

    def reference(self, embedding, sublayers, tokens=None):
        n = self.options.streams
        strands = [embedding] * n
        for site, sublayer in zip(self.sites, sublayers, strict=True):
            mean = sum(strands) / n

            def logit(row, i, site=site):
                return sum(torch.tanh(row[j]) * site.maps[i, j] for j in range(self.width)) + site.bias[i]

            def rows(i, mean=mean, logit=logit):
                return each_token(lambda row: logit(row, i), mean).unsqueeze(-1)

            pre = [torch.exp(rows(i)) for i in range(n)]
            x = sum(p * s for p, s in zip(pre, strands, strict=True)) / sum(pre)
            update = sublayer(each_token(lambda row, site=site: reference_norm(site.input_norm, row), x))
            update = each_token(lambda row, site=site: reference_norm(site.update_norm, row), update)
            after = []
            for to in range(n):
                weights = [torch.exp(rows(2 * n + to * n + source)) for source in range(n)]
                moved = sum(w * s for w, s in zip(weights, strands, strict=True)) / sum(weights)
                after.append(moved + 2 / (1 + torch.exp(-rows(n + to))) * update)
            strands = after
        return each_token(lambda row: reference_norm(self.final_norm, row), sum(strands) / n)
