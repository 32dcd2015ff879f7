"""Orthogonal residual updates: what an update has along the stream is taken out before it is added."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thalweg.connections import register
from thalweg.connections._many_streams import ManyStreams, ManyStreamsOptions, ManyStreamsSite
from thalweg.connections.base import Facts, shaped
from thalweg.errors import InputError
from thalweg.ops.precision import full_precision, wide
from thalweg.ops.value_edit import value_edit
from thalweg.registry import REFERENCE

GROUPS = {"feature": "head", "global": "all"}  # the stream that an update is added to is the value of one head


@dataclass(frozen=True)
class OrthogonalOptions(ManyStreamsOptions):
    """The options of streams side by side, with one stream, no mixing and no parameters by default; and those of the projection.

    retained: share of the part along the stream that stays; 0 is orthogonal, 1 the plain sum.
    over: what is one vector in the projection: ``feature``, each stream of a token by itself; ``global``, all streams of a token together
    (the same with one stream); ``sequence``, all tokens of a sequence too, for encoders: a decoder refuses it.
    eps: added to the squared length of the stream.
    """

    streams: int = 1
    mixer: str = "identity"
    read: Literal["sigmoid", "signed", "mean"] = "mean"
    write: Literal["double_sigmoid", "signed", "ones"] = "ones"
    retained: float = 0.0
    over: Literal["feature", "global", "sequence"] = "feature"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.retained):
            raise InputError(f"retained must be a finite number (0 removes, 1 keeps), got {self.retained}")
        if not 0 <= self.eps < math.inf:
            raise InputError(f"eps must be a finite number of at least 0, got {self.eps}")


class OrthogonalSite(ManyStreamsSite):
    """m = mix x; U_n = write_n u; x'_n = m_n + U_n - (1 - retained) (<U, m> / (|m|^2 + eps)) m_n.

    The context is (coefficients, None with one plain stream; which tokens are real, None where all are or it does not matter).
    """

    options: OrthogonalOptions

    @property
    def plain(self) -> bool:
        """One stream, read and written as it is."""
        return self.options.streams == 1 and not self.logits

    def read(self, state, tokens=None):
        real = tokens.mask if tokens is not None and self.options.over == "sequence" else None
        if self.plain:
            return self.input_norm(shaped(state, 1, self.input_norm.width).squeeze(2)), (None, real)
        x, found = super().read(state, tokens)
        return x, (found, real)

    def write(self, state, update, context):
        (found, real), update = context, self.update_norm(update)
        if found is None:
            mixed, written = wide(state), wide(update).unsqueeze(2)
        else:
            with full_precision(state):
                mixed = wide(found.mix) @ wide(state)
            written = wide(found.write).unsqueeze(-1) * wide(update).unsqueeze(2)
        return (mixed + self.turned(written, mixed, real)).to(state.dtype)

    def turned(self, written: Tensor, onto: Tensor, real: Tensor | None) -> Tensor:
        """What is left of an update [b t n d] that is added to ``onto`` [b t n d]."""
        o = self.options
        if o.over != "sequence":
            return value_edit(written, onto, o.retained, group=GROUPS[o.over], eps=o.eps)
        seen = torch.ones_like(onto[..., :1, :1]) if real is None else real[..., None, None].to(onto.dtype)
        dot, square = ((a * onto * seen).sum((1, 2, 3), keepdim=True) for a in (written, onto))
        return written + (o.retained - 1) * dot / torch.where(square > 0, square + o.eps, 1.0) * onto

    def gates(self, state, context, update=None):
        return {} if context[0] is None else super().gates(state, context[0], update)

    def mixing(self, state, context):
        return super().mixing(state, context[0])

    def force_mix(self, mix):
        if not self.mixes:
            raise NotImplementedError("one stream without coefficients has nothing to mix; give streams")
        super().force_mix(mix)


@register(
    "orthogonal",
    summary="the part of an update along the stream is removed before it is added: x' = x + f - (<x, f> / |x|^2) x, f = F(norm(x))",
    source="Oh et al. 2025, Orthogonal Residual Update (arXiv 2505.11881)",
    aliases=("orthogonal_residual",),
)
class Orthogonal(ManyStreams):
    """Stream whose updates are orthogonal to it, or keep a share of what they have along it; with several streams, to what each became
    by mixing.

    Shapes: state [b t n d], with n = 1 by default.
    Raises: InputError for a share that is not finite or a negative eps.
    Source: Oh et al. 2025, arXiv 2505.11881.
    """

    Options = OrthogonalOptions
    SiteModule = OrthogonalSite
    options: OrthogonalOptions
    facts = Facts(
        source="Oh et al. 2025, Revisiting Residual Connections: Orthogonal Updates for Stable and Efficient Deep Networks, arXiv 2505.11881",
        equation=(
            "f = F(norm(x));  c = <x, f> / (|x|^2 + eps)\nx' = x + f - (1 - retained) c x\n"
            "several streams: m = mix x, U_n = write_n f; x'_n = m_n + U_n - (1 - retained) c_n m_n\n"
            "over 'feature': c_n = <m_n, U_n> / (|m_n|^2 + eps);  'global': one c = sum_n <m_n, U_n> / (sum_n |m_n|^2 + eps)"
        ),
        words=(
            "The sublayer reads the normalised stream [b t d]. Of its update [b t d] the part along the stream of the same token is taken "
            "out, and the rest is added: an update turns the stream and lengthens it by Pythagoras alone."
        ),
        constraint="<x, x' - x> = 0 but for eps (retained 0): |x'|^2 = |x|^2 + |x' - x|^2, the stream never gets shorter",
        precision="dot products and the sum in float32 or wider; the stream in the dtype of the model",
        chosen=(
            "eps 1e-6, added, as in the source; a stream of zeros has no direction, and all of the update is added",
            "retained: ours; the source removes all (0)",
            "several streams: ours; the projection is on what the update is added to",
        ),
        deviations=(
            "global: one token's streams and width; the source's flattens the tokens too, by which one sees later ones (here over='sequence')",
            "a final norm and pre-norm sublayers, as in any pre-norm stack",
        ),
        verified=(
            REFERENCE,
            "hyper-connections (PyPI): `OrthogonalResidualUpdate` with eps 0; outputs and gradients in float64",
        ),
        bibtex=(
            "@inproceedings{oh2025orthogonal, title={Revisiting Residual Connections: Orthogonal Updates for Stable and Efficient Deep "
            "Networks}, author={Oh, Giyeong and Cho, Woohyun and Kim, Siyeol and Choi, Suhwan and Yu, Youngjae}, booktitle={NeurIPS}, "
            "year={2025}}"
        ),
    )

    @property
    def sees_later_tokens(self) -> bool:
        return self.options.over == "sequence"

    def equals_at_start(self):
        return super().equals_at_start() if self.options.retained == 1 else None

    @classmethod
    def additive_options(cls, given):
        return {"retained": 1.0}

    @classmethod
    def variants(cls):
        few = {
            "streams": 3,
            "mixer": "sinkhorn",
            "mixer_options": {"iterations": 2},
            "read": "sigmoid",
            "write": "double_sigmoid",
        }
        return [
            {"retained": 1.0},
            {"retained": 0.3, "eps": 0.0, "input_norm": False},
            few,
            {**few, "over": "global", "retained": -0.5, "streams": 2},
        ]

    def reference_write(self, site, logits, write, mixed, update, to):
        o = self.options
        if o.over == "sequence":
            raise NotImplementedError(
                "over='sequence' has a reference of its own in the tests: this one looks at one token at a time"
            )
        streams = range(o.streams) if o.over == "global" else (to,)
        dot = sum(sum(write[n] * u * m for u, m in zip(update, mixed[n], strict=True)) for n in streams)
        square = sum(sum(m * m for m in mixed[n]) for n in streams)
        taken = (1 - o.retained) * dot / (square + o.eps)
        return torch.stack([m + write[to] * u - taken * m for m, u in zip(mixed[to], update, strict=True)])
