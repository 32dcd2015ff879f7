"""Small encoders with random weights everywhere, in float64."""

import torch

from thalweg import connections
from thalweg.models import Encoder, EncoderConfig

VOCAB, CLASSES = 19, 3
# Every connection with its defaults; and options that look along tokens both ways, hold a larger state or share parameters.
CASES = {name: (name, {}) for name in connections.names()} | {
    "orthogonal, over the sequence": ("orthogonal", {"over": "sequence"}),
    "delta, matrix state, convolutions": ("delta", {"value_channels": 3, "expand": "convolution"}),
    "tangent, short window": ("tangent_projector", {"window": 4, "rank": 2}),
    "mgt, one alpha": ("mgt", {"alpha_per": "network"}),
    "additive, sandwich": ("additive", {"update_norm": True, "norm": "layernorm", "norm_bias": True}),
}


def config(case="additive", **changes):
    name, options = CASES[case]
    values = {"vocab_size": VOCAB, "width": 16, "depth": 2, "heads": 4, "kv_heads": 2, "connection": name}
    values |= {"connection_options": options, "max_length": 32}
    if changes.get("objective") != "masked":
        values["classes"] = CLASSES
    return EncoderConfig(**values | changes)


def stirred(model, seed=0, size=0.2):
    """Float64, every parameter moved from its start: gates open, memories matter."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * size)
    return model


def encoder(case="additive", **changes):
    return stirred(Encoder(config(case, **changes), generator=torch.Generator().manual_seed(1)))


def ids(batch, length, seed=0):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
