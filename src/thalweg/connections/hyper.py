"""Hyper-connections: several streams with signed, unconstrained weights."""

from dataclasses import dataclass
from typing import Literal

from thalweg.connections import register
from thalweg.connections._many_streams import ManyStreams, ManyStreamsOptions
from thalweg.connections._stream_coefficients import Source
from thalweg.connections.base import Facts
from thalweg.registry import REFERENCE


@dataclass(frozen=True)
class HyperConnectionsOptions(ManyStreamsOptions):
    """The options of streams side by side, with the defaults of hyper-connections; ``dynamic=False`` is the static form."""

    mixer: str = "unconstrained"
    read: Literal["sigmoid", "signed", "mean"] = "signed"
    write: Literal["double_sigmoid", "signed", "ones"] = "signed"
    coefficients: Source = "per_stream"
    tanh: bool = True
    contraction: Literal["mean", "sum", "head"] = "sum"


@register(
    "hyper_connections",
    summary="n streams, read, written and mixed with signed weights that the token's streams change: x' = mix x + write F(read x)",
    source="Zhu et al. 2024, Hyper-Connections (arXiv 2409.19606)",
    aliases=("hc",),
)
class HyperConnections(ManyStreams):
    """Hyper-connections, dynamic by default, static with ``dynamic=False``.

    Shapes: state [b t n d]; per site read [n], write [n], mix [to from] = A_r transposed.
    Source: Zhu et al. 2024, arXiv 2409.19606; the dynamic part as restated in mHC (arXiv 2512.24880) Eq. 5.
    """

    Options = HyperConnectionsOptions
    facts = Facts(
        source="Zhu et al. 2024, Hyper-Connections, arXiv 2409.19606 (static and dynamic); mHC, arXiv 2512.24880, Eq. 3 and 5",
        equation=(
            "c_i = rmsnorm(x_i);  read_i = alpha tanh(w_r . c_i) + b_i;  write_i = alpha tanh(w_w . c_i) + b_i\n"
            "mix[o, i] = alpha tanh(W[o] . c_i) + B[o, i]\n"
            "x'_o = sum_i mix[o, i] x_i + write_o F(norm(sum_i read_i x_i))"
        ),
        words=(
            "The embedding [b t d] is copied into n streams [b t n d]. A sublayer reads a signed sum of them; its update [b t d] is added "
            "to every stream with a signed weight, after the streams were mixed by a matrix. Each weight is a learned constant plus a small "
            "part that the stream itself decides. At the end the streams are added up."
        ),
        constraint="none: products of the mixing matrices over depth may grow or vanish",
        chosen=(
            "the norm of the dynamic part is an rms norm, as mHC restates it, and has no weight of its own: the projection absorbs it",
        ),
        deviations=(
            "mix is the transpose of the paper's A_r: rows are ``to``",
            "read and mix have a scale of their own each, as in mHC Eq. 5; the paper's Eq. 12 and 13 share one, s_alpha",
            "output layers start as those of the other connections do; the paper scales their weights by sqrt(n), without saying which way",
        ),
        verified=(
            REFERENCE,
            "hyper-connections (PyPI), dynamic and static; outputs and gradients in float64",
        ),
        bibtex=(
            "@inproceedings{zhu2025hyper, title={Hyper-Connections}, author={Zhu, Defa and Huang, Hongzhi and Huang, Zihao and Zeng, Yutao "
            "and Mao, Yunyao and Wu, Banggu and Min, Qiyang and Zhou, Xun}, booktitle={ICLR}, year={2025}}"
        ),
    )

    @classmethod
    def additive_options(cls, given):
        return {"contraction": "mean"}  # the sum is n times the stream, which the final norm removes but for its eps

    @classmethod
    def variants(cls):
        return [{"dynamic": False, "streams": 3}, {"mixer": "identity", "contraction": "mean", "streams": 2}]
