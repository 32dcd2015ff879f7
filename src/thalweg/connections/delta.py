"""Deep Delta Learning: every sublayer erases along one direction of the state and writes a new value there."""

import math
import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thalweg.connections import register
from thalweg.connections._delta_channels import CompressChannels, CompressTokens, ExpandTokens, Only, Repeat
from thalweg.connections.base import (
    ConnectionOptions,
    Facts,
    GroupHint,
    Requirements,
    Site,
    Stream,
    StreamSite,
    Tokens,
    each_token,
    reference_norm,
)
from thalweg.errors import InputError
from thalweg.ops.precision import full_precision, wide
from thalweg.ops.rank_one import delta, direction, write

BETA_START_RANGE = (0.01, 1.99)  # beyond it the sigmoid of the gate is flat and the gate does not learn


@dataclass(frozen=True)
class DeltaOptions(ConnectionOptions):
    """Options of the delta connection; the norm slots are those of every connection.

    value_channels: 1 keeps the vector state; more give the matrix state (the source uses 4).
    compress: what reads the matrix state, ``tokens`` (TC) or ``channels`` (CC). expand: what makes it from the embedding, ``repeat`` or
    ``convolution`` (EC). kernel: tokens seen by TC and EC. The three need value_channels > 1.
    gate: map from the normalised input to the logit of beta, ``linear`` or ``mlp`` (tanh, ``gate_hidden`` units).
    beta_start: beta of the untrained network, inside (0, 2); drawn into [0.01, 1.99], with a warning, where the gate can still learn.
    fixed_beta: a constant in [0, 2] in place of the gate (0 identity, 1 overwrite, 2 reflect).
    value: ``paper`` is linear in the normalised input; ``code`` is 4 sigmoid(linear) of the input before its norm.
    write_only: the control without erasure, X + beta k v^T. direction_eps: eps of k = h / sqrt(|h|^2 + eps^2).
    """

    value_channels: int = 1
    compress: Literal["tokens", "channels"] = "tokens"
    expand: Literal["repeat", "convolution"] = "repeat"
    kernel: int = 4
    gate: Literal["linear", "mlp"] = "linear"
    gate_hidden: int = 128
    beta_start: float = 1.0
    fixed_beta: float | None = None
    value: Literal["paper", "code"] = "paper"
    write_only: bool = False
    direction_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("value_channels", "kernel", "gate_hidden"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.value_channels == 1 and (self.compress, self.expand) != ("tokens", "repeat"):
            raise InputError(
                f"compress={self.compress!r} with expand={self.expand!r} needs the matrix state, got value_channels=1; "
                "set value_channels=4, or leave both at their defaults"
            )
        if not self.direction_eps > 0:
            raise InputError(f"direction_eps must be positive, got {self.direction_eps}")
        if self.fixed_beta is not None and not 0 <= self.fixed_beta <= 2:
            raise InputError(f"fixed_beta must be in [0, 2], got {self.fixed_beta}")
        if not 0 < self.beta_start < 2:
            raise InputError(
                f"beta_start must be inside (0, 2), got {self.beta_start}: at 0 and 2 the logit of the gate is infinite and the gate dead; "
                "use fixed_beta to hold beta at an end"
            )
        low, high = BETA_START_RANGE
        clamped = min(max(self.beta_start, low), high)
        if clamped != self.beta_start:
            warnings.warn(
                f"beta_start {self.beta_start} is drawn to {clamped}: outside [{low}, {high}] the gate hardly learns",
                stacklevel=2,
            )
            object.__setattr__(self, "beta_start", clamped)  # so that every record shows the value that runs


class Gate(nn.Module):
    """beta = 2 sigmoid(W c + b), or 2 sigmoid(W2 tanh(W1 c) + b): [b t d] -> [b t] in (0, 2), logits in float32 or wider.

    Starts at beta_start for every input: the last map is 0 and b = logit(beta_start / 2).
    """

    def __init__(self, width: int, options: DeltaOptions):
        super().__init__()
        self.start = options.beta_start
        mlp = options.gate == "mlp"
        self.hidden = nn.Parameter(torch.zeros(options.gate_hidden, width)) if mlp else None
        self.weight = nn.Parameter(torch.zeros(1, options.gate_hidden if mlp else width))
        self.bias = nn.Parameter(torch.zeros(1))

    def reset_parameters(self) -> None:
        if self.hidden is not None:
            nn.init.normal_(self.hidden, std=0.5 / math.sqrt(self.hidden.shape[1]))
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, math.log(self.start / (2 - self.start)))

    def forward(self, c: Tensor) -> Tensor:
        with full_precision(c):
            z = wide(c)
            if self.hidden is not None:
                z = torch.tanh(F.linear(z, wide(self.hidden)))
            return 2 * torch.sigmoid(F.linear(z, wide(self.weight), wide(self.bias))).squeeze(-1)

    def extra_repr(self) -> str:
        return f"start={self.start}, hidden={0 if self.hidden is None else self.hidden.shape[0]}"


