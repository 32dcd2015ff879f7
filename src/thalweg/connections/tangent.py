"""The tangent projector: updates confined to the estimated tangent space of the states of past tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from thalweg.connections import register
from thalweg.connections.base import (
    ConnectionOptions,
    Equivalence,
    Facts,
    Site,
    Stream,
    StreamSite,
    Tokens,
    each_token,
    reference_norm,
    shaped,
)
from thalweg.errors import InputError
from thalweg.geometry.tangent import RELATIVE_FLOOR, local_tangent, project
from thalweg.ops.precision import wide


@dataclass(frozen=True)
class TangentOptions(ConnectionOptions):
    """window: how many past tokens the tangent space is estimated from. rank: dimension of that space.

    strength: how much of the part outside the tangent space is removed from the update, in [0, 1].
    subspace: ``tangent``, or ``random`` for the control with a fixed random subspace of the same rank at each site.
    """

    window: int = 16
    rank: int = 4
    strength: float = 1.0
    subspace: Literal["tangent", "random"] = "tangent"

    def __post_init__(self) -> None:
        if not 1 <= self.rank < self.window:
            raise InputError(f"rank must be at least 1 and below window, got rank {self.rank} and window {self.window}")
        if not 0 <= self.strength <= 1:
            raise InputError(f"strength must lie in [0, 1], got {self.strength}")


class TangentSite(StreamSite):
    """x' = x + u - strength (u - P_t u), with u = F(norm(x)) and P_t from the states here of tokens before t."""

    basis: Tensor

    def __init__(self, width: int, site: Site, options: TangentOptions):
        super().__init__(width, site, options)
        self.options = options
        if options.subspace == "random":
            self.register_buffer("basis", torch.zeros(width, options.rank))

    def read(self, state, tokens=None):
        tokens = tokens or Tokens()
        shaped(state, self.input_norm.width)
        # The index is looked at only when something is remembered: a compiled graph then serves every site.
        key = "" if tokens.memory is None else f"tangent_projector.{self.site.index}"
        past, counts = past_windows(state.detach(), tokens, self.options.window, key)
        if self.options.subspace == "random":
            return self.input_norm(state), (self.basis, counts.sum(-1) > self.options.rank)
        return self.input_norm(state), tuple(local_tangent(past, self.options.rank, counts))

    def write(self, state, update, context):
        basis, valid = context
        update = wide(self.update_norm(update))
        outside = update - project(update, basis.to(update.dtype), valid)
        return (wide(state) + (update - self.options.strength * outside)).to(state.dtype)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.options.subspace == "random":
            frame = torch.empty(self.basis.shape, dtype=wide(self.basis).dtype, device=self.basis.device)
            self.basis.copy_(torch.linalg.qr(nn.init.normal_(frame)).Q)


