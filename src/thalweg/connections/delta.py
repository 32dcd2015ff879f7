"""Deep Delta Learning: every sublayer erases along one direction of the state and writes a new value there."""

import warnings
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from thalweg.connections import register
from thalweg.connections._delta_channels import CompressChannels, CompressTokens, ExpandTokens, Only, Repeat
from thalweg.connections._delta_coefficients import FixedGate, Gate, Value
from thalweg.connections._stream_references import sigmoid
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
    shaped,
)
from thalweg.errors import InputError
from thalweg.ops.rank_one import check_direction_eps, delta, direction, write
from thalweg.registry import REFERENCE

BETA_START = (0.01, 1.99)  # outside, the sigmoid of the gate is flat and the gate hardly learns


@dataclass(frozen=True)
class DeltaOptions(ConnectionOptions):
    """Options of the delta connection; the norm slots are those of every connection.

    value_channels: 1 keeps the vector state, more give the matrix state (the source uses 4).
    compress: what reads the matrix state, ``tokens`` (TC) or ``channels`` (CC).
    expand: what makes the matrix state from the embedding, ``repeat`` or ``convolution`` (EC).
    kernel: how many tokens TC and EC see, the present one included.
    gate: map from the normalised input to the logit of beta, ``linear`` or ``mlp`` (tanh, ``gate_hidden`` units).
    gate_hidden: hidden units of the ``mlp`` gate.
    beta_start: beta of the untrained network, inside (0, 2); drawn into [0.01, 1.99] with a warning.
    fixed_beta: a constant in [0, 2] in place of the gate (none: the gate): 0 keeps, 1 replaces, 2 reflects.
    value: what is written: ``paper`` is linear in the normalised input; ``code`` is 4 sigmoid(linear) of the input before its norm.
    write_only: whether nothing is erased: the control X + beta k v^T.
    direction_eps: smooths the write direction: eps of k = h / sqrt(|h|^2 + eps^2).
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
        check_direction_eps(self.direction_eps)
        if self.fixed_beta is not None and not 0 <= self.fixed_beta <= 2:
            raise InputError(f"fixed_beta must be in [0, 2], got {self.fixed_beta}")
        if not 0 < self.beta_start < 2:
            raise InputError(
                f"beta_start must be inside (0, 2), got {self.beta_start}: at the ends the gate has an infinite logit "
                "and is dead; use fixed_beta to hold beta there"
            )
        clamped = min(max(self.beta_start, BETA_START[0]), BETA_START[1])
        if clamped != self.beta_start:
            warnings.warn(
                f"beta_start={self.beta_start} is drawn to {clamped}: beyond it the gate hardly learns", stacklevel=3
            )
            object.__setattr__(self, "beta_start", clamped)  # so that every record shows the value that runs


class Strokes(NamedTuple):
    """What a read says of the coming write: beta [b t] and v [b t n]."""

    beta: Tensor
    v: Tensor


class DeltaSite(StreamSite):
    """x = compress(X); c = norm(x); k = direction(F(c)); X' = X + beta(c) k (v^T - k^T X)."""

    compress: nn.Module

    def __init__(self, width: int, site: Site, options: DeltaOptions):
        super().__init__(width, site, options)
        self.options = options
        if options.fixed_beta is None:
            hidden = options.gate_hidden if options.gate == "mlp" else None
            self.gate = Gate(width, options.beta_start, hidden)
        else:
            self.gate = FixedGate(options.fixed_beta)
        self.value = Value(width, options.value_channels, bounded=options.value == "code")

    def use(self, compress: nn.Module) -> None:
        """Read through ``compress`` without owning it: the stream does, so that it is named, saved and reset once."""
        self.__dict__["compress"] = compress

    def read(self, state, tokens=None):
        shaped(state, self.options.value_channels, self.input_norm.width)
        x = self.compress(state, tokens, self.site)
        c = self.input_norm(x)
        return c, Strokes(self.gate(c), self.value(x if self.options.value == "code" else c))

    def write(self, state, update, context):
        k = direction(self.update_norm(update), self.options.direction_eps)
        return (write if self.options.write_only else delta)(state, k, context.v, context.beta)

    def gates(self, state, context, update=None):
        erase = torch.zeros_like(context.beta) if self.options.write_only else context.beta
        return {"beta": context.beta, "erase": erase}

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.gate.reset_parameters()
        self.value.reset_parameters()


