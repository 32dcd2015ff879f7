"""Mixture of experts: a router sends every token to a few of many narrow feed-forward layers, beside some that are always on."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from thalweg.models.config import DecoderConfig
from thalweg.models.sublayers.base import Map, Sublayer
from thalweg.models.sublayers.feed_forward import FeedForward
from thalweg.ops.grouped import grouped_linear
from thalweg.ops.norms import Norm
from thalweg.ops.precision import full_precision, wide


class Router(nn.Module):
    """Scores of every expert, and a bias that only the choice sees: score_e = sigmoid(w_e x), or softmax over the experts.

    ``votes`` [e] counts for every expert how often its load was below the mean, less how often it was above; the bias is ``rate * votes``.
    Whole numbers, so that no cast of the model rounds the bias and a resumed run has it exactly.
    """

    votes: Tensor

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.kind, self.rate = config.router, config.balancing_rate
        self.linear = nn.Linear(config.width, config.experts, bias=False)
        self.register_buffer("votes", torch.zeros(config.experts, dtype=torch.int64))

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n e"]:
        """Tokens [... d] -> scores [... e] in (0, 1), float32 or wider under mixed precision too."""
        with full_precision(x):
            logits = F.linear(wide(x), wide(self.linear.weight))
            return torch.sigmoid(logits) if self.kind == "sigmoid" else torch.softmax(logits, -1)

    def choose(
        self, scores: Float[Tensor, "n e"], count: int
    ) -> tuple[Float[Tensor, "n count"], Int[Tensor, "n count"]]:
        """Scores [n e] -> weights that sum to one over the chosen experts, and who is chosen [n count]."""
        chosen = (scores.detach() + self.rate * self.votes.to(scores.dtype)).topk(count, -1).indices
        weights = scores.gather(-1, chosen)
        return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny), chosen

    @torch.no_grad()
    def balance(self, load: Int[Tensor, " e"]) -> None:
        """One step of the bias after an update whose batch sent ``load`` [e] tokens to the experts; no gradient takes part."""
        if self.rate:
            load = load.to(self.votes)
            self.votes += torch.sign(load.sum() - len(load) * load)  # of mean - load, in whole numbers


class ExpertLinear(nn.Module):
    """One linear map per expert, the weights in one tensor [e out in]."""

    bias = None  # as nn.Linear has it without one

    def __init__(self, experts: int, in_features: int, out_features: int):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))

    def forward(self, x: Float[Tensor, "rows in"], sizes: Int[Tensor, " e"]) -> Float[Tensor, "rows out"]:
        """Rows sorted by expert, sizes [e] of them for each; in the dtype of the autocast region, if there is one."""
        kind = x.device.type
        dtype = (
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype
        )
        return grouped_linear(x.to(dtype), self.weight.to(dtype), sizes)

    def extra_repr(self) -> str:
        return f"{len(self.weight)} experts, {self.in_features} -> {self.out_features}"


class MixtureOfExperts(Sublayer):
    """y = S(x) + sum over the k chosen experts e of g_e E_e(x), each E a SwiGLU of width ``expert_width``.

    chosen = top k of score + bias; g_e = score_e / (sum of the scores of the chosen), without the bias. After every update of the weights
    bias_e += rate * sign(mean load - load_e), the load counted over the whole batch (:mod:`thalweg.models.balancing`). S is the sum of the
    shared experts, which see every token: one SwiGLU as wide as all of them together, which is the same map.
    Shapes: [b t d] -> [b t d]. No token is dropped, whatever the load. Tokens that are padding are computed but do not count as load.
    Source: experts, narrow and shared, Dai et al. 2024 (arXiv 2401.06066); sigmoid scores, normalised over the chosen, DeepSeek-V3 (arXiv
    2412.19437), Section 2.1.2; loss-free balancing, Wang et al. 2024 (arXiv 2408.15664).
    Deviations: no sequence-wise balance loss, no factor on the routed part, no limit on devices. A connection's gain acts on the maps of all
    experts but not on the router, which chooses; an inner norm (Sub-LN) stands before the last map, its scale common to the routed
    experts, and over the joint width of the shared ones.
    Cost: the products of the k chosen and the shared experts, one group after the other (:func:`thalweg.ops.grouped.grouped_linear`), and
    copies of k rows a token to sort them by expert and back.
    """

    kind = "moe"

    def __init__(self, config, requirements, index):
        super().__init__(config, requirements, index)
        d, f, e = config.width, config.expert_feed_forward_width, config.experts
        self.active = config.active_experts
        self.router = Router(config)
        self.gate = ExpertLinear(e, d, f)
        self.up = ExpertLinear(e, d, f)
        self.down = ExpertLinear(e, f, d)
        self.inner_norm = Norm(f, config.norm if requirements.inner_norm else "none", eps=config.norm_eps)
        together = config.shared_experts * f
        self.shared = FeedForward(config.replace(ffn_width=together), requirements, index) if together else None
        self.load: Tensor | None = None  # [e] tokens sent to each expert in the last pass, for whoever balances

    def forward(self, x, view, cache=None):
        tokens = x.flatten(0, 1)
        weights, chosen = self.router.choose(self.router(tokens), self.active)
        sent = self.sent(chosen)
        # Set, not added to: a block that is computed again in the backward pass says the same once more.
        self.load = self.load_of(sent, view)
        y = self.routed(tokens, weights, chosen, sent.sum(0)).view_as(x)
        return y if self.shared is None else y + self.shared(x, view)

    def sent(self, chosen: Int[Tensor, "n k"]) -> Tensor:
        """Who is chosen [n k] -> whether token n goes to expert e [n e]."""
        none = chosen.new_zeros(len(chosen), len(self.router.votes), dtype=torch.bool)
        return none.scatter(1, chosen, torch.ones_like(chosen, dtype=torch.bool))

    @staticmethod
    def load_of(sent: Tensor, view) -> Int[Tensor, " e"]:
        """Tokens sent to each expert [e], padding left out."""
        return (sent if view.real is None else sent & view.real.reshape(-1, 1)).sum(0)

    def routed(
        self,
        x: Float[Tensor, "n d"],
        weights: Float[Tensor, "n k"],
        chosen: Int[Tensor, "n k"],
        sizes: Int[Tensor, " e"],
    ) -> Float[Tensor, "n d"]:
        """Weighted sum of the chosen experts' outputs; ``sizes`` [e] rows go to each."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # rows of one expert together, in the order of the tokens
        rows = x[order // self.active]
        inner = F.silu(self.gate(rows, sizes)) * self.up(rows, sizes)
        y = self.down(self.inner_norm(inner), sizes)
        y = y[order.argsort()].unflatten(0, chosen.shape)
        return (wide(y) * weights.unsqueeze(-1)).sum(1).to(y.dtype)

    def maps(self):
        yield Map(self.router.linear, gained=False)
        yield Map(self.gate, gained=False)
        yield Map(self.up)
        yield Map(self.down, last=True)
        if self.shared is not None:
            yield from self.shared.maps()
