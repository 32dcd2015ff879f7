"""DenseFormer: after each layer the stream becomes a learned sum of all states so far."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from thalweg.connections import register
from thalweg.connections.base import (
    ConnectionOptions,
    Equivalence,
    Facts,
    GroupHint,
    Site,
    Stream,
    StreamSite,
    each_token,
    reference_norm,
    shaped,
)
from thalweg.errors import InputError
from thalweg.ops.precision import wide
from thalweg.registry import REFERENCE


@dataclass(frozen=True)
class DenseFormerOptions(ConnectionOptions):
    """Options of DenseFormer.

    dilation: a layer averages itself and every dilation-th state before it. period: only every period-th layer averages.
    """

    dilation: int = 1
    period: int = 1

    def __post_init__(self) -> None:
        for name in ("dilation", "period"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")


class DenseFormerSite(StreamSite):
    """x' = x + F(norm(x)); after the last sublayer of a layer x' becomes sum_j weight[j] X_j over the states so far, itself last.

    The state is the tuple (x, X_0, X_1, ...): the stream, then what came out of the embedding and of each layer before its average.
    Slots that are not filled yet hold zeros.
    """

    def __init__(self, width: int, site: Site, options: DenseFormerOptions):
        super().__init__(width, site, options)
        done = site.layer + 1  # states of layers, the embedding left out
        ends = site.index % site.sublayers_per_layer == site.sublayers_per_layer - 1
        self.slot = done + 1 if ends else None
        averages = ends and done % options.period == 0
        self.slots: tuple[int, ...] = (
            tuple(range(done % options.dilation + 1, done + 2, options.dilation)) if averages else ()
        )
        self.weight = nn.Parameter(torch.zeros(len(self.slots))) if averages else None

    def read(self, state, tokens=None):
        return self.input_norm(shaped(state[0], self.input_norm.width)), None

    def parts(self, state):
        return state[0], state[1 : self.site.layer + 2]

    def write(self, state, update, context):
        x = state[0] + self.update_norm(update)
        if self.slot is None:
            return (x, *state[1:])
        state = (*state[: self.slot], x, *state[self.slot + 1 :])
        if self.weight is None:
            return (x, *state[1:])
        weight = wide(self.weight)
        total = weight[0] * wide(state[self.slots[0]])
        for j, slot in enumerate(self.slots[1:], start=1):
            total = total + weight[j] * wide(state[slot])
        return (total.to(x.dtype), *state[1:])

    def reset_parameters(self):
        super().reset_parameters()
        if self.weight is not None:
            with torch.no_grad():
                self.weight.zero_()
                self.weight[-1] = 1.0


@register(
    "denseformer",
    summary="after each layer the stream becomes a learned weighted sum of its own and all earlier states",
    source="Pagliardini et al. 2024, DenseFormer (arXiv 2402.02622)",
)
class DenseFormer(Stream):
    """Depth-weighted averaging: pre-norm layers, each followed by a learned sum over the states of all layers so far.

    Shapes: state (x, X_0, ..., X_depth), each [b t d]; weight of layer i [i + 1] with dilation 1.
    Raises: InputError for a dilation or period below 1.
    Source: Pagliardini et al. 2024, arXiv 2402.02622; the order of dilated slots as in the authors' code (epfml/DenseFormer, ff4aee83).
    """

    Options = DenseFormerOptions
    SiteModule = DenseFormerSite
    options: DenseFormerOptions
    facts = Facts(
        source="Pagliardini, Mohtashami, Fleuret, Jaggi 2024, DenseFormer, arXiv 2402.02622",
        equation="X_i = B_i(Y_{i-1}) with B_i a pre-norm layer;  Y_i = sum_{j <= i} a_{i,j} X_j;  Y_0 = X_0 (embedding)\n"
        "a_{i,i} starts at 1, the rest at 0",
        words="A layer [b t d] works as in the pre-norm network; then the stream is replaced by a weighted sum of the embedding and of what "
        "came out of all layers so far. The weights are learned scalars, the same for every token.",
        constraint="none",
        deviations=("the text of the paper was read in part; dilation and period follow the authors' code",),
        verified=(REFERENCE,),
        bibtex="@inproceedings{pagliardini2024denseformer, title={DenseFormer: Enhancing Information Flow in Transformers via Depth Weighted "
        "Averaging}, author={Pagliardini, Matteo and Mohtashami, Amirkeivan and Fleuret, Fran{\\c{c}}ois and Jaggi, Martin}, "
        "booktitle={NeurIPS}, year={2024}}",
    )

    def _own_sites(self) -> list[DenseFormerSite]:
        return cast("list[DenseFormerSite]", list(self.sites))

    def enter(self, embedding, tokens=None):
        depth = len({site.layer for site in self.layout})
        shaped(embedding, self.width, what="embedding")
        empty = embedding.new_zeros(()).expand_as(embedding)
        return (embedding, embedding, *[empty] * depth)

    def leave(self, state, tokens=None):
        return self.final_norm(state[0])

    def observe(self, state):
        return state[0].unsqueeze(2)

    def group_hints(self):
        return (
            {"sites.*.weight": GroupHint(weight_decay=0.0)}
            if any(s.weight is not None for s in self._own_sites())
            else {}
        )

    def equals_at_start(self):
        return Equivalence("additive", self.options.slots())

    @classmethod
    def variants(cls):
        return [{"dilation": 2}, {"period": 2}]

    def reference(self, embedding, sublayers, tokens=None):
        x, states = embedding, [embedding]
        for site, sublayer in zip(self._own_sites(), sublayers, strict=True):
            update = sublayer(each_token(lambda row, s=site: reference_norm(s.input_norm, row), x))
            x = x + each_token(lambda row, s=site: reference_norm(s.update_norm, row), update)
            if site.site.index % site.site.sublayers_per_layer < site.site.sublayers_per_layer - 1:
                continue
            states.append(x)
            layer = site.site.layer + 1
            if layer % self.options.period == 0:
                chosen = [j for j in range(layer + 1) if (layer - j) % self.options.dilation == 0]
                assert site.weight is not None
                x = sum((site.weight[k] * states[j] for k, j in enumerate(chosen)), torch.zeros_like(x))
        return each_token(lambda row: reference_norm(self.final_norm, row), x)