@register(
    "delta",
    summary="Deep Delta Learning: erase and rewrite along the sublayer's direction, X' = X + beta k (v^T - k^T X)",
    source="Zhang et al. 2026, Deep Delta Learning (arXiv 2601.00417)",
    aliases=("ddl",),
)
class Delta(Stream):
    """Deep Delta Learning, with the vector state or the matrix state of several value channels.

    Shapes: state [b t n d], n value channels of width d (the paper's d x n, transposed); n = 1 is the vector state.
    One compressor is shared by the sublayers of a layer and applied before each; one more precedes the final norm.
    Depth: the shortcut contracts, the layer need not, for k turns with the state. Measured at the start with 200 random
    sublayers: the gradient grows 1e4 times at width 32 and 6 times at width 128 (``write_only``: 3 and 1.4 times).
    Raises: InputError for options that contradict each other, and for cached decoding with segments in some calls only.
    Source: Zhang et al. 2026, arXiv 2601.00417 v3; value ``code`` and initial weights from the authors' published code.
    """

    options: DeltaOptions
    Options = DeltaOptions
    SiteModule = DeltaSite
    facts = Facts(
        source="Zhang, Liu, Wang, Gu 2026, Deep Delta Learning, arXiv 2601.00417 v3: k-Map, vector and expanded state",
        equation=(
            "x = compress(X);  c = norm(x);  h = F(c)\n"
            "k = h / sqrt(|h|^2 + eps^2);  beta = 2 sigmoid(W_b c + b);  v = W_v c\n"
            "X' = X + beta k (v^T - k^T X)"
        ),
        words=(
            "The state [b t n d] holds n value channels. A sublayer reads their mixture [b t d] through a norm; what "
            "it returns [b t d] gives only a direction k. Along k every channel moves from what it holds towards a new "
            "value v [b t n], by the share beta [b t]; all else stays."
        ),
        constraint=(
            "for fixed k, beta, v the shortcut has spectrum {1 (d - 1 times), 1 - beta} on each channel, beta in "
            "(0, 2), orthogonal only at the ends; not the Jacobian of the layer, for k, beta and v depend on the state"
        ),
        chosen=(
            "the last map of the gate starts at 0: beta is beta_start at every token (published code: logit sd 0.5)",
            "weights of the value and of the hidden gate layer start as N(0, 0.5 / sqrt d), as in the published code",
            "compressors and expansion have no weight decay, which would pull them from the identity to zero",
            "no gain on the output maps of sublayers: the norm of h cancels it",
            "beta_start is drawn into [0.01, 1.99]",
        ),
        deviations=(
            "value='code' is the published code where it differs from the paper: 4 sigmoid(W x + b), x before its norm",
            "the state is stored transposed, [n d]",
            "compress='channels' is the paper's form, a weight per feature and channel, not the code's convolution",
        ),
        verified=(REFERENCE,),
        bibtex=(
            "@article{zhang2026deep, title={Deep Delta Learning}, author={Zhang, Yifan and Liu, Yifeng and Wang, "
            "Mengdi and Gu, Quanquan}, journal={arXiv:2601.00417}, year={2026}}"
        ),
    )

    def __init__(self, width, sites, options):
        super().__init__(width, sites, options)
        self.expand = self._make_expand()
        self.compressors = nn.ModuleDict({str(site.layer): self._make_compress() for site in self.layout})
        self.readout = self._make_compress()
        for site in self._delta_sites():
            site.use(self.compressors[str(site.site.layer)])

    def _delta_sites(self) -> list[DeltaSite]:
        return cast("list[DeltaSite]", list(self.sites))

    def _make_expand(self) -> nn.Module:
        o = self.options
        if o.expand == "repeat":
            return Repeat(o.value_channels)
        return ExpandTokens(self.width, o.value_channels, o.kernel)

    def _make_compress(self) -> nn.Module:
        o = self.options
        if o.value_channels == 1:
            return Only()
        if o.compress == "channels":
            return CompressChannels(self.width, o.value_channels)
        return CompressTokens(self.width, o.value_channels, o.kernel)

    def enter(self, embedding, tokens=None):
        return self.expand(shaped(embedding, self.width, what="embedding"), tokens, "expand")

    def leave(self, state, tokens=None):
        return self.final_norm(self.readout(state, tokens, "readout"))

    def observe(self, state):
        return state

    def reset_parameters(self) -> None:
        super().reset_parameters()
        parts: list[Any] = [self.expand, *self.compressors.values(), self.readout]
        for part in parts:
            part.reset_parameters()

    def requirements(self, site):
        return Requirements()

    def group_hints(self):
        parts = ("expand", "compressors", "readout")
        return {f"{part}.*": GroupHint(weight_decay=0.0) for part in parts if list(getattr(self, part).parameters())}

    def frozen(self):
        if self.options.fixed_beta != 0:
            return {}
        return dict.fromkeys(("sites.*", "compressors.*"), "beta is held at 0: nothing is ever written")

    @classmethod
    def variants(cls):
        matrix = {"value_channels": 3}
        return [
            {"gate": "mlp", "value": "code"},
            {"write_only": True},
            {"fixed_beta": 0.5},
            matrix,
            {**matrix, "compress": "channels"},
            {**matrix, "expand": "convolution", "value": "code"},
            {**matrix, "compress": "channels", "expand": "convolution", "gate": "mlp"},
            {**matrix, "write_only": True},
        ]

    @property
    def looks_along_tokens(self) -> bool:
        o = self.options
        return o.value_channels > 1 and o.kernel > 1 and (o.compress == "tokens" or o.expand == "convolution")

    def reference(self, embedding, sublayers, tokens=None):
        if tokens is not None and tokens.memory is not None:
            raise InputError("the loop-written reference sees whole sequences only; give it tokens without memory")
        batch, length, _ = embedding.shape
        channels = range(self.options.value_channels)

        def everywhere(function) -> list[list[Any]]:
            return [[function(i, t) for t in range(length)] for i in range(batch)]

        def along_tokens(taps, rows, i, t):
            total = torch.zeros_like(rows[0])
            for lag in range(min(len(taps), t + 1)):
                if _counts(tokens, i, t, t - lag):
                    total = total + taps[len(taps) - 1 - lag] * rows[t - lag]
            return total

        def expand(i, t):
            if not isinstance(self.expand, ExpandTokens):
                return [embedding[i, t] for _ in channels]
            return [along_tokens(self.expand.taps[:, j], embedding[i], i, t) for j in channels]

        def compress(module, state, i, t):
            if len(channels) == 1:
                return state[i][t][0]
            if self.options.compress == "channels":
                return sum(module.weight[j] * state[i][t][j] for j in channels)
            past = [[state[i][s][j] for s in range(t + 1)] for j in channels]
            return sum(module.read[j] * along_tokens(module.taps[:, j], past[j], i, t) for j in channels)

        def compressed(module, state):
            rows = everywhere(lambda i, t: compress(module, state, i, t))
            return torch.stack([torch.stack(row) for row in rows])

        state = everywhere(expand)
        for site, sublayer in zip(self._delta_sites(), sublayers, strict=True):
            x = compressed(self.compressors[str(site.site.layer)], state)
            c = each_token(lambda row, norm=site.input_norm: reference_norm(norm, row), x)
            parts = (site, state, x, c, sublayer(c))
            state = everywhere(lambda i, t, p=parts: _written(p[0], p[1][i][t], p[2][i, t], p[3][i, t], p[4][i, t]))
        return each_token(lambda row: reference_norm(self.final_norm, row), compressed(self.readout, state))