class FixedGate(nn.Module):
    """The same beta everywhere: [b t d] -> [b t]."""

    def __init__(self, beta: float):
        super().__init__()
        self.beta = beta

    def reset_parameters(self) -> None:
        """Nothing to set."""

    def forward(self, c: Tensor) -> Tensor:
        return wide(c).new_full(c.shape[:2], self.beta)

    def extra_repr(self) -> str:
        return f"beta={self.beta}"


class Value(nn.Module):
    """v = W u, or 4 sigmoid(W u + b) with ``code``: [b t d] -> [b t n], in float32 or wider."""

    def __init__(self, width: int, options: DeltaOptions):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(options.value_channels, width))
        self.bias = nn.Parameter(torch.zeros(options.value_channels)) if options.value == "code" else None

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.5 / math.sqrt(self.weight.shape[1]))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, u: Tensor) -> Tensor:
        with full_precision(u):
            if self.bias is None:
                return F.linear(wide(u), wide(self.weight))
            return 4 * torch.sigmoid(F.linear(wide(u), wide(self.weight), wide(self.bias)))

    def extra_repr(self) -> str:
        return f"channels={self.weight.shape[0]}, form={'linear' if self.bias is None else '4 sigmoid'}"


class Strokes(NamedTuple):
    """What one pass over the state says of the coming write: beta [b t] and v [b t n]."""

    beta: Tensor
    v: Tensor


class DeltaSite(StreamSite):
    """x = compress(X); c = norm(x); k = direction(F(c)); X' = X + beta(c) k (v^T - k^T X)."""

    options: DeltaOptions
    compress: nn.Module  # owned by the stream, because the sublayers of one layer share it

    def __init__(self, width: int, site: Site, options: DeltaOptions):
        super().__init__(width, site, options)
        self.options = options
        self.gate = Gate(width, options) if options.fixed_beta is None else FixedGate(options.fixed_beta)
        self.value = Value(width, options)

    def share(self, compress: nn.Module) -> None:
        """Use ``compress`` without owning it: its parameters are named, saved and reset once, by the stream."""
        self.__dict__["compress"] = compress

    def read(self, state, tokens=None):
        x = self.compress(state, tokens, f"delta.compress.{self.site.index}")
        c = self.input_norm(x)
        return c, Strokes(self.gate(c), self.value(x if self.options.value == "code" else c))

    def write(self, state, update, context):
        k = direction(self.update_norm(update), self.options.direction_eps)
        return (write if self.options.write_only else delta)(state, k, context.v, context.beta)

    def gates(self, state, context):
        return {
            "beta": context.beta,
            "erase": torch.zeros_like(context.beta) if self.options.write_only else context.beta,
        }

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.gate.reset_parameters()
        self.value.reset_parameters()


