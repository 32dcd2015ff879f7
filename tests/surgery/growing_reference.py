"""A decoder of one layer kind written in loops, and helpers: what grown and pruned models are compared with."""

import torch

from thalweg.models import Decoder, DecoderConfig

VOCAB, LENGTH = 17, 7


def decoder(**changes):
    """A small decoder in float64 whose every parameter is random: nothing stands at its declared start."""
    values = {"vocab_size": VOCAB, "width": 16, "depth": 2, "heads": 4, "kv_heads": 2, "max_length": 32, **changes}
    model = Decoder(DecoderConfig(**values), generator=torch.Generator().manual_seed(5)).double()
    scatter(model)
    return model


def scatter(model, seed=6):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter))


def tokens(rows=2, length=LENGTH, seed=7):
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits_and_gradients(model, ids, seed=8):
    """Logits, and the gradient of every parameter under a random cotangent of the logits."""
    model.zero_grad()
    out = model(ids).logits
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    (out * cotangent).sum().backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return out.detach(), gradients


def attend_in_loops(attention, x, cos, sin):
    """Attention written in loops over heads, queries and keys: x [t d] -> [t d]. Without gate, norms and dictionary."""
    w, group = attention.head_width, attention.heads // attention.kv_heads

    def turned(row, t):
        half = w // 2
        one, two = row[:half], row[half:]
        c, s = cos[t, :half], sin[t, :half]
        return torch.cat([one * c - two * s, two * c + one * s])

    def projected(linear, head, t, rotate):
        row = linear.weight[head * w : (head + 1) * w] @ x[t]
        return turned(row, t) if rotate else row

    out = []
    for t in range(len(x)):
        total = torch.zeros_like(x[t])
        for head in range(attention.heads):
            q = projected(attention.query, head, t, True)
            keys = [projected(attention.key, head // group, s, True) for s in range(t + 1)]
            values = [projected(attention.value, head // group, s, False) for s in range(t + 1)]
            weights = torch.softmax(torch.stack([(q * k).sum() for k in keys]) / w**0.5, 0)
            read = sum(a * v for a, v in zip(weights, values, strict=True))
            total = total + attention.output.weight[:, head * w : (head + 1) * w] @ read
        out.append(total)
    return torch.stack(out)
