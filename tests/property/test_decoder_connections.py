"""What must hold for a decoder with any connection: found by name, so a new connection is tested by being there."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from thalweg import connections
from thalweg.models import Decoder, DecoderCache, DecoderConfig, ThalwegConfig, ThalwegForCausalLM

# Every connection with its defaults; and options that carry tokens in a memory, hold a larger state or share parameters.
CASES = {name: (name, {}) for name in connections.names()} | {
    "delta, matrix state, convolutions": ("delta", {"value_channels": 3, "expand": "convolution"}),
    "delta, matrix state, channels": ("delta", {"value_channels": 2, "compress": "channels"}),
    "tangent, short window": ("tangent_projector", {"window": 4, "rank": 2}),
    "mgt, one alpha": ("mgt", {"alpha_per": "network"}),
    "mgt, rank one": ("mgt", {"form": "rank1", "alpha_per": "layer"}),
    "additive, sandwich": ("additive", {"update_norm": True, "norm": "layernorm", "norm_bias": True}),
}
NAMES = list(CASES)
VOCAB = 19
few = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def config(case, **changes):
    name, options = CASES[case]
    values = {"vocab_size": VOCAB, "width": 16, "depth": 3, "heads": 4, "kv_heads": 2, "connection": name}
    return DecoderConfig(**values | {"connection_options": options} | changes)


def stirred(model, seed=0):
    """Float64, every parameter moved from its start: gates open, memories matter."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model


def decoder(name):
    return stirred(Decoder(config(name), generator=torch.Generator().manual_seed(1)))


def shell(name):
    torch.manual_seed(1)
    return stirred(ThalwegForCausalLM(ThalwegConfig.of(config(name), pad_token_id=0)))


def ids(batch, length, seed):
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@given(length=st.integers(2, 11), seed=st.integers(0, 999), data=st.data())
@few
def test_later_tokens_never_change_earlier_logits(name, length, seed, data):
    at = data.draw(st.integers(1, length - 1))
    model, x = decoder(name), ids(2, length, seed)
    other = x.clone()
    other[:, at:] = ids(2, length - at, seed + 1)
    with torch.no_grad():
        before, after = model(x).logits, model(other).logits
    close(after[:, :at], before[:, :at])
    if not torch.equal(x[:, at], other[:, at]):
        assert (after[:, at] - before[:, at]).abs().max() > 1e-6  # and they do change their own


@pytest.mark.parametrize("name", NAMES)
def test_the_past_gets_no_gradient_of_the_future(name):
    model = decoder(name)
    embedded = []
    model.embedding.register_forward_hook(lambda _, __, out: embedded.append(out))
    logits = model(ids(2, 9, 3)).logits[:, 4]
    (gradient,) = torch.autograd.grad(logits, embedded, torch.randn(logits.shape, dtype=torch.float64))
    assert not gradient[:, 5:].any()
    assert gradient[:, :5].abs().amax((0, 2)).min() > 1e-9  # all of the past is seen


@pytest.mark.parametrize("name", NAMES)
@given(pieces=st.lists(st.integers(1, 5), min_size=1, max_size=5), pad=st.integers(0, 4), seed=st.integers(0, 999))
@few
def test_cached_decoding_equals_the_full_pass_padded_or_not(name, pieces, pad, seed):
    model, length = decoder(name), sum(pieces)
    x = ids(2, pad + length, seed)
    mask = torch.ones_like(x)
    mask[0, :pad] = 0
    with torch.no_grad():
        full = model(x, attention_mask=mask).logits
        close(full[:1, pad:], model(x[:1, pad:]).logits)
        cache = DecoderCache()
        parts = zip(
            x.split([pad + pieces[0], *pieces[1:]], 1), mask.split([pad + pieces[0], *pieces[1:]], 1), strict=True
        )
        cached = torch.cat([model(part, attention_mask=real, cache=cache).logits for part, real in parts], 1)
    close(cached[0, pad:], full[0, pad:])
    close(cached[1], full[1])


@pytest.mark.parametrize("name", NAMES)
def test_right_padding_and_packing(name):
    model, x = decoder(name), ids(1, 9, 5)
    mask = torch.tensor([[1] * 6 + [0] * 3])
    segments = torch.tensor([[0] * 4 + [1] * 5])
    with torch.no_grad():
        close(model(x, attention_mask=mask).logits[:, :6], model(x[:, :6]).logits)
        packed = model(x, segments=segments).logits
        close(packed[:, :4], model(x[:, :4]).logits)
        close(packed[:, 4:], model(x[:, 4:]).logits)


@pytest.mark.parametrize("name", NAMES)
def test_generate_with_a_cache_equals_without(name):
    model = shell(name)
    x = ids(2, 7, 2)
    x[0, :3] = 0
    mask = (x != 0).long()
    mask[1] = 1
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for extra in ({}, {"num_beams": 3}):
        plain = model.generate(x, use_cache=False, **options, **extra)
        assert torch.equal(model.generate(x, **options, **extra), plain)
    greedy = model.generate(x, **options)
    assert torch.equal(model.generate(x, prefill_chunk_size=3, **options), greedy)
    alone = model.generate(x[:1, 3:], max_new_tokens=8, do_sample=False)
    assert torch.equal(greedy[0, 3:], alone[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layers", [("attention", "feed_forward"), ("attention",), ("parallel",)])
def test_one_pass_gives_every_parameter_a_gradient(name, layers):
    model = Decoder(config(name, layers=layers, attention_gate="head", qk_norm=True))
    x = ids(2, 9, 4)
    model(x, labels=x).loss.backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []
    assert len({id(p) for p in model.parameters()}) == len(list(model.parameters()))


@pytest.mark.parametrize("name", NAMES)
def test_saving_and_loading_is_bitwise(name, tmp_path):
    saved = shell(name).float()
    saved.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours, theirs = saved.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert loaded.num_parameters() == saved.num_parameters()
    x = ids(2, 7, 6)
    with torch.no_grad():
        assert torch.equal(saved(x).logits, loaded(x).logits)


@pytest.mark.parametrize("name", NAMES)
def test_the_stream_and_its_reference_agree_inside_the_model(name):
    model, x = decoder(name), ids(1, 5, 7)
    from thalweg.models.look import look

    tokens, view = look(model.config, torch.float64, x, None, None, None, None)
    sublayers = [lambda h, s=s: s(h, view) for s in model.sublayers]
    embedded = model.embedding(x)
    with torch.no_grad():
        logits = model.unembed(model.stream.reference(embedded, sublayers, tokens))
        close(model(x).logits, logits)