@register(
    "delta",
    summary="Deep Delta Learning: erase and rewrite the state along the sublayer's direction, X' = X + beta k (v^T - k^T X)",
    source="Zhang et al. 2026, Deep Delta Learning (arXiv 2601.00417)",
    aliases=("ddl",),
)
class Delta(Stream):
    """Deep Delta Learning, with the vector state or the matrix state of ``value_channels`` columns.

    Shapes: state [b t n d], n value channels of width d, the transpose of the d x n matrix of the paper; n = 1 is the vector state.
    One compressor is shared by the sublayers of a layer and applied before each; another one reads the state before the final norm.
    Raises: InputError for options that contradict each other, and in cached decoding for segments given in only some of the calls.
    Source: Zhang et al. 2026, arXiv 2601.00417 v3; the value branch ``code`` and initial weights from the authors' published code.
    """

    options: DeltaOptions
    Options = DeltaOptions
    SiteModule = DeltaSite
    facts = Facts(
        source="Zhang, Liu, Wang, Gu 2026, Deep Delta Learning, arXiv 2601.00417 v3: k-Map form with vector and expanded state",
        equation=(
            "x = compress(X);  c = norm(x);  h = F(c)\n"
            "k = h / sqrt(|h|^2 + eps^2);  beta = 2 sigmoid(W_b c + b);  v = W_v c\n"
            "X' = X + beta k (v^T - k^T X)"
        ),
        words=(
            "The state [b t n d] holds n value channels. A sublayer reads their mixture [b t d] through a norm; what it returns [b t d] "
            "gives only a direction k. Along k every channel moves from its old content to a new value v [b t n] by the share beta [b t]; "
            "all else stays."
        ),
        constraint=(
            "for fixed k, beta, v the shortcut has spectrum {1 (d - 1 times), 1 - beta} on each channel, beta in (0, 2); orthogonal only "
            "in the limits 0 and 2. This is not the Jacobian of the layer, for k, beta and v depend on the state"
        ),
        chosen=(
            "the last map of the gate starts at 0, so beta is beta_start for every token (the published code draws it: logit sd about 0.5)",
            "value and hidden gate weights start as N(0, 0.5 / sqrt d), as every matrix of the published code did",
            "compressors and the expansion do not decay, so that decay does not pull them to zero",
            "no gain on output maps: the norm of h cancels it",
            "beta_start is drawn into [0.01, 1.99]",
        ),
        deviations=(
            "value='code' follows the published code where it differs from the paper: 4 sigmoid(W x + b) of the input before its norm",
            "the state is stored transposed, [n d]",
            "compress='channels' is the paper's form, one weight per feature and channel, not the code's convolution along the channels",
        ),
        bibtex="@article{zhang2026deep, title={Deep Delta Learning}, author={Zhang, Yifan and Liu, Yifeng and Wang, Mengdi and Gu, Quanquan}, journal={arXiv:2601.00417}, year={2026}}",
    )

    def __init__(self, width, sites, options):
        super().__init__(width, sites, options)
        self.expand = self._make_expand()
        self.compressors = nn.ModuleDict({str(site.layer): self._make_compress() for site in self.layout})
        self.readout = self._make_compress()
        for site in self.sites:
            site.share(self.compressors[str(site.site.layer)])

    def _make_expand(self) -> nn.Module:
        o = self.options
        return (
            ExpandTokens(self.width, o.value_channels, o.kernel)
            if o.expand == "convolution"
            else Repeat(o.value_channels)
        )

    def _make_compress(self) -> nn.Module:
        o = self.options
        if o.value_channels == 1:
            return Only()
        if o.compress == "channels":
            return CompressChannels(self.width, o.value_channels)
        return CompressTokens(self.width, o.value_channels, o.kernel)

    def enter(self, embedding, tokens=None):
        return self.expand(embedding, tokens, "delta.expand")

    def leave(self, state, tokens=None):
        return self.final_norm(self.readout(state, tokens, "delta.readout"))

    def observe(self, state):
        return state

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for module in (self.expand, *self.compressors.values(), self.readout):
            module.reset_parameters()

    def requirements(self, site):
        return Requirements()

    def group_hints(self):
        held = [
            name for name in ("expand", "compressors", "readout") if any(True for _ in getattr(self, name).parameters())
        ]
        return {f"{name}.*": GroupHint(weight_decay=0.0) for name in held}

    def frozen(self):
        if self.options.fixed_beta == 0:
            return {"sites.*.value.*": "beta is held at 0, so no value is ever written"}
        return {}

    @property
    def looks_along_tokens(self) -> bool:
        o = self.options
        return o.value_channels > 1 and o.kernel > 1 and (o.compress == "tokens" or o.expand == "convolution")

    def reference(self, embedding, sublayers, tokens=None):
        if tokens is not None and tokens.memory is not None:
            raise InputError("the loop-written reference sees whole sequences only; give it tokens without memory")
        batch, length, _ = embedding.shape
        channels = range(self.options.value_channels)

        def along_tokens(taps, rows, i, t):
            total = torch.zeros_like(rows[0])
            for lag in range(min(len(taps), t + 1)):
                if _counts(tokens, i, t, t - lag):
                    total = total + taps[len(taps) - 1 - lag] * rows[t - lag]
            return total

        def expand(i, t):
            if self.options.expand == "repeat":
                return [embedding[i, t] for _ in channels]
            return [along_tokens(self.expand.taps[:, j], embedding[i], i, t) for j in channels]

        def compress(module, state, i, t):
            if len(channels) == 1:
                return state[i][t][0]
            if self.options.compress == "channels":
                return sum(module.weight[j] * state[i][t][j] for j in channels)
            past = [[state[i][s][j] for s in range(t + 1)] for j in channels]
            return sum(module.read[j] * along_tokens(module.taps[:, j], past[j], i, t) for j in channels)

        def everywhere(function):
            return [[function(i, t) for t in range(length)] for i in range(batch)]

        state = everywhere(expand)
        for site, sublayer in zip(self.sites, sublayers, strict=True):
            module = self.compressors[str(site.site.layer)]
            x = torch.stack(
                [torch.stack(row) for row in everywhere(lambda i, t, m=module, s=state: compress(m, s, i, t))]
            )
            c = each_token(lambda row, s=site: reference_norm(s.input_norm, row), x)
            h = sublayer(c)
            state = everywhere(
                lambda i, t, s=site, old=state, x=x, c=c, h=h: _written(s, old[i][t], x[i, t], c[i, t], h[i, t])
            )
        x = torch.stack([torch.stack(row) for row in everywhere(lambda i, t: compress(self.readout, state, i, t))])
        return each_token(lambda row: reference_norm(self.final_norm, row), x)


