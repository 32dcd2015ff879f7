"""The feed-forward sublayer: SwiGLU, GELU, and the forms of both that published models have."""

import functools

import torch.nn.functional as F
from torch import nn

from thalweg.models.sublayers.base import Map, Sublayer
from thalweg.ops.norms import Norm

_GELU_TANH = functools.partial(F.gelu, approximate="tanh")
ACTIVATIONS = {"swiglu": F.silu, "geglu_tanh": _GELU_TANH, "gelu": F.gelu, "gelu_tanh": _GELU_TANH}


class FeedForward(Sublayer):
    """swiglu: y = W_down (silu(W_gate x) * W_up x); gelu: y = W_down gelu(W_up x), the exact (erf) form.

    gelu_tanh: gelu in its tanh form, as GPT-2 has it; geglu_tanh: that in the place of silu in swiglu, as Gemma has it.

    Shapes: [b t d] -> [b t d], inner width f.
    Source: SwiGLU, Shazeer 2020 (arXiv 2002.05202) Eq. 6; GELU, Hendrycks and Gimpel 2016 (arXiv 1606.08415) Eq. 2; inner norm on [.. f]
    before W_down, Wang et al. 2022 (arXiv 2210.06423).
    The gate of SwiGLU chooses, so a connection's gain acts on W_up and W_down: the update scales with its square, as for two maps.
    """

    kind = "feed_forward"

    def __init__(self, config, requirements, index):
        super().__init__(config, requirements, index)
        d, f, bias = config.width, config.feed_forward_width, config.bias
        self.activation = ACTIVATIONS[config.feed_forward]
        self.gate = nn.Linear(d, f, bias=bias) if config.gated else None
        self.up = nn.Linear(d, f, bias=bias)
        self.down = nn.Linear(f, d, bias=bias)
        self.inner_norm = Norm(f, config.norm if requirements.inner_norm else "none", eps=config.norm_eps)

    def forward(self, x, view, cache=None):
        inner = self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x)
        return self.down(self.inner_norm(inner))

    def maps(self):
        if self.gate is not None:
            yield Map(self.gate, gained=False)
        yield Map(self.up)
        yield Map(self.down, last=True)
