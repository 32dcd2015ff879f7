"""Highway: a learned gate per channel decides between the sublayer and the skip."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from thalweg.connections import register
from thalweg.connections.base import (
    ConnectionOptions,
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
from thalweg.ops.precision import full_precision, wide
from thalweg.registry import REFERENCE


@dataclass(frozen=True)
class HighwayOptions(ConnectionOptions):
    """bias: first value of the gate's bias; negative, so that the network starts by carrying (-1 to -3 are usual, lower
    when deeper). gate_std: standard deviation of the gate's initial weights.
    """

    bias: float = -2.0
    gate_std: float = 0.02

    def __post_init__(self):
        if not math.isfinite(self.bias):
            raise InputError(f"highway.bias must be a finite number, got {self.bias}; -1 to -3 are usual")
        if not (math.isfinite(self.gate_std) and self.gate_std >= 0):
            raise InputError(f"highway.gate_std must be zero or a positive number, got {self.gate_std}")


class HighwaySite(StreamSite):
    """x' = T * F(norm(x)) + (1 - T) * x with T = sigmoid(W x + b); W [d d] is gate_weight, b [d] is gate_bias."""

    def __init__(self, width: int, site: Site, options: HighwayOptions):
        super().__init__(width, site, options)
        self.bias, self.std = options.bias, options.gate_std
        self.gate_weight = nn.Parameter(torch.zeros(width, width))
        self.gate_bias = nn.Parameter(torch.full((width,), self.bias))

    def read(self, state, tokens=None):
        """The context is the gate T [b t d], in float32 or wider."""
        with full_precision(shaped(state, self.input_norm.width)):
            gate = torch.sigmoid(F.linear(wide(state), wide(self.gate_weight), wide(self.gate_bias)))
        return self.input_norm(state), gate

    def write(self, state, update, context):
        return (context * self.update_norm(update) + (1 - context) * state).to(state.dtype)

    def gates(self, state, context, update=None):
        return {"gate": context, "erase": context}

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.normal_(self.gate_weight, std=self.std)
        nn.init.constant_(self.gate_bias, self.bias)


@register(
    "highway",
    summary="gated mean of sublayer and skip: x' = T * F(norm(x)) + (1 - T) * x, T = sigmoid(W x + b)",
    source="Srivastava et al. 2015 (arXiv 1505.00387)",
)
class Highway(Stream):
    """Stream in which every channel of every token is a weighted mean of the sublayer's output and of what was there.

    Shapes: state [b t d]; gate T [b t d].
    Errors: InputError for a bias that is not finite or a negative gate_std.
    Source: Srivastava et al. 2015 (arXiv 1505.00387). The gate reads the raw stream, as there; the sublayer reads it
    normalised, which the source does not.
    """

    Options = HighwayOptions
    SiteModule = HighwaySite
    facts = Facts(
        source="Srivastava et al. 2015, arXiv 1505.00387",
        equation="T = sigmoid(W x + b)\nx' = T * F(norm(x)) + (1 - T) * x",
        words="A gate T [b t d] is computed from the raw stream [b t d] by a full matrix W [d d] and a bias b [d]. The "
        "sublayer reads the normalised stream; each channel becomes T parts of its output and 1 - T parts of its old "
        "value. b starts negative: carry.",
        constraint="convex in every channel; with the gate held, the skip Jacobian is diag(1 - T), entries in (0, 1)",
        chosen=(
            "b starts at -2 (the source: -1 to -3, lower when deeper), so T starts near 0.12",
            "W starts normal with standard deviation 0.02",
            "initial weights of sublayers: the model's own distribution, without a factor for depth",
        ),
        deviations=(
            "a Transformer sublayer stands for the source's H, and reads the normalised stream (input_norm)",
            "a final norm, as in any pre-norm stack",
        ),
        verified=(REFERENCE,),
        bibtex="@article{srivastava2015highway, title={Highway Networks}, author={Srivastava, Rupesh Kumar and Greff, "
        'Klaus and Schmidhuber, J{\\"u}rgen}, journal={arXiv:1505.00387}, year={2015}}',
    )

    def requirements(self, site):
        return Requirements()

    def group_hints(self):
        return {"sites.*.gate_bias": GroupHint(weight_decay=0.0)}

    @classmethod
    def variants(cls):
        return [{"input_norm": False, "final_norm": False, "bias": 1.0}]

    def reference(self, embedding, sublayers, tokens=None):
        d, x = self.width, embedding
        for site, sublayer in zip(self.sites, sublayers, strict=True):
            update = sublayer(each_token(lambda row, s=site: reference_norm(s.input_norm, row), x))

            def write(row, u, s=site):
                u, out = reference_norm(s.update_norm, u), []
                for i in range(d):
                    logit = s.gate_bias[i] + sum(s.gate_weight[i, j] * row[j] for j in range(d))
                    gate = 1 / (1 + torch.exp(-logit))
                    out.append(gate * u[i] + (1 - gate) * row[i])
                return torch.stack(out)

            x = each_token(write, x, update)
        return each_token(lambda row: reference_norm(self.final_norm, row), x)