def _counts(tokens: Tokens | None, i: int, t: int, s: int) -> bool:
    """Whether token s of sequence i is real and of the segment of token t; for the reference."""
    if tokens is None:
        return True
    real = tokens.mask is None or bool(tokens.mask[i, s])
    return real and (tokens.segments is None or bool(tokens.segments[i, s] == tokens.segments[i, t]))


def _written(site: DeltaSite, state: list[Tensor], x: Tensor, c: Tensor, h: Tensor) -> list[Tensor]:
    """One token after one write, in loops: n rows [d] -> n rows [d]; for the reference."""
    o, gate, value = site.options, site.gate, site.value

    def dot(a, b) -> Any:
        return sum(p * q for p, q in zip(a, b, strict=True))

    h = reference_norm(site.update_norm, h)
    k = [h_m / torch.sqrt(dot(h, h) + o.direction_eps**2) for h_m in h]
    if isinstance(gate, FixedGate):
        beta = gate.beta
    else:
        z = c if gate.hidden is None else [torch.tanh(dot(row, c)) for row in gate.hidden]
        beta = 2 * sigmoid(dot(gate.weight[0], z) + gate.bias[0])
    written = []
    for j, row in enumerate(state):
        v = dot(value.weight[j], c) if value.bias is None else 4 * sigmoid(dot(value.weight[j], x) + value.bias[j])
        held = 0 if o.write_only else dot(k, row)
        written.append(torch.stack([row_m + beta * k_m * (v - held) for row_m, k_m in zip(row, k, strict=True)]))
    return written
