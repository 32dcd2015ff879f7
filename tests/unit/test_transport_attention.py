"""Attention by transport plans: against loops, causal whatever the iterations, and the same in pieces as at once."""

import math

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from thalweg.capture import locate, prove
from thalweg.editing import edit
from thalweg.errors import InputError
from thalweg.models import Decoder, DecoderCache, DecoderConfig, Encoder, EncoderConfig
from thalweg.models.sublayers import transport
from thalweg.models.sublayers.attention import Attention
from thalweg.ops import entropic

VOCAB, ITERATIONS = 19, 3


def config(**changes):
    wanted = {"vocab_size": VOCAB, "width": 16, "depth": 2, "heads": 4, "kv_heads": 2, "max_length": 32}
    return DecoderConfig(**{**wanted, "attention_weights": "sinkhorn", "attention_iterations": ITERATIONS, **changes})


def spread(model, seed=1):
    """Weights of ordinary size in float64, so that every path matters."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


def tiny(**changes):
    return spread(Decoder(config(**changes)))


def ids(batch=2, length=7, seed=3):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def causal_loops(scores, visible, iterations):
    """One number at a time: rows in order, each with the column masses of the rows before it."""
    t = len(scores)
    z = [
        [
            scores[i, j] - torch.logsumexp(torch.stack([scores[i, m] for m in range(t) if visible[i][m]]), 0)
            for j in range(t)
        ]
        for i in range(t)
    ]
    prior = [[sum(1 / sum(visible[r]) for r in range(i + 1) if visible[r][j]) for j in range(t)] for i in range(t)]
    f = [torch.zeros((), dtype=scores.dtype) for _ in range(t)]
    g = [[torch.zeros((), dtype=scores.dtype) for _ in range(t)] for _ in range(t)]
    for _ in range(iterations):
        for i in range(t):
            for j in range(t):
                if visible[i][j]:
                    mass = sum((z[r][j] + f[r]).exp() for r in range(i + 1) if visible[r][j])
                    g[i][j] = math.log(prior[i][j]) - mass.log()
        f = [-sum((z[i][j] + g[i][j]).exp() for j in range(t) if visible[i][j]).log() for i in range(t)]
    rows = []
    for i in range(t):
        row = [(z[i][j] + g[i][j]).exp() if visible[i][j] else torch.zeros((), dtype=scores.dtype) for j in range(t)]
        rows.append(torch.stack(row) / sum(row))
    return torch.stack(rows)


def both_ways_loops(scores, iterations):
    p = scores.exp() / scores.exp().sum(-1, keepdim=True)
    for _ in range(iterations):
        p = p / p.sum(-2, keepdim=True)
        p = p / p.sum(-1, keepdim=True)
    return p


def lower(t):
    return [[j <= i for j in range(t)] for i in range(t)]


def banded(t, window):
    return [[i - window < j <= i for j in range(t)] for i in range(t)]


@pytest.mark.parametrize("iterations", [1, 2, 4])
@pytest.mark.parametrize("visible", [lower(5), banded(5, 2)], ids=["causal", "window"])
def test_the_causal_plan_is_that_of_loops_gradients_included(iterations, visible):
    hidden = ~torch.tensor(visible)
    cotangent = normal(5, 5, seed=2)
    found = []
    for make in (
        lambda s: entropic.causal_bridge(s.masked_fill(hidden, -torch.inf), iterations).exp(),
        lambda s: causal_loops(s, visible, iterations),
    ):
        scores = normal(5, 5).mul(2).requires_grad_()
        plan = make(scores)
        plan.backward(cotangent)
        found.append((plan.detach(), scores.grad))
    torch.testing.assert_close(*[plan for plan, _ in found])
    torch.testing.assert_close(*[gradient for _, gradient in found])
    assert found[0][1].isfinite().all()


def test_both_ways_is_sinkhorn_and_doubly_stochastic_in_the_limit():
    scores = normal(6, 6).requires_grad_()
    torch.testing.assert_close(entropic.two_way_bridge(scores, 4).exp(), both_ways_loops(scores, 4))
    plans = [entropic.two_way_bridge(scores.detach(), many).exp() for many in (3, 10, 300)]
    errors = [float((plan.sum(-2) - 1).abs().max()) for plan in plans]
    assert errors[0] > 3 * errors[1] > 9 * errors[2]
    assert torch.autograd.gradcheck(lambda s: entropic.two_way_bridge(s, 3).exp(), scores)


@pytest.mark.parametrize("cuts", [(1, 1, 1, 1, 1, 1), (4, 2), (3, 1, 2)], ids=str)
def test_rows_in_pieces_are_rows_at_once(cuts):
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    scores = normal(2, 3, 6, 6).mul(2).masked_fill(hidden, -torch.inf)
    whole = entropic.causal_bridge(scores, ITERATIONS)
    past, at, rows = None, 0, []
    for size in cuts:
        part, past = entropic.causal_bridge_on(scores[..., at : at + size, : at + size], past, ITERATIONS)
        rows.append(torch.nn.functional.pad(part, (0, 6 - at - size), value=-torch.inf))
        at += size
    torch.testing.assert_close(torch.cat(rows, -2), whole)
    with pytest.raises(InputError, match="of 3 iterations and 6 keys, these logits of 2"):
        entropic.causal_bridge_on(scores, past, 2)


@pytest.mark.parametrize(
    "changes",
    [{}, {"windows": (3, 0)}, {"positions": "learned"}, {"attention_edit": "value:exclude-self:0.3"}],
    ids=str,
)
def test_cached_decoding_equals_the_full_pass(changes):
    model, x = tiny(**changes), ids()
    full = model(x).logits
    for cuts in ((7,), (1,) * 7, (4, 1, 2)):
        cache, at, found = DecoderCache(), 0, []
        for size in cuts:
            found.append(model(x[:, at : at + size], cache=cache).logits)
            at += size
        torch.testing.assert_close(torch.cat(found, 1), full)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    """Catches: column masses that padding adds to, or a prior that counts it."""
    model, x = tiny(), ids(1, 5)
    pad = torch.zeros(1, 3, dtype=torch.long)
    row = torch.cat([pad, x] if side == "left" else [x, pad], 1)
    mask = torch.cat([pad, torch.ones_like(x)] if side == "left" else [torch.ones_like(x), pad], 1)
    real = slice(3, None) if side == "left" else slice(0, 5)
    torch.testing.assert_close(model(row, attention_mask=mask).logits[:, real], model(x).logits)


def first_changes(model):
    one, other = ids(), ids()
    other[:, 5] = (other[:, 5] + 1) % VOCAB
    return (model(one).logits - model(other).logits)[:, :5].abs().max().item()


def test_no_token_sees_later_ones_and_plain_sinkhorn_does(monkeypatch):
    model = tiny()
    assert first_changes(model) == 0

    def leaking(logits, past, iterations):
        z = torch.log_softmax(logits, -1)
        log_columns = entropic.causal_columns(logits.shape[-1], logits.dtype).log()
        for _ in range(iterations):
            z = torch.log_softmax(torch.log_softmax(z, -2) + log_columns, -1)
        return z, entropic.CausalMasses(z, z)

    monkeypatch.setattr(transport, "causal_bridge_on", leaking)
    assert first_changes(model) > 1e-6


def test_without_peaks_it_is_softmax_and_otherwise_it_is_not():
    model = tiny()
    softmax = Decoder(model.config.replace(attention_weights="softmax")).double().eval()
    softmax.load_state_dict(model.state_dict())
    assert (model(ids()).logits - softmax(ids()).logits).abs().max() > 1e-3
    with torch.no_grad():
        for net in (model, softmax):
            for module in net.modules():
                if isinstance(module, Attention):
                    module.query.weight.zero_()
    torch.testing.assert_close(model(ids()).logits, softmax(ids()).logits)


def test_an_encoder_holds_both_masses():
    wanted = {"vocab_size": VOCAB, "width": 16, "depth": 1, "heads": 2, "classes": 3, "max_length": 32}
    model = spread(Encoder(EncoderConfig(**wanted, attention_weights="sinkhorn", attention_iterations=200)))
    seen = []
    attention = next(m for m in model.modules() if isinstance(m, Attention))
    attention.value_edit = lambda call: seen.append(call.weights)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    x = ids()
    padded = model(x, attention_mask=mask).logits
    (weights,) = seen
    torch.testing.assert_close(weights.sum(-2), torch.ones(2, 2, 7, dtype=torch.float64), atol=1e-2, rtol=0)
    assert weights[1, :, :5, 5:].abs().max() == 0
    attention.value_edit = None
    torch.testing.assert_close(model(x[1:, :5]).logits, padded[1:])


def test_capture_and_edits_know_the_plan():
    model, x = tiny(), ids()
    assert prove(locate(model), {"input_ids": x}).worst <= 1e-10
    native = tiny(attention_edit="value:exclude-self:0.3")
    native.load_state_dict(model.state_dict())
    with edit(model, site="value", parallel=0.3):
        torch.testing.assert_close(model(x).logits, native(x).logits)
    plain = model(x).logits
    assert (native(x).logits - plain).abs().max() > 1e-6


def test_probes_of_scores_do_not_apply():
    from thalweg.continuum.scores import no_attention

    assert "no softmax of scores" in no_attention(locate(tiny()))
    assert no_attention(locate(tiny(attention_weights="softmax"))) is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_it_compiles_and_trains_in_float32():
    torch._dynamo.reset()
    x, found = ids(), []
    for compiled in (False, True):
        model = Decoder(config(), generator=torch.Generator().manual_seed(0))
        if compiled:
            model.compile_blocks(backend=aot_eager)
        loss = model(x, labels=x).loss
        found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    torch._dynamo.reset()
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_iterations": 0}, "attention_iterations must be at least 1"),
        ({"attention_weights": "sinkhorm"}, "sinkhorn"),
    ],
)
def test_values_that_cannot_be(changes, says):
    with pytest.raises(InputError, match=says):
        config(**changes)
