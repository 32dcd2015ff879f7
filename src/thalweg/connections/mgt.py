"""The Manifold-Geometric Transformer: a soft gate on the update, a signed delta gate on the write, and what tells them apart.

The source calls its gate "mHC"; here it is the *soft gate* and never mHC: that name belongs to the manifold-constrained
hyper-connections of Xie et al. 2025 (arXiv 2512.24880), which mix several streams by a doubly stochastic matrix. The
soft gate has one stream and no matrix constraint; it is a sigmoid gate on the channels of the update.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
)
from thalweg.errors import InputError
from thalweg.ops.norms import Norm
from thalweg.ops.precision import full_precision, wide


@dataclass(frozen=True)
class Preset:
    """Where a site begins. All values are ours: the source states none.

    alpha: erase strength (None: 1 / number of sublayers). beta_shift: the constant epsilon. beta_bias, beta_std: start
    of b_beta and standard deviation of W_beta. gate_bias, gate_spread: start of the shift and scale of the LayerNorm
    inside the gate.
    clamp_erase: whether alpha * beta is held in [0, 2].
    """

    alpha: float | None = None
    beta_shift: float = 0.0
    beta_bias: float = 0.0
    beta_std: float = 0.0
    gate_bias: float = 0.0
    gate_spread: float = 1.0
    clamp_erase: bool = False


PRESETS = {
    "paper": Preset(beta_std=0.02),
    "residual": Preset(alpha=0.0, beta_shift=1.0, gate_bias=3.0),
    "identity": Preset(),
    "stable": Preset(alpha=0.1, beta_bias=math.atanh(0.1), clamp_erase=True),
}
GATED = ("full", "soft_gate", "rank1")
RANK_ONE = ("rank1", "delta_rank1")


@dataclass(frozen=True)
class MGTOptions(ConnectionOptions):
    """What is written, what the gates see, and where they begin. An option that is None takes the value of the preset.

    form: ``full`` (gate and delta, element-wise), ``soft_gate`` (x + G V), ``delta`` (element-wise, G = 1), ``rank1``
    (true rank-1 erase along the gated update), ``delta_rank1`` (the same with G = 1).
    preset: ``paper`` (the literal form), ``residual`` (beta = 1, alpha = 0, gate nearly open: starts near the pre-norm
    block), ``identity`` (beta = 0: every block starts as the identity), ``stable`` (beta = 0.1, alpha = 0.1, alpha *
    beta held in [0, 2]).
    gate: ``learned``; controls: ``fixed_random`` (W_gate is drawn and never learned), ``input_independent`` (one
    learned vector), ``update`` (the gate reads the update V instead of the state).
    gate_input: what the gate and beta read: the ``raw`` state, or the ``norm``-alised one (recommended from 48 layers).
    write_only: alpha = 0, not learned; nothing is erased.
    gate_open: the gate is divided by its start value, and the scale of its LayerNorm starts at 0: it is exactly 1 at
    start, trains, and ranges over [0, 1 / sigmoid(gate_bias)].
    alpha, alpha_kind, alpha_per: start of the erase strength; ``free``, ``positive`` (by softplus) or ``fixed``; one
    for each sublayer, layer or network. beta_scale: lambda, learned if beta_scale_learned. beta_shift: epsilon (1 gives
    the range [0, 2] of delta learning).
    beta_bias, beta_std, gate_bias, gate_spread, clamp_erase: see :class:`Preset`.
    direction_eps: k = u / sqrt(|u|^2 + direction_eps^2) in the rank-1 forms.
    """

    form: Literal["full", "soft_gate", "delta", "rank1", "delta_rank1"] = "full"
    preset: Literal["paper", "residual", "identity", "stable"] = "paper"
    gate: Literal["learned", "fixed_random", "input_independent", "update"] = "learned"
    gate_input: Literal["raw", "norm"] = "raw"
    write_only: bool = False
    gate_open: bool = False
    alpha: float | None = None
    alpha_kind: Literal["free", "positive", "fixed"] = "free"
    alpha_per: Literal["sublayer", "layer", "network"] = "sublayer"
    beta_scale: float = 1.0
    beta_scale_learned: bool = False
    beta_shift: float | None = None
    beta_bias: float | None = None
    beta_std: float | None = None
    gate_bias: float | None = None
    gate_spread: float | None = None
    clamp_erase: bool | None = None
    direction_eps: float = 1e-5

    def __post_init__(self) -> None:
        for used, part, names in (
            (self.gated, "gate", ("gate", "gate_open", "gate_bias", "gate_spread")),
            (self.gated and self.gate != "input_independent", "LayerNorm in its gate", ("gate_spread",)),
            (
                self.delta,
                "delta gate",
                ("write_only", "alpha", "alpha_kind", "alpha_per", "beta_scale", "beta_scale_learned"),
            ),
            (self.delta, "delta gate", ("beta_shift", "beta_bias", "beta_std", "clamp_erase")),
            (self.delta and not self.write_only, "erase term", ("alpha", "alpha_kind", "alpha_per", "clamp_erase")),
            (self.form in RANK_ONE, "direction", ("direction_eps",)),
        ):
            defaults = {f.name: f.default for f in fields(self)}
            idle = [name for name in names if getattr(self, name) != defaults[name]]
            if not used and idle:
                raise InputError(
                    f"form {self.form!r} with these options has no {part}, so {', '.join(idle)} would do nothing; leave it out"
                )
        if self.gate_input == "norm" and not self.input_norm:
            raise InputError(
                "gate_input 'norm' reads the input norm, which input_norm=false switches off; use gate_input 'raw'"
            )
        if self.gate_open and self.gate_spread:
            raise InputError(
                f"gate_open needs a gate that starts constant, got gate_spread {self.gate_spread}; leave it out"
            )
        if self.alpha_kind == "positive" and self.alpha_start(1) <= 0:
            raise InputError(
                f"alpha_kind 'positive' is a softplus and starts above 0, but alpha is {self.alpha_start(1)}; give alpha > 0 or another kind"
            )
        for name in ("beta_scale", "direction_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if self.start.beta_std < 0:
            raise InputError(f"beta_std must not be negative, got {self.start.beta_std}")

    @property
    def gated(self) -> bool:
        """Whether the form has the soft gate."""
        return self.form in GATED

    @property
    def delta(self) -> bool:
        """Whether the form has beta."""
        return self.form != "soft_gate"

    @property
    def start(self) -> Preset:
        """The preset with the explicit options over it."""
        given = {f.name: getattr(self, f.name) for f in fields(Preset) if getattr(self, f.name) is not None}
        if self.gate_open:
            given["gate_spread"] = 0.0
        return replace(PRESETS[self.preset], **given)

    def alpha_start(self, sublayers: int) -> float:
        """The erase strength at start in a network of this many sublayers."""
        if self.write_only or not self.delta:
            return 0.0
        return 1 / sublayers if self.start.alpha is None else self.start.alpha


class MGTSite(StreamSite):
    """x' = x + beta (G V - alpha x), element-wise or along one direction; see :class:`MGT`."""

    gate_matrix: Tensor

    def __init__(self, width: int, site: Site, options: MGTOptions):
        super().__init__(width, site, options)
        self.options = options
        self.gate_norm = self.gate_logit = self.beta_matrix = self.beta_bias = self.beta_scale = self.alpha = None
        if options.gated:
            self._make_gate(width)
        if options.delta:
            channels = 1 if options.form in RANK_ONE else width
            self.beta_matrix = nn.Parameter(torch.zeros(channels, width))
            self.beta_bias = nn.Parameter(torch.zeros(channels))
            self.beta_scale = nn.Parameter(torch.ones(1)) if options.beta_scale_learned else None
            learned = not options.write_only and options.alpha_kind != "fixed"
            self.alpha = nn.Parameter(torch.zeros(1)) if learned else None  # one axis: FSDP takes no scalars

    def _make_gate(self, width: int) -> None:
        if self.options.gate == "input_independent":
            self.gate_logit = nn.Parameter(torch.zeros(width))
            return
        self.gate_norm = Norm(width, "layernorm", eps=self.options.norm_eps, bias=True)
        if self.options.gate == "fixed_random":
            self.register_buffer("gate_matrix", torch.zeros(width, width))
        else:
            self.gate_matrix = nn.Parameter(torch.zeros(width, width))

    def soft_gate(self, seen: Tensor) -> Tensor:
        """G = sigma(LN(seen W_gate)): [b t d] -> [b t d]; of the input-independent gate the same row for every token."""
        if self.gate_logit is not None:
            logits = wide(self.gate_logit).expand(seen.shape)
        else:
            assert self.gate_norm is not None
            with full_precision(seen):
                logits = self.gate_norm(F.linear(wide(seen), wide(self.gate_matrix)))
        gate = torch.sigmoid(logits)
        return gate * (1 + math.exp(-self.options.start.gate_bias)) if self.options.gate_open else gate

    def delta_gate(self, seen: Tensor) -> Tensor:
        """beta = lambda tanh(seen W_beta + b_beta) + epsilon: [b t d] -> [b t d], or [b t 1] in the rank-1 forms."""
        assert self.beta_matrix is not None and self.beta_bias is not None
        with full_precision(seen):
            logits = F.linear(wide(seen), wide(self.beta_matrix), wide(self.beta_bias))
        scale = self.options.beta_scale if self.beta_scale is None else wide(self.beta_scale)
        return scale * torch.tanh(logits) + self.options.start.beta_shift

    def erase(self, beta: Tensor) -> Tensor:
        """alpha * beta, in the shape of beta; held in [0, 2] if the options say so."""
        if self.alpha is None:
            product = self.options.alpha_start(self.site.total) * beta
        else:
            product = (
                F.softplus(wide(self.alpha)) if self.options.alpha_kind == "positive" else wide(self.alpha)
            ) * beta
        return product.clamp(0, 2) if self.options.start.clamp_erase else product

    def read(self, state, tokens=None):
        normed = self.input_norm(state)
        seen = normed if self.options.gate_input == "norm" else state
        context = {}
        if self.options.gated and self.options.gate in ("learned", "fixed_random"):
            context["gate"] = self.soft_gate(seen)
        if self.options.delta:
            context["beta"] = self.delta_gate(seen)
        return normed, context

    def write(self, state, update, context):
        x, update = wide(state), wide(self.update_norm(update))
        if self.options.gated:
            update = (context["gate"] if "gate" in context else self.soft_gate(update)) * update
        if not self.options.delta:
            return (x + update).to(state.dtype)
        beta = context["beta"]
        if self.options.write_only:
            return (x + beta * update).to(state.dtype)
        removed = x
        if (
            self.options.form in RANK_ONE
        ):  # k k^T x with k along the update; no root, so the gradient at update = 0 is finite
            square = update.square().sum(-1, keepdim=True) + self.options.direction_eps**2
            removed = update * ((update * x).sum(-1, keepdim=True) / square)
        return (x + beta * update - self.erase(beta) * removed).to(state.dtype)

    def gates(self, state, context, update: Tensor | None = None):
        """``gate``, ``beta`` and ``erase`` of the form. A gate that reads the update is returned when ``update`` is given."""
        found = dict(context)
        if self.gate_logit is not None:
            found["gate"] = self.soft_gate(state)
        elif self.options.gated and self.options.gate == "update" and update is not None:
            found["gate"] = self.soft_gate(self.update_norm(update))
        if "beta" in found:
            found["erase"] = self.erase(found["beta"])
        return {
            name: value.squeeze(-1) if self.options.form in RANK_ONE and name != "gate" else value
            for name, value in found.items()
        }

    def reset_parameters(self) -> None:
        super().reset_parameters()
        start = self.options.start
        if self.gate_norm is not None:
            width = self.gate_matrix.shape[1]
            nn.init.normal_(
                self.gate_matrix, std=width**-0.5
            )  # never 0: LayerNorm would amplify the backward pass by 1/sqrt(eps)
            nn.init.constant_(self.gate_norm.weight, start.gate_spread)
            nn.init.constant_(self.gate_norm.bias, start.gate_bias)
        if self.gate_logit is not None:
            nn.init.constant_(self.gate_logit, start.gate_bias)
        if self.beta_matrix is not None and self.beta_bias is not None:
            nn.init.normal_(self.beta_matrix, std=start.beta_std)
            nn.init.constant_(self.beta_bias, start.beta_bias)
        if self.beta_scale is not None:
            nn.init.constant_(self.beta_scale, self.options.beta_scale)
        if self.alpha is not None:
            alpha = self.options.alpha_start(self.site.total)
            nn.init.constant_(
                self.alpha, math.log(math.expm1(alpha)) if self.options.alpha_kind == "positive" else alpha
            )