@register(
    "tangent_projector",
    summary="update projected on the estimated tangent space of past tokens' states: x' = x + P F(norm(x))",
    source="ours: the control for the tangent claim of MGT (arXiv 2601.01014)",
)
class TangentProjector(Stream):
    """Residual stream whose updates stay in the local tangent space that the states of earlier tokens span.

    MGT claims that its gate keeps updates near the tangent space; nothing in it estimates one. Here the space is
    estimated, and the update of token t is projected on the top principal directions of the states, at the same site,
    of the ``window`` tokens strictly before t (real tokens of the same segment). The subspace carries no gradient. With
    fewer than rank + 1 such tokens, or when their states do not span ``rank`` directions, the update passes unchanged.
    Padding must stand at either end, not between real tokens.

    Shapes: state [b t d].
    Raises: InputError for a rank that is not below the window and the width.
    """

    Options = TangentOptions
    SiteModule = TangentSite
    options: TangentOptions
    facts = Facts(
        source="ours: tests the tangent claim of Su and You 2026, arXiv 2601.01014, which estimates no tangent space",
        equation=(
            "u = F(norm(x))\n"
            "P_t = B B^T, B [d rank] the top principal directions of x_{t-window} .. x_{t-1} about their mean\n"
            "x' = x + (1 - strength) u + strength P_t u"
        ),
        words=(
            "The sublayer reads the normalised stream [b t d]. What it returns [b t d] loses its part outside the"
            " subspace that the last `window` past states at this site span best, and is added to the stream."
        ),
        constraint="an update lies in a subspace of dimension `rank` (strength 1); the skip Jacobian is the identity",
        precision=(
            "the subspace in float64, from the Gram matrix of the window; the projection in float32 or wider;"
            " the stream in the dtype of the model"
        ),
        chosen=(
            "window 16",
            "rank 4",
            "strength 1",
            "strictly past tokens",
            "centred at the mean of the window",
            "subspace detached",
        ),
        verified=(
            "loop-written reference by SVD in float64, outputs and all gradients",
            "stepwise, chunked and left-padded passes equal the full pass",
        ),
    )

    def __init__(self, width: int, sites: Sequence[Site], options: TangentOptions):
        if options.rank >= width:
            raise InputError(f"rank must be below the width {width}, or nothing is projected; got {options.rank}")
        super().__init__(width, sites, options)

    @property
    def looks_along_tokens(self) -> bool:
        return True

    @classmethod
    def variants(cls):
        return [{"window": 3, "rank": 2, "strength": 0.7}, {"window": 4, "rank": 2, "subspace": "random"}]

    def equals_at_start(self):
        if self.options.strength > 0:
            return None
        return Equivalence("additive", {f.name: getattr(self.options, f.name) for f in fields(ConnectionOptions)})

    def reference(self, embedding, sublayers, tokens=None):
        tokens = tokens or Tokens()
        x = embedding
        for site, sublayer in zip(self.sites, sublayers, strict=True):
            assert isinstance(site, TangentSite)
            update = sublayer(each_token(lambda row, s=site: reference_norm(s.input_norm, row), x))
            update = each_token(lambda row, s=site: reference_norm(s.update_norm, row), update)
            rows = []
            for b in range(x.shape[0]):
                for t in range(x.shape[1]):
                    u, strength = update[b, t], self.options.strength
                    inside = reference_projector(site, x[b].detach(), t, tokens, b) @ u
                    rows.append(x[b, t] + (1 - strength) * u + strength * inside)
            x = torch.stack(rows).reshape(x.shape)
        return each_token(lambda row: reference_norm(self.final_norm, row), x)


def past_windows(
    x: Float[Tensor, "b t d"], tokens: Tokens, size: int, key: str
) -> tuple[Float[Tensor, "b t w d"], Bool[Tensor, "b t w"]]:
    """The states of the ``size`` tokens before each token, oldest first, and which of them count.

    A past token counts when it exists, is real and belongs to the same segment. With ``tokens.memory`` the past of
    earlier calls is continued under ``key``.
    Raises: InputError when segments are given in some calls of one decoding and not in others.
    """
    length = x.shape[1]
    real, own = tokens.real(x), tokens.segments
    segments = own
    if tokens.memory is not None:
        slots = tokens.memory.slots
        if key in slots and (f"{key}.segments" in slots) != (own is not None):
            raise InputError("segments must be given in every call of a cached decoding or in none")
        if own is not None:
            segments, _ = tokens.memory.extend(f"{key}.segments", own, real, size)
        x, real = tokens.memory.extend(key, x, real, size)
    missing = size + length - x.shape[1]
    windows = F.pad(x, (0, 0, missing, 0)).unfold(1, size, 1)[:, :length].mT
    counts = F.pad(real, (missing, 0)).unfold(1, size, 1)[:, :length]
    if own is not None and segments is not None:
        counts = counts & (F.pad(segments, (missing, 0)).unfold(1, size, 1)[:, :length] == own.unsqueeze(-1))
    return windows, counts


def reference_projector(site: TangentSite, x: Tensor, t: int, tokens: Tokens, b: int) -> Tensor:
    """The projector [d d] of token t of row b, by SVD of states of that row x [t d]; the identity if not determined."""
    options, identity = site.options, torch.eye(x.shape[1], dtype=x.dtype)
    past = []
    for s in range(max(t - options.window, 0), t):
        same = tokens.segments is None or tokens.segments[b, s] == tokens.segments[b, t]
        if same and (tokens.mask is None or tokens.mask[b, s]):
            past.append(x[s])
    if len(past) < options.rank + 1:
        return identity
    if options.subspace == "random":
        basis = site.basis
    else:
        states = torch.stack(past)
        _, values, directions = torch.linalg.svd(states - states.mean(0), full_matrices=False)
        floor = max(8 * torch.finfo(x.dtype).eps * states.norm(), RELATIVE_FLOOR**0.5 * values[0])
        if values[options.rank - 1] <= floor:
            return identity
        basis = directions[: options.rank].T
    return sum((torch.outer(column, column) for column in basis.T), torch.zeros_like(identity))
