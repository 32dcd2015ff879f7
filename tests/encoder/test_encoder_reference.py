"""The encoder against a forward pass written in loops from the definitions, with all gradients; and mutants that must be found out."""

import math

import pytest
import torch
from small_encoders import VOCAB, config, encoder, ids
from torch import nn

from thalweg.models import encoder as encoder_module
from thalweg.models import look as look_module
from thalweg.models.sublayers import Attention

LENGTH = 7
MASK = torch.tensor([[1] * 7, [1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1]])
LABELS = torch.tensor([2, 0, 1])


def normed(x, norm):
    return x / torch.sqrt((x * x).mean() + norm.eps) * norm.weight


def turned(x, position, base=10000.0):
    half = len(x) // 2
    out = []
    for i in range(half):
        angle = position / base ** (2 * i / len(x))
        out.append(x[i] * math.cos(angle) - x[i + half] * math.sin(angle))
    for i in range(half):
        angle = position / base ** (2 * i / len(x))
        out.append(x[i + half] * math.cos(angle) + x[i] * math.sin(angle))
    return torch.stack(out)


def attended(layer, xs, real, window):
    """One row [t d] -> [t d]: every token reads the real tokens of both sides, at most window - 1 away."""
    positions, place = {}, 0
    for t in range(len(xs)):
        if real[t]:
            positions[t], place = place, place + 1
    heads, groups, w = layer.heads, layer.heads // layer.kv_heads, layer.head_width
    out = []
    for t in range(len(xs)):
        if not real[t]:
            out.append(torch.zeros_like(xs[0]))  # nobody reads it
            continue
        read = []
        for h in range(heads):
            g = h // groups
            q = turned(layer.query.weight[h * w : (h + 1) * w] @ xs[t], positions[t])
            scores, values = [], []
            for s in positions:
                if window and abs(t - s) >= window:
                    continue
                k = turned(layer.key.weight[g * w : (g + 1) * w] @ xs[s], positions[s])
                scores.append(q @ k / math.sqrt(w))
                values.append(layer.value.weight[g * w : (g + 1) * w] @ xs[s])
            weights = torch.stack(scores).exp()
            weights = weights / weights.sum()
            read.append(sum(a * v for a, v in zip(weights, values, strict=True)))
        out.append(layer.output.weight @ torch.cat(read))
    return out


def fed(layer, x):
    gate, up = layer.gate.weight @ x, layer.up.weight @ x
    return layer.down.weight @ (gate * torch.sigmoid(gate) * up)


def pooled(how, row, real):
    kept = [x for x, seen in zip(row, real, strict=True) if seen]
    if how == "first":
        return kept[0]
    if how == "max":
        return torch.stack([max(x[i] for x in kept) for i in range(len(kept[0]))])
    return sum(kept) / len(kept)


def reference(model, rows, mask, labels):
    """Logits of the real places, and the loss."""
    config = model.config
    logits = []
    for row, real in zip(rows, mask, strict=True):
        state = [model.embedding.weight[i] for i in row]
        for k, sublayer in enumerate(model.sublayers):
            site = model.stream.sites[k]
            xs = [normed(x, site.input_norm) for x in state]
            window = config.window(k // 2)
            attends = isinstance(sublayer, Attention)
            updates = attended(sublayer, xs, real, window) if attends else [fed(sublayer, x) for x in xs]
            state = [x + u for x, u in zip(state, updates, strict=True)]
        left = [normed(x, model.stream.final_norm) for x in state]
        if config.classifies:
            logits.append(model.head.weight @ pooled(config.pooling, left, real) + model.head.bias)
        else:
            logits.append(torch.stack([model.head.weight @ x for x in left]))
    logits, nats = torch.stack(logits), []
    for b, row in enumerate(logits):
        for place, label in [(row, labels[b])] if config.classifies else zip(row, labels[b], strict=True):
            if label != -100:
                nats.append(torch.log(place.exp().sum()) - place[label])
    return logits, sum(nats) / len(nats)


def labels_of(model, x):
    if model.config.classifies:
        return LABELS
    labels = torch.full_like(x, -100)
    for row, column in ((0, 1), (0, 6), (1, 0), (1, 3), (2, 2), (2, 5)):
        labels[row, column] = (x[row, column] + 3) % VOCAB
    return labels


def agrees(model, seed=0):
    """Whether loss, logits of real places and all gradients, at random cotangents, are those of the reference."""
    x = ids(3, LENGTH, seed)
    labels = labels_of(model, x)
    shown = MASK.bool() if not model.config.classifies else torch.ones(3, dtype=torch.bool)
    parameters = list(model.parameters())
    cotangent = torch.Generator().manual_seed(9)

    def gradients(logits, loss):
        cotangent.manual_seed(9)
        random = torch.randn(logits[shown].shape, generator=cotangent, dtype=torch.float64)
        return torch.autograd.grad((logits[shown] * random).sum() + 1.7 * loss, parameters, materialize_grads=True)

    out = model(x, attention_mask=MASK, labels=labels)
    logits, loss = reference(model, x.tolist(), MASK.tolist(), labels.tolist())
    pairs = [(out.loss, loss), (out.logits[shown], logits[shown])]
    pairs += zip(gradients(out.logits, out.loss), gradients(logits, loss), strict=True)
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in pairs)


