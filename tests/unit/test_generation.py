"""Cached decoding equals the full pass: token by token, in chunks, padded, reordered; and through ``generate``."""

import pytest
import torch
from transformers import DynamicCache

from thalweg.errors import InputError
from thalweg.models import Decoder, DecoderCache, DecoderConfig, ThalwegCache, ThalwegConfig, ThalwegForCausalLM

VOCAB = 29


def config(**changes):
    return DecoderConfig(
        **{"vocab_size": VOCAB, "width": 16, "depth": 2, "heads": 4, "kv_heads": 2, "max_length": 64, **changes}
    )


def loud(model, seed=0):
    """Weights of ordinary size in float64: differences show, and ties in argmax do not happen."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


def shell(**changes):
    return loud(ThalwegForCausalLM(ThalwegConfig.of(config(**changes), pad_token_id=0)))


def ids(batch=2, length=9, seed=1):
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 1, 3], [8, 1], [9]])
@pytest.mark.parametrize("gate", ["none", "element"])
@torch.no_grad()
def test_any_split_equals_the_full_pass(pieces, gate):
    decoder = loud(Decoder(config(attention_gate=gate, qk_norm=True)))
    x, cache = ids(), DecoderCache()
    parts = [decoder(part, cache=cache).logits for part in x.split(pieces, dim=1)]
    close(torch.cat(parts, 1), decoder(x).logits)
    assert cache.length == 9 and cache.mask is None


@torch.no_grad()
def test_left_padding_with_a_cache_by_either_form_of_the_mask():
    decoder = loud(Decoder(config()))
    x = ids(1, 8)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), x], 1)
    mask = torch.tensor([[0] * 3 + [1] * 8])
    full = decoder(padded, attention_mask=mask).logits[:, 3:]
    close(full, decoder(x).logits)
    for whole in (False, True):  # the mask of this call, or of all tokens so far
        cache = DecoderCache()
        parts, start = [], 0
        for size in (5, 1, 3, 2):
            piece = slice(start, start + size)
            parts.append(
                decoder(
                    padded[:, piece], attention_mask=mask[:, : piece.stop] if whole else mask[:, piece], cache=cache
                ).logits
            )
            start += size
        close(torch.cat(parts, 1)[:, 3:], full)


@torch.no_grad()
def test_a_mask_given_later_finds_the_earlier_tokens_real():
    decoder = loud(Decoder(config()))
    x, cache = ids(2, 6), DecoderCache()
    decoder(x[:, :4], cache=cache)
    logits = decoder(x[:, 4:], attention_mask=torch.ones(2, 2), cache=cache).logits
    close(logits, decoder(x).logits[:, 4:])


@torch.no_grad()
def test_select_reorders_drops_and_repeats_rows():
    decoder = loud(Decoder(config()))
    x, cache = ids(3, 5), DecoderCache()
    mask = torch.tensor([[0, 1, 1, 1, 1], [1] * 5, [1] * 5])
    decoder(x[:, :4], attention_mask=mask[:, :4], cache=cache)
    rows = torch.tensor([2, 0, 0, 1])
    cache.select(rows)
    logits = decoder(x[rows, 4:], attention_mask=mask[rows, 4:], cache=cache).logits
    close(logits, decoder(x[rows], attention_mask=mask[rows]).logits[:, 4:])


@torch.no_grad()
def test_drop_last_and_reset():
    decoder = loud(Decoder(config()))
    x, cache = ids(), DecoderCache()
    decoder(x, attention_mask=torch.ones(2, 9), cache=cache)
    cache.drop_last(4)
    close(decoder(x[:, 5:], cache=cache).logits, decoder(x).logits[:, 5:])
    cache.reset()
    close(decoder(x, cache=cache).logits, decoder(x).logits)


@torch.no_grad()
def test_a_memory_of_tokens_cannot_be_cropped():
    cache = DecoderCache()
    cache.memory.extend("site", torch.zeros(1, 2, 3), torch.ones(1, 2, dtype=torch.bool), keep=2)
    with pytest.raises(InputError, match="cannot be cropped"):
        cache.drop_last(1)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
        {"do_sample": False, "prefill_chunk_size": 4},
    ],
    ids=["greedy", "beams", "several beams", "chunked prefill"],
)
@pytest.mark.parametrize("padded", [False, True])
def test_generate_with_a_cache_equals_without(options, padded):
    model = shell()
    x = ids()
    mask = torch.ones_like(x)
    if padded:
        x[0, :4], mask[0, :4] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 10, "pad_token_id": 0, **options}
    cached = model.generate(x, **options)
    options.pop("prefill_chunk_size", None)
    assert torch.equal(cached, model.generate(x, use_cache=False, **options))
    assert cached.shape[1] == 19


def test_generate_is_greedy_decoding_of_the_decoder():
    model = shell()
    x = ids()
    expected = x
    with torch.no_grad():
        for _ in range(8):
            expected = torch.cat([expected, model.decoder(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(x, max_new_tokens=8, do_sample=False), expected)


def test_a_padded_row_generates_what_it_generates_alone():
    model = shell()
    x = ids(1, 6)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), x], 1)
    both = torch.cat([padded, ids(1, 9, seed=5)])
    mask = (torch.arange(9) >= 3).long()[None].repeat(2, 1)
    mask[1] = 1
    together = model.generate(both, attention_mask=mask, max_new_tokens=7, do_sample=False, pad_token_id=0)
    alone = model.generate(x, max_new_tokens=7, do_sample=False)
    assert torch.equal(together[0, 3:], alone[0])


def test_generation_goes_on_from_a_cache():
    model = shell()
    x = ids()
    cache = ThalwegCache()
    first = model.generate(x, cache=cache, max_new_tokens=4, do_sample=False)
    assert cache.get_seq_length() == first.shape[1] - 1
    second = model.generate(first, cache=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(second, model.generate(x, max_new_tokens=8, do_sample=False))


def test_assisted_generation_equals_greedy():
    model = shell()
    x = ids(1, 6)
    draft = shell(depth=1)
    plain = model.generate(x, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(x, assistant_model=draft, max_new_tokens=8, do_sample=False), plain)


def test_both_names_of_the_cache():
    model = shell()
    x = ids()
    full = model(x).logits
    for name in ("cache", "past_key_values"):
        with torch.no_grad():
            out = model(x[:, :5], use_cache=True)
            assert isinstance(out.cache, ThalwegCache)
            close(model(x[:, 5:], **{name: out.cache}).logits, full[:, 5:])
    with pytest.raises(InputError, match="two names of one argument"):
        model(x, cache=ThalwegCache(), past_key_values=ThalwegCache())
    assert model(x).cache is None


def test_what_the_shell_refuses():
    model = shell()
    x = ids()
    with pytest.raises(InputError, match="got DynamicCache"):
        model(x, cache=DynamicCache())
    with pytest.raises(TypeError, match="unexpected keyword argument 'cache_params'"):
        model(x, cache_params=None)
    with pytest.raises(ValueError, match="not_an_argument"):
        model.generate(x, not_an_argument=1)
    with pytest.raises(InputError, match="StreamTrace"):
        model(x, output_hidden_states=True)
    with pytest.raises(InputError, match="cache_implementation must be 'dynamic'"):
        model.generate(x, cache_implementation="static", max_new_tokens=2)
