"""The baseline connections against their equations in loops: float64, random parameters, outputs and every gradient."""

import pytest
import torch
from torch import nn

from thalweg import connections
from thalweg.connections import Site

CASES = [
    ("post_norm", {}),
    ("post_norm", {"norm": "layernorm", "norm_bias": True, "enter_norm": True}),
    ("post_norm", {"input_norm": True, "update_norm": True, "final_norm": True}),
    ("deepnorm", {}),
    ("deepnorm", {"norm": "layernorm", "norm_bias": True}),
    ("deepnorm", {"alpha": 0.7, "update_norm": True}),
    ("sub_ln", {}),
    ("sub_ln", {"norm": "layernorm", "norm_bias": True, "update_norm": True}),
    ("layerscale", {}),
    ("layerscale", {"norm": "layernorm", "norm_bias": True, "update_norm": True}),
    ("rezero", {}),
    ("rezero", {"input_norm": True, "update_norm": True, "final_norm": True}),
    ("highway", {}),
    ("highway", {"norm": "layernorm", "norm_bias": True, "update_norm": True}),
    ("highway", {"input_norm": False, "final_norm": False, "bias": 1.0}),
    ("ln_scaling", {}),
    ("ln_scaling", {"norm": "layernorm", "norm_bias": True, "update_norm": True}),
    ("keel", {}),
    ("keel", {"norm": "layernorm", "norm_bias": True}),
    ("keel", {"alpha": "layers", "plain_start": "nothing", "enter_norm": True}),
    ("keel", {"alpha": "sqrt_layers", "plain_start": "layer", "final_norm": True}),
    ("keel", {"alpha": 2.5, "update_norm": True}),
    ("none", {}),
    ("none", {"input_norm": False, "final_norm": False}),
    ("none", {"norm": "layernorm", "norm_bias": True, "update_norm": True}),
]
SIZES = [
    pytest.param((2, 3, 4), Site.decoder(3), id="decoder"),
    pytest.param((1, 5, 3), Site.stack(4, ("attention",)), id="attention-only"),
]


class MixingSublayer(nn.Module):
    """A nonlinear causal sublayer: each token mixes what came before it, with weights that depend on the input."""

    def __init__(self, width: int):
        super().__init__()
        self.key, self.value, self.output = (nn.Parameter(torch.randn(width, width)) for _ in range(3))

    def forward(self, x):
        scores = (x @ self.key @ x.mT).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
        return torch.tanh(scores.softmax(-1) @ x @ self.value) @ self.output


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def subject(name, options, shape, sites):
    """A stream with noise on every parameter, random sublayers, an embedding [b t d] and a cotangent [b t d]."""
    torch.manual_seed(0)
    stream = connections.create(name, width=shape[-1], sites=sites, **options)
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    sublayers = nn.ModuleList(MixingSublayer(shape[-1]) for _ in sites)
    return stream, sublayers, torch.randn(shape, requires_grad=True), torch.randn(shape)


def gradients(output, cotangent, stream, sublayers, embedding):
    parameters = {f"stream.{name}": p for name, p in stream.named_parameters()}
    parameters |= {f"sublayers.{name}": p for name, p in sublayers.named_parameters()}
    found = torch.autograd.grad(output, [embedding, *parameters.values()], cotangent, allow_unused=True)
    return dict(zip(["embedding", *parameters], found, strict=True))


@pytest.mark.parametrize(("shape", "sites"), SIZES)
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: value if isinstance(value, str) else None)
def test_forward_and_gradients_equal_the_loops(name, options, shape, sites):
    stream, sublayers, embedding, cotangent = subject(name, options, shape, sites)
    fast, slow = stream(embedding, sublayers), stream.reference(embedding, sublayers)
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-12)
    ours = gradients(fast, cotangent, stream, sublayers, embedding)
    theirs = gradients(slow, cotangent, stream, sublayers, embedding)
    for key, gradient in ours.items():
        assert gradient is not None, f"{key} has no gradient"
        assert gradient.abs().max() > 0, f"the gradient of {key} is zero"
        torch.testing.assert_close(gradient, theirs[key], rtol=1e-8, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("break_at", [0, -1])
@pytest.mark.parametrize("name", ["post_norm", "deepnorm", "layerscale", "rezero", "highway", "ln_scaling", "keel"])
def test_the_comparison_sees_one_wrong_site(name, break_at):
    """A tenth more update at one site must not pass, wherever it stands."""
    stream, sublayers, embedding, _ = subject(name, {}, (2, 3, 4), Site.decoder(3))
    slow = stream.reference(embedding, sublayers)
    site = stream.sites[break_at]
    write = site.write
    site.write = lambda state, update, context: write(state, 1.1 * update, context)
    assert (stream(embedding, sublayers) - slow).abs().max() > 1e-4
