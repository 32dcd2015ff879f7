"""The mixture of experts against loops over tokens and experts, in float64: outputs and all gradients, with random cotangents."""

import math

import pytest
import torch

from thalweg.connections import Requirements
from thalweg.models import DecoderConfig
from thalweg.models.sublayers import MixtureOfExperts, TokenView

CASES = {
    "sigmoid": {},
    "softmax": {"router": "softmax"},
    "no shared expert": {"shared_experts": 0},
    "all experts active": {"experts": 3, "active_experts": 3},
    "one active of many, most of them idle": {"experts": 11, "active_experts": 1, "expert_width": 2},
    "one expert": {"experts": 1, "active_experts": 1, "shared_experts": 1},
}


def make(inner_norm=False, **changes):
    config = DecoderConfig(
        **{"vocab_size": 9, "width": 6, "depth": 1, "heads": 1, "layers": ("moe",), "experts": 5, "active_experts": 2}
        | {"shared_experts": 2, "expert_width": 3}
        | changes
    )
    layer = MixtureOfExperts(config, Requirements(inner_norm=inner_norm), 0).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        layer.router.votes.copy_(torch.randint(-400, 400, (config.experts,), generator=generator))
    return layer


def swiglu(gate, up, down, scale, x):
    """One feed-forward layer, entry by entry: x [d] -> [d]; ``scale`` [f] of the inner norm, or None."""
    inner = []
    for g, u in zip(gate, up, strict=True):
        a, b = sum(w * v for w, v in zip(g, x, strict=True)), sum(w * v for w, v in zip(u, x, strict=True))
        inner.append(a / (1 + torch.exp(-a)) * b)
    if scale is not None:
        root = torch.sqrt(sum(v * v for v in inner) / len(inner) + 1e-6)
        inner = [v / root * s for v, s in zip(inner, scale, strict=True)]
    return torch.stack([sum(w * v for w, v in zip(row, inner, strict=True)) for row in down])


def reference(layer, x):
    """x [b t d] -> [b t d], from the equations alone."""
    config_bias = [layer.router.rate * int(v) for v in layer.router.votes]
    out = []
    for row in x:
        tokens = []
        for token in row:
            logits = [sum(w * v for w, v in zip(weight, token, strict=True)) for weight in layer.router.linear.weight]
            if layer.router.kind == "sigmoid":
                scores = [1 / (1 + torch.exp(-z)) for z in logits]
            else:
                scores = [torch.exp(z) / sum(torch.exp(other) for other in logits) for z in logits]
            ranked = sorted(range(len(scores)), key=lambda e, s=scores: -(s[e].item() + config_bias[e]))
            chosen = ranked[: layer.active]
            total = sum(scores[e] for e in chosen)
            y = torch.zeros_like(token)
            for e in chosen:
                expert = (layer.gate.weight[e], layer.up.weight[e], layer.down.weight[e], layer.inner_norm.weight)
                y = y + scores[e] / total * swiglu(*expert, token)
            if layer.shared is not None:
                shared = layer.shared
                y = y + swiglu(
                    shared.gate.weight, shared.up.weight, shared.down.weight, shared.inner_norm.weight, token
                )
            tokens.append(y)
        out.append(torch.stack(tokens))
    return torch.stack(out)


@pytest.mark.parametrize("inner_norm", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_all_gradients_equal_the_reference(case, inner_norm):
    layer = make(inner_norm, **CASES[case])
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    view = TokenView(torch.empty(0), torch.empty(0))
    got, want = layer(x, view), reference(layer, x)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    names, leaves = zip(("x", x), *layer.named_parameters(), strict=True)
    ours = torch.autograd.grad(got, leaves, cotangent)
    theirs = torch.autograd.grad(want, leaves, cotangent, materialize_grads=True)
    for name, a, b in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
        silent = name == "router.linear.weight" and layer.active == 1  # one weight that is always 1
        assert (b.abs().max() > 1e-9) is not silent, f"{name}: zero where it should not be, or the reverse"
    if "idle" in case:
        used = layer.load > 0
        assert 0 < used.sum() < 9 and not ours[names.index("up.weight")][~used].any()


def test_the_bias_chooses_but_does_not_weigh():
    layer = make(active_experts=1, shared_experts=0)
    x = torch.randn(1, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer.router.votes.zero_()
    layer.router.votes[4] = 10_000
    scores = layer.router(x.flatten(0, 1))
    weights, chosen = layer.router.choose(scores, 2)
    assert (chosen[:, 0] == 4).all()
    other = scores.clone()
    other[:, 4] = -math.inf
    assert torch.equal(chosen[:, 1], other.argmax(-1))
    torch.testing.assert_close(weights[:, 0], scores[:, 4] / (scores[:, 4] + other.amax(-1)))