@register(
    "mgt",
    summary="Manifold-Geometric Transformer: x' = x + beta (G V - alpha x), its parts alone, and gating controls",
    source="Su and You 2026 (arXiv 2601.01014 v3), reconstructed from a published review",
)
class MGT(Stream):
    """Residual stream with a soft gate G on the update and a signed gate beta on the write.

    Element-wise, per channel: x_i' = (1 - alpha beta_i) x_i + beta_i g_i v_i. The old value is kept at alpha beta = 0,
    erased at 1, reflected at 2, and *amplified* below 0 or above 2: with alpha > 0 a negative beta enlarges the old
    state, it does not undo it.

    The published spectrum theorem (eigenvalues 1 with multiplicity d - 1, and one other) is about I - beta k k^T and
    does not hold for the element-wise form, where all d factors 1 - alpha beta_i may differ. ``form="rank1"`` is ours
    and makes it hold. Take the gated update u = G V, its direction k = u / |u|, a scalar beta per token, and restore in
    the update the term Proj_k(x) = k k^T x that alpha x stands for in the element-wise form:

        x' = x + beta (u - alpha k k^T x) = x + beta k (|u| - alpha k^T x) = (I - alpha beta k k^T) x + beta |u| k.

    It is the delta rule with the value v = |u| and erase strength alpha (v - k^T x at alpha = 1); the shortcut, with
    gates frozen, has the eigenvalues 1 (d - 1 times) and 1 - alpha beta, determinant 1 - alpha beta. At alpha = 0 it
    writes the gated update unchanged.

    Shapes: state [b t d]; gate [b t d]; beta and erase [b t d], in the rank-1 forms one number per token.
    Raises: InputError for options that contradict each other or would do nothing.
    """

    Options = MGTOptions
    SiteModule = MGTSite
    options: MGTOptions
    facts = Facts(
        source=(
            "Su and You 2026, arXiv 2601.01014 v3, a proposal without experiments; reconstructed from a published review of it, whose"
            " equation numbers 5 to 7 are used. Forms rank1 and delta_rank1, presets and controls: ours"
        ),
        equation=(
            "V = F(norm(x))\nG = sigma(LN(x W_gate))                          (5: the soft gate)\n"
            "beta = lambda tanh(x W_beta + b_beta) + epsilon      (6: the delta gate)\n"
            "x' = x + beta * (G * V - alpha x)                    (7)\n"
            "soft_gate: x' = x + G * V;  delta: G = 1\n"
            "rank1: u = G * V, k = u/|u|, beta scalar: x' = x + beta k (|u| - alpha k^T x);  delta_rank1: G = 1"
        ),
        words=(
            "Two d x d maps read the raw stream [b t d]. One gives a sigmoid gate in [0, 1] on every channel of the update [b t d], the"
            " other a signed strength with which that update is written and the old state, scaled by alpha, is removed."
        ),
        constraint=(
            "element-wise: skip Jacobian diag(1 - alpha beta), bounded by 1 only where alpha beta lies in [0, 2] (clamp_erase);"
            " rank-1 forms: I - alpha beta k k^T, eigenvalues 1 (d - 1 times) and 1 - alpha beta"
        ),
        precision="gate logits, LayerNorm, sigmoid, tanh and the update in float32 or wider; the stream in the dtype of the model",
        chosen=(
            "W_gate normal with standard deviation 1/sqrt(d); its scale cancels in the LayerNorm",
            "LayerNorm in the gate: scale 1, shift 0 (paper, identity, stable), shift 3 (residual); epsilon of the model's norms; no bias of W_gate",
            "lambda 1, not learned; epsilon 0 (residual: 1)",
            "paper: W_beta normal with standard deviation 0.02, b_beta 0, alpha 1/(number of sublayers), free",
            "residual: W_beta 0, b_beta 0, alpha 0",
            "identity: W_beta 0, b_beta 0, alpha 1/(number of sublayers)",
            "stable: W_beta 0, b_beta artanh(0.1), alpha 0.1, alpha beta clamped to [0, 2]",
            "one alpha for each sublayer",
            "a final norm, as in any pre-norm stack; output maps scaled by 1/sqrt(number of sublayers)",
            "rank-1 forms: k from the gated update, value |u|, k = u/sqrt(|u|^2 + 1e-10)",
        ),
        deviations=(
            "the default input norm is the model's; the source says LayerNorm",
            "the gate that the source names mHC is called the soft gate",
            "gate_open divides the gate by its start value",
        ),
        bibtex="@article{su2026geometric, title={Geometric and Dynamic Scaling in Deep Transformers}, author={Su, Haoran and You, Chenyu}, journal={arXiv:2601.01014}, year={2026}}",
    )

    def __init__(self, width, sites, options):
        super().__init__(width, sites, options)
        if options.alpha_per != "sublayer":
            first: dict[int, MGTSite] = {}
            for site in self.sites:  # tied: one parameter under several names
                assert isinstance(site, MGTSite)
                site.alpha = first.setdefault(site.site.layer if options.alpha_per == "layer" else 0, site).alpha

    def group_hints(self):
        names = ("alpha", "beta_bias", "beta_scale", "gate_norm.*", "gate_logit")
        plain = GroupHint(weight_decay=0.0)
        return {f"sites.*.{name}": plain for name in names if getattr(self.sites[0], name.split(".")[0]) is not None}

    def equals_at_start(self):
        options, start = self.options, self.options.start
        beta = options.beta_scale * math.tanh(start.beta_bias) + start.beta_shift
        writes_one = start.beta_std == 0 and abs(beta - 1) < 1e-12 and options.alpha_start(len(self.sites)) == 0
        if (options.delta and not writes_one) or (options.gated and not options.gate_open):
            return None
        return Equivalence("additive", {f.name: getattr(options, f.name) for f in fields(ConnectionOptions)})

    def reference(self, embedding, sublayers, tokens=None):
        x = embedding
        for site, sublayer in zip(self.sites, sublayers, strict=True):
            assert isinstance(site, MGTSite)
            normed = each_token(lambda row, s=site: reference_norm(s.input_norm, row), x)
            seen = normed if self.options.gate_input == "norm" else x
            x = each_token(lambda row, v, read, s=site: reference_write(s, row, v, read), x, sublayer(normed), seen)
        return each_token(lambda row: reference_norm(self.final_norm, row), x)


