"""The decoder: its configuration, its loss, what it passes to the stream, the trace, the errors at its edge."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F

from thalweg.connections import Site
from thalweg.errors import InputError, ShapeError, UnknownNameError
from thalweg.models import Decoder, DecoderCache, DecoderConfig, StreamTrace
from thalweg.models.sublayers import FeedForward
from thalweg.models.transformer import check_stream
from thalweg.ops.norms import Norm

VOCAB = 23


def config(**changes):
    return DecoderConfig(**{"vocab_size": VOCAB, "width": 16, "depth": 2, "heads": 2, "max_length": 32, **changes})


def tiny(seed=0, **changes):
    """A float64 decoder with weights of ordinary size, so that every path matters."""
    decoder = Decoder(config(**changes), generator=torch.Generator().manual_seed(seed)).double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return decoder


def ids(batch=2, length=7, seed=3):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_the_forward_pass_is_the_stream_over_the_sublayers():
    decoder = tiny()
    x = ids()
    out = decoder(x)
    assert out.logits.shape == (2, 7, VOCAB) and out.loss is None and out.cache is None
    from thalweg.models.look import look

    tokens, view = look(decoder.config, torch.float64, x, None, None, None, None)
    sublayers = [lambda h, s=s: s(h, view) for s in decoder.sublayers]
    for run in (decoder.stream, decoder.stream.reference):
        logits = F.linear(run(decoder.embedding(x), sublayers, tokens), decoder.embedding.weight)
        torch.testing.assert_close(out.logits, logits, rtol=1e-11, atol=1e-11)


def test_the_loss_is_the_mean_over_counted_labels():
    decoder = tiny()
    x = ids()
    labels = x.clone()
    labels[0, :4] = -100
    out = decoder(x, labels=labels)
    terms = [
        -torch.log_softmax(out.logits[b, t], -1)[labels[b, t + 1]]
        for b in range(2)
        for t in range(6)
        if labels[b, t + 1] != -100
    ]
    assert len(terms) == 9
    assert out.loss.item() == pytest.approx(sum(terms).item() / len(terms), rel=1e-12)


def test_a_loss_without_labels_that_count_is_nan():
    assert math.isnan(tiny()(ids(), labels=torch.full((2, 7), -100)).loss.item())


@pytest.mark.parametrize(
    "layers", [("attention",), ("feed_forward",), ("parallel",), ("attention", "attention", "feed_forward")]
)
def test_layers_of_any_make(layers):
    decoder = tiny(layers=layers, depth=3)
    x = ids()
    assert len(decoder.stream.sites) == 3 * len(layers)
    assert [s.kind for s in decoder.sublayers] == list(layers) * 3
    decoder(x, labels=x).loss.backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_a_parallel_layer_is_the_sum_of_its_branches():
    decoder = tiny(layers=("parallel",), depth=1)
    trace = StreamTrace()
    decoder(ids(), trace=trace)
    (record,) = trace.records
    assert list(record.branches) == ["attention", "feed_forward"]
    torch.testing.assert_close(record.update, sum(record.branches.values()), rtol=0, atol=0)
    layer = decoder.sublayers[0]
    torch.testing.assert_close(
        record.branches["feed_forward"], layer.feed_forward(record.input, None), rtol=1e-12, atol=1e-12
    )


def test_a_trace_replays():
    decoder = tiny(attention_gate="head")
    x = ids()
    plain = decoder(x)
    trace = StreamTrace()
    traced = decoder(x, trace=trace)
    assert torch.equal(plain.logits, traced.logits)
    assert [r.site for r in trace.records] == list(Site.decoder(2))
    state = trace.entered
    for record, site in zip(trace.records, decoder.stream.sites, strict=True):
        assert record.state_before is state
        torch.testing.assert_close(site.write(state, record.update, record.context), record.state_after, rtol=0, atol=0)
        state = record.state_after
    torch.testing.assert_close(decoder.stream.leave(state), trace.left, rtol=0, atol=0)
    torch.testing.assert_close(decoder.unembed(trace.left), traced.logits, rtol=0, atol=0)
    decoder(x, trace=trace)
    assert len(trace.records) == 4  # a second pass replaces the first


def test_logits_to_keep_and_soft_cap():
    x = ids()
    capped, plain = tiny(logit_softcap=2.0), tiny()
    torch.testing.assert_close(capped(x).logits, 2 * torch.tanh(plain(x).logits / 2), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(plain(x, logits_to_keep=2).logits, plain(x).logits[:, -2:], rtol=1e-12, atol=1e-12)


def test_packed_documents_equal_the_documents_alone():
    decoder = tiny()
    x = ids(1, 9)
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2]])
    packed = decoder(x, segments=segments).logits
    for part in (slice(0, 4), slice(4, 7), slice(7, 9)):
        torch.testing.assert_close(packed[:, part], decoder(x[:, part]).logits, rtol=1e-11, atol=1e-11)


def test_given_positions_are_used():
    decoder = tiny()
    x = ids()
    shifted = decoder(x, position_ids=torch.arange(7)[None] + 5).logits
    torch.testing.assert_close(shifted, decoder(x).logits, rtol=1e-10, atol=1e-10)  # rotary positions are relative
    spread = decoder(x, position_ids=torch.arange(7).expand(2, 7) * 2).logits
    assert (spread - shifted).abs().max() > 1e-3


def test_autocast_keeps_the_stream_and_the_loss_wide():
    decoder = Decoder(config(attention_gate="element", qk_norm=True))
    x = ids()
    trace = StreamTrace()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = decoder(x, labels=x, trace=trace)
    assert {r.update.dtype for r in trace.records} == {torch.bfloat16}
    assert {r.state_after.dtype for r in trace.records} == {torch.float32}
    assert {r.input.dtype for r in trace.records} == {torch.float32}
    assert out.loss.dtype == torch.float32
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in decoder.parameters())


def test_a_bfloat16_model_has_a_bfloat16_stream_and_a_float32_loss():
    decoder = Decoder(config()).bfloat16()
    trace = StreamTrace()
    out = decoder(ids(), labels=ids(), trace=trace)
    assert out.logits.dtype == torch.bfloat16 and out.loss.dtype == torch.float32
    assert {r.state_after.dtype for r in trace.records} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
@pytest.mark.parametrize("inner", [False, True])
def test_feed_forward_equals_the_formula(kind, inner):
    from thalweg.connections import Requirements

    cfg = config(feed_forward=kind, ffn_width=10, bias=True)
    layer = FeedForward(cfg, Requirements(inner_norm=inner), 0).double()
    x = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = []
    for row in x.view(-1, 16):
        up = layer.up.weight @ row + layer.up.bias
        if kind == "swiglu":
            gate = layer.gate.weight @ row + layer.gate.bias
            hidden = torch.stack([g / (1 + torch.exp(-g)) * u for g, u in zip(gate, up, strict=True)])
        else:
            hidden = torch.stack([u * 0.5 * (1 + math.erf(u.item() / math.sqrt(2))) for u in up])
        if inner:
            hidden = hidden / torch.sqrt((hidden**2).mean() + cfg.norm_eps)
        rows.append(layer.down.weight @ hidden + layer.down.bias)
    torch.testing.assert_close(layer(x, None), torch.stack(rows).view_as(x), rtol=1e-12, atol=1e-12)


def test_defaults_of_the_configuration():
    cfg = config(width=48, heads=4, norm="layernorm", norm_eps=1e-4)
    assert (cfg.key_value_heads, cfg.head_width, cfg.feed_forward_width) == (4, 12, 128)
    assert config(width=40, heads=4).feed_forward_width == 112  # 106.67 rounded up to a multiple of 8
    assert config(feed_forward="gelu").feed_forward_width == 64
    options = cfg.stream_options()
    assert (options.norm, options.norm_eps) == ("layernorm", 1e-4)
    assert config(connection_options={"norm_eps": 1e-2}, norm_eps=1e-4).stream_options().norm_eps == 1e-2
    assert config(connection="pre_norm").connection == "additive"  # an alias is the same connection
    assert cfg.replace(depth=5).depth == 5 and hash(cfg) == hash(
        config(width=48, heads=4, norm="layernorm", norm_eps=1e-4)
    )
    norms = [m for m in Decoder(cfg).modules() if isinstance(m, Norm) and m.kind != "none"]
    assert norms and all(m.kind == "layernorm" and m.eps == 1e-4 for m in norms)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"width": 15}, "width must be a multiple of heads, got width 15 and heads 2"),
        ({"width": 6}, "must be even for rotary positions"),
        ({"heads": 4, "kv_heads": 3}, "heads must be a multiple of kv_heads, got heads 4 and kv_heads 3"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"vocab_size": "many"}, "vocab_size must be int, got 'many'"),
        ({"width": 16.0}, "width must be int, got 16.0"),
        ({"qk_norm": 1}, "qk_norm must be bool, got 1"),
        ({"norm": "batchnorm"}, "unknown value for norm: 'batchnorm'"),
        ({"layers": ()}, "layers must name at least one sublayer"),
        ({"layers": ("attention", "feedforward")}, "Did you mean 'feed_forward'?"),
        ({"connection": "aditive"}, "unknown connection 'aditive'. Did you mean 'additive'?"),
        ({"connection_options": {"update_nrom": True}}, "Did you mean 'additive.update_norm'?"),
        ({"connection_options": {"update_norm": "yes"}}, "additive.update_norm must be bool"),
        ({"norm_eps": 0.0}, "norm_eps must be positive and finite, got 0.0"),
        ({"initial_std": -0.1}, "initial_std must be finite and not negative, got -0.1"),
        ({"rope_base": float("nan")}, "rope_base must be positive and finite, got nan"),
        ({"attention_gate": "both"}, "unknown value for attention_gate: 'both'"),
    ],
)
def test_a_configuration_that_cannot_be_says_why_in_one_line(changes, line):
    with pytest.raises(InputError) as raised:
        config(**changes)
    assert line in str(raised.value) and "\n" not in str(raised.value)


def test_replace_knows_its_fields():
    with pytest.raises(UnknownNameError, match="Did you mean 'width'"):
        config().replace(widht=3)


@pytest.mark.parametrize(
    ("call", "error", "line"),
    [
        (
            lambda d: d(torch.tensor([[0, VOCAB]])),
            InputError,
            r"token ids must lie in 0..22 \(vocab_size 23\), got 0..23",
        ),
        (lambda d: d(torch.tensor([[-1, 2]])), InputError, "got -1..2"),
        (lambda d: d(torch.ones(1, 3)), InputError, "input_ids must be integers"),
        (lambda d: d(torch.zeros(3, dtype=torch.long)), ShapeError, r"input_ids must be \[batch, tokens\]"),
        (lambda d: d(torch.zeros(1, 0, dtype=torch.long)), ShapeError, "at least one of each"),
        (lambda d: d(ids(1, 33)), InputError, r"the sequence has 33 tokens, this model takes 32 \(max_length\)"),
        (lambda d: d(ids(), labels=ids(2, 6)), InputError, "labels must be aligned"),
        (lambda d: d(ids(), labels=ids(), logits_to_keep=1), InputError, "need all logits"),
        (lambda d: d(ids(), attention_mask=torch.ones(2, 6)), ShapeError, r"attention_mask must be \[2, 7\]"),
        (
            lambda d: d(ids(), position_ids=torch.zeros(2, 6, dtype=torch.long)),
            ShapeError,
            "position_ids must have the shape",
        ),
        (lambda d: d(ids(), segments=torch.zeros(1, 7, dtype=torch.long)), ShapeError, "segments must have the shape"),
        (lambda d: d(ids(), segments=ids(), cache=DecoderCache()), InputError, "packed documents"),
        (lambda d: d([[1, 2]]), InputError, "input_ids must be a tensor of integers .*, got list; make it one by"),
        (lambda d: d(ids().bool()), InputError, r"input_ids must be integers \(int64 or int32\), got torch.bool"),
        (lambda d: d(ids()[None]), ShapeError, r"input_ids must be \[batch, tokens\] .*, got shape \(1, 2, 7\)"),
        (lambda d: d(ids(), labels=ids()[0]), ShapeError, r"labels must be aligned .*, got shape \(7,\); do not shift"),
        (lambda d: d(ids(), labels=ids().double()), InputError, "labels must be integers .*, got torch.float64"),
        (lambda d: d(ids(), labels=ids().tolist()), InputError, "labels must be a tensor of integers .*, got list"),
        (
            lambda d: d(ids(), labels=ids() - 99),
            InputError,
            r"labels must lie in 0..22 or be -100 \(not scored\), got -",
        ),
        (lambda d: d(ids(), labels=ids() + VOCAB), InputError, r"labels must lie in 0..22 or be -100"),
        (lambda d: d(ids(), attention_mask=[[1] * 7] * 2), InputError, "attention_mask must be a tensor, .*, got list"),
        (lambda d: d(ids(), position_ids=torch.rand(2, 7)), InputError, "position_ids must be integers"),
        (lambda d: d(ids(), segments=[0]), InputError, "segments must be a tensor of integers .*, got list"),
        (
            lambda d: d(ids(), cache=[]),
            InputError,
            r"cache must be a DecoderCache, got list; make one by DecoderCache\(\)",
        ),
        (lambda d: d(ids(), cache=True), InputError, "cache must be a DecoderCache, got bool"),
        (lambda d: d(ids(), trace=[]), InputError, "trace must be a StreamTrace, got list"),
        (lambda d: d(ids(), logits_to_keep=-1), InputError, "logits_to_keep must be a whole number of at least 0"),
        (lambda d: d(ids(), logits_to_keep=1.0), InputError, "logits_to_keep must be a whole number .*, got 1.0"),
        (lambda d: d(ids(), logits_to_keep=True), InputError, "logits_to_keep must be a whole number .*, got True"),
        (lambda d: Decoder({"width": 8}), InputError, "made of a DecoderConfig, got dict"),
        (lambda d: Decoder(config(), generator=3), InputError, "generator must be a torch.Generator, got int"),
    ],
)
def test_arguments_that_do_not_fit(call, error, line):
    with pytest.raises(error, match=line) as raised:
        call(tiny())
    assert "\n" not in str(raised.value)


def test_a_cache_serves_one_model():
    """The same sizes and another connection: keys and values would fit, and mean nothing."""
    first, second, cache = tiny(), tiny(connection="mgt"), DecoderCache()
    first(ids(), cache=cache)
    with pytest.raises(
        InputError, match="holds 7 tokens of another model; give each model a cache of its own"
    ) as raised:
        second(ids(), cache=cache)
    assert "\n" not in str(raised.value) and cache.length == 7
    first(ids(2, 1), cache=cache)
    cache.reset()
    second(ids(), cache=cache)
    assert cache.length == 7


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@torch.no_grad()
def test_a_copied_cache_goes_on(copied):
    decoder, cache = tiny(), DecoderCache()
    decoder(ids(), cache=cache)
    again = copied(cache)
    ours, theirs = (decoder(ids(2, 1), cache=c).logits for c in (cache, again))
    assert torch.equal(ours, theirs)


def test_labels_may_be_as_narrow_as_ids():
    decoder, x = tiny(), ids()
    assert torch.equal(decoder(x.int(), labels=x.int()).loss, decoder(x, labels=x).loss)


def test_the_cache_counts_towards_the_longest_sequence():
    decoder, cache = tiny(), DecoderCache()
    decoder(ids(1, 30), cache=cache)
    with pytest.raises(InputError, match="the sequence has 33 tokens"):
        decoder(ids(1, 3), cache=cache)


def test_a_call_that_is_refused_leaves_the_cache_alone():
    decoder, cache = tiny(), DecoderCache()
    decoder(ids(2, 3), cache=cache)
    with pytest.raises(ShapeError, match="the cache holds 2 rows, got 1"):
        decoder(ids(1, 1), cache=cache)
    with pytest.raises(InputError, match="labels must be aligned"):
        decoder(ids(2, 1), labels=ids(2, 2), cache=cache)
    assert cache.length == 3


def test_a_stream_that_fuses_where_no_block_calls_is_refused():
    from thalweg.connections.additive import Additive

    class Fused(Additive):
        def advance(self, index, state, update, context, tokens=None):
            return super().advance(index, state, update, context, tokens)

    stream = Fused(16, Site.decoder(1), Additive.Options())
    with pytest.raises(InputError, match="must fuse in its site's advance"):
        check_stream("fused", stream)


def test_a_stream_with_buffers_that_are_not_saved_is_refused():
    from thalweg.connections.additive import Additive

    stream = Additive(16, Site.decoder(1), Additive.Options())
    stream.sites[0].register_buffer("scale", torch.ones(1), persistent=False)
    with pytest.raises(InputError, match="must register its buffers as persistent"):
        check_stream("forgetful", stream)
