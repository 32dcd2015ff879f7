"""mHC: several streams with non-negative weights and a mixing matrix held near the Birkhoff polytope."""

from dataclasses import dataclass

from thalweg.connections import register
from thalweg.connections._many_streams import ManyStreams, ManyStreamsOptions
from thalweg.connections.base import Facts
from thalweg.registry import REFERENCE


@dataclass(frozen=True)
class MHCOptions(ManyStreamsOptions):
    """The options of streams side by side, with the defaults of mHC; ``mixer="identity"`` is Identity HC."""


@register(
    "mhc",
    summary="n streams, read by sigmoids, written by 2 sigmoid, mixed by a constrained matrix (any mixer; Sinkhorn by default)",
    source="Xie et al. 2025, mHC (arXiv 2512.24880)",
    aliases=("manifold_hyper_connections",),
)
class MHC(ManyStreams):
    """Manifold-constrained hyper-connections, with any mixer.

    Shapes: state [b t n d]; per token and site read [n], write [n], mix [to from].
    Source: Xie et al. 2025, arXiv 2512.24880 v2, Eq. 3 and 7-19; initial biases from appendix A.6 of the camera-ready, as quoted publicly.
    """

    Options = MHCOptions
    facts = Facts(
        source="Xie et al. 2025, mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880 v2, Eq. 3 and 7-19",
        equation=(
            "h = vec(x) phi / rms(vec(x));  read = sigmoid(alpha_r h_r + b_r);  write = 2 sigmoid(alpha_w h_w + b_w)\n"
            "mix = Sinkhorn_20(alpha_m mat(h_m) + b_m)\n"
            "x'_o = sum_i mix[o, i] x_i + write_o F(norm(sum_i read_i x_i))"
        ),
        words=(
            "The embedding [b t d] is copied into n streams [b t n d]. All streams of a token, normalised as one vector [n d], decide its "
            "weights. A sublayer reads a sum with weights between 0 and 1; its update [b t d] goes to every stream with a weight between 0 "
            "and 2, after a matrix whose rows (and, as far as it has converged, columns) sum to one has mixed the streams."
        ),
        constraint="mix is doubly stochastic: rows exactly, columns as far as 20 iterations converge (other mixers: see theirs)",
        precision="logits, weights and the mixing product in float32 or wider; streams in the dtype of the model",
        chosen=(
            "the projection starts at zero (the paper does not say; Megatron draws it, mHC-lite's mHC has zeros)",
            "home stream of a site: its index modulo n (the rule of hyper-connections; the paper's is not known)",
            "eps 1e-6 inside the root (the paper writes none, its configurations 1e-20; DeepSeek-V4 has 1e-6)",
            "contraction: mean (the paper does not say; sum differs by a factor that the final norm removes)",
            "no weight decay on biases and scales",
        ),
        deviations=(
            "initial values of every mixer follow one contract: read the home stream, write 1, mix near the identity",
        ),
        verified=(
            REFERENCE,
            "transformers: DeepSeek-V4, modules and a whole model; DeepSeek's TileKernels reference; outputs and gradients in float64",
            "with options for their deviations: hyper-connections (PyPI) in float64, Liger in float32",
        ),
        bibtex=(
            "@article{xie2025mhc, title={mHC: Manifold-Constrained Hyper-Connections}, author={Xie, Zhenda and Wei, Yixuan and Cao, Huanqi "
            "and others}, journal={arXiv:2512.24880}, year={2025}}"
        ),
    )

    @classmethod
    def variants(cls):
        return [
            {"dynamic": False, "mixer_options": {"iterations": 2}},
            {"contraction": "head", "read_eps": 1e-6, "streams": 3, "mixer_options": {"iterations": 2}},
            {"mixer": "identity", "read": "signed", "write": "signed"},
            {"mixer": "uniform", "read": "mean", "write": "ones"},
            {"coefficients": "per_stream", "tanh": True, "streams": 3, "mixer_options": {"iterations": 2}},
            {"streams": 1, "input_norm": False},
        ]