def reference_write(site: MGTSite, x: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """One token in loops over channels: state x, update v, what the gates read: [d], [d], [d] -> [d]."""
    options, start, channels = site.options, site.options.start, range(len(x))
    v = reference_norm(site.update_norm, v)
    u = [v[i] for i in channels]
    if options.gated:
        if site.gate_logit is not None:
            logits = site.gate_logit
        else:
            assert site.gate_norm is not None
            logits = reference_norm(site.gate_norm, _map(site.gate_matrix, v if options.gate == "update" else seen))
        largest = 1 + math.exp(-start.gate_bias) if options.gate_open else 1.0
        u = [largest / (1 + torch.exp(-logits[i])) * v[i] for i in channels]
    if not options.delta:
        return torch.stack([x[i] + u[i] for i in channels])

    assert site.beta_matrix is not None and site.beta_bias is not None
    scale = options.beta_scale if site.beta_scale is None else site.beta_scale[0]
    logits = _map(site.beta_matrix, seen)
    beta = [scale * torch.tanh(logits[i] + site.beta_bias[i]) + start.beta_shift for i in range(len(logits))]
    alpha: Tensor | float = options.alpha_start(site.site.total)
    if site.alpha is not None:
        alpha = torch.log(1 + torch.exp(site.alpha[0])) if options.alpha_kind == "positive" else site.alpha[0]
    bound: Callable[[Tensor], Tensor] = (lambda e: e.clamp(0, 2)) if start.clamp_erase else (lambda e: e)
    if options.form not in RANK_ONE:
        return torch.stack([x[i] + beta[i] * u[i] - bound(alpha * beta[i]) * x[i] for i in channels])
    length = torch.sqrt(sum((c * c for c in u), torch.zeros_like(x[0])) + options.direction_eps**2)
    k = [c / length for c in u]
    along = sum((k[i] * x[i] for i in channels), torch.zeros_like(x[0]))
    return torch.stack([x[i] + beta[0] * length * k[i] - bound(alpha * beta[0]) * along * k[i] for i in channels])


def _map(matrix: Tensor, x: Tensor) -> Tensor:
    """x W for a map stored as [to, from], in loops."""
    return torch.stack([sum((row[j] * x[j] for j in range(len(x))), torch.zeros_like(x[0])) for row in matrix])
