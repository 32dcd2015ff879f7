"""Parts of published models as fields of the decoder: windows, learned positions, heads of their own width, biases, scaled angles."""

import math

import pytest
import torch

from thalweg.errors import InputError, UnknownNameError
from thalweg.models import Decoder, DecoderCache, DecoderConfig, ThalwegConfig, size_of
from thalweg.models.look import allowed
from thalweg.models.rotary import RotaryScaling, angles

BASE = {"vocab_size": 23, "width": 12, "depth": 3, "heads": 2, "max_length": 20}
PARTS = {
    "windows": {"windows": (3, 0, 5), "window_rope_base": 50.0, "rotary_scaling": {"kind": "linear", "factor": 2.0}},
    "windows, one base": {"windows": (4, 4, 0)},
    "learned positions": {"positions": "learned", "head_size": 5, "bias": True, "feed_forward": "gelu_tanh"},
    "wide heads": {
        "head_size": 10,
        "kv_heads": 1,
        "qk_norm": True,
        "attention_gate": "element",
        "attention_scale": 0.2,
    },
    "some biases": {"attention_bias": "qkv", "feed_forward": "geglu_tanh"},
    "other biases": {"attention_bias": "none", "bias": True, "attention_gate": "head", "embedding_scale": 3.5},
    "all biases of attention": {"attention_bias": "all", "attention_gate": "head"},
    "llama3": {"rotary_scaling": {"kind": "llama3", "factor": 8.0, "original_length": 16}},
    "inner norms": {"connection": "sub_ln", "head_size": 10},
}


def decoder(part, **more):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**{**BASE, **PARTS[part], **more})).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def ids(rows=2, length=14):
    return torch.randint(BASE["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("part", PARTS)
def test_stepwise_and_padded_passes_equal_the_full_one(part):
    model, x = decoder(part), ids()
    full = model(x).logits
    assert full.std() > 0.1
    cache = DecoderCache()
    pieces = [model(x[:, a:b], cache=cache).logits for a, b in ((0, 6), (6, 7), (7, 8), (8, 12), (12, 14))]
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=1e-10, atol=1e-11)
    padded, mask = torch.cat([x[:, :4], x], 1), torch.ones(2, 18, dtype=torch.long)
    mask[:, :4] = 0
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 4:], full, rtol=1e-10, atol=1e-11)
    segments = torch.tensor([[0] * 5 + [1] * 9])
    packed = model(x[:1], segments=segments).logits
    torch.testing.assert_close(packed[:, 5:], model(x[:1, 5:]).logits, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("part", PARTS)
def test_the_counted_size_is_the_size(part):
    model, config = decoder(part), DecoderConfig(**{**BASE, **PARTS[part]})
    assert size_of(config, length=8).total_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("part", PARTS)
def test_the_shell_keeps_the_fields(part):
    config = DecoderConfig(**{**BASE, **PARTS[part]})
    stored = ThalwegConfig.of(config).to_dict()
    assert ThalwegConfig.from_dict(stored).to_decoder() == config


@pytest.mark.parametrize(("window", "past"), [(1, 0), (3, 0), (3, 4), (9, 0), (0, 2)])
def test_a_window_of_w_tokens_holds_oneself_and_those_before(window, past):
    length = 5
    found = allowed(None, None, past, length, torch.device("cpu"), window)
    wanted = torch.zeros(length, past + length, dtype=torch.bool)
    for query in range(length):
        for key in range(past + length):
            behind = past + query - key
            wanted[query, key] = behind >= 0 and (window == 0 or behind < window)
    assert (found is None) == (past == 0 and (window == 0 or window >= length))
    assert found is None or torch.equal(found[0, 0], wanted)


def test_a_token_beyond_every_window_is_not_seen():
    model, x = decoder("windows, one base", windows=(4, 4, 4)), ids(1)
    changed = x.clone()
    changed[0, 0] = (changed[0, 0] + 1) % BASE["vocab_size"]
    same = (model(x).logits == model(changed).logits).all(-1)[0]
    reach = 3 * 3  # three layers, three tokens back in each
    assert not same[: reach + 1].any() and same[reach + 1 :].all()


def test_llama3_scaling_in_loops():
    rule = RotaryScaling("llama3", 8.0, 1.0, 4.0, 64)
    cos, _ = angles(torch.tensor([[5]]), 16, 100.0, torch.float64, rule)
    for i in range(8):
        frequency = 100.0 ** (-2 * i / 16)
        length = 2 * math.pi / frequency  # tokens of a full turn
        if length > 64 / 1.0:
            frequency = frequency / 8
        elif length >= 64 / 4.0:
            share = (64 / length - 1.0) / (4.0 - 1.0)
            frequency = (1 - share) * frequency / 8 + share * frequency
        assert cos[0, 0, i].item() == pytest.approx(math.cos(5 * frequency), rel=1e-12)


def test_a_kind_of_scaling_that_is_not_ours_is_refused():
    with pytest.raises(UnknownNameError, match=r"unknown kind of rotary_scaling 'yarn'.* Known: linear, llama3"):
        RotaryScaling("yarn", 4.0)
    with pytest.raises(UnknownNameError, match="Did you mean 'linear'"):
        RotaryScaling("Linear", 2.0)


def test_positions_that_have_no_vector_are_refused():
    model = decoder("learned positions")
    with pytest.raises(InputError, match=r"position_ids must lie in 0\.\.19 \(max_length 20\), got 0\.\.25"):
        model(ids(1, 2), position_ids=torch.tensor([[0, 25]]))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"windows": (3, 0)}, "one number of tokens for each of the 3 layers"),
        ({"windows": (3, -1, 0)}, "one number of tokens for each of the 3 layers"),
        ({"window_rope_base": 50.0}, "windows names none"),
        ({"head_size": 5}, "head_size must be even"),
        ({"heads": 5}, "width must be a multiple of heads, got width 12 and heads 5; change them or give head_size"),
        (
            {"positions": "learned", "rotary_scaling": {"kind": "linear", "factor": 2.0}},
            "learned positions have no angles",
        ),
        ({"rotary_scaling": {"kind": "linear", "factor": 0.5}}, "factor of rotary_scaling must be at least 1"),
        ({"rotary_scaling": {"kind": "llama3", "factor": 2.0, "low_factor": 5.0}}, "0 < low_factor < high_factor"),
        ({"rotary_scaling": {"kind": "yarn", "factor": 2.0}}, "unknown value for rotary_scaling.kind: 'yarn'"),
        ({"attention_scale": 0.0}, "attention_scale must be positive and finite"),
        ({"embedding_scale": math.inf}, "embedding_scale must be positive and finite"),
    ],
)
def test_wrong_values_are_one_line(values, says):
    with pytest.raises(InputError) as caught:
        DecoderConfig(**{**BASE, **values})
    assert says in str(caught.value) and "\n" not in str(caught.value)
