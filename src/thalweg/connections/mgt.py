"""The Manifold-Geometric Transformer: a soft gate on the update and a signed delta gate on the write.

The source calls its gate "mHC"; here it is the *soft gate* and never mHC: that name belongs to the manifold-constrained
hyper-connections of Xie et al. 2025 (arXiv 2512.24880), which mix several streams by a doubly stochastic matrix. The
soft gate has one stream and no matrix constraint; it is a sigmoid gate on the channels of the update.
"""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thalweg.connections import register
from thalweg.connections._mgt_options import MGTOptions
from thalweg.connections.base import (
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
from thalweg.ops.norms import Norm
from thalweg.ops.precision import full_precision, wide
from thalweg.registry import REFERENCE


class Alpha(nn.Module):
    """The erase strength alpha: a learned scalar, its softplus, or a fixed number."""

    def __init__(self, options: MGTOptions, sublayers: int):
        super().__init__()
        self.positive, self.start = options.alpha_kind == "positive", options.alpha_start(sublayers)
        self.value = (
            nn.Parameter(torch.zeros(1)) if options.learns_alpha else None
        )  # one axis: FSDP takes no 0-d tensor

    def forward(self) -> Tensor | float:
        if self.value is None:
            return self.start
        return F.softplus(wide(self.value)) if self.positive else wide(self.value)

    def reset_parameters(self) -> None:
        if self.value is not None:
            nn.init.constant_(self.value, math.log(math.expm1(self.start)) if self.positive else self.start)


class MGTSite(StreamSite):
    """x' = x + beta (G V - alpha x), element-wise or along one direction; see :class:`MGT`."""

    gate_matrix: Tensor  # a parameter, or a buffer where the gate is fixed_random
    alpha: Alpha  # a submodule, or that of the stream where sites share it

    def __init__(self, width: int, site: Site, options: MGTOptions):
        super().__init__(width, site, options)
        self.options, self.start, self.gate_scale = options, options.start, options.gate_scale
        self.output_norm = options.make_norm(width, options.post_norm)
        self.gate_norm: Norm | None = None
        self.gate_logit = self.beta_matrix = self.beta_bias = self.beta_scale = None
        if options.gated and options.gate == "input_independent":
            self.gate_logit = nn.Parameter(torch.zeros(width))
        elif options.gated:
            self.gate_norm = Norm(width, "layernorm", eps=options.norm_eps, bias=True)
            if options.gate == "fixed_random":
                self.register_buffer("gate_matrix", torch.zeros(width, width))
            else:
                self.gate_matrix = nn.Parameter(torch.zeros(width, width))
        if options.delta:
            channels = 1 if options.rank_one else width
            self.beta_matrix = nn.Parameter(torch.zeros(channels, width))
            self.beta_bias = nn.Parameter(torch.zeros(channels))
            self.beta_scale = nn.Parameter(torch.ones(1)) if options.beta_scale_learned else None
            if options.alpha_per == "sublayer":
                self.alpha = Alpha(options, site.total)

    def share(self, alpha: Alpha) -> None:
        """Use ``alpha`` of the stream, which stays its only owner."""
        object.__setattr__(self, "alpha", alpha)  # nn.Module's own would register it here a second time

    def soft_gate(self, seen: Tensor) -> Tensor:
        """G = sigma(LN(seen W_gate)): [b t d] -> [b t d]; if input-independent, one row for every token."""
        if self.gate_norm is None:
            assert self.gate_logit is not None
            logits = wide(self.gate_logit).expand(seen.shape)
        else:
            with full_precision(seen):
                logits = self.gate_norm(F.linear(wide(seen), wide(self.gate_matrix)))
        return torch.sigmoid(logits) * self.gate_scale

    def delta_gate(self, seen: Tensor) -> Tensor:
        """beta = lambda tanh(seen W_beta + b_beta) + epsilon: [b t d] -> [b t d], or [b t 1] in the rank-1 forms."""
        assert self.beta_matrix is not None and self.beta_bias is not None
        with full_precision(seen):
            logits = F.linear(wide(seen), wide(self.beta_matrix), wide(self.beta_bias))
        scale = self.options.beta_scale if self.beta_scale is None else wide(self.beta_scale)
        return scale * torch.tanh(logits) + self.start.beta_shift

    def erase(self, beta: Tensor) -> Tensor:
        """alpha * beta, in the shape of beta; held in [0, 2] if the options say so."""
        erase = self.alpha() * beta
        return erase.clamp(0, 2) if self.start.clamp_erase else erase

    def read(self, state, tokens=None):
        normed = self.input_norm(shaped(state, self.input_norm.width))
        seen = normed if self.options.gate_input == "norm" else state
        context = {}
        if self.options.gated and self.options.gate in ("learned", "fixed_random"):
            context["gate"] = self.soft_gate(seen)
        if self.options.delta:
            context["beta"] = self.delta_gate(seen)
        return normed, context

    def write(self, state, update, context):
        return self.output_norm(self.written(wide(state), update, context)).to(state.dtype)

    def written(self, x: Tensor, update: Tensor, context: dict[str, Tensor]) -> Tensor:
        """The state after the write, before the norm of a post-norm block: [b t d] in float32 or wider."""
        update = wide(self.update_norm(update))
        if self.options.gated:
            update = (context["gate"] if "gate" in context else self.soft_gate(update)) * update
        if not self.options.delta:
            return x + update
        beta = context["beta"]
        if self.options.write_only:
            return x + beta * update
        removed = x
        if self.options.rank_one:  # k k^T x; the length is squared, not rooted: the gradient at update 0 stays finite
            power = update.square().sum(-1, keepdim=True) + self.options.direction_eps**2
            removed = update * ((update * x).sum(-1, keepdim=True) / power)
        return x + beta * update - self.erase(beta) * removed

    def gates(self, state, context, update: Tensor | None = None):
        """``gate``, ``beta``, ``erase`` where the form has them; a gate that reads the update needs ``update``."""
        found = dict(context)
        if self.options.gated and self.options.gate == "input_independent":
            found["gate"] = self.soft_gate(state)
        elif self.options.gated and self.options.gate == "update" and update is not None:
            found["gate"] = self.soft_gate(wide(self.update_norm(update)))
        if self.options.delta:
            found["erase"] = self.erase(found["beta"])
        if self.options.rank_one:
            found |= {name: found[name].squeeze(-1) for name in ("beta", "erase")}
        return found

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.output_norm.reset_parameters()
        start = self.start
        if self.gate_norm is not None:  # a W_gate of 0 would amplify the backward pass of LayerNorm by 1/sqrt(eps)
            nn.init.normal_(self.gate_matrix, std=self.gate_matrix.shape[1] ** -0.5)
        if self.beta_matrix is not None:
            nn.init.normal_(self.beta_matrix, std=start.beta_std)
        for parameter, value in (
            (self.gate_norm and self.gate_norm.weight, start.gate_spread),
            (self.gate_norm and self.gate_norm.bias, start.gate_bias),
            (self.gate_logit, start.gate_bias),
            (self.beta_bias, start.beta_bias),
            (self.beta_scale, self.options.beta_scale),
        ):
            if parameter is not None:
                nn.init.constant_(parameter, value)
        if self.options.delta:
            self.alpha.reset_parameters()


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

    The published spectrum theorem (eigenvalue 1 with multiplicity d - 1, and one other) is about I - beta k k^T and
    does not hold for the element-wise form, where all d factors 1 - alpha beta_i may differ. ``form="rank1"`` is ours
    and makes it hold. Take the gated update u = G V, its direction k = u / |u| and one beta per token, and put back the
    projection k k^T x, for which alpha x stands in the element-wise form:

        x' = x + beta (u - alpha k k^T x) = x + beta k (|u| - alpha k^T x) = (I - alpha beta k k^T) x + beta |u| k.

    This is the delta rule x + beta k (v - k^T x) with the value v = |u|, and alpha on what is removed. With the gates
    frozen, the shortcut has the eigenvalues 1 (d - 1 times) and 1 - alpha beta, and the determinant 1 - alpha beta. At
    alpha = 0 it writes the gated update unchanged, so ``soft_gate`` and the pre-norm block are special cases.

    Shapes: state [b t d]; gate [b t d]; beta and erase [b t d], in the rank-1 forms one number per token.
    Raises: InputError for options that contradict each other or would do nothing.
    """

    Options = MGTOptions
    SiteModule = MGTSite
    options: MGTOptions
    facts = Facts(
        source=(
            "Su and You 2026, arXiv 2601.01014 v3, a proposal without experiments; reconstructed from a published"
            " review of it, whose equation numbers 5 to 7 are used. Rank-1 forms, presets and controls: ours"
        ),
        equation=(
            "V = F(norm(x))\n"
            "G = sigma(LN(x W_gate))                             (5, the soft gate)\n"
            "beta = lambda tanh(x W_beta + b_beta) + epsilon     (6, the delta gate)\n"
            "x' = x + beta * (G * V - alpha x)                   (7)\n"
            "soft_gate: x' = x + G * V;  delta: G = 1\n"
            "rank1: u = G * V, k = u/|u|, one beta: x' = x + beta k (|u| - alpha k^T x);  delta_rank1: G = 1"
        ),
        words=(
            "Two d x d maps read the raw stream [b t d]. One gives a sigmoid gate in [0, 1] on every channel of the"
            " update [b t d], the other a signed strength with which that update is written and the old state, scaled"
            " by alpha, is removed."
        ),
        constraint=(
            "element-wise: with gates frozen the skip Jacobian is diag(1 - alpha beta), bounded by 1 only where"
            " alpha beta lies in [0, 2] (clamp_erase); rank-1 forms: I - alpha beta k k^T, eigenvalues 1 (d - 1 times)"
            " and 1 - alpha beta"
        ),
        precision="gates, their LayerNorm and the update in float32 or wider; the stream in the dtype of the model",
        chosen=(
            "W_gate: no bias, normal with standard deviation 1/sqrt(d) (its scale cancels in the LayerNorm)",
            "LayerNorm in the gate: affine, scale 1, shift 0 (residual: 3), epsilon of the model's norms",
            "lambda 1, not learned; epsilon 0 (residual: 1)",
            "paper: W_beta normal with standard deviation 0.02, b_beta 0, alpha 1/(number of sublayers)",
            "residual: W_beta 0, b_beta 0, alpha 0",
            "identity: W_beta 0, b_beta 0, alpha 1/(number of sublayers)",
            "stable: W_beta 0, b_beta artanh(0.1), alpha 0.1, alpha beta clamped to [0, 2]",
            "one free alpha and one pair of gates for each sublayer",
            "a final norm, as in any pre-norm stack; output maps scaled by 1/sqrt(number of sublayers)",
            "rank-1 forms: k from the gated update, value |u|, k = u/sqrt(|u|^2 + 1e-10)",
        ),
        deviations=(
            "the input norm is the model's kind; the source says LayerNorm",
            "the gate that the source names mHC is called the soft gate",
            "gate_open divides the gate by its start value",
        ),
        verified=(REFERENCE,),
        bibtex=(
            "@article{su2026geometric, title={Geometric and Dynamic Scaling in Deep Transformers},"
            " author={Su, Haoran and You, Chenyu}, journal={arXiv:2601.01014}, year={2026}}"
        ),
    )

    def __init__(self, width: int, sites: Sequence[Site], options: MGTOptions):
        super().__init__(width, sites, options)
        self.alphas = nn.ModuleDict()  # of layers, or of the network; a site owns its own otherwise
        for site in self.sites if options.alpha_per != "sublayer" else ():
            assert isinstance(site, MGTSite)
            owner = f"layer{site.site.layer}" if options.alpha_per == "layer" else "network"
            alpha = self.alphas[owner] if owner in self.alphas else Alpha(options, site.site.total)
            assert isinstance(alpha, Alpha)
            self.alphas[owner] = alpha
            site.share(alpha)

    def requirements(self, site):
        return Requirements() if self.options.post_norm else super().requirements(site)

    def group_hints(self):
        vectors = ("alpha.value", "beta_bias", "beta_scale", "gate_logit", "gate_norm.weight", "gate_norm.bias")
        patterns = (*(f"sites.*.{name}" for name in vectors), "alphas.*.value")
        names = [name for name, _ in self.named_parameters()]
        return {p: GroupHint(weight_decay=0.0) for p in patterns if any(fnmatchcase(name, p) for name in names)}

    @classmethod
    def variants(cls):
        return [
            {"form": "soft_gate", "gate": "update"},
            {"form": "delta", "preset": "residual"},
            {"form": "rank1", "preset": "stable", "gate": "input_independent"},
            {"form": "delta_rank1", "preset": "identity", "alpha_per": "network"},
            {"preset": "residual", "gate_open": True, "gate_input": "norm", "beta_scale_learned": True},
            {"preset": "residual", "post_norm": True, "input_norm": False, "final_norm": False},
            {"gate": "fixed_random", "alpha_kind": "positive", "alpha_per": "layer"},
        ]

    def equals_at_start(self):
        options, start = self.options, self.options.start
        if options.post_norm:
            return None
        slots = options.slots()
        beta = options.beta_scale * math.tanh(start.beta_bias) + start.beta_shift if options.delta else 1.0
        if options.delta and start.beta_std != 0:
            return None
        if options.delta and beta == 0:
            return Equivalence("rezero", slots)  # both are the identity
        keeps = options.alpha_start(self.layout[0].total) == 0
        opens = options.gate_open or not options.gated
        return Equivalence("additive", slots) if keeps and opens and abs(beta - 1) < 1e-12 else None

    @classmethod
    def additive_options(cls, given):
        """The gate divided by its start value, which is exact; with ``gate_open`` false it starts constant, to be divided out by the caller."""
        if not MGTOptions(form=given.get("form", "full")).gated:
            return {"preset": "residual"}
        if given.get("gate_open", "gate_spread" not in given):
            return {"preset": "residual", "gate_open": True}
        return {"preset": "residual", **({} if given.get("gate") == "input_independent" else {"gate_spread": 0.0})}

    def start_as_additive(self):
        options, start = self.options, self.options.start
        if options.post_norm or (options.gated and options.gate != "input_independent" and start.gate_spread):
            return None
        beta = options.beta_scale * math.tanh(start.beta_bias) + start.beta_shift if options.delta else 1.0
        if options.alpha_start(self.layout[0].total) != 0 or (options.delta and start.beta_std):
            return None
        gate = options.gate_scale / (1 + math.exp(-start.gate_bias)) if options.gated else 1.0
        return (gate * beta,) * len(self.layout) if gate * beta > 0 else None

    def reference(self, embedding, sublayers, tokens=None):
        x = embedding
        for site, sublayer in zip(self.sites, sublayers, strict=True):
            assert isinstance(site, MGTSite)
            normed = each_token(lambda row, s=site: reference_norm(s.input_norm, row), x)
            seen = normed if self.options.gate_input == "norm" else x
            x = each_token(lambda row, v, z, s=site: reference_write(s, row, v, z), x, sublayer(normed), seen)
            x = each_token(lambda row, s=site: reference_norm(s.output_norm, row), x)
        return each_token(lambda row: reference_norm(self.final_norm, row), x)


def reference_write(site: MGTSite, x: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """One token in loops over channels: state x, update v and what the gates read -> next state, each [d]."""
    options, start, channels = site.options, site.start, range(len(x))
    zero = torch.zeros_like(x[0])
    u = v = reference_norm(site.update_norm, v)
    if options.gated:
        if site.gate_norm is None:
            logits = site.gate_logit
        else:
            source = v if options.gate == "update" else seen
            logits = reference_norm(site.gate_norm, _map(site.gate_matrix, source))
        assert logits is not None
        at_start = 1 / (1 + math.exp(-start.gate_bias)) if options.gate_open else 1.0
        u = torch.stack([v[i] / (1 + torch.exp(-logits[i])) / at_start for i in channels])
    if not options.delta:
        return torch.stack([x[i] + u[i] for i in channels])

    assert site.beta_matrix is not None and site.beta_bias is not None
    scale = options.beta_scale if site.beta_scale is None else site.beta_scale[0]
    logits = _map(site.beta_matrix, seen)
    beta = [scale * torch.tanh(logits[i] + site.beta_bias[i]) + start.beta_shift for i in range(len(logits))]
    alpha: Tensor | float = options.alpha_start(site.site.total)
    if site.alpha.value is not None:
        alpha = site.alpha.value[0]
        alpha = torch.log(1 + torch.exp(alpha)) if options.alpha_kind == "positive" else alpha
    erase = [alpha * b for b in beta]
    if start.clamp_erase:
        erase = [torch.minimum(torch.maximum(e, zero), zero + 2) for e in erase]
    if not options.rank_one:
        return torch.stack([x[i] + beta[i] * u[i] - erase[i] * x[i] for i in channels])
    length = torch.sqrt(sum((c * c for c in u), zero) + options.direction_eps**2)
    k = [c / length for c in u]
    along = sum((k[i] * x[i] for i in channels), zero)
    return torch.stack([x[i] + k[i] * (beta[0] * length - erase[0] * along) for i in channels])


def _map(matrix: Tensor, x: Tensor) -> Tensor:
    """x W, with W stored as [to, from], in loops: [d] -> [to]."""
    return torch.stack([sum((row[j] * x[j] for j in range(len(x))), torch.zeros_like(x[0])) for row in matrix])