def _counts(tokens: Tokens | None, i: int, t: int, s: int) -> bool:
    """Whether token s of sequence i is real and of the segment of token t; for the reference."""
    if tokens is None:
        return True
    real = tokens.mask is None or bool(tokens.mask[i, s])
    return real and (tokens.segments is None or bool(tokens.segments[i, s] == tokens.segments[i, t]))


def _written(site: DeltaSite, state: list[Tensor], x: Tensor, c: Tensor, h: Tensor) -> list[Tensor]:
    """The state of one token after one write, in loops: n rows [d] -> n rows [d]; for the reference."""
    o, width = site.options, range(len(h))

    def dot(a, b):
        return sum(p * q for p, q in zip(a, b, strict=True))

    def sigmoid(z):
        return 1 / (1 + torch.exp(-z))

    h = reference_norm(site.update_norm, h)
    k = [h[m] / torch.sqrt(dot(h, h) + o.direction_eps**2) for m in width]
    if o.fixed_beta is not None:
        beta = o.fixed_beta
    else:
        z = c if o.gate == "linear" else [torch.tanh(dot(row, c)) for row in site.gate.hidden]
        beta = 2 * sigmoid(dot(site.gate.weight[0], z) + site.gate.bias[0])
    written = []
    for j, row in enumerate(state):
        weight = site.value.weight[j]
        v = dot(weight, c) if o.value == "paper" else 4 * sigmoid(dot(weight, x) + site.value.bias[j])
        held = 0 if o.write_only else dot(k, row)
        written.append(torch.stack([row[m] + beta * k[m] * (v - held) for m in width]))
    return written