@pytest.mark.parametrize("pooling", ["mean", "first", "max"])
def test_a_classification_is_what_the_loops_say(pooling):
    assert agrees(encoder(pooling=pooling))


@pytest.mark.parametrize("tied", [True, False])
def test_masked_tokens_are_what_the_loops_say(tied):
    assert agrees(encoder(objective="masked", tie_embeddings=tied))


def test_a_window_reaches_to_both_sides():
    assert agrees(encoder(windows=(2, 0)))
    assert agrees(encoder(objective="masked", windows=(3, 2)))


def causal(monkeypatch):
    monkeypatch.setattr(Attention, "attend", lambda self, q, k, v, allowed: _attend(q, k, v, allowed, self))


def _attend(q, k, v, allowed, self):
    t = q.shape[2]
    seen = torch.ones(t, t, dtype=torch.bool).tril()
    seen = seen if allowed is None else seen & allowed
    groups = self.heads // self.kv_heads
    y = nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), attn_mask=seen
    )
    return y.transpose(1, 2)


def window_behind(monkeypatch):
    allowed = look_module.allowed

    def one_sided(*args, **kwargs):
        found = allowed(*args, **kwargs)
        window, length = (args[5] if len(args) > 5 else 0), args[3]
        return found.logical_and(torch.ones(length, length, dtype=torch.bool).tril()) if window else found

    monkeypatch.setattr(look_module, "allowed", one_sided)


def pooling_with_padding(monkeypatch):
    pool = encoder_module.pool
    monkeypatch.setattr(encoder_module, "pool", lambda hidden, how, real=None: pool(hidden, how, None))


def pooling_over_the_length(monkeypatch):
    def pool(hidden, how, real=None):
        return hidden.masked_fill(~real[..., None], 0.0).mean(1)

    monkeypatch.setattr(encoder_module, "pool", pool)


def first_of_the_row(monkeypatch):
    pool = encoder_module.pool
    monkeypatch.setattr(
        encoder_module, "pool", lambda h, how, real=None: h[:, 0] if how == "first" else pool(h, how, real)
    )


def padding_is_read(monkeypatch):
    allowed = look_module.allowed
    monkeypatch.setattr(look_module, "allowed", lambda seen, *rest: allowed(None, *rest))


def shifted(monkeypatch):
    loss = encoder_module.Encoder.loss

    def off_by_one(self, logits, labels):
        return loss(self, logits, labels) if labels.ndim == 1 else loss(self, logits[:, :-1], labels[:, 1:])

    monkeypatch.setattr(encoder_module.Encoder, "loss", off_by_one)


MUTANTS = [
    (causal, {}),
    (causal, {"objective": "masked"}),
    (window_behind, {"windows": (2, 0)}),
    (pooling_with_padding, {}),
    (pooling_with_padding, {"pooling": "max"}),
    (pooling_over_the_length, {}),
    (first_of_the_row, {"pooling": "first"}),
    (padding_is_read, {}),
    (padding_is_read, {"objective": "masked"}),
    (shifted, {"objective": "masked"}),
]


@pytest.mark.parametrize(("mutant", "changes"), MUTANTS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_mutant_is_found_out(monkeypatch, mutant, changes):
    model = encoder(**changes)
    assert agrees(model)
    mutant(monkeypatch)
    assert not agrees(encoder(**changes))


def test_without_a_mask_everybody_sees_everybody():
    """The path of attention without a mask, which a decoder takes for causal."""
    for changes in ({}, {"objective": "masked"}):
        model, x = encoder(**changes), ids(3, LENGTH)
        with torch.no_grad():
            bare, masked = model(x), model(x, attention_mask=torch.ones_like(x))
        torch.testing.assert_close(bare.logits, masked.logits, rtol=1e-10, atol=1e-12)
    assert config().causal is False
